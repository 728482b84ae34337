"""Sizes in memory and on disk, in words."""

from __future__ import annotations


def in_words(size: float) -> str:
    """Bytes as GiB, or as MiB where that would show next to nothing."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
