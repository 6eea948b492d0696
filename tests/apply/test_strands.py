"""Who sees an entry: threads, coroutines that are suspended, thrown into or closed, generators."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepolicy.context import strands
from tilepolicy.errors import ScopeError


@contextmanager
def pushed(payload: object) -> Iterator[None]:
    entry = strands.push(payload)
    try:
        yield
    finally:
        strands.remove(entry)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test starts and ends with nothing in force and no monitoring tool in use."""
    assert strands.active() == ()
    yield
    assert strands.active() == ()
    assert sys.monitoring.get_tool(3) is None
    assert sys.monitoring.get_tool(4) is None


def run(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


class TestThreads:
    def test_a_thread_does_not_see_what_another_pushed(self) -> None:
        """An entry belongs to its thread, also for a thread that is started inside."""
        seen: list[tuple[object, ...]] = []
        with pushed("mine"):
            thread = threading.Thread(target=lambda: seen.append(strands.active()))
            thread.start()
            thread.join()
            assert strands.active() == ("mine",)
        assert seen == [()]

    @given(st.lists(st.integers(0, 5), max_size=30))
    @settings(max_examples=50, deadline=None)
    def test_any_order_of_removal_leaves_the_others(self, choices: list[int]) -> None:
        """Entries may be removed in any order; the rest keep theirs."""
        model: list[tuple[int, strands.Entry]] = []
        for number, choice in enumerate(choices):
            if model and choice < 3:
                strands.remove(model.pop(choice % len(model))[1])
            else:
                model.append((number, strands.push(number)))
            assert strands.active() == tuple(number for number, _ in model)
        for _, entry in model:
            strands.remove(entry)

    def test_removal_in_another_thread_is_an_error_there(self) -> None:
        """A generator closed elsewhere leaves its scope, and says so where it was closed."""
        entry = strands.push("held")
        errors: list[BaseException] = []

        def close() -> None:
            try:
                strands.remove(entry)
            except ScopeError as error:
                errors.append(error)

        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
        assert strands.active() == ()
        assert "left in another thread than the one it was entered in" in str(errors[0])


class TestTasks:
    def test_a_suspended_task_hides_its_entries(self) -> None:
        """While a task awaits, another task sees only its own."""

        async def main() -> None:
            inside, outside = asyncio.Event(), asyncio.Event()

            async def holder() -> None:
                with pushed("held"):
                    inside.set()
                    await outside.wait()
                    assert strands.active() == ("held",)

            async def observer() -> None:
                await inside.wait()
                assert strands.active() == ()
                outside.set()

            async with asyncio.TaskGroup() as group:
                group.create_task(holder())
                group.create_task(observer())

        run(main)

    def test_a_task_started_inside_does_not_see_the_entry(self) -> None:
        """A child task has a strand of its own."""

        async def child() -> tuple[object, ...]:
            await asyncio.sleep(0)
            return strands.active()

        async def main() -> tuple[object, ...]:
            with pushed("parent"):
                return await asyncio.create_task(child())

        assert run(main) == ()

    def test_an_entry_around_the_loop_is_seen_by_its_tasks(self) -> None:
        """What the thread pushed before running the loop is in force for every task."""

        async def main() -> None:
            with pushed("task"):
                await asyncio.sleep(0)
                assert strands.active() == ("thread", "task")

            assert await asyncio.gather(child(), child()) == [("thread",)] * 2

        async def child() -> tuple[object, ...]:
            await asyncio.sleep(0)
            return strands.active()

        with pushed("thread"):
            run(main)

    def test_a_cancelled_await_is_resumed_with_its_entries(self) -> None:
        """A timeout throws into the innermost coroutine; handlers and cleanup see the entries."""
        seen: list[tuple[object, ...]] = []

        async def cleanup() -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                seen.append(strands.active())
                await asyncio.sleep(0.001)
                seen.append(strands.active())
                raise

        async def main() -> None:
            with pushed("outer"):
                try:
                    async with asyncio.timeout(0.001):
                        await cleanup()
                except TimeoutError:
                    seen.append(strands.active())
                await asyncio.sleep(0)
                seen.append(strands.active())

        async def both() -> None:
            task = asyncio.create_task(main())
            while not task.done():
                assert strands.active() == ()
                await asyncio.sleep(0)
            await task

        run(both)
        assert seen == [("outer",)] * 4

    def test_a_failing_task_leaves_nothing(self) -> None:
        """An exception through the scope and out of the task removes the entry."""

        async def failing() -> None:
            with pushed("task"):
                await asyncio.sleep(0)
                raise KeyError("inside")

        async def main() -> None:
            task = asyncio.create_task(failing())
            with pytest.raises(KeyError, match="inside"):
                await task
            assert strands.active() == ()

        run(main)

    def test_a_coroutine_that_is_never_finished_leaves_nothing(self) -> None:
        """Closing a suspended coroutine runs its exits."""

        async def waiting() -> None:
            with pushed("waiting"):
                await asyncio.sleep(10)

        async def main() -> None:
            task = asyncio.create_task(waiting())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(main)

    def test_a_coroutine_may_be_resumed_in_another_thread(self) -> None:
        """What a coroutine pushed goes with it, whoever drives it."""

        @contextmanager
        def driven() -> Iterator[Any]:
            async def body() -> None:
                with pushed("mine"):
                    await _pause()
                    seen.append(strands.active())
                    await _pause()

            coroutine = body()
            yield coroutine
            coroutine.close()

        seen: list[tuple[object, ...]] = []
        with driven() as coroutine:
            coroutine.send(None)
            assert strands.active() == ()
            thread = threading.Thread(target=coroutine.send, args=(None,))
            thread.start()
            thread.join()
            assert strands.active() == ()
        assert seen == [("mine",)]

    def test_hundreds_of_tasks_with_random_waits(self) -> None:
        """No interleaving of waits, nesting, timeouts and failures shows anybody's entry."""

        async def worker(number: int) -> None:
            chance = random.Random(number)
            with pushed(number):
                for _ in range(10):
                    await asyncio.sleep(chance.random() * 0.002)
                    assert strands.active() == (number,)
                with pushed(-number):
                    try:
                        async with asyncio.timeout(chance.random() * 0.002):
                            await asyncio.sleep(chance.random() * 0.004)
                    except TimeoutError:
                        assert strands.active() == (number, -number)
                    await asyncio.sleep(0)
                    assert strands.active() == (number, -number)
                if number % 7 == 0:
                    raise ZeroDivisionError
            assert strands.active() == ()

        async def main() -> list[Any]:
            work = (worker(number) for number in range(1, 201))
            return await asyncio.gather(*work, return_exceptions=True)

        results = run(main)
        assert {type(result) for result in results} == {type(None), ZeroDivisionError}

    def test_an_async_context_manager_holds_its_entry_for_its_user(self) -> None:
        """An async generator that yields inside ``with`` keeps it in force, per task."""

        @asynccontextmanager
        async def scope(name: str) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            with pushed(name):
                await asyncio.sleep(0)
                yield
                await asyncio.sleep(0)

        async def user(name: str) -> None:
            async with scope(name):
                for _ in range(5):
                    assert strands.active() == (name,)
                    await asyncio.sleep(0)
            assert strands.active() == ()

        async def main() -> None:
            await asyncio.gather(*(user(f"user {i}") for i in range(20)))

        run(main)

    def test_an_async_generator_that_outlives_its_task_holds_nothing_for_others(self) -> None:
        """The entry of an unfinished async generator is not in force after its task."""
        held: list[Any] = []

        async def numbers() -> AsyncIterator[int]:
            with pushed("generator"):
                yield 1
                yield 2

        async def user() -> None:
            generator = numbers()
            held.append(generator)
            assert await anext(generator) == 1

        async def main() -> None:
            await asyncio.create_task(user())
            assert strands.active() == ()
            await held[0].aclose()

        run(main)

    def test_without_a_free_tool_a_coroutine_is_refused(self) -> None:
        """Rather than leak into other tasks, the scope does not open."""
        for tool in (3, 4):
            sys.monitoring.use_tool_id(tool, f"other {tool}")
        try:

            async def main() -> None:
                with pushed("refused"):
                    pass

            with pytest.raises(ScopeError, match="are taken by other 4, other 3"):
                run(main)
        finally:
            for tool in (3, 4):
                sys.monitoring.free_tool_id(tool)


class TestGenerators:
    def test_a_generator_holds_its_entry_for_its_consumer(self) -> None:
        """Between two steps the entry stays in force; it goes when the generator ends."""

        def numbers() -> Iterator[int]:
            with pushed("generator"):
                yield 1
                yield 2

        generator = numbers()
        next(generator)
        with pushed("consumer"):
            assert strands.active() == ("generator", "consumer")
            generator.close()
            assert strands.active() == ("consumer",)

    def test_a_collected_generator_leaves_nothing(self) -> None:
        """Garbage collection closes it."""

        def numbers() -> Iterator[int]:
            with pushed("generator"):
                yield 1

        generator = numbers()
        next(generator)
        del generator
        gc.collect()
        assert strands.active() == ()


def test_listeners_follow_every_change() -> None:
    """A listener is told what is in force after each change."""
    heard: list[tuple[object, ...]] = []
    strands.listen(heard.append)
    try:
        with pushed(1), pushed(2):
            pass
    finally:
        strands._LISTENERS.remove(heard.append)
    assert heard == [(1,), (1, 2), (1,), ()]


class _Pause:
    def __await__(self) -> Iterator[None]:
        yield


async def _pause() -> None:
    await _Pause()
