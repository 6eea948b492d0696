"""Which kernels a config has, and with which tiles they would run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_moe import TOKAMAX, write_config, write_rules

from tilepolicy import policy
from tilepolicy.errors import ConfigError, VerifyError
from tilepolicy.tuning.sites import GmmTile
from tilepolicy.tuning.targets import Target, default_device, find_targets, model_configs

V2 = TOKAMAX + "use_gmm_v2: true\n"


def targets(path: Path, *policies: Path, device: str = "v6e", **options: int) -> dict[str, Target]:
    """Targets of a config by name."""
    loaded = policy.combine([policy.load(p) for p in (*policies, "maxtext-default")])
    found = find_targets(loaded, model_configs(str(path)), device, **options)
    return {target.name: target for target in found.targets}


def test_megablox_runs_the_configs_tiles(tmp_path: Path) -> None:
    """MaxText's default kernel takes the knobs, defaults included."""
    found = targets(write_config(tmp_path, "wi_tile_dlhs_mlp_dim: 256\n"))
    assert list(found) == ["wi.fwd", "wi.dlhs", "wi.drhs", "wo.fwd", "wo.dlhs", "wo.drhs"]
    assert {target.site.backend for target in found.values()} == {"megablox"}
    assert found["wi.fwd"].request.tile == GmmTile(512, 1024, 1024)
    assert found["wi.dlhs"].request.tile == GmmTile(512, 1024, 256)
    site = found["wo.drhs"].site
    assert (site.batch_seq, site.embed_dim, site.mlp_dim, site.num_groups) == (4096, 1024, 512, 8)
    assert (site.shape.k, site.shape.n) == (512, 1024)


def test_tokamax_v1_chooses_by_itself_without_a_decision(tmp_path: Path) -> None:
    """A default of MaxText is no decision for a kernel that does not read it."""
    found = targets(write_config(tmp_path, TOKAMAX))
    assert {target.request.tile for target in found.values()} == {None}
    assert found["wi.fwd"].partial == {}


def test_tokamax_v1_takes_a_rule(tmp_path: Path) -> None:
    """A whole tile is compiled as it is, with the kernel's other fields."""
    rules = write_rules(
        tmp_path,
        "layer: wi, pass: fwd => "
        "batch_seq: 256, embed_dim: 512, mlp_dim: 128, input_buffer_count: 3",
    )
    request = targets(write_config(tmp_path, TOKAMAX), rules)["wi.fwd"].request
    assert request.tile == GmmTile(256, 512, 128)
    assert request.options.input_buffer_count == 3


def test_a_partial_rule_leaves_the_rest_to_the_library(tmp_path: Path) -> None:
    """One decided axis: the others are the library's, once they are known."""
    rules = write_rules(tmp_path, "layer: wo, pass: dlhs => embed_dim: 512")
    target = targets(write_config(tmp_path, TOKAMAX), rules)["wo.dlhs"]
    assert target.request.tile is None
    assert target.partial == {"embed_dim": 512}
    whole = target.completed(GmmTile(128, 128, 128))
    # In wo the embedding is n.
    assert whole.request.tile == GmmTile(128, 128, 512)


def test_v2_takes_the_knobs(tmp_path: Path) -> None:
    """MaxText's vendored v2 reads the knobs; with heuristic tiling it reads none."""
    assert targets(write_config(tmp_path, V2))["wi.fwd"].request.tile == GmmTile(512, 1024, 1024)
    heuristic = write_config(tmp_path, V2 + "use_gmm_v2_heuristic_tiling: true\n", "h.yml")
    assert targets(heuristic)["wi.fwd"].request.tile is None


def test_rows_are_padded_to_the_row_tile(tmp_path: Path) -> None:
    """MaxText pads every call's rows to a multiple of wi.fwd's row tile."""
    config = write_config(tmp_path, "max_target_length: 300\n".replace("300", "1100"))
    text = config.read_text().replace("max_target_length: 2048\n", "")
    config.write_text(text)
    target = targets(config)["wo.drhs"]
    assert (target.rows, target.site.batch_seq) == (2200, 2560)


def test_limit_comes_from_flags(tmp_path: Path) -> None:
    """The config's XLA flags, unless the command says otherwise."""
    flags = 'compile_xla_flags: "--xla_tpu_scoped_vmem_limit_kib=65536"\n'
    config = write_config(tmp_path, flags)
    assert targets(config)["wi.fwd"].request.scoped_vmem_limit_kib == 65536
    given = targets(config, scoped_vmem_limit_kib=40960)["wi.fwd"]
    assert given.request.scoped_vmem_limit_kib == 40960
    assert targets(write_config(tmp_path))["wi.fwd"].request.scoped_vmem_limit_kib is None


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ("sparse_matmul: false\n", "backend dense_moe; sparse_matmul is false"),
        ("megablox: false\n", "backend ragged_dot"),
    ],
)
def test_backends_without_a_kernel_say_so(tmp_path: Path, more: str, note: str) -> None:
    """Nothing is compiled, and the report says why."""
    loaded = policy.load("maxtext-default")
    path = str(write_config(tmp_path, more))
    found = find_targets(loaded, model_configs(path), "v6e")
    assert found.targets == ()
    assert note in found.notes[0]


def test_unknown_sizes_are_an_error(tmp_path: Path) -> None:
    """A size that depends on the number of devices names what to give."""
    path = write_config(tmp_path, "ici_expert_parallelism: -1\nici_fsdp_parallelism: 1\n")
    with pytest.raises(VerifyError, match=r"wi fwd: .* is not known, so there is nothing to comp"):
        targets(path)
    assert targets(path, device="v6e-8")["wi.fwd"].site.num_groups == 1


def test_quantised_operands_are_refused(tmp_path: Path) -> None:
    """Quantised kernels take scales; there is no verdict without them."""
    with pytest.raises(VerifyError, match="remedy: compile without quantization"):
        targets(write_config(tmp_path, "quantization: fp8_full\nuse_qwix_quantization: true\n"))


def test_a_distillation_has_two_models(tmp_path: Path) -> None:
    """Student and teacher are the config with their overrides; a teacher only runs forward."""
    path = write_config(
        tmp_path,
        "student_overrides: {base_emb_dim: 512}\nteacher_overrides: {base_moe_mlp_dim: 1024}\n",
    )
    found = targets(path)
    assert list(found)[:6] == [f"student {n}" for n in targets(write_config(tmp_path, "", "m.yml"))]
    assert list(found)[6:] == ["teacher wi.fwd", "teacher wo.fwd"]
    assert found["student wi.fwd"].site.embed_dim == 512
    assert found["teacher wi.fwd"].site.mlp_dim == 1024


def test_what_does_not_resolve_is_reported_next_to_the_tiles(tmp_path: Path) -> None:
    """A broken rule about other settings does not keep the kernels from being compiled."""
    path = write_config(tmp_path, "num_vocab_tiling: 7\n")
    found = find_targets(policy.load("maxtext-default"), model_configs(str(path)), "v6e")
    assert len(found.targets) == 6
    assert any(problem.severity == "error" for problem in found.problems)


def test_device_defaults_to_the_compile_topology(tmp_path: Path) -> None:
    """Without one, a device has to be named."""
    with_topology = model_configs(str(write_config(tmp_path, "compile_topology: v5p-8\n")))
    assert default_device(with_topology) == "v5p-8"
    with pytest.raises(VerifyError, match=r"for which TPU to compile .*\n.*remedy: give --device"):
        default_device(model_configs(str(write_config(tmp_path))))


def test_devices_without_a_compiler_are_refused(tmp_path: Path) -> None:
    """A known accelerator that libtpu does not compile for, and a word that is none."""
    path = write_config(tmp_path)
    with pytest.raises(VerifyError, match="no offline TPU compiler for device 'v4'"):
        targets(path, device="v4")
    with pytest.raises(ConfigError, match="'v99' is not a device"):
        targets(path, device="v99")
