"""Who sees a scope: one stack per thread, and one per coroutine chain that an event loop drives.

jax keeps its trace key per thread. Threads alone would do for plain code, but the tasks of an
event loop share a thread and take turns: a scope that a task entered would stay in force while
another task runs. A *strand* is what a scope really belongs to: the thread, or the chain of
coroutines from the one that a loop drives down to the ``with`` statement. A coroutine's strand is
taken out of force when the chain yields to its driver and put back when it is resumed.

Python tells neither a context manager nor a ``ContextVar`` that a task is suspended.
:mod:`sys.monitoring` (PEP 669) does, for the code objects concerned and only while a coroutine
holds a scope open. ``throw()`` (a cancellation, a timeout) resumes the innermost coroutine first
and lets its next yield pass the outer ones by, so each frame that is thrown into is watched too.

Nothing here knows jax: :func:`listen` registers what has to follow a change.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Final

from tilepolicy.errors import Problem, ScopeError

__all__ = ["Entry", "active", "innermost", "listen", "open_entries", "push", "remove"]

type Listener = Callable[[tuple[object, ...]], None]

_COROUTINE: Final = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_SUSPENDABLE: Final = _COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR
_TOOL_NAME: Final = "tilepolicy"
# 0 to 2 and 5 are reserved for debuggers, coverage, profilers and optimizers.
_TOOL_IDS: Final = (4, 3)
_EVENTS: Final = sys.monitoring.events
_LOCAL_EVENTS: Final = _EVENTS.PY_YIELD | _EVENTS.PY_RESUME | _EVENTS.PY_RETURN
_GLOBAL_EVENTS: Final = _EVENTS.PY_THROW | _EVENTS.PY_UNWIND


class Strand:
    """One line of execution with the entries pushed on it, outermost first."""

    __slots__ = ("entries", "root", "thread")

    def __init__(self, root: FrameType | None) -> None:
        self.entries: list[Entry] = []
        self.root = root
        self.thread: int | None = threading.get_ident()


class Entry:
    """One pushed payload; the handle that :func:`remove` takes."""

    __slots__ = ("payload", "strand")

    def __init__(self, payload: object, strand: Strand) -> None:
        self.payload = payload
        self.strand = strand


class _Thread(threading.local):
    """The strands in force on this thread: its own first, then running coroutine chains."""

    def __init__(self) -> None:
        self.live: list[Strand] = [Strand(None)]
        self.active: tuple[object, ...] = ()
        self.foreign_removals = 0


class _ForeignRemovals:
    """How often an entry of another thread was removed: what a thread keeps may then be old."""

    count = 0


_THREAD: Final = _Thread()
_FOREIGN_REMOVALS: Final = _ForeignRemovals()
_LISTENERS: Final[list[Listener]] = []


def listen(listener: Listener) -> None:
    """Call ``listener(active())`` on the thread concerned after each change of what is active."""
    _LISTENERS.append(listener)


def active() -> tuple[object, ...]:
    """The payloads in force here, outermost first."""
    if _THREAD.foreign_removals != _FOREIGN_REMOVALS.count:
        _refresh()
    return _THREAD.active


def open_entries() -> int:
    """How many entries are in force on this thread."""
    return sum(len(strand.entries) for strand in _THREAD.live)


def innermost() -> Entry:
    """The entry that was put in force last on this thread.

    Raises:
        IndexError: there is none.
    """
    return [entry for strand in _THREAD.live for entry in strand.entries][-1]


def push(payload: object) -> Entry:
    """Put a payload in force for the strand that calls.

    Raises:
        ScopeError: the caller is a coroutine and no ``sys.monitoring`` tool id is free.
    """
    root = next(reversed(tuple(_chain(sys._getframe(1)))), None)
    strand = _THREAD.live[0] if root is None else _coroutine_strand(root)
    entry = Entry(payload, strand)
    strand.entries.append(entry)
    _changed()
    return entry


def remove(entry: Entry) -> None:
    """Take an entry out of force, in whatever order; the other entries stay.

    Raises:
        ScopeError: the entry is in force on another thread (a generator that holds a scope was
            closed there). It is removed all the same, but that thread's jax trace key only
            follows at its next change of scope.
    """
    strand = entry.strand
    strand.entries.remove(entry)
    if strand.root is not None and not strand.entries:
        _WATCH.forget(strand)
    if strand in _THREAD.live:
        if strand.root is not None and not strand.entries:
            _THREAD.live.remove(strand)
        _changed()
    elif strand.thread is not None and strand.thread != threading.get_ident():
        _FOREIGN_REMOVALS.count += 1
        raise ScopeError(
            Problem(
                code="left-in-another-thread",
                message="a scope was left in another thread than the one it was entered in",
                remedy="close the generator that holds the scope in the thread that started it",
            )
        )


def _changed() -> None:
    _refresh()
    for listener in _LISTENERS:
        listener(_THREAD.active)


def _refresh() -> None:
    _THREAD.foreign_removals = _FOREIGN_REMOVALS.count
    _THREAD.active = tuple(entry.payload for strand in _THREAD.live for entry in strand.entries)


def _chain(frame: FrameType | None) -> Iterator[FrameType]:
    """The coroutines of the innermost chain that is running here, innermost first."""
    while frame is not None and not frame.f_code.co_flags & _COROUTINE:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_flags & _SUSPENDABLE:
        if frame.f_code.co_flags & _COROUTINE:
            yield frame
        frame = frame.f_back


def _coroutine_strand(root: FrameType) -> Strand:
    for strand in _THREAD.live:
        if strand.root is root:
            return strand
    strand = Strand(root)
    _WATCH.begin(strand)
    _THREAD.live.append(strand)
    return strand


def _live_strand(frame: FrameType) -> Strand | None:
    """The strand in force on this thread whose coroutine chain the frame belongs to."""
    coroutines = _THREAD.live[1:]
    if coroutines:
        for link in _chain(frame):
            for strand in coroutines:
                if strand.root is link:
                    return strand
    return None


class _Watch:
    """Follows the coroutines that hold scopes open, through ``sys.monitoring``."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may close a coroutine, and so leave its scope, here.
        self._lock = threading.RLock()
        self._tool: int | None = None
        self._strands: set[Strand] = set()
        self._suspended: dict[FrameType, Strand] = {}
        self._codes: dict[int, CodeType] = {}

    def begin(self, strand: Strand) -> None:
        """Watch a coroutine chain that enters its first scope."""
        with self._lock:
            if self._tool is None:
                self._tool = self._start()
            self._strands.add(strand)
            if strand.root is not None:
                self._watch(strand.root.f_code)

    def forget(self, strand: Strand) -> None:
        """Stop watching a chain that left its last scope."""
        with self._lock:
            self._strands.discard(strand)
            if strand.root is not None:
                self._suspended.pop(strand.root, None)
            if not self._strands and self._tool is not None:
                self._stop(self._tool)
                self._tool = None

    def _start(self) -> int:
        monitoring = sys.monitoring
        tool = next((tool for tool in _TOOL_IDS if monitoring.get_tool(tool) is None), None)
        if tool is None:
            owners = ", ".join(str(monitoring.get_tool(tool)) for tool in _TOOL_IDS)
            raise ScopeError(
                Problem(
                    code="no-monitoring-tool",
                    message="a scope inside a coroutine needs a sys.monitoring tool id, and all "
                    f"that are free for applications are taken by {owners}",
                    remedy="enter the scope outside of the event loop, or stop one of those tools",
                )
            )
        monitoring.use_tool_id(tool, _TOOL_NAME)
        for event, callback in self._callbacks().items():
            monitoring.register_callback(tool, event, callback)
        monitoring.set_events(tool, _GLOBAL_EVENTS)
        return tool

    def _stop(self, tool: int) -> None:
        monitoring = sys.monitoring
        monitoring.set_events(tool, _EVENTS.NO_EVENTS)
        for code in self._codes.values():
            monitoring.set_local_events(tool, code, _EVENTS.NO_EVENTS)
        self._codes.clear()
        for event in self._callbacks():
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)

    def _callbacks(self) -> dict[int, Callable[..., None]]:
        return {
            _EVENTS.PY_YIELD: self._on_yield,
            _EVENTS.PY_RESUME: self._on_resume,
            _EVENTS.PY_RETURN: self._on_end,
            _EVENTS.PY_UNWIND: self._on_end,
            _EVENTS.PY_THROW: self._on_throw,
        }

    def _watch(self, code: CodeType) -> None:
        if self._tool is not None and id(code) not in self._codes:
            self._codes[id(code)] = code
            sys.monitoring.set_local_events(self._tool, code, _LOCAL_EVENTS)

    def _on_yield(self, _code: CodeType, _offset: int, _value: object) -> None:
        strand = _live_strand(sys._getframe(1))
        if strand is not None:
            self._suspend(strand)

    def _on_end(self, _code: CodeType, _offset: int, _value: object) -> None:
        """A chain that ends with a scope still open (held by an async generator) is parked."""
        if len(_THREAD.live) > 1:
            frame = sys._getframe(1)
            strand = _live_strand(frame)
            if strand is not None and strand.root is frame:
                self._suspend(strand)

    def _on_resume(self, _code: CodeType, _offset: int) -> None:
        self._resume(sys._getframe(1))

    def _on_throw(self, code: CodeType, _offset: int, _error: BaseException) -> None:
        frame = sys._getframe(1)
        self._resume(frame)
        if code.co_flags & _COROUTINE and _live_strand(frame) is not None:
            with self._lock:
                self._watch(code)

    def _suspend(self, strand: Strand) -> None:
        if strand.root is not None:
            _THREAD.live.remove(strand)
            strand.thread = None
            self._suspended[strand.root] = strand
            _changed()

    def _resume(self, frame: FrameType) -> None:
        if self._suspended:
            for link in _chain(frame):
                strand = self._suspended.pop(link, None)
                if strand is not None:
                    strand.thread = threading.get_ident()
                    _THREAD.live.append(strand)
                    _changed()


_WATCH: Final = _Watch()
