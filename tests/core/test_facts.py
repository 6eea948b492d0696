"""Facts derived from configs; ``test_maxtext_configs`` holds them against MaxText itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepolicy.configs import read
from tilepolicy.errors import ConfigError
from tilepolicy.facts import Facts, derive, site

MOE = {
    "base_emb_dim": 256,
    "base_moe_mlp_dim": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 1000,
    "max_target_length": 512,
    "per_device_batch_size": 2,
}
VERSIONS = {"jax": "0.12.0", "tokamax": "0.0.17"}


def facts_of(device: str | None = "v6e-8", **config: object) -> Facts:
    """Facts of a small mixture of experts with some keys changed."""
    return derive(read(MOE | config, env={}), device, versions=VERSIONS)


def sizes(facts: Facts, layer: str = "wi", phase: str = "train", **kwargs: int) -> list[object]:
    """batch_seq, embed_dim, num_groups and mlp_dim of a site; None where unknown."""
    found = site(facts, layer, "fwd", phase, **kwargs)  # type: ignore[arg-type]
    return [found.get(name) for name in ("batch_seq", "embed_dim", "num_groups", "mlp_dim")]


@pytest.mark.parametrize(
    ("config", "wi"),
    [
        ({}, [4096, 256, 16, 512]),
        ({"ici_expert_parallelism": 4}, [16384, 256, 4, 512]),
        ({"ici_expert_parallelism": 8}, [16384, 256, 2, 512]),
        ({"ici_expert_parallelism": 4, "ragged_buffer_factor": 1.5}, [6144, 256, 4, 512]),
        ({"ici_expert_parallelism": 4, "use_ring_of_experts": True}, [16384, 256, 4, 512]),
        (
            {
                "ici_expert_parallelism": 4,
                "use_ring_of_experts": True,
                "use_ragged_sort": True,
                "ragged_buffer_factor": 1.5,
            },
            [6144, 256, 4, 512],
        ),
        ({"ici_tensor_parallelism": 4}, [16384, 256, 16, 128]),
        ({"ici_tensor_sequence_parallelism": 2}, [4096, 256, 16, 256]),
        ({"per_device_batch_size": 0.5}, [8192, 256, 16, 512]),
        ({"per_device_batch_size": 0.5, "ici_context_parallelism": 2}, [1024, 256, 16, 512]),
        ({"wi_tile_fwd_batch_seq": 300}, [4200, 256, 16, 512]),
        ({"prefuse_moe_weights": True}, [4096, 256, 16, 1024]),
        ({"global_parameter_scale": 4}, [4096, 512, 16, 1024]),
        ({"padded_base_moe_mlp_dim": 640}, [4096, 256, 16, 640]),
        ({"gradient_accumulation_steps": 2}, [4096, 256, 16, 512]),
        ({"base_moe_mlp_dim": -1, "base_mlp_dim": 768}, [4096, 256, 16, 768]),
    ],
)
def test_sizes_of_wi(config: dict[str, object], wi: list[int]) -> None:
    """Rows, padding, experts and dimensions; each was also traced through MaxText 0.2.5."""
    assert sizes(facts_of(**config)) == wi


def test_prefused_weights_double_wi_only() -> None:
    """prefuse_moe_weights leaves wo as it is; emb chunks divide the embedding of wi only."""
    facts = facts_of(prefuse_moe_weights=True)
    assert sizes(facts, "wo") == [4096, 256, 16, 512]
    facts = facts_of(
        num_moe_emb_chunks=2, use_ring_of_experts=True, ici_expert_parallelism=4, use_gmm_v2=True
    )
    assert sizes(facts, "wi")[1] == 128
    assert sizes(facts, "wo")[1] == 256


def test_site_names_its_layer_and_operands() -> None:
    """A site carries layer, pass, phase, unpadded rows, rows per group and both operand types."""
    facts = facts_of(wi_tile_fwd_batch_seq=300, weight_dtype="float32")
    found = site(facts, "wo", "drhs")
    assert {name: found[name] for name in ("layer", "pass", "phase", "rows")} == {
        "layer": "wo",
        "pass": "drhs",
        "phase": "train",
        "rows": 4096,
    }
    assert (found["rows_per_group"], found["batch_seq"]) == (4200 // 16, 4200)
    assert (found["dtype"], found["weight_dtype"]) == ("bfloat16", "bfloat16")
    assert facts.values["weight_dtype"] == "float32"


def test_rows_are_padded_to_the_tile_that_is_used() -> None:
    """pad_to stands for the resolved tile; -1 in the config pads to nothing that is known."""
    facts = facts_of(wi_tile_fwd_batch_seq=-1)
    assert sizes(facts)[0] is None
    assert sizes(facts, pad_to=3000)[0] == 6000


def test_evaluation_without_rules_of_its_own() -> None:
    """Evaluation has its own batch size, but the train tile and buffer factor."""
    facts = facts_of(eval_per_device_batch_size=4, eval_wi_tile_fwd_batch_seq=768)
    assert facts.values["eval_tiles_read"] is False
    assert sizes(facts, phase="eval") == [8192, 256, 16, 512]


@pytest.mark.parametrize("quantization", ["int8", "fp8_full"])
def test_quantized_operands_are_not_guessed(quantization: str) -> None:
    """Under quantization the operand types depend on its rule: they are missing, with the key."""
    facts = facts_of(quantization=quantization)
    assert "dtype" not in site(facts, "wi", "fwd")
    assert facts.missing["wi.dtype"] == ("quantization",)


def test_tokens_and_vocabulary() -> None:
    """Tokens are MaxText's product; tensor axes divide the vocabulary and share the tokens."""
    facts = facts_of(ici_tensor_parallelism=4, cast_logits_to_fp32=True)
    names = ("tokens_per_device", "logit_rows_per_device", "vocab_per_device", "logits_itemsize")
    assert [facts.values[name] for name in names] == [1024, 4096, 250, 4]


@pytest.mark.parametrize(
    ("config", "itemsize"),
    [
        ({"cast_logits_to_fp32": False}, 2),
        ({"cast_logits_to_fp32": False, "logits_dot_in_fp32": True}, 4),
        ({"cast_logits_to_fp32": True}, 4),
        ({"cast_logits_to_fp32": False, "dtype": "float32"}, 4),
    ],
)
def test_bytes_of_a_logit(config: dict[str, object], itemsize: int) -> None:
    """Logits have 4 bytes if they are cast to or computed in float32."""
    assert facts_of(**config).values["logits_itemsize"] == itemsize


def test_vocabulary_that_does_not_divide_is_rounded_up() -> None:
    """A shard of an uneven vocabulary is the larger part."""
    facts = facts_of(vocab_size=1001, ici_tensor_parallelism=2)
    assert facts.values["vocab_per_device"] == 501


def test_numbers_of_devices_are_not_guessed() -> None:
    """Without a topology what depends on the number of devices is missing, with its keys."""
    facts = facts_of("v6e", ici_context_parallelism=-1, ici_fsdp_parallelism=1)
    assert facts.values["tokens_per_device"] == 1024
    assert "fsdp_shards" in facts.values
    assert facts.missing["wi.rows"] == ("ici_context_parallelism", "compile_topology")
    assert facts.undecided == {
        "wi.rows": ("ici_context_parallelism", "compile_topology"),
        "wo.rows": ("ici_context_parallelism", "compile_topology"),
    }


def test_the_rest_axis_need_not_be_known_where_it_cancels() -> None:
    """With fsdp as the rest the rows of a device do not depend on the number of devices."""
    assert sizes(facts_of("v6e")) == [4096, 256, 16, 512]


def test_fractional_batch_needs_the_number_of_devices() -> None:
    """Half a sequence a device: whether the batch divides depends on the devices."""
    facts = facts_of("v6e", per_device_batch_size=0.5)
    assert facts.missing["wi.rows"] == (
        "compile_topology",
        "--device TOPOLOGY",
        "compile_topology_num_slices",
    )
    facts = derive(read(MOE | {"per_device_batch_size": 0.5}, env={}), "v6e", devices=8)
    assert sizes(facts)[0] == 8192


@pytest.mark.parametrize(
    ("config", "device", "count"),
    [
        ({"compile_topology": "v5p-16", "compile_topology_num_slices": 2}, None, 16),
        ({"compile_topology": "v5p-16"}, "v6e-4", 4),
        ({"compile_topology": "v6e-16", "compile_topology_num_slices": 1}, "v6e", 16),
        ({"num_slices": 2}, "v6e-4", 8),
        ({"hardware": "cpu", "internal_compile": True, "internal_compile_num_devices": 3}, None, 3),
    ],
)
def test_number_of_devices(config: dict[str, object], device: str | None, count: int) -> None:
    """The device option goes before compile_topology; slices multiply."""
    assert facts_of(device, **config).values["num_devices"] == count


@pytest.mark.parametrize(
    ("config", "device", "name"),
    [
        ({"compile_topology": "tpu7x-8"}, None, "v7x"),
        ({"compile_topology": "tpu7x-8"}, "TPU v5 lite", "v5e"),
        ({"hardware": "cpu"}, None, "cpu"),
        ({"hardware": "gpu_multiprocess"}, None, "gpu"),
        ({}, None, None),
    ],
)
def test_device(config: dict[str, object], device: str | None, name: str | None) -> None:
    """The device comes from the option, compile_topology, or a hardware that is no TPU."""
    facts = facts_of(device, **config)
    assert facts.values.get("device") == name
    assert facts.missing.get("device") == (None if name else ("compile_topology", "--device"))


def test_unknown_device() -> None:
    """A device that does not exist is an error with the names that do."""
    with pytest.raises(ConfigError) as caught:
        facts_of("v9x")
    assert str(caught.value) == (
        "error: 'v9x' is not a device [unknown-device]\n"
        "  remedy: use v4, v5e, v5p, v6e, v7x, cpu, gpu or a topology such as v5p-128"
    )


def test_contradicting_mesh_is_a_warning() -> None:
    """A mesh that MaxText cannot build is reported; what depends on it is missing."""
    facts = facts_of(ici_expert_parallelism=3)
    [problem] = facts.problems
    assert str(problem) == (
        "warning: 8 devices of a slice cannot be divided by ici_expert_parallelism=3 for the one "
        "axis that is -1 [mesh]\n  remedy: change a parallelism, or name the right topology"
    )


def test_scoped_vmem_limit() -> None:
    """The limit is that of the flag in the config or the environment, else the device's own."""
    assert facts_of().values["scoped_vmem_limit_kib"] == 32768
    flags = {"compile_xla_flags": "--xla_tpu_scoped_vmem_limit_kib=98304 --other=1"}
    assert facts_of(**flags).values["scoped_vmem_limit_kib"] == 98304
    env = {"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=81920"}
    facts = derive(read(MOE, env={}), "v5p", env=env)
    assert facts.values["scoped_vmem_limit_kib"] == 81920
    assert "scoped_vmem_limit_kib" not in facts_of("cpu").values


def test_versions() -> None:
    """Versions are the given ones; MaxText's is the release of the config's defaults."""
    facts = facts_of()
    assert (facts.values["maxtext"], facts.values["tokamax"]) == ("0.2.5", "0.0.17")
    facts = derive(read(MOE, env={}, release="0.2.3"), "v6e", versions={})
    assert facts.values["maxtext"] == "0.2.3"
    assert "tokamax" not in facts.values
    assert derive(read(MOE, env={}), "v6e").values["maxtext"] == "0.2.5"


def test_dense_model_has_no_sites() -> None:
    """Without experts there is no grouped matmul; the vocabulary is known all the same."""
    facts = facts_of(num_experts=1)
    assert facts.values["backend"] == "none"
    assert facts.sites == {}
    assert "batch_seq" not in site(facts, "wi", "fwd")
    assert facts.values["vocab_per_device"] == 1000


def test_config_keys_are_facts_under_their_own_names() -> None:
    """Every scalar of the config is a fact; nulls and lists are not."""
    values = facts_of(model_name="default").values
    assert values["training_objective"] == "causal_lm"
    assert "mesh_axes" not in values
    assert all(isinstance(value, bool | int | float | str) for value in values.values())


def test_custom_mesh_is_unknown_without_maxtext(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of a custom mesh are in MaxText's folder; without it the key is named."""
    monkeypatch.setattr("tilepolicy.configs.files.find_maxtext_configs", lambda: None)
    facts = facts_of(custom_mesh_and_rule="pure-fsdp")
    assert facts.missing["vocab_per_device"] == ("custom_mesh_and_rule",)
    assert facts.missing["wi.rows"] == ("custom_mesh_and_rule",)


@given(
    expert=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 4),
    length=st.sampled_from([128, 512]),
    factor=st.sampled_from([-1.0, 1.0, 2.0]),
)
@settings(deadline=None, max_examples=30)
def test_rows_hold_every_token(
    expert: int, tensor: int, batch: int, length: int, factor: float
) -> None:
    """All devices together have room for every token's experts when the buffer is balanced."""
    if expert * tensor > 8:
        return
    facts = facts_of(
        ici_expert_parallelism=expert,
        ici_tensor_parallelism=tensor,
        per_device_batch_size=batch,
        max_target_length=length,
        ragged_buffer_factor=factor if expert > 1 else -1.0,
    )
    rows = site(facts, "wi", "fwd")["rows"]
    assert isinstance(rows, int)
    assert rows * (8 // tensor) >= 8 * batch * length * 4
