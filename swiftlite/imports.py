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


def require_package(name: str, flag: str) -> None:
    """Raises UserError where a package is not installed that an extra of the same name brings. flag: that needs it."""
    found = importlib.util.find_spec(name)
    # A folder of that name in the working directory (wandb leaves one) is found as a package without a file.
    if found is None or found.origin is None:
        raise UserError(
            f"{flag} needs the package {name}",
            where=flag,
            fix=f"pip install 'swiftlite[{name}]', or leave {flag} out",
        )
