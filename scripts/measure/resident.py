"""What a process holds: bytes of tensors, and the peak of its own memory while something runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

SECONDS_BETWEEN = 0.001


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this process's parts."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def own_bytes() -> int:
    """Resident memory that belongs to this process alone (RssAnon of Linux).

    Not counted: pages of files that it has mapped, which the system drops when it wants the room.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class PeakGrowth:
    """`with PeakGrowth() as peak: ...`; afterwards `peak.bytes` is the most that `own_bytes` was above the start."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakGrowth:
        self._start = own_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, own_bytes() - self._start)
