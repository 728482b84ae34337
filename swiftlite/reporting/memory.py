"""Peak memory of this process in GiB."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory_gib() -> float:
    """The device's peak allocation on CUDA, else the process's largest resident set (children not counted)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return _peak_resident_bytes() / 2**30


def _peak_resident_bytes() -> int:
    """VmHWM where there is one: getrusage on Linux starts from the peak of the process it was forked from."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
