"""Forms of a scope: nested, re-entered, decorated, in generators, tasks, threads and processes."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from moe import SIX, document, gmm_arguments, load, overlays, tpu

import tilepolicy
from tilepolicy import scope
from tilepolicy.adapters.tokamax import ragged_dot_op
from tilepolicy.context import carrier, strands
from tilepolicy.errors import ScopeError
from tilepolicy.policy import Policy

OP = ragged_dot_op("wi")
CALL = OP.bind(gmm_arguments()[0], gmm_arguments()[1], group_sizes=gmm_arguments()[2])


def asked() -> int:
    """tile_m that Tokamax finds here and now; 128 without a policy (the heuristic)."""
    with tpu():
        return int(CALL.default_config.tile_m)


class TileReader:
    """A jitted function whose result is the tile_m that it was traced with."""

    def __init__(self) -> None:
        self.traces: list[int] = []
        self.call = jax.jit(self._traced)

    def _traced(self, x: Any) -> Any:
        tile = asked()
        self.traces.append(tile)
        return x + tile

    def __call__(self) -> int:
        return int(self.call(jnp.int32(0)))


def policy_of(folder: Path, tile_m: int, name: str = "one") -> Policy:
    """A policy whose wi forward tile has this tile_m, which must divide 512 rows."""
    content = document({("wi", "fwd"): {"batch_seq": tile_m}}, name)
    return load(folder, content, f"{name}-{tile_m}.yml")


def many_policies(folder: Path, count: int) -> list[tuple[int, Policy]]:
    """Policies of different content with their tile_m."""
    sizes = (256, 512, 64, 32)
    return [
        (sizes[i % len(sizes)], policy_of(folder, sizes[i % len(sizes)], f"p{i}"))
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def _no_residue() -> Iterator[None]:
    """Nothing of a scope is left after any test."""
    yield
    assert strands.active() == ()
    assert carrier.key() == ()
    assert carrier._CONTEXT.value == ()
    assert overlays() == ("ContextVar",)


class TestTraceKey:
    def test_equal_content_is_not_traced_again(self, tmp_path: Path) -> None:
        """Re-entry, another object of equal content, and nesting in itself: 0 retraces."""
        read = TileReader()
        first, second = policy_of(tmp_path, 256), policy_of(tmp_path, 256)
        assert first is not second
        assert read() == 128
        with tilepolicy.apply(first):
            assert read() == 256
        with tilepolicy.apply(second):
            assert read() == 256
            with tilepolicy.apply(first):
                assert read() == 256
        again = tilepolicy.apply(first)
        with again, again:
            assert read() == 256
        assert read() == 128
        assert read.traces == [128, 256]

    def test_other_content_is_traced_anew_and_found_again(self, tmp_path: Path) -> None:
        """Each content has its program; leaving brings the outer one back."""
        read = TileReader()
        a, b = policy_of(tmp_path, 256, "a"), policy_of(tmp_path, 512, "b")
        with tilepolicy.apply(a):
            assert read() == 256
            with tilepolicy.apply(b):
                assert read() == 512
                with tilepolicy.apply(a):
                    assert read() == 256
            assert read() == 256
        with tilepolicy.apply(b):
            assert read() == 512
        assert read.traces == [256, 512, 256, 512]

    def test_a_thousand_short_lived_policies(self, tmp_path: Path) -> None:
        """1,000 policy objects that come and go over one jitted function: 0 stale tiles."""
        read = TileReader()
        paths = [(size, policy.files[0]) for size, policy in many_policies(tmp_path, 20)]
        stale = 0
        for i in range(1000):
            size, path = paths[i % len(paths)]
            with tilepolicy.apply(tilepolicy.load(path)):
                stale += read() != size
        assert stale == 0
        assert len(read.traces) == 20
        assert read() == 128

    def test_compiled_programs_are_outside_of_every_scope(self, tmp_path: Path) -> None:
        """A program keeps the tile of the scope in which it was lowered."""
        read = TileReader()
        with tilepolicy.apply(policy_of(tmp_path, 256)):
            compiled = read.call.lower(jnp.int32(0)).compile()
        assert int(compiled(jnp.int32(0))) == 256
        with tilepolicy.apply(policy_of(tmp_path, 512, "other")):
            assert int(compiled(jnp.int32(0))) == 256

    def test_phase_sizes_and_options_are_content(self, tmp_path: Path) -> None:
        """Whatever a lookup's answer may depend on gives another digest."""
        policy = policy_of(tmp_path, 256)
        digests = {
            tilepolicy.apply(policy, **arguments).digest
            for arguments in (
                {},
                {"phase": "eval"},
                {"device": "v6e"},
                {"sizes": tilepolicy.context.layers.LayerSizes(8, 16)},
                {"call_sites": [tilepolicy.context.layers.CallSites(("up",), ("down",))]},
                {"options": {"tokamax": {"any": 1}}},
            )
        }
        assert len(digests) == 6
        assert tilepolicy.apply(policy).digest == tilepolicy.apply(policy).digest


class TestForms:
    def test_current_is_the_innermost_session(self, tmp_path: Path) -> None:
        """``current()`` follows nesting and is None outside."""
        policy = policy_of(tmp_path, 256)
        assert scope.current() is None
        with tilepolicy.apply(policy) as outer:
            with tilepolicy.apply(policy) as inner:
                assert scope.current() is inner
            assert scope.current() is outer
        assert scope.current() is None

    def test_an_exception_leaves_the_scope(self, tmp_path: Path) -> None:
        """It passes through unchanged; the tile outside is the old one."""
        with pytest.raises(KeyError, match="mine"), tilepolicy.apply(policy_of(tmp_path, 256)):
            assert asked() == 256
            raise KeyError("mine")
        assert asked() == 128

    def test_a_failing_adapter_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Adapters that were entered before are left again."""
        made = tilepolicy.apply(policy_of(tmp_path, 256), adapters=["tokamax"])
        monkeypatch.setattr(made, "_adapters", (*made._adapters, _Broken()))
        with pytest.raises(RuntimeError, match="cannot enter"), made:
            pass
        assert asked() == 128

    def test_leaving_without_entering_is_an_error(self, tmp_path: Path) -> None:
        """An exit needs an entry."""
        made = tilepolicy.apply(policy_of(tmp_path, 256))
        with pytest.raises(ScopeError, match="this scope has not been entered"):
            made.__exit__(None, None, None)

    def test_a_decorated_function(self, tmp_path: Path) -> None:
        """Each call runs in the scope; name and docstring stay."""

        @tilepolicy.apply(policy_of(tmp_path, 256))
        def step(number: int) -> tuple[int, int]:
            """Docstring."""
            return number, asked()

        assert step(7) == (7, 256)
        assert step(number=8) == (8, 256)
        assert (step.__name__, step.__doc__) == ("step", "Docstring.")
        assert asked() == 128

    def test_a_decorated_coroutine_function(self, tmp_path: Path) -> None:
        """It stays a coroutine function, and is in the scope while it runs."""

        @tilepolicy.apply(policy_of(tmp_path, 256))
        async def step() -> tuple[int, int]:
            before = asked()
            await asyncio.sleep(0)
            return before, asked()

        async def main() -> Any:
            return await asyncio.gather(step(), other())

        async def other() -> int:
            await asyncio.sleep(0)
            return asked()

        assert asyncio.run(main()) == [(256, 256), 128]

    def test_a_decorated_generator_function(self, tmp_path: Path) -> None:
        """Only its own code is in the scope: not its consumer's between two steps."""
        closed: list[int] = []

        @tilepolicy.apply(policy_of(tmp_path, 256))
        def steps() -> Iterator[int]:
            try:
                received = yield asked()
                with pytest.raises(KeyError):
                    yield received + asked()
                yield asked()
            finally:
                closed.append(asked())

        generator: Any = steps()
        assert next(generator) == 256
        assert asked() == 128
        assert generator.send(1) == 257
        assert generator.throw(KeyError()) == 256
        assert asked() == 128
        generator.close()
        assert closed == [256]

    def test_a_decorated_generator_function_returns_its_value(self, tmp_path: Path) -> None:
        """``yield from`` gets what the generator returns."""

        @tilepolicy.apply(policy_of(tmp_path, 256))
        def steps() -> Any:
            yield 1
            return asked()

        def consumer() -> Any:
            result.append((yield from steps()))

        result: list[int] = []
        assert list(consumer()) == [1]
        assert result == [256]

    def test_an_async_generator_function_is_refused(self, tmp_path: Path) -> None:
        """The scope belongs inside of it."""
        with pytest.raises(ScopeError, match="is an asynchronous generator function"):

            @tilepolicy.apply(policy_of(tmp_path, 256))
            async def steps() -> Any:
                yield 1

    def test_a_generator_with_its_own_scope(self, tmp_path: Path) -> None:
        """In force for its consumer between two steps; gone after close, in any order."""

        def steps() -> Iterator[int]:
            with tilepolicy.apply(policy_of(tmp_path, 256, "generator")):
                yield asked()

        generator = steps()
        assert next(generator) == 256
        assert asked() == 256
        with tilepolicy.apply(policy_of(tmp_path, 512, "consumer")):
            assert asked() == 512
            generator.close()
            assert asked() == 512
        assert asked() == 128


class _Broken:
    name = "broken"

    def versions(self) -> dict[str, str]:
        return {"broken": "1"}

    def enter(self, request: Any) -> Any:
        raise RuntimeError("cannot enter")


class TestConcurrency:
    def test_threads_with_different_policies_at_once(self, tmp_path: Path) -> None:
        """8 threads × 200 scopes over one jitted function: 0 leaks, 0 wrong tiles."""
        read = TileReader()
        policies = many_policies(tmp_path, 8)
        start = threading.Barrier(8)

        def work(number: int) -> int:
            start.wait()
            wrong = 0
            for i in range(200):
                size, policy = policies[(number + i) % len(policies)]
                with tilepolicy.apply(policy):
                    wrong += read() != size
                wrong += carrier.key() != ()
            return wrong + (read() != 128)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [0] * 8

    def test_tasks_with_different_policies_at_once(self, tmp_path: Path) -> None:
        """100 tasks that await inside their scopes, in turns: 0 leaks, 0 wrong tiles."""
        read = TileReader()
        policies = many_policies(tmp_path, 8)

        async def work(number: int) -> int:
            wrong = 0
            for i in range(3):
                size, policy = policies[(number + i) % len(policies)]
                with tilepolicy.apply(policy):
                    await asyncio.sleep(0)
                    wrong += read() != size
                    inner_size, inner = policies[(number + i + 1) % len(policies)]
                    with tilepolicy.apply(inner):
                        await asyncio.sleep(0)
                        wrong += read() != inner_size
                    await asyncio.sleep(0)
                    wrong += read() != size
                await asyncio.sleep(0)
                wrong += read() != 128
            return wrong

        async def main() -> list[int]:
            return await asyncio.gather(*(work(number) for number in range(100)))

        assert asyncio.run(main()) == [0] * 100

    def test_a_thread_started_inside_sees_nothing(self, tmp_path: Path) -> None:
        """Also through ``asyncio.to_thread``, which copies the context."""

        async def main() -> int:
            with tilepolicy.apply(policy_of(tmp_path, 256)):
                return await asyncio.to_thread(asked)

        assert asyncio.run(main()) == 128
        with tilepolicy.apply(policy_of(tmp_path, 256)), ThreadPoolExecutor(1) as pool:
            assert pool.submit(asked).result() == 128

    def test_copied_contexts_carry_no_policy(self, tmp_path: Path) -> None:
        """What a context runs sees what is in force where it is run: program and lookup agree."""
        read = TileReader()
        before = contextvars.copy_context()
        with tilepolicy.apply(policy_of(tmp_path, 256)):
            inside = contextvars.copy_context()
            assert before.run(read) == 256
            assert inside.run(read) == 256
            assert contextvars.Context().run(read) == 256
        assert inside.run(read) == 128
        assert read.traces == [256, 128]

    def test_a_runner_from_before_the_scope(self, tmp_path: Path) -> None:
        """A scope around a loop with an older context reaches the loop's lookups."""

        async def task() -> int:
            await asyncio.sleep(0)
            return asked()

        with asyncio.Runner() as runner:
            assert runner.run(task()) == 128
            with tilepolicy.apply(policy_of(tmp_path, 256)):
                assert runner.run(task()) == 256
            assert runner.run(task()) == 128

    def test_a_subprocess_sees_nothing(self, tmp_path: Path) -> None:
        """No variable of the environment carries a scope."""
        code = (
            "from tilepolicy import scope; from tilepolicy.context import strands; "
            "print(strands.active(), scope.current())"
        )
        with tilepolicy.apply(policy_of(tmp_path, 256)):
            environment = dict(os.environ)
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            )
        assert done.stdout.strip() == "() None"


def test_apply_imports_no_jax_until_it_is_entered(tmp_path: Path) -> None:
    """Making a scope, or decorating with it, costs no import of jax or Tokamax."""
    path = tmp_path / "policy.yml"
    path.write_text("version: 1\nname: empty\n")
    code = (
        "import sys, tilepolicy; s = tilepolicy.apply(sys.argv[1]); s(len); "
        "print([m for m in ('jax', 'tokamax', 'maxtext') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_jax_the_error_gives_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scope needs jax."""
    made = tilepolicy.apply(policy_of(tmp_path, 256))
    for name in ("tilepolicy.context.carrier", "tilepolicy.context.distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(tilepolicy.context, name.rpartition(".")[2], raising=False)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(tilepolicy.errors.MissingLibraryError) as raised, made:
        pass
    assert 'pip install "tilepolicy[tokamax]"' in str(raised.value)


def test_six_tiles_are_reported(tmp_path: Path) -> None:
    """A policy of one rule per site has no rule that a device rules out."""
    with tilepolicy.apply(load(tmp_path, document(SIX))) as session:
        assert asked() == 128
    assert len(session.rules_never_hit) == 5
