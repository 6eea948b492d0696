"""Where a call comes from, and the memory of what was said of it.

jax keeps, for each operation, the Python traceback of the code that made it, and brings it back
when it traces the operation again (jvp, transposition). So the chain of (code object,
instruction) that led to a forward call is found again in its backward pass. jax's name stack is
empty at that point and does not help. The kept chain may be short: from jax 0.12 on it ends where
the innermost enclosing trace (of a scan body, of a checkpointed function) began.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from types import CodeType, FrameType
from typing import Final

from tilepolicy.context.layers import CallSites
from tilepolicy.settings import Layer

__all__ = ["MOST_FRAMES", "CallOrigin", "CallStack", "SiteMemory"]

_NO_LAYER: Final[frozenset[Layer]] = frozenset()

type ForwardSizes = tuple[int, int, int]
"""(m, k, n) of a forward problem."""

MOST_FRAMES: Final = 64
"""How much of a chain is kept and compared: more than jax itself keeps from 0.12 on.

Two tagged calls whose chains differ only further out count as one line that serves both layers.
"""

_MOST_CHAINS: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class CallStack:
    """Frames that led to a call, innermost first.

    Attributes:
        codes: code object of each frame.
        offsets: instruction (byte offset) that each frame is at.
    """

    codes: list[CodeType]
    offsets: list[int]

    def begins_with(self, other: CallStack) -> bool:
        """Whether the innermost frames, as far as they are compared, are those of ``other``."""
        size = min(len(other.codes), MOST_FRAMES)
        return (
            size <= len(self.codes)
            and self.offsets[:size] == other.offsets[:size]
            and all(map(operator.is_, self.codes[:size], other.codes))
        )

    @classmethod
    def above(cls, frame: FrameType, most: int) -> CallStack:
        """The callers of a running frame, at most so many of the innermost."""
        callers = list(islice(_callers(frame), most))
        return cls([caller.f_code for caller in callers], [caller.f_lasti for caller in callers])

    def lines(self, leave_out: Sequence[str] = (), most: int = 6) -> list[str]:
        """``file:line in function`` of the innermost frames, without those of given folders."""
        return [line for line, _ in zip(self._lines(leave_out), range(most), strict=False)]

    def _lines(self, leave_out: Sequence[str]) -> Iterator[str]:
        for code, offset in zip(self.codes, self.offsets, strict=True):
            if not any(part in code.co_filename for part in leave_out):
                yield f"{code.co_filename}:{_line(code, offset)} in {code.co_name}"


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _layer_of(codes: Iterable[CodeType], sites: Sequence[CallSites]) -> Layer | None:
    """The layer of the innermost function that call sites know."""
    names = {name for known in sites for name in (*known.wi, *known.wo)}
    for code in codes:
        if code.co_name in names:
            for known in sites:
                if (found := known.layer_of(code)) is not None:
                    return found
    return None


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if line is not None and start <= offset < end:
            return line
    return code.co_firstlineno


@dataclass(frozen=True, slots=True, eq=False)
class CallOrigin:
    """Where the operation comes from that jax is tracing, as far as jax says.

    Attributes:
        remembered: the callers that jax kept for an operation that it is tracing again; None
            while it traces Python code for the first time.
        remembers_op: whether ``remembered`` are the callers of the op itself. If not, they are
            those of an operation around it: of a checkpointed function, or of a rule that calls
            the op.
    """

    remembered: CallStack | None
    remembers_op: bool

    def function_layer(
        self, running: FrameType | None, sites: Sequence[CallSites], jax_folder: str
    ) -> Layer | None:
        """The layer of the innermost known function that leads to the call, or None.

        A traceback of an operation around a re-traced op is not used: a checkpoint around the wi
        calls inside of the wo function would say wo.

        Args:
            running: the frame of the op's call, if that is on the Python stack now.
            sites: the known functions.
            jax_folder: frames from there on are those of a transformation around the call.
        """
        if running is not None:
            codes = (caller.f_code for caller in _callers(running))
            if self.remembered is None:
                return _layer_of(codes, sites)
            direct = takewhile(lambda code: jax_folder not in code.co_filename, codes)
            return _layer_of(direct, sites) or _layer_of(self.remembered.codes, sites)
        if self.remembered is not None and self.remembers_op:
            return _layer_of(self.remembered.codes, sites)
        return None


class SiteMemory:
    """Layers that were decided while Python could tell, for when it no longer can.

    Two memories. *Chains*: the callers of a call with a tag, with its forward sizes; bounded, the
    oldest are forgotten (a later lookup then asks instead of guessing). *Ops*: the bound op
    object, which is the same in every re-trace of one call; held weakly.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: OrderedDict[tuple[int, int, ForwardSizes], list[tuple[CallStack, Layer]]]
        self._chains = OrderedDict()
        self._recalled: dict[tuple[CallStack, ForwardSizes], frozenset[Layer]] = {}
        self._ops: dict[int, tuple[weakref.ref[object], frozenset[Layer]]] = {}

    def remember(self, callers: CallStack, sizes: ForwardSizes, layer: Layer) -> None:
        """Keep what a tag said of a call."""
        key = (id(callers.codes[0]), callers.offsets[0], sizes)
        with self._lock:
            known = self._chains.setdefault(key, [])
            self._chains.move_to_end(key)
            if not any(said == layer and callers.begins_with(kept) for kept, said in known):
                known.append((callers, layer))
                self._recalled.clear()
            if len(self._chains) > _MOST_CHAINS:
                self._chains.popitem(last=False)
                self._recalled.clear()

    def knows_chains(self) -> bool:
        """Whether any call was ever tagged: else there is no stack to capture."""
        return bool(self._chains)

    def recall(self, callers: CallStack, sizes: ForwardSizes) -> frozenset[Layer]:
        """The layers that tags gave to this chain and these sizes: two when it serves both."""
        asked = (callers, sizes)
        if (found := self._recalled.get(asked)) is not None:
            return found
        if not callers.codes:
            return frozenset()
        key = (id(callers.codes[0]), callers.offsets[0], sizes)
        with self._lock:
            known = self._chains.get(key, ())
            found = frozenset(layer for kept, layer in known if kept.begins_with(callers))
            if len(self._recalled) >= _MOST_CHAINS:
                self._recalled.clear()
            self._recalled[asked] = found
        return found

    def remember_op(self, op: object, layer: Layer) -> None:
        """Keep the layer of a bound op; an op that serves both layers tells nothing."""
        with self._lock:
            known = self._ops.get(id(op))
            if known is None or known[0]() is not op:
                self._ops[id(op)] = (weakref.ref(op, self._forget(id(op))), frozenset({layer}))
            elif layer not in known[1]:
                self._ops[id(op)] = (known[0], known[1] | {layer})

    def recall_op(self, op: object) -> frozenset[Layer]:
        """The layers of the calls that this bound op was made for."""
        known = self._ops.get(id(op))
        return known[1] if known is not None and known[0]() is op else _NO_LAYER

    def _forget(self, identity: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._ops.pop(identity, None)

        return forget
