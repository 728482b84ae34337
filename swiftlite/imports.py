"""Importing: torch and transformers without what slows it down, and packages that not everybody has."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from swiftlite.errors import UserError


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cyclic garbage collector off while large libraries are imported.

    An import makes hundreds of thousands of objects that stay, and the collector looks at all of them again and again:
    a fifth of the time of importing a model's code. What was imported is then frozen (`gc.freeze`): later collections
    pass it over as well.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


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
