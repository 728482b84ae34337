"""What the C library is told of how this process uses its heap. Nothing happens where that is not glibc.

Sources: https://sourceware.org/glibc/manual/latest/html_node/Malloc-Tunable-Parameters.html and
https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD = -8, -3, -1  # M_ARENA_MAX and others of malloc.h
LARGEST_IN_HEAP = 32 << 20  # bytes of a block, to which glibc itself comes in time; larger ones have pages of their own
RESERVED = 1 << 30  # bytes of the heap that lie in huge pages


def prepare_heap() -> None:
    """To be called before there are threads or tensors."""
    keep_one_heap()
    use_huge_pages()


def keep_one_heap() -> None:
    """Let all threads take memory from one heap, if it is said before there are any.

    Otherwise each has a heap of its own, and what one lane's backward pass frees is of no use to the others.
    """
    _tell("mallopt", ARENA_MAX, 1)


def use_huge_pages() -> None:
    """Let the heap grow in pages of 2 MiB where the system has them for those who ask, and keep what is freed.

    A micro-batch takes and frees the same blocks as the one before. In small pages that return to the system each of
    them is cleared and mapped anew. Addresses are reserved; memory is taken where something is written.
    """
    _tell("mallopt", MMAP_THRESHOLD, 2 * RESERVED - 1)  # for the moment: the reserved block has to lie in the heap
    _tell("mallopt", TRIM_THRESHOLD, 2 * RESERVED - 1)
    with contextlib.suppress(OSError, TypeError, AttributeError):
        library, advice = ctypes.CDLL(None), mmap.MADV_HUGEPAGE
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes = [ctypes.c_void_p]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if start := library.malloc(RESERVED):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            library.madvise(first, start + RESERVED - first, advice)
            library.free(start)
    _tell("mallopt", MMAP_THRESHOLD, LARGEST_IN_HEAP)


def give_back() -> None:
    """Give the system what is free in the heap."""
    _tell("malloc_trim", 0)


def _tell(function: str, *numbers: int) -> None:
    with contextlib.suppress(OSError, TypeError, AttributeError):  # no such library, or no such function in it
        getattr(ctypes.CDLL(None), function)(*numbers)
