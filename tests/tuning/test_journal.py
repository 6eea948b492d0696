"""Verdicts on disk and in memory, and what a kill leaves of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_compiler import FakeTpuCompiler

from tilepolicy.tuning.batch import Compiler
from tilepolicy.tuning.compiler import CompileRequest, CompileVerdict, Status
from tilepolicy.tuning.journal import Journal, library_versions
from tilepolicy.tuning.kernels import KernelOptions
from tilepolicy.tuning.sites import GmmTile, Site

VERSIONS = {"libtpu": "1", "tokamax": "2"}
SITE = Site("wi", "fwd", 4096, 1024, 512, 8)
REQUEST = CompileRequest(SITE, "v6e", GmmTile(128, 256, 512))
OTHER = replace(REQUEST, tile=GmmTile(256, 256, 512), options=KernelOptions(input_buffer_count=3))


def verdict(
    request: CompileRequest, status: Status = "fits", seconds: float = 1.0
) -> CompileVerdict:
    """A verdict as the compiler gives it."""
    return CompileVerdict(request, status, compile_seconds=seconds, tile=request.tile)


def filled(path: Path, *verdicts: CompileVerdict) -> None:
    """A journal with these verdicts."""
    with Journal(path, VERSIONS) as journal:
        for one in verdicts:
            journal.add(one)


def test_verdicts_survive(tmp_path: Path) -> None:
    """What one run added, the next one knows, whole."""
    path = tmp_path / "j"
    filled(path, verdict(REQUEST), verdict(OTHER, "does-not-fit"))
    again = Journal(path, VERSIONS)
    assert len(again) == 2
    assert again.get(REQUEST, 10) == verdict(REQUEST)
    assert again.get(OTHER, 10) == verdict(OTHER, "does-not-fit")
    assert again.get(replace(REQUEST, device="v5e"), 10) is None


def test_every_verdict_is_on_disk_before_the_next(tmp_path: Path) -> None:
    """A kill at any moment loses at most the compile in progress."""
    path = tmp_path / "j"
    journal = Journal(path, VERSIONS)
    journal.add(verdict(REQUEST))
    assert len(Journal(path, VERSIONS)) == 1
    journal.add(verdict(OTHER))
    assert len(Journal(path, VERSIONS)) == 2
    journal.close()


@pytest.mark.parametrize("cut", [2, 20, 200])
def test_a_line_cut_short_is_dropped(tmp_path: Path, cut: int) -> None:
    """A kill in the middle of a write leaves half a line; the rest counts, and goes on."""
    path = tmp_path / "j"
    filled(path, verdict(REQUEST), verdict(OTHER))
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, VERSIONS) as again:
        assert again.get(REQUEST, 10) == verdict(REQUEST)
        assert again.get(OTHER, 10) is None
        again.add(verdict(OTHER))
    assert len(Journal(path, VERSIONS)) == 2


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    """Zeroes after a power cut, or another file, are no verdicts and no error."""
    path = tmp_path / "j"
    path.write_bytes(b"\0\0\0\n{}\nnot json\n")
    with Journal(path, VERSIONS) as journal:
        assert len(journal) == 0
        journal.add(verdict(REQUEST))
    assert len(Journal(path, VERSIONS)) == 1


def test_verdicts_of_other_versions_are_not_used(tmp_path: Path) -> None:
    """Another compiler may decide otherwise."""
    path = tmp_path / "j"
    filled(path, verdict(REQUEST))
    assert len(Journal(path, VERSIONS | {"libtpu": "9"})) == 0


def test_a_line_of_another_release_is_compiled_again(tmp_path: Path) -> None:
    """A verdict with fields that this release does not know is left out."""
    path = tmp_path / "j"
    filled(path, verdict(REQUEST), verdict(OTHER))
    path.write_text(path.read_text().replace('"used_bytes"', '"vmem"', 1))
    again = Journal(path, VERSIONS)
    assert again.get(REQUEST, 10) is None
    assert again.get(OTHER, 10) is not None


def test_a_crash_is_tried_again() -> None:
    """Memory may have been short; a second crash costs one compile."""
    journal = Journal(None, VERSIONS)
    journal.add(verdict(REQUEST, "crashed"))
    assert journal.get(REQUEST, 10) is None


def test_a_timeout_is_tried_again_with_a_longer_limit() -> None:
    """The same limit would only time out again."""
    journal = Journal(None, VERSIONS)
    journal.add(verdict(REQUEST, "timeout", seconds=60.2))
    assert journal.get(REQUEST, 60) is not None
    assert journal.get(REQUEST, 120) is None


def test_discard_deletes_the_file(tmp_path: Path) -> None:
    """After the policy is written there is nothing to go on with."""
    path = tmp_path / "j"
    with Journal(path, VERSIONS) as journal:
        journal.add(verdict(REQUEST))
        assert path.exists()
        journal.discard()
    assert not path.exists()


def test_no_file_before_the_first_verdict(tmp_path: Path) -> None:
    """A dry run leaves nothing behind."""
    with Journal(tmp_path / "j", VERSIONS):
        pass
    assert list(tmp_path.iterdir()) == []


def test_json_keeps_everything() -> None:
    """Requests and verdicts are the same after JSON, options and absent tiles included."""
    for request in (REQUEST, OTHER, replace(REQUEST, tile=None, scoped_vmem_limit_kib=98304)):
        assert CompileRequest.from_json(request.to_json()) == request
        one = FakeTpuCompiler().verdict(request)
        assert CompileVerdict.from_json(one.to_json()) == one


def test_one_kernel_has_one_identity() -> None:
    """Layer wi with embed 1024 and mlp 512 is the kernel of wo with the sizes exchanged."""
    mirrored = replace(SITE, layer="wo", embed_dim=512, mlp_dim=1024, phase="eval")
    assert replace(REQUEST, site=mirrored).identity == REQUEST.identity
    assert replace(REQUEST, site=replace(SITE, pass_="dlhs")).identity != REQUEST.identity
    assert replace(REQUEST, site=replace(SITE, weight_dtype="float32")).identity != REQUEST.identity
    assert OTHER.identity != replace(OTHER, options=KernelOptions()).identity


def test_equal_kernels_are_compiled_once() -> None:
    """A batch compiles each kernel once, asks the journal first, and tells of each verdict."""
    fake, told = FakeTpuCompiler(), []

    def tell(one: CompileVerdict, done: int, total: int, *, known: bool) -> None:
        told.append((one.request.tile, done, total, known))

    journal = Journal(None, VERSIONS)
    journal.add(verdict(OTHER))
    compiler = Compiler(journal=journal, progress=tell, run=fake)
    mirrored = replace(REQUEST, site=replace(SITE, layer="wo", embed_dim=512, mlp_dim=1024))
    found = compiler.verdicts([REQUEST, mirrored, OTHER])
    assert set(found) == {REQUEST.identity, OTHER.identity}
    assert fake.requests == [REQUEST]
    assert told == [(OTHER.tile, 1, 2, True), (REQUEST.tile, 2, 2, False)]
    assert compiler.verdict(REQUEST).request == REQUEST


def test_versions_are_those_of_the_compiler() -> None:
    """The head of a journal names the libraries that a verdict depends on."""
    versions = library_versions()
    assert {"jax", "libtpu", "tokamax"} <= set(versions)
    assert list(versions) == [
        n for n in ("jax", "jaxlib", "libtpu", "tokamax", "maxtext") if n in versions
    ]
