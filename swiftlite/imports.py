"""Packages that not everybody has, and where what outlives a run is kept."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from swiftlite.errors import UserError, first_line


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/swiftlite`, else `~/.cache/swiftlite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftlite"


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
    except Exception:  # each has its own reasons to fail
        sys.modules[name] = None


def quiet_bitsandbytes() -> None:
    """peft imports it: it tells of kernels that nobody uses."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def require_package(name: str, flag: str, extra: str | None = None) -> None:
    """Raises UserError where a package is not installed. flag: that needs it; extra: that brings it, of the package's
    name by default. Imports nothing."""
    if not is_installed(name):
        raise UserError(
            f"{flag} needs the package {name}",
            where=flag,
            fix=f"pip install 'swiftlite[{extra or name}]', or leave {flag} out",
        )


def import_package(name: str, flag: str, extra: str | None = None) -> ModuleType:
    """Import it. Raises UserError where it is not installed, or fails. Arguments as of `require_package`."""
    require_package(name, flag, extra)
    try:
        return importlib.import_module(name)
    except Exception as error:  # each has its own reasons to fail
        raise UserError(
            f"{flag} needs the package {name}, whose import fails: {type(error).__name__}: {first_line(error)[:200]}",
            where=flag,
            fix=f"install {name} again in a version that fits the other packages, or leave {flag} out",
        ) from error
