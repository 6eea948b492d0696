"""The adapter for MaxText: its losses and its training engine follow the policy of a scope.

MaxText reads tiles and ``num_vocab_tiling`` from its own config (see
:func:`tilepolicy.maxtext.resolved_config` and ``tilepolicy run``); what it has no knob for is done
here. MaxText is not imported: a scope entered before the program imports it attaches as soon as it
does (see :mod:`tilepolicy.adapters.maxtext_patch`).

The replacements consult the scopes in force where they are called: another thread, or the same one
after the scope, gets MaxText's own functions. What is traced inside is kept by jax under the
scope's content digest.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tilepolicy.adapters import maxtext_api as api
from tilepolicy.adapters.maxtext_engine import EngineScope
from tilepolicy.adapters.maxtext_engine import patches as engine_patches
from tilepolicy.adapters.maxtext_patch import Patch, installed
from tilepolicy.adapters.maxtext_types import Foreign
from tilepolicy.context import active
from tilepolicy.context.active import ActivePolicy

if TYPE_CHECKING:
    from tilepolicy.adapters import ScopeRequest
    from tilepolicy.session import Session

__all__ = ["MaxTextAdapter", "adapter"]

_LOSSES: Final = (api.CROSS_ENTROPY, api.NNX_TILED_LOSS, api.LINEN_TILED_LOSS)


class MaxTextAdapter:
    """See :class:`tilepolicy.adapters.Adapter`."""

    name: Final = "maxtext"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[Session, EngineScope] = {}

    def versions(self) -> Mapping[str, str]:
        """The installed MaxText."""
        version = api.installed_version()
        return {} if version is None else {api.DISTRIBUTION: version}

    @contextmanager
    def enter(self, request: ScopeRequest) -> Iterator[None]:
        """Have the losses and the engine follow the policy until exit.

        Raises:
            AdapterError: the installed MaxText's functions are not those it was verified with.
        """
        version = self.versions()[api.DISTRIBUTION]
        session = request.session
        wanted = request.resolver.policy.engine.cache_pure_state
        with self._lock:
            self._engines[session] = EngineScope(session, wanted)
        try:
            with installed(self._patches(version, wanted, _keeps_upstream_loss(session))):
                yield
        finally:
            with self._lock:
                del self._engines[session]

    def scope(self) -> ActivePolicy | None:
        """The innermost scope in force here that has entered this adapter."""
        return next((s for s in active.policies() if s.session in self._engines), None)

    def engine_scope(self) -> EngineScope | None:
        """What the innermost scope in force here wants of the training engine."""
        scope = self.scope()
        return None if scope is None else self._engines.get(scope.session)

    def _patches(self, version: str, cache: object, upstream: bool) -> list[Patch]:
        table = api.verified(version)
        targets = [] if upstream else [target for target in _LOSSES if target in table]
        api.require(tuple(targets), version)
        patches = [_loss_patch(target, version, self.scope) for target in targets]
        if cache is not False or api.own_cache(version):
            of_engine = engine_patches(version, self.engine_scope)
            api.require(tuple(api.ENGINE.values()) if of_engine else (), version)
            patches += of_engine
        return patches


def _keeps_upstream_loss(session: Session) -> bool:
    """Whether the scope is known to want MaxText's own loss, so that nothing need be replaced."""
    resolution = session.inputs.resolution if session.inputs is not None else None
    return resolution is not None and resolution.settings["loss"].value == "upstream"


type _Current = Callable[[], ActivePolicy | None]


def _loss_patch(target: api.Target, version: str, current: _Current) -> Patch:
    makers = {
        api.CROSS_ENTROPY: _monolithic,
        api.NNX_TILED_LOSS: _nnx_tiled,
        api.LINEN_TILED_LOSS: _linen_tiled,
    }
    replace = functools.partial(makers[target], version=version, current=current)
    return Patch(target.module, target.name, replace, imported_by_name=True)


def _monolithic(original: Foreign, *, version: str, current: _Current) -> Foreign:  # noqa: ARG001
    @functools.wraps(original)
    def cross_entropy_with_logits(
        logits: Foreign, targets: Foreign, z_loss: Foreign = 0.0
    ) -> Foreign:
        config = api.pretrain_loss_config(sys._getframe(1))
        scope = current() if config is not None else None
        if scope is None:
            return original(logits, targets, z_loss=z_loss)
        from tilepolicy.adapters.maxtext_losses import monolithic_loss

        return monolithic_loss(original, scope, config, logits, targets, z_loss)

    return cross_entropy_with_logits


def _nnx_tiled(original: Foreign, *, version: str, current: _Current) -> Foreign:
    @functools.wraps(original)
    def vocab_tiling_nnx_loss(
        model: Foreign, hidden_states: Foreign, data: Foreign, config: Foreign, is_train: Foreign
    ) -> Foreign:
        def call() -> Foreign:
            return original(model, hidden_states, data, config, is_train)

        scope = current()
        if scope is None:
            return call()
        from tilepolicy.adapters.maxtext_losses import TiledCall, tiled_loss

        return tiled_loss(
            call, scope, TiledCall(model, hidden_states, data, config, is_train, version)
        )

    return vocab_tiling_nnx_loss


def _linen_tiled(original: Foreign, *, version: str, current: _Current) -> Foreign:
    @functools.wraps(original)
    def vocab_tiling_linen_loss(
        hidden_states: Foreign,
        data: Foreign,
        config: Foreign,
        model: Foreign,
        params: Foreign,
        is_train: Foreign,
    ) -> Foreign:
        def call() -> Foreign:
            return original(hidden_states, data, config, model, params, is_train)

        scope = current()
        if scope is None:
            return call()
        from tilepolicy.adapters.maxtext_losses import TiledCall, tiled_loss

        return tiled_loss(
            call,
            scope,
            TiledCall(model, hidden_states, data, config, is_train, version, params),
        )

    return vocab_tiling_linen_loss


adapter: Final = MaxTextAdapter()
