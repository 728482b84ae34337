"""What the C library is told of how this process uses its heap. Nothing happens where that is not glibc.

Source: https://sourceware.org/glibc/manual/latest/html_node/Malloc-Tunable-Parameters.html
"""

from __future__ import annotations

import contextlib
import ctypes

ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def keep_one_heap() -> None:
    """Let all threads take memory from one heap, if it is said before there are any.

    Otherwise each has a heap of its own, and what one lane's backward pass frees is of no use to the others.
    """
    _tell("mallopt", ARENA_MAX, 1)


def give_back() -> None:
    """Give the system what is free in the heap."""
    _tell("malloc_trim", 0)


def _tell(function: str, *numbers: int) -> None:
    with contextlib.suppress(OSError, TypeError, AttributeError):  # no such library, or no such function in it
        getattr(ctypes.CDLL(None), function)(*numbers)
