"""Losses of MaxText's training step under a policy: MaxText's own meaning, and who sees them.

The reference is MaxText's monolithic loss, in float32 unless a test says otherwise. Run with
MaxText 0.2.4 and 0.2.5 (``scripts/maxtext_versions.py``).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import tilepolicy
import tilepolicy.scope
from tilepolicy.adapters import maxtext_api as api
from tilepolicy.adapters import maxtext_patch
from tilepolicy.adapters.maxtext import adapter
from tilepolicy.errors import ConfigError
from tilepolicy.maxtext import resolved_config
from tilepolicy.vocab import tiled_loss_is_broken

pytestmark = [pytest.mark.maxtext, pytest.mark.filterwarnings("ignore")]

HEADS = {
    "own head": (),
    "own head in float32": ("dtype=bfloat16", "logits_dot_in_fp32=True"),
    "tied, capped, normalised": (
        "logits_via_embedding=True",
        "final_logits_soft_cap=3.0",
        "normalize_embedding_logits=True",
    ),
    "bfloat16 logits": ("dtype=bfloat16", "cast_logits_to_fp32=False"),
}
TOLERANCE = {
    # of the sums, and of the gradients relative to their largest entry. A model in bfloat16 rounds
    # its hidden states, MaxText rounds a tied table to bfloat16 and sums bfloat16 logits in it.
    "own head": (1e-5, 1e-5),
    "own head in float32": (1e-3, 2e-2),
    "tied, capped, normalised": (1e-5, 1e-2),
    "bfloat16 logits": (1e-2, 5e-2),
}
LOSSES = ("sparse", "chunked", "online")


@pytest.fixture(scope="module")
def tiny() -> Any:
    """The helpers around the tiny model; imports MaxText once."""
    import tiny as helpers

    return helpers


def policy(folder: Path, loss: str, *, more: str = "") -> Any:
    """A policy that selects a loss."""
    path = folder / f"{loss}.yml"
    path.write_text(f"version: 1\nname: {loss}\nvocab: {{loss: {loss}{more}}}\n")
    return tilepolicy.load(path)


def notes(session: Any) -> list[tuple[object, str]]:
    """What the session says of losses."""
    return [(note.value, note.reason) for note in session.notes if note.subject == "loss"]


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_every_loss_means_what_maxtexts_means(tiny: Any, tmp_path: Path, head: str) -> None:
    """Loss, z-loss, mask and gradients agree with MaxText's monolithic loss, for each head."""
    plain = tiny.grade(tiny.build(*HEADS[head]))
    tiled = tiny.build(*HEADS[head], "num_vocab_tiling=4")
    of_sums, of_gradients = TOLERANCE[head]
    for loss in LOSSES:
        with tilepolicy.apply(policy(tmp_path, loss), config=tiled.config) as session:
            ours = tiny.grade(tiled)
        assert [used for used, _ in notes(session)] == [loss]
        assert not session.misses
        assert ours.loss == pytest.approx(plain.loss, rel=of_sums)
        assert ours.xent_sum == pytest.approx(plain.xent_sum, rel=of_sums)
        assert ours.z_loss == pytest.approx(plain.z_loss, rel=of_sums)
        assert plain.distance(ours) < of_gradients, loss


def test_the_tiled_gradient_is_the_monolithic_one(tiny: Any, tmp_path: Path) -> None:
    """With a cotangent that is not 1, as gradient accumulation and loss scaling bring.

    Before 0.2.5 MaxText's own tiled loss fails this: its hidden-state gradient lacks the factor.
    """
    plain = tiny.grade(tiny.build())
    tiled = tiny.build("num_vocab_tiling=4")
    own = plain.distance(tiny.grade(tiled))
    if tiled_loss_is_broken(tiny.MAXTEXT):
        assert own > 0.5
    else:
        assert own < 1e-5
    with tilepolicy.apply(policy(tmp_path, "chunked"), config=tiled.config):
        assert plain.distance(tiny.grade(tiled)) < 1e-5


def test_the_monolithic_loss_is_sparse_too(tiny: Any, tmp_path: Path) -> None:
    """Logits that MaxText has formed anyway are not one-hot encoded; what cannot be is a miss."""
    built = tiny.build()
    plain = tiny.grade(built)
    with tilepolicy.apply(policy(tmp_path, "sparse"), config=built.config) as session:
        assert plain.distance(tiny.grade(built)) < 1e-6
    assert notes(session) == [("sparse", "of the logits that MaxText's model returned")]
    with tilepolicy.apply(policy(tmp_path, "chunked"), config=built.config) as session:
        assert plain.distance(tiny.grade(built)) < 1e-6
    (miss,) = session.misses
    assert miss.miss == (
        "sparse instead of chunked: MaxText's config has num_vocab_tiling: 1, so its model "
        "returned all logits; build it with tilepolicy.maxtext.resolved_config, or use tilepolicy "
        "run"
    )


def test_resolved_config_routes_the_loss(tiny: Any, tmp_path: Path) -> None:
    """A config object of the same type, with what MaxText honours; the given one is unchanged."""
    built = tiny.build()
    chosen = policy(tmp_path, "online")
    config = resolved_config(built.config, chosen)
    assert type(config) is type(built.config)
    assert (built.config.num_vocab_tiling, config.num_vocab_tiling) == (1, 2)
    routed = tiny.with_config(config)
    with tilepolicy.apply(chosen, config=built.config) as session:
        ours = tiny.grade(routed)
    assert tiny.grade(built).distance(ours) < 1e-5
    assert notes(session) == [("online", "vocabulary tiles of 1024")]


def test_resolved_config_takes_a_config_object_only(tiny: Any) -> None:
    """A path is for ``tilepolicy run``."""
    with pytest.raises(ConfigError, match="resolved_config takes a MaxText config object"):
        resolved_config(str(tiny.BASE), "maxtext-default")


def test_a_scope_without_a_config_resolves_that_of_the_call(tiny: Any, tmp_path: Path) -> None:
    """The step's own config decides about automatic values."""
    tiled = tiny.build("num_vocab_tiling=4")
    with tilepolicy.apply(policy(tmp_path, "auto")) as session:
        tiny.grade(tiled)
    assert notes(session) == [("sparse", "1 chunks of tokens")]


def test_chunks_follow_the_policy(tiny: Any, tmp_path: Path) -> None:
    """The number of chunks is the resolved one, whatever routed the call."""
    tiled = tiny.build("num_vocab_tiling=-1")
    small = ", max_chunk_bytes: 65536, max_monolithic_vocab_size: 1, min_chunk_tokens: 8"
    chosen = policy(tmp_path, "chunked", more=small)
    routed = tiny.with_config(resolved_config(tiled.config, chosen))
    with tilepolicy.apply(chosen, config=tiled.config) as session:
        tiny.grade(routed)
    assert routed.config.num_vocab_tiling == 8
    assert notes(session) == [("chunked", "8 chunks of tokens")]


def test_an_unrecognised_head_is_cut_along_the_tokens(tiny: Any, tmp_path: Path) -> None:
    """``online`` needs the weights; dropout before the head hides them, and the report says so."""
    tiled = tiny.build("num_vocab_tiling=4", "enable_dropout=True", "dropout_rate=0.1")
    with tilepolicy.apply(policy(tmp_path, "online"), config=tiled.config) as session:
        tiny.grade(tiled)
    (miss,) = session.misses
    assert miss.miss == "chunked instead of online: there is dropout before the output head"


def test_block_diffusion_keeps_maxtexts_loss(tiny: Any, tmp_path: Path) -> None:
    """Its loss is of aligned logits: one tile and MaxText's own function, whatever the policy."""
    from tilepolicy.adapters.maxtext_choice import choose

    with tilepolicy.apply(policy(tmp_path, "sparse"), config=tiny.config()):
        scope = adapter.scope()
        assert scope is not None

        class BlockDiffusion:
            training_objective = "block_diffusion"

        assert choose(scope, BlockDiffusion()).loss == "upstream"
        assert choose(scope, tiny.config()).loss == "sparse"


def test_another_thread_gets_maxtexts_own(tiny: Any, tmp_path: Path) -> None:
    """A policy in one thread and plain MaxText in another at the same time: each its own."""
    tiled = tiny.build("num_vocab_tiling=4")
    own = tiny.grade(tiled)
    inside, traced = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def plain() -> None:
        inside.wait(600)
        found["plain"] = tiny.grade(tiled)
        traced.set()

    thread = threading.Thread(target=plain)
    thread.start()
    with tilepolicy.apply(policy(tmp_path, "chunked"), config=tiled.config) as session:
        inside.set()
        assert traced.wait(600)
        assert notes(session) == [], "what the other thread traced did not ask this scope"
        found["ours"] = tiny.grade(tiled)
        assert [used for used, _ in notes(session)] == ["chunked"]
    thread.join()
    assert found["plain"].distance(own) == 0.0
    assert found["plain"].loss == own.loss


def test_the_same_content_again_does_not_trace_again(tiny: Any, tmp_path: Path) -> None:
    """A jitted step is traced once for a policy, anew for another, and plainly outside."""
    tiled = tiny.build("num_vocab_tiling=4")
    call = tiny.step(tiled)
    counts = []
    for loss in ("sparse", "sparse", "chunked", None, "sparse", None):
        if loss is None:
            tiny.grade(tiled, call)
        else:
            with tilepolicy.apply(policy(tmp_path, loss), config=tiled.config):
                tiny.grade(tiled, call)
        counts.append(call._cache_size())
    assert counts == [1, 1, 2, 3, 3, 3]


def test_a_hundred_scopes_leave_nothing(tiny: Any, tmp_path: Path) -> None:
    """MaxText's functions are its own again, after exceptions too, and no scope is remembered."""
    config = tiny.build().config
    scope = tilepolicy.apply(policy(tmp_path, "sparse"), config=config)
    own_loss = tiny.train.vocab_tiling_nnx_loss
    before = functions_of_maxtext()
    for turn in range(100):
        if turn % 2:
            with pytest.raises(KeyError), scope:
                raise KeyError(turn)
        else:
            with scope:
                assert tiny.train.vocab_tiling_nnx_loss is not own_loss
    assert tiny.train.vocab_tiling_nnx_loss is own_loss
    assert functions_of_maxtext() == before
    assert not maxtext_patch._ACTIVE
    assert maxtext_patch._FINDER not in sys.meta_path
    assert not adapter._engines
    assert tilepolicy.scope.current() is None


def functions_of_maxtext() -> dict[str, object]:
    """Whatever the imported modules of MaxText hold under the names that a scope replaces."""
    names = {target.name for release in api.SIGNATURES.values() for target in release}
    return {
        f"{module}.{name}": vars(sys.modules[module])[name]
        for module in sorted(sys.modules)
        if module.startswith("maxtext.")
        for name in sorted(names & set(vars(sys.modules[module])))
    }
