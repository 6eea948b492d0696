"""Many processes: one verdict for all of them before anything is compiled."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from moe import document, write

from tilepolicy.context import distributed

WORKER = """
import json, os, sys
import jax
number, count, port, policy, mode = sys.argv[1:6]
adapters = [] if mode == "bare" else ["tokamax"]
import tilepolicy
from tilepolicy.errors import HostMismatchError

def start():
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))

def trace():
    sys.path.insert(0, sys.argv[6])
    from moe import gmm_arguments, tpu
    from tilepolicy.adapters.tokamax import ragged_dot_op
    x, w, sizes = gmm_arguments()
    with tpu():
        return ragged_dot_op("wi").bind(x, w, group_sizes=sizes).default_config.tile_m

if mode != "late":
    start()
compiles = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiles.append(name) if "compile" in name else None
)
try:
    with tilepolicy.apply(policy, adapters=adapters) as session:
        if mode == "late":
            start()
        tile = None if mode == "bare" else trace()
    with tilepolicy.apply(policy, adapters=adapters):
        pass
    answer = {"tile": tile}
except HostMismatchError as error:
    answer = {"error": str(error)}
print("ANSWER " + json.dumps(answer | {"compiles": len(compiles)}))
"""


def run(count: int, policies: list[Path], mode: str) -> list[dict[str, Any]]:
    """Start the processes of one run on the loopback address; what each of them says.

    ``early``: jax.distributed is up before the scope; ``late``: it starts inside of it; ``bare``:
    early, and without an adapter.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ) | {"TILEPOLICY_TEST": "1"}
    here = str(Path(__file__).parent)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(i), str(count), str(port), str(p), mode, here],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i, p in enumerate(policies)
    ]
    answers = []
    for worker in workers:
        out, err = worker.communicate(timeout=400)
        lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
        assert lines, err[-3000:]
        answers.append(json.loads(lines[0].removeprefix("ANSWER ")))
    return answers


def policies(folder: Path, tiles: list[int]) -> list[Path]:
    return [
        write(folder, document({("wi", "fwd"): {"batch_seq": tile}}), f"p{i}.yml")
        for i, tile in enumerate(tiles)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["early", "late"])
def test_two_processes_that_agree(tmp_path: Path, mode: str) -> None:
    """Equal content of different files runs, also if jax.distributed starts inside the scope."""
    answers = run(2, policies(tmp_path, [256, 256]), mode)
    assert answers == [{"tile": 256, "compiles": 0}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bare", "late"])
def test_two_processes_that_differ(tmp_path: Path, mode: str) -> None:
    """Both stop with the same error before a compile; of two, both are named."""
    answers = run(2, policies(tmp_path, [256, 512]), mode)
    assert answers[0] == answers[1]
    assert answers[0]["compiles"] == 0
    assert (
        "the processes of this run do not agree on their scope: policy: process 0 has "
        in (answers[0]["error"])
    )
    assert ", process 1 has " in answers[0]["error"]


@pytest.mark.slow
def test_four_processes_with_one_odd(tmp_path: Path) -> None:
    """All four stop with the same error, which names the odd one and the differing field."""
    answers = run(4, policies(tmp_path, [256, 256, 512, 256]), "bare")
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["compiles"] == 0
    error = answers[0]["error"]
    assert "policy: process 2 has " in error
    assert "the others have " in error
    assert "start all processes with the same policy files, config and packages" in error


class TestVerdict:
    def test_agreement_is_empty(self) -> None:
        """Nothing to say."""
        assert distributed.compare_statements([{"a": "1"}, {"a": "1"}]) == ""

    def test_the_minority_is_named(self) -> None:
        """Field by field, with what the others have."""
        usual = {"policy": "p", "jax": "0.12.0"}
        odd = {"policy": "p", "jax": "0.11.0"}
        assert distributed.compare_statements([usual, odd, usual]) == (
            "jax: process 1 has 0.11.0, the others have 0.12.0"
        )

    def test_without_a_majority_all_are_named(self) -> None:
        """Of two processes neither is the odd one."""
        statements = [{"policy": "a" * 64}, {"policy": "b" * 64}]
        assert distributed.compare_statements(statements) == (
            "policy: process 0 has aaaaaaaaaaaa…, process 1 has bbbbbbbbbbbb…"
        )

    def test_a_library_that_one_process_lacks(self) -> None:
        """A missing field is a difference too."""
        statements = [{"maxtext": "0.2.5"}, {}, {"maxtext": "0.2.5"}]
        assert distributed.compare_statements(statements) == (
            "maxtext: process 1 has (not installed), the others have 0.2.5"
        )

    def test_a_process_that_did_not_come(self) -> None:
        """It is named rather than waited for without end."""
        assert distributed.compare_statements([{"a": "1"}, None, None]) == (
            "processes 1, 2 (did not enter the scope)"
        )

    def test_a_timeout_reads_as_absence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that does not come makes the others stop with its number."""
        import jax

        class Client:
            store: dict[str, str] = {}  # noqa: RUF012 - one store for the test

            def key_value_set(self, key: str, value: str) -> None:
                self.store[key] = value

            def blocking_key_value_get(self, key: str, _: int) -> str:
                if key not in self.store:
                    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody")
                return self.store[key]

            def wait_at_barrier(self, _name: str, _timeout: int) -> None:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: barrier")

        from types import SimpleNamespace

        state = SimpleNamespace(client=Client(), process_id=0, num_processes=2)
        monkeypatch.setattr(distributed, "_state", lambda: state)
        monkeypatch.setattr(distributed, "_LEDGER", distributed._Ledger())
        with pytest.raises(distributed.HostMismatchError, match=r"process 1 .did not enter"):
            distributed.expect("digest", {"policy": "p"})
