"""Importing: torch and transformers without what slows it down, and packages that not everybody has."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from swiftlite.errors import UserError


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around the import of large libraries: what they import is the same, in less time.

    Python's cyclic garbage collector is off: an import makes hundreds of thousands of objects that stay, and it looks
    at all of them again and again, a fifth of the time of importing a model's code. What was imported is then frozen
    (`gc.freeze`): later collections pass it over as well. And transformers finds the names of its models where an
    earlier process found them (`_RememberedNames`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    finder = _RememberedNames()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if was_enabled:
            gc.freeze()
            gc.enable()


class _RememberedNames(MetaPathFinder):
    """Lets transformers read the source of all of its models once, instead of twice in each process.

    At its import it looks through the 2,500 files below `transformers/models` for the names that each defines (0.2 s,
    twice). The result is kept like Python's compiled files: with the name, size and time of change of every file, and
    made again where any of them differs.
    """

    MODULE, FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self.MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, self.FUNCTION):
                setattr(module, self.FUNCTION, _remembered(getattr(module, self.FUNCTION), Path(module.__file__)))

        spec.loader.exec_module = execute_and_patch
        return spec


def _remembered(scan: Callable[[Any], Any], code: Path) -> Callable[[Any], Any]:
    """scan: from a folder, or a file in it, to the names defined below, in plain containers; code: its source."""

    of_folder = functools.cache(lambda folder: _load_or_make(folder, scan, code))  # asked as a folder and as a file

    def look_up(place: Any) -> Any:
        folder = Path(place)
        folder = folder.parent if folder.is_file() else folder
        return of_folder(folder) if folder.name == "models" else scan(place)

    return look_up


def _load_or_make(folder: Path, scan: Callable[[Any], Any], code: Path) -> Any:
    state = _state_of(folder, code)
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    kept = default_cache() / "imports" / f"{name}.{sys.implementation.cache_tag}"
    with suppress(OSError):
        content = kept.read_bytes()
        found = content[2 * len(state) :]
        if content.startswith(state + hashlib.sha256(found).digest()):  # marshal reads only what it has written
            return marshal.loads(found)
    names = scan(folder)
    with suppress(OSError, ValueError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        written = marshal.dumps(names)
        partial.write_bytes(state + hashlib.sha256(written).digest() + written)
        os.replace(partial, kept)
    return names


def _state_of(folder: Path, code: Path) -> bytes:
    """A digest of the name, size and time of change of every source file below a folder, and of one more."""
    files, folders = [os.fspath(code)], [os.fspath(folder)]
    for each in folders:  # which grows on the way
        with os.scandir(each) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    files.append(entry.path)
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    digest = hashlib.sha256()
    for file in sorted(files):
        status = os.stat(file)
        digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return digest.digest()


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/swiftlite`, else `~/.cache/swiftlite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftlite"


def is_installed(name: str) -> bool:
    """Whether a package is here, without importing it."""
    found = importlib.util.find_spec(name)
    # A folder of that name in the working directory (wandb leaves one) is found as a package without a file.
    return found is not None and found.origin is not None


def require_package(name: str, flag: str, extra: str | None = None) -> None:
    """Raises UserError where a package is not installed. flag: that needs it; extra: that brings it, of the package's
    name by default."""
    if not is_installed(name):
        raise UserError(
            f"{flag} needs the package {name}",
            where=flag,
            fix=f"pip install 'swiftlite[{extra or name}]', or leave {flag} out",
        )
