"""Reading MaxText configs: chains, precedence, places, and every kind of mistake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepolicy.configs import read
from tilepolicy.configs.values import ConfigValues
from tilepolicy.errors import ConfigError, Problem

MODEL = "base_emb_dim: 4096\nvocab_size: 1000\n"


@pytest.fixture
def maxtext(tmp_path: Path) -> Path:
    """A configs folder with a base.yml of its own and one model."""
    folder = tmp_path / "maxtext" / "configs"
    (folder / "models").mkdir(parents=True)
    (folder / "post_train").mkdir()
    (folder / "base.yml").write_text("model_name: default\nsteps: 150\nbase_emb_dim: 2048\n")
    (folder / "models" / "tiny.yml").write_text(MODEL)
    (folder / "post_train" / "sft.yml").write_text("base_config: base.yml\nsteps: 7\n")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A user's config that builds on base.yml and names the model."""
    path = tmp_path / "my.yml"
    path.write_text(
        "base_config: base.yml\nmodel_name: tiny\nnum_vocab_tiling: 4\nbase_emb_dim: 64\n"
    )
    return path


def problems_of(*args: object, **kwargs: object) -> list[str]:
    """The problems of a config that cannot be read, as text."""
    with pytest.raises(ConfigError) as caught:
        read(*args, **{"env": {}} | kwargs)  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def test_chain_and_places(config: Path, maxtext: Path) -> None:
    """A value has the file and line of the file that sets it; defaults have no source file."""
    values = read(config, env={}, maxtext_configs=maxtext)
    place = values.place("num_vocab_tiling")
    assert place is not None
    assert str(place) == f"{config}:3:1"
    assert place.text == "num_vocab_tiling: 4"
    assert values["num_vocab_tiling"] == 4
    assert values.is_explicit("num_vocab_tiling")
    assert not values.is_explicit("steps")
    assert not values.is_explicit("wi_tile_fwd_batch_seq")
    assert values["wi_tile_fwd_batch_seq"] == 512
    assert values.files == (str(config),)
    assert values.release == "0.2.5"


def test_base_config_is_found_beside_the_file_then_in_maxtext(
    tmp_path: Path, maxtext: Path
) -> None:
    """A relative base_config means the file beside, else that of MaxText's folder."""
    (tmp_path / "mine.yml").write_text("base_config: post_train/sft.yml\n")
    values = read(tmp_path / "mine.yml", env={}, maxtext_configs=maxtext)
    assert values["steps"] == 7
    (tmp_path / "post_train").mkdir()
    (tmp_path / "post_train" / "sft.yml").write_text("base_config: base.yml\nsteps: 8\n")
    values = read(tmp_path / "mine.yml", env={}, maxtext_configs=maxtext)
    assert values["steps"] == 8
    assert [Path(name).name for name in values.files] == ["mine.yml", "sft.yml"]


def test_checkout_paths_lead_into_maxtext(maxtext: Path) -> None:
    """A config named by its path in a checkout is found in MaxText's folder."""
    values = read("src/maxtext/configs/post_train/sft.yml", env={}, maxtext_configs=maxtext)
    assert values["steps"] == 7


def test_model_file_beats_the_config_file_with_a_warning(config: Path, maxtext: Path) -> None:
    """MaxText lets the model's file win against the config file; the loser is named."""
    values = read(config, env={}, maxtext_configs=maxtext)
    assert values["base_emb_dim"] == 4096
    entry = values.entries["base_emb_dim"]
    assert entry.source == "model"
    assert [lost.value for lost in entry.lost] == [64, 2048, 2048]
    [warning] = values.warnings
    model = maxtext / "models" / "tiny.yml"
    assert str(warning) == (
        f"{config}:4:1: warning: base_emb_dim: 64 has no effect: MaxText lets the file of model "
        f"'tiny' win (4096 in {model}:1:1) (at base_emb_dim) [model-wins]\n"
        "  4 | base_emb_dim: 64\n"
        "      ^\n"
        "  remedy: pass base_emb_dim=64 override_model_config=True on the command line"
    )


def test_override_model_config_in_a_file_changes_nothing(config: Path, maxtext: Path) -> None:
    """override_model_config lets arguments win, never the config file."""
    config.write_text(config.read_text() + "override_model_config: true\n")
    values = read(config, env={}, maxtext_configs=maxtext)
    assert values["base_emb_dim"] == 4096
    values = read(config, ["base_emb_dim=128"], env={}, maxtext_configs=maxtext)
    assert values["base_emb_dim"] == 128


def test_argument_that_contradicts_the_model_is_an_error(config: Path, maxtext: Path) -> None:
    """An argument may repeat the model's value, contradict it only with override_model_config."""
    assert read(config, ["base_emb_dim=4096"], env={}, maxtext_configs=maxtext)
    [problem] = problems_of(config, ["base_emb_dim=128"], maxtext_configs=maxtext)
    model = maxtext / "models" / "tiny.yml"
    assert problem == (
        f"<command line>:1:1: error: base_emb_dim is 128 here and 4096 in {model}:1:1 of model "
        "'tiny' (at base_emb_dim) [contradicts-model]\n"
        "  1 | base_emb_dim=128\n"
        "      ^\n"
        "  remedy: MaxText refuses this; add override_model_config=True to let the argument win"
    )
    values = read(
        config,
        ["base_emb_dim=128", "override_model_config=True"],
        env={},
        maxtext_configs=maxtext,
    )
    assert values["base_emb_dim"] == 128
    assert values["vocab_size"] == 1000


def test_instruct_models_share_the_file_of_the_base_model(config: Path, maxtext: Path) -> None:
    """-Instruct is dropped from the name before the model's file is looked for."""
    values = read(config, ["model_name=tiny-Instruct"], env={}, maxtext_configs=maxtext)
    assert values["vocab_size"] == 1000


def test_model_file_beside_the_config_comes_first(config: Path, maxtext: Path) -> None:
    """The folder models beside the config, then beside its folder, then MaxText's."""
    (config.parent / "models").mkdir()
    (config.parent / "models" / "tiny.yml").write_text("vocab_size: 77\n")
    assert read(config, env={}, maxtext_configs=maxtext)["vocab_size"] == 77


def test_unknown_model_is_a_warning_with_a_suggestion(config: Path, maxtext: Path) -> None:
    """MaxText goes on without a model's file, and so does the reader, with a word."""
    values = read(config, ["model_name=mixtral-8x7c"], env={}, maxtext_configs=maxtext)
    [warning] = values.warnings
    assert str(warning) == (
        "<command line>:1:1: warning: MaxText 0.2.5 has no models/mixtral-8x7c.yml "
        "[no-model-file]\n"
        "  1 | model_name=mixtral-8x7c\n"
        "      ^\n"
        "  remedy: did you mean mixtral-8x7b?"
    )


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("num_vocab_tiling=8", "num_vocab_tiling", 8),
        ("run_name=a=b", "run_name", "a=b"),
        ("learning_rate=1e-4", "learning_rate", 1e-4),
        ("mlp_activations=[silu,linear]", "mlp_activations", ["silu", "linear"]),
        ("dpo.max_prompt_length=5", "dpo", {"max_prompt_length": 5}),
        ("sparse_matmul=False", "sparse_matmul", False),
        ("quantization=none", "quantization", None),
        ("per_device_batch_size=4", "per_device_batch_size", 4.0),
        ("wi_tile_fwd_batch_seq=256.0", "wi_tile_fwd_batch_seq", 256),
        ("wi_tile_fwd_batch_seq='256'", "wi_tile_fwd_batch_seq", 256),
        ("megablox='no'", "megablox", False),
        ("num_vocab_tiling=-1", "num_vocab_tiling", -1),
        ("num_vocab_tiling=auto", "num_vocab_tiling", "auto"),
        ("run_name=", "run_name", None),
    ],
)
def test_arguments(config: Path, maxtext: Path, argument: str, key: str, value: object) -> None:
    """KEY=VALUE is read as OmegaConf and MaxText's pydantic model read it."""
    values = read(config, [argument], env={}, maxtext_configs=maxtext)
    assert values[key] == value
    assert type(values[key]) is type(value)
    assert values.entries[key].source == "command line"


def test_last_of_equal_arguments_counts_and_mappings_merge(config: Path, maxtext: Path) -> None:
    """A repeated argument replaces the earlier one; dotted keys add to one mapping."""
    arguments = ["steps=1", "steps=2", "dpo.algo=orpo", "dpo.dpo_beta=0.2"]
    values = read(config, arguments, env={}, maxtext_configs=maxtext)
    assert values["steps"] == 2
    assert values["dpo"] == {"algo": "orpo", "dpo_beta": 0.2}


@pytest.mark.parametrize("value", ["-1", "auto"])
def test_automatic_values_of_settings_are_not_explicit(
    config: Path, maxtext: Path, value: str
) -> None:
    """-1 and auto leave a setting to the policy; -1 of another key is a choice."""
    arguments = [f"wo_tile_drhs_mlp_dim={value}", "ici_fsdp_parallelism=-1"]
    values = read(config, arguments, env={}, maxtext_configs=maxtext)
    assert not values.is_explicit("wo_tile_drhs_mlp_dim")
    assert values.is_explicit("ici_fsdp_parallelism")
    assert not values.is_explicit("no_such_key")


def test_environment(config: Path, maxtext: Path) -> None:
    """M_KEY takes the type of the value it replaces and is explicit; other variables are none."""
    env = {"M_STEPS": "9", "M_SPARSE_MATMUL": "no", "M_RUN_NAME": "x", "M_other": "1", "PATH": "/"}
    config.write_text("base_config: base.yml\nrun_name: old\n")
    values = read(config, env=env, maxtext_configs=maxtext)
    assert (values["steps"], values["sparse_matmul"], values["run_name"]) == (9, False, "x")
    assert values.is_explicit("steps")
    assert values.entries["steps"].source == "environment"


def test_environment_rules(config: Path, maxtext: Path) -> None:
    """A variable may not repeat an argument or a model's key, and must have the right type."""
    found = problems_of(
        config,
        ["max_target_length=5"],
        env={
            "M_MAX_TARGET_LENGTH": "5",
            "M_VOCAB_SIZE": "1000",
            "M_STEPS": "many",
            "M_MEGABLOX": "maybe",
            "M_MESH_AXES": "[a]",
        },
        maxtext_configs=maxtext,
    )
    model = maxtext / "models" / "tiny.yml"
    heads = [problem.splitlines()[0] for problem in found]
    assert heads == [
        "<environment>:1:1: error: max_target_length is set by M_MAX_TARGET_LENGTH and at "
        "<command line>:1:1, which MaxText refuses (at max_target_length) [set-twice]",
        "<environment>:1:1: error: vocab_size is set by M_VOCAB_SIZE and by the model's file "
        f"{model}:2:1, which MaxText refuses (at vocab_size) [contradicts-model]",
        "<environment>:1:1: error: M_STEPS must be an integer [wrong-type]",
        "<environment>:1:1: error: M_MEGABLOX must be a boolean [wrong-type]",
        "<environment>:1:1: error: MaxText cannot take M_MESH_AXES: the value it would replace is "
        "['diloco', 'data', 'stage', 'fsdp', 'fsdp_transpose', 'context', 'context_usp_ulysses', "
        "'context_autoregressive', 'tensor', 'tensor_sequence', 'expert', 'autoregressive'] "
        "[no-environment]",
    ]


def test_environment_may_override_the_model_when_told(config: Path, maxtext: Path) -> None:
    """With override_model_config a variable wins against the model's file."""
    env = {"M_VOCAB_SIZE": "2000"}
    values = read(config, ["override_model_config=True"], env=env, maxtext_configs=maxtext)
    assert values["vocab_size"] == 2000


def test_model_name_of_the_environment_comes_too_late(tmp_path: Path, maxtext: Path) -> None:
    """M_MODEL_NAME does not load the model's file, which deserves a warning."""
    (tmp_path / "a.yml").write_text("base_config: base.yml\n")
    values = read(tmp_path / "a.yml", env={"M_MODEL_NAME": "tiny"}, maxtext_configs=maxtext)
    assert values["base_emb_dim"] == 2048
    [warning] = values.warnings
    assert warning.code == "environment-ignored"
    assert warning.message == (
        "M_MODEL_NAME changes the name only: MaxText chooses the model's file before it reads the "
        "environment"
    )


def test_mapping_ranks_with_the_command_line(maxtext: Path) -> None:
    """A mapping stands for keyword arguments: explicit, and it may not contradict the model."""
    values = read({"num_vocab_tiling": 2, "steps": 150}, env={}, maxtext_configs=maxtext)
    assert values.is_explicit("steps")
    assert values.entries["num_vocab_tiling"].source == "mapping"
    assert problems_of({"model_name": "tiny", "base_emb_dim": 1}, maxtext_configs=maxtext)


def test_mapping_names_its_file(config: Path, maxtext: Path) -> None:
    """base_config of a mapping is the config file below it."""
    values = read({"base_config": str(config), "steps": 3}, env={}, maxtext_configs=maxtext)
    assert (values["steps"], values["num_vocab_tiling"]) == (3, 4)


def test_own_copy_of_base_yml_counts_only_where_it_differs(tmp_path: Path, maxtext: Path) -> None:
    """A user's base.yml is explicit only in the values that are not MaxText's defaults."""
    (tmp_path / "base.yml").write_text("num_vocab_tiling: 1\nvocab_size: 99\n")
    values = read(tmp_path / "base.yml", env={}, maxtext_configs=maxtext)
    assert values.is_explicit("vocab_size")
    assert not values.is_explicit("num_vocab_tiling")


def test_without_base_yml_there_are_no_axis_rules(tmp_path: Path, maxtext: Path) -> None:
    """A config that does not build on base.yml gets the model's defaults and no axis rules."""
    (tmp_path / "a.yml").write_text("steps: 1\n")
    values = read(tmp_path / "a.yml", env={}, maxtext_configs=maxtext)
    assert values["logical_axis_rules"] == []
    assert values["num_vocab_tiling"] == 1


def test_axis_rules_of_a_model_replace_those_of_the_same_name(config: Path, maxtext: Path) -> None:
    """MaxText merges logical_axis_rules by logical axis, except when told to override."""
    (maxtext / "base.yml").write_text("logical_axis_rules: [[a, [x]], [b, [y]], [a, [z]]]\n")
    model = maxtext / "models" / "tiny.yml"
    model.write_text("logical_axis_rules: [[a, [w]]]\n")
    values = read(config, env={}, maxtext_configs=maxtext)
    assert values["logical_axis_rules"] == [["b", ["y"]], ["a", ["w"]]]
    model.write_text("logical_axis_rules: [[a, [w]]]\noverride_logical_axis_rules: true\n")
    values = read(config, env={}, maxtext_configs=maxtext)
    assert values["logical_axis_rules"] == [["a", ["w"]]]


def test_all_problems_in_one_run(tmp_path: Path, maxtext: Path) -> None:
    """Unknown, old and mistyped keys of file and arguments are reported together, with places."""
    path = tmp_path / "bad.yml"
    path.write_text(
        "base_config: base.yml\nnum_vocab_tilling: 2\ntile_batch_seq: 512\n"
        "max_target_length: long\nzzz: 1\n"
    )
    found = problems_of(path, ["steps", "vocab_size=big"], maxtext_configs=maxtext)
    assert found == [
        "<command line>:1:1: error: argument 'steps' has no '=' [no-value]\n"
        "  1 | steps\n      ^\n  remedy: write it as KEY=VALUE",
        f"{path}:2:1: error: MaxText 0.2.5 has no key 'num_vocab_tilling' and refuses a config "
        "with it (at num_vocab_tilling) [unknown-key]\n"
        "  2 | num_vocab_tilling: 2\n      ^\n  remedy: did you mean num_vocab_tiling?",
        f"{path}:3:1: error: tile_batch_seq is a key of before November 2025, which MaxText 0.2.5 "
        "refuses (at tile_batch_seq) [old-key]\n"
        "  3 | tile_batch_seq: 512\n      ^\n"
        "  remedy: set the six {wi,wo}_tile_{fwd,dlhs,drhs}_batch_seq",
        f"{path}:4:1: error: max_target_length takes an integer, not 'long' "
        "(at max_target_length) [wrong-type]\n"
        "  4 | max_target_length: long\n      ^",
        f"{path}:5:1: error: MaxText 0.2.5 has no key 'zzz' and refuses a config with it (at zzz) "
        "[unknown-key]\n  5 | zzz: 1\n      ^\n  remedy: remove it",
        "<command line>:2:1: error: vocab_size takes an integer, not 'big' (at vocab_size) "
        "[wrong-type]\n  2 | vocab_size=big\n      ^",
    ]


def test_keys_are_those_of_the_release(tmp_path: Path) -> None:
    """vocab_tiling_ag_once is unknown to 0.2.3, whose own keys are known to it."""
    path = tmp_path / "a.yml"
    path.write_text("base_config: base.yml\nvocab_tiling_ag_once: true\n")
    assert read(path, env={}, release="0.2.4")["vocab_tiling_ag_once"] is True
    [problem] = problems_of(path, release="0.2.3")
    assert "MaxText 0.2.3 has no key 'vocab_tiling_ag_once'" in problem
    assert read({"wi_tile_fwd_buffer_count": 3}, env={}, release="0.2.1")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- a\n", "not-a-mapping"),
        ("base_config: nowhere.yml\n", "no-such-file"),
        ("base_config: [base.yml]\n", "wrong-type"),
        ("base_config: bad.yml\n", "base-config-cycle"),
        ("steps: 1\nsteps: 2\n", "duplicate-key"),
        ("a: [\n", "syntax"),
    ],
)
def test_broken_files_have_places(tmp_path: Path, maxtext: Path, text: str, code: str) -> None:
    """Whatever is wrong with a file is one problem with a place."""
    path = tmp_path / "bad.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path, env={}, maxtext_configs=maxtext)
    [problem] = caught.value.problems
    assert problem.code == code
    assert problem.place is not None
    assert problem.place.file == str(path)


def test_missing_file(tmp_path: Path) -> None:
    """A config that does not exist is a problem, not an OSError."""
    path = tmp_path / "none.yml"
    assert problems_of(path) == [f"{path}: error: there is no file {path} [no-such-file]"]


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    """A folder is not a config."""
    assert problems_of(tmp_path) == [
        f"{tmp_path}: error: there is no file {tmp_path} [no-such-file]"
    ]


def test_wrong_argument_type() -> None:
    """Something that is no config at all is a TypeError that says what is taken."""
    with pytest.raises(TypeError, match="a config is a path, a mapping or a MaxText config, not"):
        read(3, env={})


def test_without_maxtext_the_shipped_table_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """base.yml resolves from the shipped table; a model without sizes in the file is a warning."""
    monkeypatch.setattr("tilepolicy.configs.files.find_maxtext_configs", lambda: None)
    path = tmp_path / "a.yml"
    path.write_text("base_config: base.yml\nmodel_name: deepseek3-671b\n")
    values = read(path, env={})
    assert (values["steps"], values.maxtext_configs) == (150001, None)
    [warning] = values.warnings
    assert str(warning) == (
        f"{path}:2:1: warning: the sizes of model 'deepseek3-671b' are in MaxText's "
        "models/deepseek3-671b.yml, and MaxText is not installed [no-model-file]\n"
        "  2 | model_name: deepseek3-671b\n"
        "      ^\n"
        "  remedy: install MaxText, name a checkout's configs folder, or write the model's keys "
        "into the config"
    )


def test_variable_names_the_folder(config: Path, maxtext: Path) -> None:
    """TILEPOLICY_MAXTEXT_CONFIGS names a checkout's configs folder."""
    values = read(config, env={"TILEPOLICY_MAXTEXT_CONFIGS": str(maxtext)})
    assert values.maxtext_configs == maxtext
    assert values["vocab_size"] == 1000


class _Model:
    """What a MaxText config object looks like."""

    model_fields: ClassVar[dict[str, object]] = {}

    def __init__(self, values: dict[str, object], chosen: set[str]) -> None:
        self.values = values
        self.model_fields_set = chosen

    def model_dump(self) -> dict[str, object]:
        return self.values


class _Wrapper:
    def __init__(self, model: _Model) -> None:
        self._pydantic_config = model


@pytest.mark.parametrize("wrap", [_Wrapper, lambda model: model])
def test_config_object(wrap: type) -> None:
    """Of a config object a value is explicit if recorded as set, or if it is not the default."""
    model = _Model(
        {"num_vocab_tiling": 1, "wi_tile_fwd_batch_seq": 256, "vocab_size": 32000, "steps": 150001},
        {"num_vocab_tiling"},
    )
    values = read(wrap(model), env={})
    assert isinstance(values, ConfigValues)
    assert values.is_explicit("num_vocab_tiling")
    assert values.is_explicit("wi_tile_fwd_batch_seq")
    assert not values.is_explicit("steps")
    assert values.place("num_vocab_tiling") is None


def _problems(config: object, arguments: Sequence[str] = ()) -> Sequence[Problem]:
    """Errors, or the warnings where there is none."""
    try:
        return read(config, arguments, env={}).warnings
    except ConfigError as error:
        return error.problems


@given(text=st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_text_gives_values_or_problems_with_places(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """No text raises anything but ConfigError, and each of its problems has a place."""
    path = tmp_path_factory.getbasetemp() / "any.yml"
    path.write_text(text, encoding="utf-8", errors="replace")
    assert all(problem.place is not None for problem in _problems(path))


@given(arguments=st.lists(st.text(max_size=30), max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_arguments_give_values_or_problems_with_places(arguments: list[str]) -> None:
    """No arguments raise anything but ConfigError, and each of their problems has a place."""
    assert all(problem.place is not None for problem in _problems({}, arguments))
