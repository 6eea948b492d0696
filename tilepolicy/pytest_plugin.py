"""pytest support: a fixture, and a check that no test leaves a policy active.

Loaded by pytest wherever tilepolicy is installed. It imports neither jax nor anything else of
the package until a test uses a scope.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tilepolicy.session import Session

__all__ = ["apply_policy"]

_STRANDS = "tilepolicy.context.strands"


@pytest.fixture
def apply_policy() -> Iterator[Callable[..., Session]]:
    """Enter policies for the rest of the test: takes what ``tilepolicy.apply`` takes.

    ::

        def test_step(apply_policy):
            session = apply_policy("moe-v6e", config="tests/tiny.yml")
            train_step(state, batch)
            assert not session.misses

    The scopes are left when the test ends, the last one first. With ``strict=True`` the test
    fails where the scope would.
    """
    from tilepolicy.scope import apply

    with ExitStack() as scopes:

        def enter(*args: Any, **kwargs: Any) -> Session:  # noqa: ANN401 - those of apply
            return scopes.enter_context(apply(*args, **kwargs))

        yield enter


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remember how many scopes were open before the test and its fixtures."""
    item.stash[_OPEN] = _open_scopes()
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves a policy active after its fixtures were torn down."""
    result = yield
    left = _open_scopes() - item.stash[_OPEN]
    if left > 0:
        _close(left)
        pytest.fail(
            f"the test left {left} scope{'s' if left > 1 else ''} of tilepolicy active; "
            "use `with tilepolicy.apply(...)` or the fixture apply_policy",
            pytrace=False,
        )
    return result


_OPEN = pytest.StashKey[int]()


def _open_scopes() -> int:
    strands = sys.modules.get(_STRANDS)
    return 0 if strands is None else strands.open_entries()


def _close(count: int) -> None:
    """Take the scopes out of force, so that only the test that left them fails."""
    strands = sys.modules[_STRANDS]
    for _ in range(count):
        strands.remove(strands.innermost())
