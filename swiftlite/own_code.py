"""Functions that users write: found as FILE.py:NAME or PACKAGE.MODULE.NAME, and called without harm to the run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from swiftlite.ending import STOPPING, is_of_a_signal
from swiftlite.errors import UserError

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_of_files: dict[tuple[str, int], ModuleType] = {}  # by path and time of change: each is run once a process


@dataclass(frozen=True)
class Code:
    """Where a function is found. place: a file, or a package; name: of the function."""

    place: str
    name: str
    is_file: bool


def find(spec: str, where: str, how: str) -> Code | None:
    """What a word names, None where it names nothing; nothing is run. where, how: of errors, the latter how functions
    are named. Raises UserError where there is no such file."""
    place, colon, name = spec.rpartition(":")
    if not colon:
        place, _, name = spec.rpartition(".")
    if not place or not name or spec.endswith(".py"):
        return None
    if colon and not Path(place).expanduser().is_file():
        raise UserError(f"there is no file {place}", where=where, fix=how)
    return Code(place, name, is_file=bool(colon))


def load(named: Code, where: str, how: str) -> Callable[..., Any]:
    """The function, or class, of that name. Raises UserError where it cannot be had."""
    place, name = named.place, named.name
    module = _module_of(place, where, how) if named.is_file else _package_of(place, where, how)
    found = vars(module).get(name)
    if not callable(found):
        has = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise UserError(f"there is no function {name} in {place}", where=where, fix=f"its functions: {has}")
    return found


def _module_of(place: str, where: str, how: str) -> ModuleType:
    """The module of a file, which finds others beside it as a script does."""
    path = Path(place).expanduser()
    key = str(path.resolve()), path.stat().st_mtime_ns
    if key not in _of_files:
        _of_files[key] = _run(path, place, where, how)
    return _of_files[key]


def _run(path: Path, place: str, where: str, how: str) -> ModuleType:
    known = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    if known is None or known.loader is None:
        raise UserError(f"{place} is no Python file", where=where, fix=how)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    if _is_found(path):
        if any(name == str(path.resolve()) for name, _ in _of_files):  # it was another one then
            sys.modules.pop(path.stem, None)
        return _package_of(path.stem, where, how)
    module = importlib.util.module_from_spec(known)
    sys.modules[known.name] = module  # for dataclasses and pickles in it
    with _importing(place, where, how):
        known.loader.exec_module(module)
    return module


def _is_found(path: Path) -> bool:
    """Whether an import by the file's own name gives this file, and no other of that name. Then processes that are
    spawned, which import anew, find its functions too."""
    try:
        found = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None and Path(found.origin).resolve() == path.resolve()


def _package_of(place: str, where: str, how: str) -> ModuleType:
    with _importing(place, where, how):
        return importlib.import_module(place)


@contextmanager
def _importing(place: str, where: str, how: str) -> Iterator[None]:
    """A user's own code may raise anything, and end the program. Raises UserError."""
    try:
        with setting_back():
            yield
    except (Exception, SystemExit) as error:
        if is_of_a_signal(error):
            raise
        raise UserError(
            f"{place} cannot be imported: {type(error).__name__}: {error}", where=where, fix=f"mend it, or {how}"
        ) from error


@contextmanager
def setting_back() -> Iterator[None]:
    """What code of others sets for the whole process, training does not see: else it would go on in another folder."""
    import torch  # a dry run reads the names of functions without it

    kind, learning, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    device = torch.get_default_device()
    answering = {number: signal.getsignal(number) for number in STOPPING}
    try:
        with chdir("."):
            yield
    finally:
        torch.set_default_dtype(kind)
        torch.set_grad_enabled(learning)
        torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        for number, handler in answering.items():
            signal.signal(number, handler)


@contextmanager
def ending_forks() -> Iterator[None]:
    """A process that a function forks ends with it: it would go on as a second run, in the same folder."""
    here, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == here:
            raise
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        traceback.print_exc()
    if os.getpid() != here:
        os._exit(code)
