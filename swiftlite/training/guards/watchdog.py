"""Where every thread of a process stands, written to a file when a step takes too long: what a hung run is asked first.

Each process watches itself, shortly before a collective that waits in vain would give up.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from swiftlite.parallel.world import PATIENCE
from swiftlite.reporting.files import disk_errors

SECONDS = 0.9 * PATIENCE.total_seconds()
TRIES = 10


@contextmanager
def watchdog(folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yields a function to be called whenever there is progress. `folder/rank-00000.txt` stays only if it was written.

    Source: https://docs.python.org/3/library/faulthandler.html#faulthandler.dump_traceback_later
    """
    path = folder / f"rank-{rank:05d}.txt"
    try:
        with _opened(path) as file:

            def progress() -> None:
                faulthandler.dump_traceback_later(SECONDS, repeat=False, file=file)

            progress()
            try:
                yield progress
            finally:
                faulthandler.cancel_dump_traceback_later()
    finally:  # a run that was interrupted has not hung
        with suppress(OSError):  # others' stacks lie there, or somebody has cleared the folder away
            if not path.stat().st_size:
                path.unlink()
                folder.rmdir()


def _opened(path: Path, tries: int = TRIES) -> TextIO:
    """For writing. Raises RunError where the disk will not have it."""
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a")
        except (FileExistsError, FileNotFoundError):  # another process, for which nothing was left, has removed it
            if tries == 1:
                raise
    return _opened(path, tries - 1)
