"""MaxText's own training engine under a policy: the same state, and what the report says.

On 0.2.4 tilepolicy keeps the split state, from 0.2.5 on MaxText does; the test is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tilepolicy
from tilepolicy.adapters import maxtext_api as api

pytestmark = [pytest.mark.maxtext, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 10


def trained(tiny: Any, folder: Path) -> list[np.ndarray]:
    """Every array of the engine's state after ten steps of two micro steps each."""
    import tunix_stand_in
    from flax import nnx
    from flax.core.spmd import logical_axis_rules

    tunix_stand_in.install()
    from maxtext.training_engine.maxtext_engine import MaxTextTrainingEngine

    config = tiny.config(f"base_output_directory={folder}", "gradient_accumulation_steps=2")
    mesh = tiny.build().mesh
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        engine = MaxTextTrainingEngine(config, mesh)
        if not isinstance(engine.optimizer, nnx.Optimizer):  # 0.2.4 leaves the optax one
            engine.optimizer = nnx.Optimizer(engine.model, engine.optimizer, wrt=nnx.Param)
        data = tiny.batch()
        engine.compile(dict(data))
        for _ in range(STEPS):
            for _ in range(2):
                engine.fwd_bwd(dict(data))
            engine.update()
        leaves = jax.tree.leaves(nnx.split(engine.state)[1])
        engine.close()
    return [
        np.asarray(
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for x in leaves
    ]


def under(tiny: Any, folder: Path, cache: str) -> tuple[list[np.ndarray], list[tuple[Any, str]]]:
    """The state after training under ``engine.cache_pure_state``, and the notes of it."""
    path = folder / f"{cache}.yml"
    path.write_text(
        f"version: 1\nname: p\nvocab: {{loss: upstream}}\nengine: {{cache_pure_state: {cache}}}\n"
    )
    with tilepolicy.apply(path) as session:
        state = trained(tiny, folder)
    found = [note for note in session.notes if note.subject == "engine.cache_pure_state"]
    return state, [(note.value, note.reason) for note in found]


def test_ten_steps_are_bit_identical_to_those_without_the_cache(tmp_path: Path) -> None:
    """Parameters, optimizer, counters and keys, and the report says who kept the state."""
    import tiny

    off, off_notes = under(tiny, tmp_path, "false")
    on, on_notes = under(tiny, tmp_path, "true")
    assert len(on) == len(off)
    for a, b in zip(on, off, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    if api.own_cache(tiny.MAXTEXT):
        assert off_notes == [("off", "the policy switches MaxText's own cache off")]
        assert on_notes == [("live", "MaxText's own cache")]
    else:
        assert off_notes == []
        assert on_notes == [("live", "tilepolicy keeps the split state, as MaxText 0.2.5 does")]
