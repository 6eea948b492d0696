"""Engine state kept between steps: the same training, fewer walks, and when it gives up."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tilepolicy.adapters import maxtext_api as api
from tilepolicy.adapters.maxtext_engine import EngineCacheWarning, EngineScope, patches
from tilepolicy.adapters.maxtext_patch import installed
from tilepolicy.errors import AdapterError
from tilepolicy.session import Session

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)


class CountingNnx:
    """``flax.nnx`` that counts splits."""

    def __init__(self) -> None:
        self.splits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(nnx, name)

    def split(self, *args: Any) -> Any:
        """``nnx.split``, counted."""
        self.splits += 1
        return nnx.split(*args)


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The toy engine under the name of MaxText's engine module."""
    spec = importlib.util.spec_from_file_location(
        api.ENGINE_MODULE, Path(__file__).with_name("toy_engine.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, api.ENGINE_MODULE, module)
    spec.loader.exec_module(module)
    module.nnx = CountingNnx()
    return module


class Scope:
    """A scope that can be switched on and off, as threads and nesting do."""

    def __init__(self, wanted: object = "auto") -> None:
        self.engine = EngineScope(Session(), wanted)
        self.active = True

    def current(self) -> EngineScope | None:
        """The scope in force."""
        return self.engine if self.active else None

    @property
    def notes(self) -> list[tuple[object, str]]:
        """What was reported."""
        return [(note.value, note.reason) for note in self.engine.session.notes]


@pytest.fixture
def scope(engine_module: ModuleType) -> Iterator[Scope]:
    """The cache of MaxText 0.2.4 in force, with ``engine.cache_pure_state: auto``."""
    found = Scope()
    assert engine_module.__name__ == api.ENGINE_MODULE
    with installed(patches("0.2.4", found.current)):
        yield found


def train(engine: Any, steps: int = 10, micro_steps: int = 2) -> list[float]:
    """Trains, and gives the loss of each micro step."""
    losses = []
    for step in range(steps):
        for micro in range(micro_steps):
            losses.append(engine.fwd_bwd(BATCH * (1 + step + micro / 7)))
        engine.update()
    return losses


def leaves(engine: Any) -> list[np.ndarray]:
    """Every array of the live state; keys as their data."""
    state = nnx.split(engine._state)[1]
    raw = [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x) for x in raw]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether all are equal bit for bit."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


def test_ten_steps_are_bit_identical_with_two_walks(engine_module: ModuleType) -> None:
    """Losses and every array of the state agree; only the first step walks the graph."""
    plain = engine_module.MaxTextTrainingEngine()
    expected = train(plain)
    walks = engine_module.nnx.splits
    scope = Scope()
    with installed(patches("0.2.4", scope.current)):
        kept = engine_module.MaxTextTrainingEngine()
        counter = engine_module.nnx._nnx
        before = counter.splits
        assert train(kept) == expected
        in_kernels = 2
        assert counter.splits - before == in_kernels, "none but those traced inside the kernels"
    assert walks == 30 + in_kernels
    assert same(leaves(plain), leaves(kept))
    assert scope.notes == [("live", "tilepolicy keeps the split state, as MaxText 0.2.5 does")]


@pytest.mark.usefixtures("scope")
def test_live_objects_are_never_stale(engine_module: ModuleType) -> None:
    """After each step the model itself holds the new values."""
    engine = engine_module.MaxTextTrainingEngine()
    train(engine, steps=3)
    assert float(engine._model.calls.get_value()) == 6
    assert engine._state.model is engine._model


def test_a_variable_changed_from_outside_is_seen(engine_module: ModuleType) -> None:
    """A program that writes to the model between steps gets its value trained on."""

    def with_change() -> tuple[list[float], list[np.ndarray]]:
        engine = engine_module.MaxTextTrainingEngine()
        losses = train(engine, steps=2)
        kernel = engine._model.first.kernel
        kernel.set_value(kernel.get_value() * 2)
        losses += train(engine, steps=2)
        return losses, leaves(engine)

    expected = with_change()
    scope = Scope()
    with installed(patches("0.2.4", scope.current)):
        found = with_change()
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


def test_a_module_changed_from_outside_is_seen(engine_module: ModuleType) -> None:
    """Replacing a submodule in place is as good as a new model."""

    def with_change() -> list[float]:
        engine = engine_module.MaxTextTrainingEngine()
        losses = train(engine, steps=2)
        engine._model.second = nnx.Linear(8, 1, rngs=nnx.Rngs(5))
        engine.compile()
        return losses + train(engine, steps=2)

    expected = with_change()
    scope = Scope()
    with installed(patches("0.2.4", scope.current)):
        assert with_change() == expected


def test_steps_outside_of_a_scope_are_plain_and_seen_afterwards(
    engine_module: ModuleType, scope: Scope
) -> None:
    """A step without the scope (another thread's, or one between two scopes) spoils nothing."""
    engine = engine_module.MaxTextTrainingEngine()
    losses = train(engine, steps=2)
    scope.active = False
    counter = engine_module.nnx._nnx
    before = counter.splits
    losses += train(engine, steps=1)
    assert counter.splits - before == 3
    scope.active = True
    losses += train(engine, steps=2)
    scope.active = False
    plain = engine_module.MaxTextTrainingEngine()
    assert losses == [*train(plain, 2), *train(plain, 1), *train(plain, 2)]
    assert same(leaves(engine), leaves(plain))


def test_a_state_that_does_not_line_up_falls_back_with_one_warning(
    engine_module: ModuleType, scope: Scope
) -> None:
    """A forward pass that leaves more in the model than was split: trained plainly, said once."""
    engine = engine_module.MaxTextTrainingEngine()
    engine.sows = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EngineCacheWarning)
        losses = train(engine, steps=3)
    reason = "fwd_bwd returned other non-parameters than the model was split into"
    texts = [str(w.message) for w in caught if w.category is EngineCacheWarning]
    assert texts == [f"the training engine's state is split anew in every step: {reason}"]
    assert scope.notes[-1] == ("disabled", reason)
    scope.active = False
    plain = engine_module.MaxTextTrainingEngine()
    plain.sows = True
    assert losses == train(plain, steps=3)
    assert same(leaves(engine), leaves(plain))


def test_a_demanded_cache_that_cannot_be_is_an_error(engine_module: ModuleType) -> None:
    """``cache_pure_state: true`` does not fall back."""
    scope = Scope(wanted=True)
    with installed(patches("0.2.4", scope.current)):
        engine = engine_module.MaxTextTrainingEngine()
        engine.sows = True
        with (
            pytest.warns(EngineCacheWarning),
            pytest.raises(
                AdapterError,
                match=r"engine\.cache_pure_state is true, but fwd_bwd returned other "
                "non-parameters than the model was split into",
            ),
        ):
            train(engine, steps=1)


def test_switched_off_it_does_nothing(engine_module: ModuleType) -> None:
    """``cache_pure_state: false`` leaves every split to flax."""
    scope = Scope(wanted=False)
    with installed(patches("0.2.4", scope.current)):
        engine = engine_module.MaxTextTrainingEngine()
        counter = engine_module.nnx._nnx
        before = counter.splits
        train(engine, steps=1)
        assert counter.splits - before == 3 + 2
    assert scope.notes == []


def test_a_step_that_raises_leaves_no_kept_state(engine_module: ModuleType, scope: Scope) -> None:
    """The next step starts from the live objects."""
    engine = engine_module.MaxTextTrainingEngine()
    train(engine, steps=1)
    with pytest.raises(TypeError):
        engine.fwd_bwd("no array")
    losses = train(engine, steps=1)
    scope.active = False
    plain = engine_module.MaxTextTrainingEngine()
    train(plain, steps=1)
    assert losses == train(plain, steps=1)


def test_nothing_is_left_behind(engine_module: ModuleType) -> None:
    """The module's ``nnx`` and the methods are themselves again."""
    before = (
        engine_module.nnx,
        engine_module.MaxTextTrainingEngine.fwd_bwd,
        engine_module.MaxTextTrainingEngine.update,
    )
    with installed(patches("0.2.4", Scope().current)):
        assert engine_module.nnx is not before[0]
    assert before == (
        engine_module.nnx,
        engine_module.MaxTextTrainingEngine.fwd_bwd,
        engine_module.MaxTextTrainingEngine.update,
    )


class OwnCache:
    """What is observed of MaxText 0.2.5's engine."""

    def __init__(self, refusal: str = "") -> None:
        self._refusal = refusal
        self._params_pure: object = None

    def _refresh_pure_state(self) -> None:
        self._params_pure = object()
        if self._refusal:
            self._disable_pure_state(self._refusal)

    def _disable_pure_state(self, _reason: str) -> None:
        self._invalidate_pure_state()

    def _invalidate_pure_state(self) -> None:
        self._params_pure = None


@pytest.mark.parametrize(
    ("wanted", "refusal", "note", "kept"),
    [
        ("auto", "", ("live", "MaxText's own cache"), True),
        ("auto", "no model", ("disabled", "no model"), False),
        (False, "", ("off", "the policy switches MaxText's own cache off"), False),
    ],
)
def test_maxtexts_own_cache_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    wanted: object,
    refusal: str,
    note: tuple[str, str],
    kept: bool,
) -> None:
    """From 0.2.5 on the report says whether MaxText's cache is live, or why it is not."""
    holder = SimpleNamespace(MaxTextTrainingEngine=type("E", (OwnCache,), dict(vars(OwnCache))))
    monkeypatch.setitem(sys.modules, api.ENGINE_MODULE, holder)
    scope = Scope(wanted)
    with installed(patches("0.2.5", scope.current)):
        engine = holder.MaxTextTrainingEngine(refusal)
        engine._refresh_pure_state()
    assert scope.notes == [note]
    assert api.keeps_pure_state(engine) is kept


def test_releases_without_an_engine_have_nothing_to_cache() -> None:
    """Before 0.2.4 there is no training engine."""
    assert patches("0.2.3", Scope().current) == []
