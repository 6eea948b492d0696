"""The table of MaxText's private names: held against what is installed, and refusing the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilepolicy.adapters import maxtext_api as api
from tilepolicy.errors import AdapterError, MissingLibraryError
from tilepolicy.settings import MAXTEXT_RELEASES

FAKE = """
import functools

@functools.wraps
def cross_entropy_with_logits(logits: "Array", targets, z_loss: float = 0.0) -> tuple:
    return logits


class MaxTextTrainingEngine:
    def fwd_bwd(self, payload, *, micro=1, **kwargs):
        pass
"""


@pytest.fixture
def fake_maxtext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of MaxText's name that holds only what a test writes into it."""
    package = tmp_path / "maxtext"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "utils" / "max_utils.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "maxtext", raising=False)
    return package / "utils" / "max_utils.py"


@pytest.mark.maxtext
def test_the_installed_maxtext_is_as_the_table_says() -> None:
    """Every function of the installed release has the parameters it was verified with."""
    version = api.installed_version()
    assert version in api.SIGNATURES
    found = {target: api.read_signature(target) for target in api.SIGNATURES[version]}
    assert found == dict(api.SIGNATURES[version])
    api.require(tuple(found), version)


@pytest.mark.maxtext
def test_reading_signatures_imports_nothing_of_maxtext() -> None:
    """A scope can refuse a MaxText before the minute that its import takes."""
    code = (
        "import sys; from tilepolicy.adapters import maxtext_api as api\n"
        "api.require(tuple(api.verified(api.installed_version())), api.installed_version())\n"
        "print('maxtext' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_table_covers_every_release() -> None:
    """The releases of the settings table, and no other."""
    assert tuple(api.SIGNATURES) == MAXTEXT_RELEASES
    assert MAXTEXT_RELEASES[-1] == api.NEWEST


def test_which_release_caches_by_itself() -> None:
    """0.2.5 keeps the engine's state, 0.2.4 has an engine without, before there is none."""
    assert [v for v in api.SIGNATURES if api.own_cache(v)] == ["0.2.5"]
    assert [v for v in api.SIGNATURES if api.ENGINE["fwd_bwd"] in api.verified(v)] == ["0.2.4"]
    assert api.own_cache("0.9.0"), "a later release is taken to be like the newest known one"


@pytest.mark.usefixtures("fake_maxtext")
def test_a_signature_is_read_without_annotations() -> None:
    """Functions and methods, as their parameters would be written."""
    assert api.read_signature(api.CROSS_ENTROPY) == "logits, targets, z_loss=0.0"
    method = api.Target("maxtext.utils.max_utils", "MaxTextTrainingEngine.fwd_bwd")
    assert api.read_signature(method) == "self, payload, *, micro=1, **kwargs"
    assert api.read_signature(api.Target("maxtext.utils.max_utils", "other")) is None
    assert api.read_signature(api.Target("maxtext.utils.gone", "other")) is None


def test_a_changed_signature_is_refused(fake_maxtext: Path) -> None:
    """The error names the function, what was expected and what is there, and what to do."""
    fake_maxtext.write_text("def cross_entropy_with_logits(logits, labels): pass\n")
    with pytest.raises(AdapterError) as caught:
        api.require((api.CROSS_ENTROPY, api.NNX_TILED_LOSS), "0.2.5")
    first, second = caught.value.problems
    assert str(first) == (
        "error: cannot attach to maxtext.utils.max_utils.cross_entropy_with_logits(logits, "
        "targets, z_loss=0.0) of MaxText 0.2.5: the installed MaxText 0.2.5 has it as (logits, "
        "labels) [maxtext-signature]\n"
        "  remedy: install a MaxText release that has it so (0.2.0, 0.2.1, 0.2.2, 0.2.3, 0.2.4, "
        "0.2.5), or set vocab.loss: upstream and engine.cache_pure_state: false in the policy"
    )
    assert second.message == (
        "cannot attach to maxtext.utils.vocabulary_tiling.vocab_tiling_nnx_loss(model, "
        "hidden_states, data, config, is_train) of MaxText 0.2.5: the installed MaxText 0.2.5 "
        "does not have it"
    )


def test_an_unknown_release_is_held_to_the_newest(fake_maxtext: Path) -> None:
    """What is the same there is accepted; what is not is refused and says so."""
    api.require((api.CROSS_ENTROPY, api.LINEN_TILED_LOSS), "0.3.0")
    fake_maxtext.write_text("")
    with pytest.raises(
        AdapterError,
        match=r"of MaxText 0\.2\.5, the newest release known here: the installed "
        r"MaxText 0\.3\.0 does not have it",
    ):
        api.require((api.CROSS_ENTROPY,), "0.3.0")


def test_no_maxtext_is_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text gives the install line."""
    monkeypatch.setattr(api.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingLibraryError, match=r"pip install \"tilepolicy\[maxtext\]\""):
        api.module_path("maxtext.utils.max_utils")


def test_output_head_parameters_are_known_by_their_path() -> None:
    """In every form in which jax and flax write a path."""

    class Key:
        def __init__(self, **names: str) -> None:
            self.__dict__.update(names)

    assert api.is_output_head((Key(key="decoder"), Key(key="logits_dense"), Key(key="kernel")))
    assert api.is_output_head((Key(name="token_embedder"),))
    assert api.is_output_head(("decoder", "decoder_norm", "scale"))
    assert not api.is_output_head(("decoder", "layers", "mlp", "kernel"))


def test_the_head_method_got_its_name_with_0_2_3() -> None:
    """Before, it had no suffix."""
    assert api.head_method("0.2.2") == "logits_from_hidden_states"
    assert api.head_method("0.2.3") == "logits_from_hidden_states_for_vocab_tiling"


@pytest.mark.maxtext
def test_only_maxtexts_own_loss_function_is_recognised(tmp_path: Path) -> None:
    """A caller is MaxText's ``loss_fn`` by its file, under whatever module name; no other is."""
    path = api.module_path("maxtext.trainers.pre_train.train")
    assert path is not None
    source = "def loss_fn(model, config):\n    return look(sys._getframe(0))\n"

    def defined(source: str, file: Path, name: str) -> Callable[[object, str], object]:
        names = {"sys": sys, "look": api.pretrain_loss_config, "__name__": "__main__"}
        exec(compile(source, str(file), "exec"), names)  # noqa: S102 - the test's own source
        return names[name]  # type: ignore[return-value]

    assert defined(source, path, "loss_fn")(None, "the config") == "the config"
    assert defined(source, tmp_path / "train.py", "loss_fn")(None, "the config") is None
    renamed = source.replace("loss_fn", "other")
    assert defined(renamed, path, "other")(None, "the config") is None
    assert api.pretrain_loss_config(None) is None
