"""Environment variables that libraries read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable_for_now(name: str, value: str) -> Iterator[None]:
    """A value for a while, where the user has not given one."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
