"""Importing torch and transformers, without what slows it down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
