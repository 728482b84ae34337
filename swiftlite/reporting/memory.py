"""Peak memory of this process in GiB."""

from __future__ import annotations

import resource
import sys


def peak_memory_gib() -> float:
    """The device's peak allocation on CUDA, else the process's largest resident set (children not counted)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
