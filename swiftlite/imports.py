"""Packages that not everybody has, and where what outlives a run is kept."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from swiftlite.errors import UserError, kind_and_words

OURS = ("__main__", "swiftlite", "transformers_modules")  # the last is code that comes with a model

# What libraries try to import and do without, where no swiftlite run needs it: each `import` stands in a
# `try: ... except ImportError:`, past which any other error of a broken package would go.
TRIED = ("brotli", "brotlicffi", "zstandard", "triton", "torch_xla")

_broken: dict[str, Exception] = {}  # what the import of each hidden or tried package raised


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/swiftlite`, else `~/.cache/swiftlite`. Raises UserError where the user has no home, as in some
    containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftlite"
    except RuntimeError as error:
        fix = "name a folder with --cache-dir, or set HOME"
        raise UserError("this user has no home folder to keep tokenized rows in", fix=fix) from error


def is_installed(name: str) -> bool:
    """Whether a package is here, without importing it."""
    found = importlib.util.find_spec(name)
    # A folder of that name in the working directory (wandb leaves one) is found as a package without a file.
    return found is not None and found.origin is not None


def hide_broken(name: str) -> None:
    """Import a package that others import where it is there. One that fails, since it was made for another torch or
    another system, is for all of them none from here on: Python finds no module that is None."""
    if not is_installed(name):
        return
    try:
        importlib.import_module(name)
    except Exception as error:  # each has its own reasons to fail
        sys.modules[name], _broken[name] = None, error


class _Tried(MetaPathFinder):
    """Finds the packages of `TRIED`, and makes an ImportError of whatever they raise."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in TRIED else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute_tried, spec.loader.exec_module)
        return spec


def _execute_tried(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        execute(module)
    except Exception as error:  # each has its own reasons to fail
        _broken[module.__name__] = error
        raise ImportError(kind_and_words(error), name=module.__name__) from error


def do_without_broken() -> None:
    """From here on those who try to import a package of `TRIED` that is broken do without it."""
    if not any(isinstance(finder, _Tried) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Tried())


def failed_import(error: BaseException) -> str | None:
    """The package whose code was being executed for the first time, None where it is no other's."""
    modules = [
        frame.f_globals["__name__"].partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    return modules[-1] if modules and modules[-1] not in OURS else None


def quiet_bitsandbytes() -> None:
    """It tells of kernels that nobody uses when it is imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def import_package(name: str, flag: str, extra: str | None = None) -> ModuleType:
    """Import it, or a module in it. Raises UserError where it is not installed, or fails.

    flag: or what else needs it; extra: that brings it, None for a package that comes with swiftlite.
    """
    do_without_broken()
    package = name.partition(".")[0]
    if package not in _broken and not is_installed(package):
        raise UserError(
            f"{flag} needs the package {package}",
            where=flag,
            fix=f"pip install '{f'swiftlite[{extra}]' if extra else package}'"
            + (f", or leave {flag} out" if flag.startswith("--") else ""),
        )
    try:
        return importlib.import_module(name)
    except Exception as failed:  # each has its own reasons to fail
        error = _broken.get(getattr(failed, "name", None), failed)  # of a package that is None for Python
        raise UserError(
            f"{flag} needs the package {package}, whose import fails: {kind_and_words(error)[:200]}",
            where=flag,
            fix=f"install {failed_import(error) or package} again in a version that fits the other packages"
            + (f", or leave {flag} out" if flag.startswith("--") else ""),
        ) from error
