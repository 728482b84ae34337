"""Imports of large libraries: what transformers finds out about its files is remembered, and is the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftlite.imports import _remembered

ASK = """
import sys
from transformers.utils.import_utils import create_import_structure_from_path, define_import_structure
import transformers
folder = transformers.__path__[0] + "/models"
print(hash(repr(sorted((sorted(key), sorted((k, sorted(v)) for k, v in value.items()))
    for key, value in define_import_structure(folder).items()))))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "llama" / "modeling_llama.py").write_text("__all__ = ['Llama']")
    (folder / "__init__.py").touch()
    return folder


class Scan:
    """Counts how often it is asked, and names the files there are."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, place: Path) -> dict[str, object]:
        self.calls += 1
        return {"llama": {frozenset(("torch",)): {file.stem: {file.read_text()} for file in place.rglob("*.py")}}}


def ask(models: Path, scan: Scan) -> object:
    """What a new process would be told."""
    return _remembered(scan, Path(__file__))(models / "__init__.py")


def test_names_are_looked_for_once(models: Path) -> None:
    scan = Scan()
    first = ask(models, scan)
    assert ask(models, scan) == first == Scan()(models)
    assert scan.calls == 1


def test_a_file_of_the_folder_stands_for_it(models: Path) -> None:
    scan = Scan()
    look_up = _remembered(scan, Path(__file__))
    assert look_up(models) == look_up(str(models / "__init__.py"))
    assert scan.calls == 1


@pytest.mark.parametrize("change", ["edited", "added", "removed", "touched", "damaged"])
def test_whatever_differs_is_looked_at_again(models: Path, change: str) -> None:
    scan, file = Scan(), models / "llama" / "modeling_llama.py"
    ask(models, scan)
    [kept] = (models.parent / "cache" / "swiftlite" / "imports").iterdir()
    if change == "edited":
        file.write_text("__all__ = ['Other']")
    elif change == "added":
        (models / "llama" / "more.py").touch()
    elif change == "removed":
        file.unlink()
    elif change == "touched":
        os.utime(file, ns=(0, 0))
    else:
        kept.write_bytes(kept.read_bytes()[:-1])
    assert ask(models, scan) == Scan()(models)
    assert scan.calls == 2


def test_other_folders_are_left_to_transformers(models: Path) -> None:
    scan = Scan()
    for _ in range(2):
        _remembered(scan, Path(__file__))(models / "llama")
    assert scan.calls == 2


def test_a_cache_that_cannot_be_written_is_done_without(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(models.parent / "file"))
    assert ask(models, Scan()) == Scan()(models)


def test_transformers_itself_finds_the_same(tmp_path: Path) -> None:
    """Plainly, when it is looked for and kept, and when it is remembered."""
    quick = "from swiftlite.imports import quick_imports\nwith quick_imports():\n    import transformers\n"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "0"}
    said = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for program in (ASK, quick + ASK, quick + ASK)
    ]
    assert len({process.stdout for process in said}) == 1
    assert len(list(tmp_path.rglob("imports/*"))) == 1
