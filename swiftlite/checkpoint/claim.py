"""One run at a time in an output folder: two would drop each other's checkpoints, metrics and result."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftlite.checkpoint.folder import lock_folder
from swiftlite.errors import UserError


class Claim:
    """A folder that this process holds until it ends, however it ends, or until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None

    def take(self) -> None:
        """Hold the folder, which has to be there. Raises UserError where another process does."""
        self.close()
        try:
            self._handle = lock_folder(self._folder)
        except BlockingIOError:
            raise UserError(
                "another run is writing into the output folder",
                where=str(self._folder),
                fix="let it finish or stop it, or choose another --output-dir",
            ) from None

    @property
    def holds(self) -> bool:
        """Whether the folder of this name is still the one that was taken: it may have been removed meanwhile."""
        if self._handle is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._handle), self._folder.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Let others have it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


@contextmanager
def new_folder(name: str) -> Iterator[str]:
    """Make a folder of this name, or with a number behind it where that is there: runs that begin in the same second
    have the same name of the clock. Yields its name; what nothing was written into goes again.

    Where none can be made, that is told by who writes into it.
    """
    above, made = Path(name).parent, Path(name)
    is_new = not above.exists()
    try:
        for number in itertools.count(2):
            try:
                made.mkdir(parents=True)
                break
            except FileExistsError:
                made = Path(f"{name}-{number}")
    except OSError:
        made = Path(name)
    try:
        yield str(made)
    finally:
        with suppress(OSError):  # it holds a run
            made.rmdir()
            if is_new:
                above.rmdir()


def is_held(folder: Path) -> bool:
    """Whether a run has claimed the folder; taken to be so where the file system knows no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
