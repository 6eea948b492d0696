"""The training engine's split state: kept for MaxText 0.2.4, observed from 0.2.5 on.

0.2.4: inside a scope ``fwd_bwd`` and ``update`` run as they are, but the ``nnx.split`` and
``nnx.update`` they call go through :class:`_Nnx`, which answers from the engine's
:class:`~tilepolicy.adapters.maxtext_state.PureState` where that is current.

0.2.5 keeps the state itself and says only in the log when it gives up; the scope's report says
which of the two it was, and why.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tilepolicy.adapters import maxtext_api as api
from tilepolicy.adapters.maxtext_patch import Patch
from tilepolicy.adapters.maxtext_types import Foreign
from tilepolicy.errors import AdapterError, Problem
from tilepolicy.session import Note

if TYPE_CHECKING:
    from tilepolicy.adapters.maxtext_state import PureState
    from tilepolicy.session import Session

__all__ = ["SETTING", "EngineCacheWarning", "EngineScope", "patches"]

SETTING: Final = "engine.cache_pure_state"


class EngineCacheWarning(UserWarning):
    """The training engine's state cannot be kept between steps; training stays correct."""


class EngineScope:
    """What one scope wants of the training engine.

    Attributes:
        session: where it is reported.
        wanted: the policy's ``engine.cache_pure_state``: ``auto``, True or False.
    """

    def __init__(self, session: Session, wanted: object) -> None:
        self.session = session
        self.wanted = wanted

    def report(self, value: str, reason: str) -> None:
        """Put the state of the cache into the scope's report."""
        self.session.note(Note("maxtext", SETTING, value, reason))

    def disabled(self, reason: str) -> None:
        """Report that an engine goes without the cache.

        Raises:
            AdapterError: the policy demands the cache (``true``).
        """
        self.report("disabled", reason)
        if self.wanted is True:
            raise AdapterError(
                Problem(
                    code="no-engine-cache",
                    message=f"{SETTING} is true, but {reason}",
                    remedy=f"set {SETTING}: auto to train without the cache",
                )
            )


type Current = Callable[[], EngineScope | None]


def patches(version: str, current: Current) -> list[Patch]:
    """What to replace in a MaxText release, none where it has no training engine.

    Args:
        version: MaxText release.
        current: finds the scope in force where it is called.
    """
    if api.own_cache(version):
        return _observing(current)
    if api.ENGINE["fwd_bwd"] in api.verified(version):
        return _caching(current)
    return []


def _observing(current: Current) -> list[Patch]:
    """0.2.5: note what the engine decides when it compiles; the steps themselves are untouched."""

    def refresh(original: Callable[[Foreign], None]) -> Callable[[Foreign], None]:
        @functools.wraps(original)
        def observed(engine: Foreign) -> None:
            original(engine)
            scope = current()
            if scope is None:
                return
            if scope.wanted is False:
                api.drop_pure_state(engine)
                scope.report("off", "the policy switches MaxText's own cache off")
            elif api.keeps_pure_state(engine):
                scope.report("live", "MaxText's own cache")

        return observed

    def disable(original: Callable[[Foreign, str], None]) -> Callable[[Foreign, str], None]:
        @functools.wraps(original)
        def observed(engine: Foreign, reason: str) -> None:
            original(engine, reason)
            scope = current()
            if scope is not None:
                scope.disabled(reason)

        return observed

    return [
        _patch("_refresh_pure_state", refresh),
        _patch("_disable_pure_state", disable),
    ]


def _caching(current: Current) -> list[Patch]:
    """0.2.4: serve the two splits of a step from the engine's kept state."""
    keeper = _Keeper()

    def step(original: Callable[..., Foreign]) -> Callable[..., Foreign]:
        @functools.wraps(original)
        def cached(engine: Foreign, *args: Foreign, **kwargs: Foreign) -> Foreign:
            scope = current()
            if scope is None or scope.wanted is False:
                keeper.forget(engine)
                return original(engine, *args, **kwargs)
            with keeper.serving(engine, scope):
                return original(engine, *args, **kwargs)

        return cached

    return [
        Patch(api.ENGINE_MODULE, "nnx", lambda nnx: _Nnx(nnx, keeper)),
        _patch("fwd_bwd", step),
        _patch("update", step),
    ]


def _patch(method: str, replace: Callable[[Foreign], Foreign]) -> Patch:
    target = api.ENGINE[method]
    return Patch(target.module, target.name, replace)


class _Keeper:
    """The kept states of all engines; which of them serves the step that runs on this thread."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[Foreign, PureState] = weakref.WeakKeyDictionary()
        self._refused: weakref.WeakSet[Foreign] = weakref.WeakSet()
        self._kernels: weakref.WeakKeyDictionary[Foreign, tuple[Foreign, ...]] = (
            weakref.WeakKeyDictionary()
        )
        self._step = threading.local()

    def forget(self, engine: Foreign) -> None:
        """Let go of an engine's state: a step without the cache will change it."""
        self._states.pop(engine, None)

    @contextmanager
    def serving(self, engine: Foreign, scope: EngineScope) -> Iterator[None]:
        """Answer the step's splits of this engine's state until exit."""
        kernels = api.compiled_kernels(engine)
        known = self._kernels.get(engine)
        if known is None or any(a is not b for a, b in zip(known, kernels, strict=True)):
            self.forget(engine)
            self._kernels[engine] = kernels
        outer = getattr(self._step, "now", None)
        self._step.now = (engine, scope)
        try:
            yield
        except BaseException:
            self.forget(engine)
            raise
        finally:
            self._step.now = outer

    def state_for(self, node: Foreign) -> PureState | None:
        """The kept state that answers a split of this object, made if need be."""
        step = getattr(self._step, "now", None)
        if step is None:
            return None
        engine, scope = step
        live = api.engine_state(engine)
        if live is None or (node is not live and node is not getattr(live, "model", None)):
            return None
        kept = self._states.get(engine)
        if kept is not None and kept.state is live:
            current = kept.state_is_current() if node is live else kept.model_is_current()
            if current:
                return kept
        return self._keep(engine, live, scope)

    def publish(self, node: Foreign, values: Foreign) -> None:
        """Take over what a step has written to the live objects."""
        step = getattr(self._step, "now", None)
        kept = self._states.get(step[0]) if step is not None else None
        if step is None or kept is None or (node is not kept.state and node is not kept.model):
            return
        from tilepolicy.adapters.maxtext_state import NotReusableError

        try:
            if node is kept.state:
                kept.publish_state(values, api.update_kernel(step[0]))
            else:
                kept.publish_rest(values)
        except NotReusableError as error:
            self._refuse(step[0], step[1], str(error))

    def _keep(self, engine: Foreign, live: Foreign, scope: EngineScope) -> PureState | None:
        if engine in self._refused:
            return None
        from tilepolicy.adapters.maxtext_state import NotReusableError, PureState

        try:
            kept = PureState(live)
        except NotReusableError as error:
            self._refuse(engine, scope, str(error))
            return None
        self._states[engine] = kept
        scope.report("live", "tilepolicy keeps the split state, as MaxText 0.2.5 does")
        return kept

    def _refuse(self, engine: Foreign, scope: EngineScope, reason: str) -> None:
        """Do without the cache for this engine, with one warning."""
        self.forget(engine)
        self._refused.add(engine)
        warnings.warn(
            f"the training engine's state is split anew in every step: {reason}",
            EngineCacheWarning,
            stacklevel=2,
        )
        scope.disabled(reason)


class _Nnx:
    """``flax.nnx`` as the engine's module sees it: two functions ask the keeper first."""

    def __init__(self, nnx: Foreign, keeper: _Keeper) -> None:
        self._nnx = nnx
        self._keeper = keeper

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._nnx, name)

    def split(self, node: Foreign, *filters: Foreign) -> Foreign:
        """``nnx.split``, from memory for the engine's model and state."""
        kept = self._keeper.state_for(node)
        if kept is None:
            return self._nnx.split(node, *filters)
        if node is kept.state:
            return kept.split_state() if not filters else self._nnx.split(node, *filters)
        if filters == (self._nnx.Param, ...):
            return kept.split_model()
        return self._nnx.split(node, *filters)

    def update(self, node: Foreign, values: Foreign, *more: Foreign) -> None:
        """``nnx.update``, and the keeper takes the values over."""
        self._nnx.update(node, values, *more)
        if not more:
            self._keeper.publish(node, values)
