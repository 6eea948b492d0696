"""Many processes, one policy: they compare what they are about to run before anything compiles.

jax's own distributed runtime carries the comparison: the key-value store of its coordination
service, which exists from ``jax.distributed.initialize`` on and needs no device, no collective
and no compilation. Process 0 collects the statements and publishes one verdict, so that every
process stops with the same error, and the store sees a number of requests that grows with the
number of processes, not with its square.

A scope that is entered before ``jax.distributed.initialize`` (as ``tilepolicy run`` does around a
program that initialises jax itself) is compared at its first lookup instead.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import jax

from tilepolicy.errors import AdapterError, HostMismatchError, Problem

__all__ = ["TIMEOUT_S", "compare_statements", "expect", "settle"]

TIMEOUT_S: Final = 120
"""How long a process waits for the others to enter the same scope."""

# Private in jax: read in 0.10.2, 0.11.0, 0.11.2 and 0.12.0. No public name leads to the store.
_MODULE: Final = "jax._src.distributed"
_STATE: Final = "global_state"
_PREFIX: Final = "tilepolicy/scope"
_LEAVE_S: Final = 10
_LOG: Final = logging.getLogger("tilepolicy")
_MISSING: Final = "(did not enter the scope)"


class _Ledger:
    """Which digests the processes agreed on, and which still have to be compared."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.agreed: set[str] = set()
        self.pending: dict[str, Mapping[str, str]] = {}
        self.rounds = 0


_LEDGER: Final = _Ledger()


def expect(digest: str, statement: Mapping[str, str]) -> None:
    """Announce a scope; compares at once where jax's distributed runtime is up.

    A digest that was agreed on is not compared again. Scopes must be entered in the same order
    by all processes.

    Raises:
        HostMismatchError: the processes differ, or one did not come.
    """
    with _LEDGER.lock:
        if digest in _LEDGER.agreed:
            return
        _LEDGER.pending[digest] = statement
    settle()


def settle() -> None:
    """Compare what is pending, if there are several processes; else do nothing, quickly.

    Raises:
        HostMismatchError: the processes differ, or one did not come.
    """
    if not _LEDGER.pending:
        return
    state = _state()
    if state.client is None or state.num_processes == 1:
        return
    with _LEDGER.lock:
        for digest, statement in list(_LEDGER.pending.items()):
            _LEDGER.rounds += 1
            _compare(state, _LEDGER.rounds, statement)
            _LEDGER.agreed.add(digest)
            del _LEDGER.pending[digest]


@cache
def _state() -> Any:  # noqa: ANN401 - private jax object
    """The record of the run that jax keeps: one object, filled when the runtime starts."""
    found = getattr(import_module(_MODULE), _STATE, None)
    missing = [
        name for name in ("client", "process_id", "num_processes") if not hasattr(found, name)
    ]
    if missing:
        raise AdapterError(
            Problem(
                code="jax-changed",
                message=f"jax {jax.__version__} has no {_MODULE}.{_STATE}.{missing[0]}",
                remedy="install a release of jax that this release of tilepolicy knows",
            )
        )
    return found


def _compare(state: Any, number: int, statement: Mapping[str, str]) -> None:  # noqa: ANN401
    prefix = f"{_PREFIX}/{number}"
    client = state.client
    client.key_value_set(f"{prefix}/{state.process_id}", json.dumps(dict(statement)))
    if state.process_id == 0:
        collected = [_get(client, f"{prefix}/{i}", TIMEOUT_S) for i in range(state.num_processes)]
        statements = [None if text is None else json.loads(text) for text in collected]
        verdict = compare_statements(statements)
        client.key_value_set(f"{prefix}/verdict", verdict or "agreed")
    else:
        # Process 0 may first wait the full time for another one.
        answer = _get(client, f"{prefix}/verdict", 2 * TIMEOUT_S)
        verdict = compare_statements([None, statement]) if answer is None else answer
        verdict = "" if verdict == "agreed" else verdict
    if verdict:
        # Process 0 holds the store: it must not go before the others have read the verdict.
        _meet(client, f"{prefix}/read")
        raise HostMismatchError(
            Problem(
                code="hosts-differ",
                message=f"the processes of this run do not agree on their scope: {verdict}",
                remedy="start all processes with the same policy files, config and packages",
            )
        )


def _meet(client: Any, name: str) -> None:  # noqa: ANN401 - private jax object
    try:
        client.wait_at_barrier(name, _LEAVE_S * 1000)
    except jax.errors.JaxRuntimeError as error:
        _LOG.warning("a process did not wait for the verdict: %s", error)


def _get(client: Any, key: str, seconds: int) -> str | None:  # noqa: ANN401 - private jax object
    try:
        return str(client.blocking_key_value_get(key, seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def compare_statements(statements: list[Mapping[str, str] | None]) -> str:
    """What differs, field by field, with the processes that differ from most; empty if nothing.

    Args:
        statements: one per process, in order; None for a process that did not come.
    """
    absent = [i for i, statement in enumerate(statements) if statement is None]
    if absent:
        return f"{_processes(absent)} {_MISSING}"
    given = [statement for statement in statements if statement is not None]
    fields = dict.fromkeys(name for statement in given for name in statement)
    found = (_difference(name, [s.get(name, "(not installed)") for s in given]) for name in fields)
    return "; ".join(text for text in found if text)


def _difference(name: str, values: list[str]) -> str:
    counts = Counter(values)
    if len(counts) == 1:
        return ""
    usual, most = counts.most_common(1)[0]
    if 2 * most <= len(values):
        each = (f"process {i} has {_short(value)}" for i, value in enumerate(values))
        return f"{name}: {', '.join(each)}"
    odd = (f"process {i} has {_short(value)}" for i, value in enumerate(values) if value != usual)
    return f"{name}: {', '.join(odd)}, the others have {_short(usual)}"


def _short(value: str) -> str:
    return f"{value[:12]}…" if len(value) == 64 else value


def _processes(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names}" if len(numbers) == 1 else f"processes {names}"
