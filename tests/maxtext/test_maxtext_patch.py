"""Replaced functions: who sees them, when they come and go, and what is left behind."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tilepolicy.adapters import maxtext_patch
from tilepolicy.adapters.maxtext_patch import Patch, installed

LIBRARY = "patched_library"


def louder(original: Callable[[], str]) -> Callable[[], str]:
    """A replacement that shouts."""
    return lambda: original().upper()


pytestmark = pytest.mark.usefixtures("library")

PATCH = Patch(LIBRARY, "speak", louder, imported_by_name=True)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable module with a function and a class; not imported yet."""
    (tmp_path / f"{LIBRARY}.py").write_text(
        "def speak():\n    return 'hello'\n\n\nclass Voice:\n    def speak(self):\n"
        "        return 'hi'\n"
    )
    (tmp_path / "caller.py").write_text(f"from {LIBRARY} import speak\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in (LIBRARY, "caller"):
        sys.modules.pop(name, None)


def load(name: str = LIBRARY) -> ModuleType:
    """Imports a module of the fixture."""
    return importlib.import_module(name)


def residue() -> tuple[int, bool]:
    """Patches still in force, and whether the import finder is still there."""
    return len(maxtext_patch._ACTIVE), maxtext_patch._FINDER in sys.meta_path


def test_a_function_is_replaced_inside_and_itself_again_outside() -> None:
    """Entering replaces, leaving puts back the very object that was there."""
    module = load()
    before = module.speak
    with installed([PATCH]):
        assert module.speak() == "HELLO"
    assert module.speak is before
    assert residue() == (0, False)


def test_a_method_is_replaced() -> None:
    """``Class.method`` names an attribute of a class."""
    module = load()
    patch = Patch(LIBRARY, "Voice.speak", lambda original: lambda self: original(self) + "!")
    with installed([patch]):
        assert module.Voice().speak() == "hi!"
    assert module.Voice().speak() == "hi"


def test_names_imported_elsewhere_follow() -> None:
    """``from library import speak`` is replaced and put back too, also when it comes inside."""
    load()
    caller = load("caller")
    with installed([PATCH]):
        assert caller.speak() == "HELLO"
    assert caller.speak() == "hello"
    sys.modules.pop("caller")
    with installed([PATCH]):
        late = load("caller")
        assert late.speak() == "HELLO"
    assert late.speak() == "hello"


def test_what_only_claims_to_be_a_module_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cffi and others put objects into ``sys.modules`` that have no globals."""

    class Claims:
        __slots__ = ()
        __class__ = ModuleType

    monkeypatch.setitem(sys.modules, "claims", Claims())
    module = load()
    with installed([PATCH]):
        assert module.speak() == "HELLO"


def test_a_module_is_patched_when_it_is_imported_later() -> None:
    """A scope imports nothing; the import inside it is patched and looks like any other."""
    with installed([PATCH]):
        assert LIBRARY not in sys.modules
        module = load()
        assert module.speak() == "HELLO"
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
        assert module.__loader__ is module.__spec__.loader
        assert maxtext_patch._FINDER not in sys.meta_path
    assert module.speak() == "hello"


def test_nothing_is_left_when_the_module_is_never_imported() -> None:
    """The finder goes with the last scope."""
    with installed([PATCH]):
        assert residue() == (1, True)
    assert residue() == (0, False)
    assert load().speak() == "hello"


def test_a_failing_import_stays_the_callers_error(library: Path) -> None:
    """A module that raises while it is imported raises the same inside a scope."""
    (library / f"{LIBRARY}.py").write_text("raise RuntimeError('broken module')\n")
    with installed([PATCH]), pytest.raises(RuntimeError, match=r"^broken module$"):
        load()
    assert residue() == (0, False)


def test_scopes_share_a_patch_until_the_last_leaves() -> None:
    """Nested and overlapping scopes count; the first one's replacement stays in between."""
    module = load()
    first, second = installed([PATCH]), installed([PATCH])
    first.__enter__()
    replaced = module.speak
    second.__enter__()
    assert module.speak is replaced
    first.__exit__(None, None, None)
    assert module.speak is replaced
    second.__exit__(None, None, None)
    assert module.speak() == "hello"


def test_a_hundred_scopes_with_exceptions_leave_nothing() -> None:
    """Neither exits nor exceptions leave a patch, a finder or a replaced name behind."""
    module, caller = load(), load("caller")
    before = module.speak
    for turn in range(100):
        if turn % 2:
            with pytest.raises(KeyError), installed([PATCH]):
                raise KeyError(turn)
        else:
            with installed([PATCH]):
                assert module.speak() == "HELLO"
    assert module.speak is before
    assert caller.speak is before
    assert residue() == (0, False)


def test_somebody_elses_replacement_is_not_undone() -> None:
    """What another tool put there meanwhile stays."""
    module = load()

    def theirs() -> str:
        return "theirs"

    with installed([PATCH]):
        module.speak = theirs
    assert module.speak is theirs


def test_threads_enter_and_leave_together() -> None:
    """Many threads at once install once and leave nothing."""
    module = load()
    before = module.speak
    barrier = threading.Barrier(8)
    heard: list[str] = []

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            with installed([PATCH]):
                heard.append(module.speak())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(heard) == {"HELLO"}
    assert module.speak is before
    assert residue() == (0, False)
