"""What a run will write, against what the disk has: asked before the first step instead of found out at hour nine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from swiftlite.errors import UserError

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


def check_space(output: Path, space: Space) -> None:
    """Raise UserError where the file system of `output` has less free than `space` needs."""
    place = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if space.needed > free:
        gib = 2**30
        raise UserError(
            f"the run needs {space.needed / gib:.2f} GiB of disk and {free / gib:.2f} GiB are free: "
            f"{space.checkpoint / gib:.2f} GiB a checkpoint, {space.keep} kept and one being written, "
            f"{space.result / gib:.2f} GiB for model/",
            where=str(place),
            fix="free space, name another --output-dir, or lower --keep-checkpoints",
        )
