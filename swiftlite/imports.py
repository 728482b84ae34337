"""Packages that not everybody has, and where what outlives a run is kept."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

from swiftlite.errors import UserError


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/swiftlite`, else `~/.cache/swiftlite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftlite"


def is_installed(name: str) -> bool:
    """Whether a package is here, without importing it."""
    found = importlib.util.find_spec(name)
    # A folder of that name in the working directory (wandb leaves one) is found as a package without a file.
    return found is not None and found.origin is not None


def quiet_bitsandbytes() -> None:
    """peft imports it: it tells of kernels that nobody uses."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def require_package(name: str, flag: str, extra: str | None = None) -> None:
    """Raises UserError where a package is not installed. flag: that needs it; extra: that brings it, of the package's
    name by default."""
    if not is_installed(name):
        raise UserError(
            f"{flag} needs the package {name}",
            where=flag,
            fix=f"pip install 'swiftlite[{extra or name}]', or leave {flag} out",
        )
