"""One run at a time in an output folder: two would drop each other's checkpoints, metrics and result."""

from __future__ import annotations

import fcntl
import os
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
