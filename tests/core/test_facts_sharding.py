"""Mesh sizes and how rules cut arrays."""

from __future__ import annotations

from tilepolicy.facts.sharding import Mesh, build_mesh, parse_rules, partition

AXES = ("data", "fsdp", "tensor", "expert")


def test_the_one_axis_of_minus_one_is_the_rest() -> None:
    """-1 is what the other axes leave of the devices, within slices and across them."""
    config = {
        "ici_fsdp_parallelism": -1,
        "ici_tensor_parallelism": 2,
        "dcn_data_parallelism": -1,
    }
    mesh = build_mesh(config, AXES, 16, 4)
    assert mesh == Mesh({"data": 4, "fsdp": 8, "tensor": 2, "expert": 1}, {})
    assert mesh.size(("fsdp", "tensor", "no_such_axis")) == 16


def test_the_rest_is_unknown_without_devices() -> None:
    """Without a number of devices the size is not known, and the keys that would tell it are."""
    mesh = build_mesh({"ici_fsdp_parallelism": -1}, AXES, None, 1)
    assert mesh.size(("fsdp",)) is None
    assert mesh.size(("data", "tensor")) == 1
    assert mesh.missing(("data", "fsdp")) == ("ici_fsdp_parallelism", "compile_topology")
    assert set(mesh.axes) == set(AXES)


def test_contradictions_are_named() -> None:
    """Sizes that do not make up the devices are MaxText's error, found here."""
    mesh = build_mesh({"ici_fsdp_parallelism": 3}, AXES, 8, None)
    assert mesh.problem == "ici_fsdp_parallelism=3 makes 3, not 8 devices of a slice"
    mesh = build_mesh({}, AXES, 8, None)
    assert mesh.problem == "every ici parallelism 1 makes 1, not 8 devices of a slice"
    mesh = build_mesh({"ici_fsdp_parallelism": -1, "ici_expert_parallelism": 3}, AXES, 8, None)
    assert mesh.problem == (
        "8 devices of a slice cannot be divided by ici_expert_parallelism=3 for the one axis that "
        "is -1"
    )
    assert mesh.size(("fsdp",)) is None


def test_two_axes_of_minus_one_are_unknown() -> None:
    """At most one axis can be the rest."""
    mesh = build_mesh({"ici_fsdp_parallelism": -1, "ici_data_parallelism": -1}, AXES, 8, 1)
    assert set(mesh.unknown) == {"data", "fsdp"}


def test_stage_and_model_have_keys_of_other_names() -> None:
    """The stage axis is sized by pipeline parallelism, the model axis by tensor parallelism."""
    config = {"ici_pipeline_parallelism": 2, "ici_tensor_parallelism": 4}
    mesh = build_mesh(config, ("stage", "model", "attn_dp"), 8, 1)
    assert mesh.sizes == {"stage": 2, "model": 4, "attn_dp": 1}


def test_explicit_list_counts_only_for_axes_of_other_names() -> None:
    """ici_parallelism is taken for a mesh with an axis that no key is for, else ignored."""
    config = {"ici_parallelism": [2, 4], "dcn_parallelism": [1, 1], "ici_data_parallelism": 1}
    assert build_mesh(config, ("data", "rows"), 8, 1).sizes == {"data": 2, "rows": 4}
    config["ici_rows_parallelism"] = 8
    assert build_mesh(config, ("data", "rows"), 8, 1).sizes == {"data": 1, "rows": 8}


def test_rules_apply_in_order_and_use_a_mesh_axis_once() -> None:
    """A dimension takes the first rule of its name whose mesh axes are free."""
    rules = parse_rules(
        [
            ["embed", ["fsdp", "expert"]],
            ["experts", "expert"],
            ["experts", ["data"]],
            ["embed", ["tensor"]],
            ["none", []],
            ["none", ["fsdp"]],
            "not a rule",
            ["also", "not", "one"],
        ]
    )
    assert partition(("experts", "embed"), rules) == (("data",), ("fsdp", "expert"))
    assert partition(("experts", None, "none"), rules) == (("expert",), (), ())
    assert partition(("unknown",), rules) == ((),)
