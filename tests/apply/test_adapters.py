"""Adapters are plugins: found by entry point, entered, reported, left; errors are exact."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moe import SIX, document, load

import tilepolicy
from tilepolicy import adapters
from tilepolicy.adapters import tokamax_upstream
from tilepolicy.errors import AdapterError, MissingLibraryError

THIRD_PARTY = """
from contextlib import contextmanager
from tilepolicy.session import Note

events = []

class Adapter:
    name = "tiny"

    def versions(self):
        return {"tinylib": "1.2"}

    @contextmanager
    def enter(self, request):
        events.append(("enter", request.digest, dict(request.options)))
        verdict = request.resolver.tile("wi", "fwd", {"batch_seq": 512})
        request.session.note(Note("tiny", "tile", verdict.fields["batch_seq"].value, "asked"))
        try:
            yield
        finally:
            events.append(("leave", request.digest))

adapter = Adapter()
"""


def install(folder: Path, name: str, target: str, source: str = THIRD_PARTY) -> None:
    """A distribution as pip leaves it: a module, and metadata with an entry point."""
    (folder / f"{name}_adapter.py").write_text(source)
    info = folder / f"{name}_dist-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_dist\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[tilepolicy.adapters]\n{name} = {target}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that distributions can be installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.endswith("_adapter")]:
        del sys.modules[name]


class TestPlugins:
    def test_a_third_party_adapter(self, site: Path, tmp_path: Path) -> None:
        """Found without being named; entered with resolver, session and options; left."""
        install(site, "tiny", "tiny_adapter:adapter")
        policy = load(tmp_path, document(SIX))
        made = tilepolicy.apply(policy, options={"tiny": {"level": 3}})
        with made as session:
            import tiny_adapter

            assert tiny_adapter.events == [("enter", made.digest, {"level": 3})]
        assert tiny_adapter.events[1:] == [("leave", made.digest)]
        assert "tiny" in session.adapters
        assert "tinylib 1.2" in session.report()
        assert "tiny: tile = 128 (asked) (x1)" in session.report()

    def test_built_in_ones_use_the_same_door(self) -> None:
        """Tokamax's own adapter is an entry point."""
        found = adapters.discover()
        assert found["tokamax"].value == "tilepolicy.adapters.tokamax:adapter"
        (tokamax,) = adapters.select(["tokamax"])
        assert isinstance(tokamax, adapters.Adapter)
        assert tokamax.versions() == {"tokamax": version("tokamax")}

    def test_an_unknown_name(self) -> None:
        """The installed ones are listed."""
        with pytest.raises(AdapterError, match="no adapter is named 'nothing'") as raised:
            adapters.select(["nothing"])
        assert "tokamax" in str(raised.value)

    def test_two_distributions_with_one_name(self, site: Path) -> None:
        """Which one would win is not left to the order of folders."""
        install(site, "tiny", "tiny_adapter:adapter")
        other = site / "other_dist-1.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other_dist\nVersion: 1\n")
        (other / "entry_points.txt").write_text("[tilepolicy.adapters]\ntiny = other:adapter\n")
        adapters._discover.cache_clear()
        with pytest.raises(AdapterError, match="two adapters are named 'tiny'"):
            adapters.discover()

    def test_an_entry_point_that_is_no_adapter(self, site: Path) -> None:
        """What it lacks is said before it is entered."""
        install(site, "wrong", "wrong_adapter:adapter", "adapter = object()")
        adapters._discover.cache_clear()
        with pytest.raises(AdapterError, match="is no adapter: it needs name, versions"):
            adapters.select(["wrong"])

    def test_an_adapter_without_its_library(self, site: Path) -> None:
        """Passed over by default; asked for by name it is an error with the install line."""
        source = THIRD_PARTY.replace('{"tinylib": "1.2"}', "{}")
        install(site, "tiny", "tiny_adapter:adapter", source)
        adapters._discover.cache_clear()
        assert "tiny" not in [adapter.name for adapter in adapters.select()]
        with pytest.raises(MissingLibraryError, match="library of adapter 'tiny'") as raised:
            adapters.select(["tiny"])
        assert 'pip install "tilepolicy[tiny]"' in str(raised.value)


class TestUpstream:
    @pytest.mark.parametrize(("module", "attribute"), tokamax_upstream._NEEDED)
    def test_everything_that_is_attached_to_exists(self, module: str, attribute: str) -> None:
        """Each private name, in the installed release."""
        tokamax_upstream._look_up(module, attribute, "installed")

    def test_a_missing_attribute_is_named_with_the_release(self) -> None:
        """An unknown release fails at entry, not by doing nothing."""
        with pytest.raises(AdapterError) as raised:
            tokamax_upstream._look_up("tokamax._src.ops.op", "Op.no_such_thing", "9.9.9")
        assert (
            "tokamax 9.9.9 has no tokamax._src.ops.op.Op.no_such_thing [tokamax-changed]\n"
            "  remedy: install a release that this adapter knows: 0.0.14, 0.0.15, 0.0.16, 0.0.17"
        ) in str(raised.value)

    def test_a_lookup_that_does_not_read_the_stack_is_noticed(self) -> None:
        """If lookups stop reading the module global, replacing it would do nothing."""

        class BoundArguments:
            @property
            def cached_autotuning_data(self) -> Any:
                return None

        with pytest.raises(AdapterError, match="reading AUTOTUNING_CACHE_OVERLAY_STACK"):
            tokamax_upstream._require_global(SimpleNamespace(BoundArguments=BoundArguments), "9")

    def test_importing_tokamax_starts_no_backend(self) -> None:
        """A scope may be entered before ``jax.distributed.initialize``."""
        code = (
            "import tilepolicy.adapters.tokamax_upstream as u; u.load(); "
            "from jax._src import xla_bridge as b; print(b.backends_are_initialized())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "False"
