"""What a run will write, against what the disk has: asked before the first step instead of found out at hour nine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from swiftlite.errors import UserError

GIB = 2**30
SPARE = 16 << 20  # beside tensors: headers, tokenizers, metrics, curves


@dataclass(frozen=True)
class Space:
    """checkpoint, result: bytes of one checkpoint and of `model/`; saves: checkpoints still to be written; keep: how
    many stay; kept: how many are there already.
    """

    checkpoint: int
    result: int
    saves: int
    keep: int
    kept: int

    @property
    def needed(self) -> int:
        """Bytes more than now at the worst moment: the oldest checkpoint goes after the next is complete."""
        grown = min(self.saves, max(0, self.keep - self.kept) + 1)
        return grown * self.checkpoint + self.result + SPARE

    def words(self) -> str:
        return (
            f"{self.checkpoint / GIB:.2f} GiB a checkpoint, {self.keep} kept and one being written, "
            f"{self.result / GIB:.2f} GiB for model/"
        )


def check_space(folder: Path, needed: float, what: str, *, details: str = "", fix: str) -> None:
    """Raise UserError where the file system of `folder`, which need not be there yet, has less free than `needed`.

    needed: bytes; what: needs them, for the error, details: behind the numbers.
    """
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        numbers = f"{needed / GIB:.2f} GiB of disk and {free / GIB:.2f} GiB are free"
        raise UserError(f"{what} needs {numbers}{details and ': '}{details}", where=str(place), fix=fix)
