"""Tile axes are translated the same way that the kernels and MaxText read them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepolicy import axes
from tilepolicy.axes import GmmShape, Kernel
from tilepolicy.settings import AXES, LAYERS, PASSES, Axis, Layer, Pass

SITES = [(layer, pass_) for layer in LAYERS for pass_ in PASSES]
sizes = st.integers(min_value=1, max_value=1 << 20)
shapes = st.builds(GmmShape, m=sizes, k=sizes, n=sizes, g=st.integers(1, 512))

V1 = {
    ("wi", "fwd"): ("batch_seq", "embed_dim", "mlp_dim"),
    ("wi", "dlhs"): ("batch_seq", "embed_dim", "mlp_dim"),
    ("wi", "drhs"): ("batch_seq", "embed_dim", "mlp_dim"),
    ("wo", "fwd"): ("batch_seq", "mlp_dim", "embed_dim"),
    ("wo", "dlhs"): ("batch_seq", "mlp_dim", "embed_dim"),
    ("wo", "drhs"): ("batch_seq", "mlp_dim", "embed_dim"),
}
V2 = V1 | {
    ("wi", "dlhs"): ("batch_seq", "mlp_dim", "embed_dim"),
    ("wo", "dlhs"): ("batch_seq", "embed_dim", "mlp_dim"),
}


@pytest.mark.parametrize(("layer", "pass_"), SITES)
@pytest.mark.parametrize(
    ("kernel", "expected"), [("tokamax_v1", V1), ("tokamax_v2", V2), ("megablox", V2)]
)
def test_each_kernel_names_the_axes_in_its_own_order(
    kernel: Kernel, expected: dict[tuple[Layer, Pass], tuple[Axis, ...]], layer: Layer, pass_: Pass
) -> None:
    """v1 keeps the forward names in dlhs; v2 and megablox put the contracting axis second."""
    assert axes.kernel_axes(kernel, layer, pass_) == expected[layer, pass_]


def test_wi_dlhs_embed_dim_is_tile_k_in_v1_and_tile_n_in_v2() -> None:
    """One policy field reaches differently named kernel fields, values untouched."""
    tile = {"batch_seq": 512, "embed_dim": 7168, "mlp_dim": 256}
    assert axes.to_kernel(tile, "tokamax_v1", "wi", "dlhs") == {
        "tile_m": 512,
        "tile_k": 7168,
        "tile_n": 256,
    }
    assert axes.to_kernel(tile, "tokamax_v2", "wi", "dlhs") == {
        "tile_m": 512,
        "tile_n": 7168,
        "tile_k": 256,
    }


@given(
    kernel=st.sampled_from(axes.KERNELS),
    site=st.sampled_from(SITES),
    tile=st.dictionaries(st.sampled_from(AXES), sizes),
    buffers=st.integers(1, 8),
)
def test_to_kernel_and_back_loses_nothing(
    kernel: Kernel, site: tuple[Layer, Pass], tile: dict[str, int], buffers: int
) -> None:
    """from_kernel inverts to_kernel for partial tiles and for fields that tile no axis."""
    given_tile = tile | dict.fromkeys(axes.KERNEL_EXTRA_FIELDS[kernel], buffers)
    config = axes.to_kernel(given_tile, kernel, *site)
    assert axes.from_kernel(config, kernel, *site) == given_tile


def test_a_field_of_another_kernel_is_refused_by_name() -> None:
    """The text names the kernel, the unknown field and the fields there are."""
    expected = (
        r"^tokamax_v2 has no field input_buffer_count; "
        r"its fields are batch_seq, embed_dim, mlp_dim, bucket_base$"
    )
    with pytest.raises(ValueError, match=expected):
        axes.to_kernel({"input_buffer_count": 2}, "tokamax_v2", "wi", "fwd")
    with pytest.raises(ValueError, match=r"^megablox has no field tile_mm; its fields are tile_m,"):
        axes.from_kernel({"tile_mm": 2}, "megablox", "wi", "fwd")


@given(shape=shapes, pass_=st.sampled_from(PASSES))
def test_operand_shapes_give_the_forward_problem_back(shape: GmmShape, pass_: Pass) -> None:
    """of_operands inverts operands for every pass."""
    lhs, rhs = shape.operands(pass_)
    assert GmmShape.of_operands(pass_, lhs, rhs, shape.g) == shape


def test_operands_that_do_not_fit_the_pass_are_refused() -> None:
    """Ranks and shared dimensions are checked."""
    with pytest.raises(ValueError, match=r"^fwd does not take operands of shapes \(4, 8\) and"):
        GmmShape.of_operands("fwd", (4, 8), (8, 2), 2)
    with pytest.raises(ValueError, match=r"^drhs with 2 groups does not take operands"):
        GmmShape.of_operands("drhs", (4, 8), (5, 2), 2)
    with pytest.raises(ValueError, match=r"^dlhs with 3 groups does not take operands"):
        GmmShape.of_operands("dlhs", (4, 8), (2, 6, 8), 3)


def test_a_shape_serves_both_layers_with_k_and_n_exchanged() -> None:
    """The problem lhs [m,k] x rhs [g,k,n] is wi with embed = k, and wo with embed = n."""
    shape = GmmShape(m=4096, k=7168, n=2048, g=8)
    assert axes.layer_facts(shape, "wi") == {
        "batch_seq": 4096,
        "embed_dim": 7168,
        "mlp_dim": 2048,
        "num_groups": 8,
        "rows_per_group": 512,
    }
    assert axes.layer_facts(shape, "wo")["embed_dim"] == 2048
    assert axes.layer_facts(shape, "wo")["mlp_dim"] == 7168


@pytest.mark.maxtext
def test_the_installed_maxtext_puts_the_knobs_in_this_order() -> None:
    """The 18 knobs stand in MaxText's moe.py in the order of maxtext_tuple_knobs."""
    spec = importlib.util.find_spec("maxtext")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "layers" / "moe.py").read_text("utf-8")
    # Each knob is read once in a 9-tuple, which has one entry a line.
    entries = re.findall(r"^\s*\S*?\b(w[io])_tile_(fwd|dlhs|drhs)_(\w+?)\b\"?\)?,", text, re.M)
    for layer, pass_ in SITES:
        order = tuple(axis for a, b, axis in entries if (a, b) == (layer, pass_))
        assert order == axes.maxtext_tuple_knobs(layer, pass_)


def test_before_release_0_2_2_knob_names_did_not_follow_the_axes() -> None:
    """Up to 0.2.1 the order was (batch_seq, embed_dim, mlp_dim) in every tuple."""
    assert axes.maxtext_tuple_knobs("wo", "fwd", "0.2.1") == AXES
    assert axes.knob_axis("wo", "fwd", "embed_dim", "0.2.1") == "mlp_dim"
    assert axes.knob_axis("wi", "dlhs", "embed_dim", "0.2.1") == "mlp_dim"
    assert axes.knob_axis("wi", "fwd", "embed_dim", "0.2.1") == "embed_dim"
    assert axes.knob_axis("wo", "drhs", "batch_seq", "0.2.0") == "batch_seq"


@pytest.mark.parametrize(("layer", "pass_"), SITES)
@pytest.mark.parametrize("axis", AXES)
def test_from_release_0_2_2_on_a_knob_tiles_the_axis_of_its_name(
    layer: Layer, pass_: Pass, axis: Axis
) -> None:
    """knob_axis is the identity for current releases."""
    assert axes.knob_axis(layer, pass_, axis, "0.2.2") == axis
    assert axes.knob_axis(layer, pass_, axis) == axis
