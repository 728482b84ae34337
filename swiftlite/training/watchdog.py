"""Where every thread of a process stands, written to a file when a step takes too long: what a hung run is asked first.

Each process watches itself, shortly before a collective that waits in vain would give up.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftlite.parallel.world import PATIENCE

SECONDS = 0.9 * PATIENCE.total_seconds()


@contextmanager
def watchdog(folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yields a function to be called whenever there is progress. `folder/rank-00000.txt` stays only if it was written.

    Source: https://docs.python.org/3/library/faulthandler.html#faulthandler.dump_traceback_later
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}.txt"
    try:
        with path.open("a") as file:

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
