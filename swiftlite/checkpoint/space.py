"""What a run will write, against what the disk has: asked before the first step instead of found out at hour nine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swiftlite.errors import UserError
from swiftlite.sizes import in_words

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
    def more(self) -> int:
        """Checkpoints beyond those there are, at the worst moment: the oldest goes after the next is complete."""
        return min(self.saves, max(0, self.keep - self.kept) + 1)

    def needed(self, output: Path) -> dict[Path, int]:
        """Bytes by folder: `checkpoints/` may be a link to another file system."""
        return {output / "checkpoints": self.more * self.checkpoint, output: self.result + SPARE}

    def words(self) -> str:
        return (
            f"{in_words(self.checkpoint)} for each of {self.more} more checkpoints at once, "
            f"{in_words(self.result)} for model/, {in_words(SPARE)} for all beside them"
        )


def check_place(output: Path) -> None:
    """Raise UserError where no folder of this name can be made or written, nor what a run replaces in it."""
    place = next(parent for parent in (output, *output.absolute().parents) if parent.exists() or parent.is_symlink())
    if not place.exists():
        raise UserError(
            "the output folder is a link that leads nowhere",
            where=str(place),
            fix="make the folder it points to, or choose another --output-dir",
        )
    if not place.is_dir():
        raise UserError("the output folder is a file", where=str(place), fix="choose another --output-dir")
    for folder in (place, output / "checkpoints", output / "model"):
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise UserError("the folder cannot be written", where=str(folder), fix="choose another --output-dir")


def check_space(needed: Mapping[Path, float], what: str, *, details: str = "", fix: str) -> None:
    """Raise UserError where a file system has less free than is needed of it.

    needed: bytes by folder, which need not be there yet; what: needs them, for the error, details: behind the numbers.
    """
    by_system: dict[int, tuple[Path, float]] = {}
    for folder, size in needed.items():
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        system = place.stat().st_dev
        before = by_system.get(system, (place, 0))[1]
        by_system[system] = place, before + size
    for place, size in by_system.values():
        free = shutil.disk_usage(place).free
        if size > free:
            numbers = f"{in_words(size)} of disk and {in_words(free)} are free"
            raise UserError(f"{what} needs {numbers}{details and ': '}{details}", where=str(place), fix=fix)
