"""Runs a reader on hostile input and watches it: what it raises, how long it takes, which files it opens.

The audit hook (https://docs.python.org/3/library/audit_events.html) sees what Python opens and starts.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swiftlite.errors import SwiftliteError

ACCEPTED, REFUSED, FINDING = "accepted", "refused", "finding"
LONGEST_MESSAGE = 4000  # characters; whoever reads an error reads a page at most
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = (
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "os.system",
    "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "socket.getaddrinfo",
    "pickle.find_class",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """outcome: accepted, refused or finding; problem: of a finding, what was wrong with it."""

    outcome: str
    problem: str | None = None


class TooLong(BaseException):
    """No Exception, so that no reader can take it for its own."""


class Guard:
    """Watches one reader at a time. Only one guard a process: an audit hook stays until the process ends."""

    def __init__(self, seconds: float) -> None:
        """seconds: that one input may take."""
        self._seconds = seconds
        self._folders: tuple[Path, Path] | None = None
        self._trespasses: list[str] = []
        packages = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(_project())}
        self._readable = tuple({os.path.realpath(path) + "/" for path in packages} | {"/proc/", "/usr/share/", "/sys/"})
        sys.dont_write_bytecode = True  # an import that comes late would look like a file written
        sys.addaudithook(self._see)
        signal.signal(signal.SIGALRM, _too_long)

    def judge(self, read: Callable[[], bool], folder: Path, scratch: Path) -> Verdict:
        """Call `read`, which says whether it accepts. folder: the only one to read in; scratch: the only to write in.

        Refusing is raising a SwiftliteError, or returning False; anything else than these two is a finding.
        """
        self._trespasses.clear()
        self._folders = Path(os.path.realpath(folder)), Path(os.path.realpath(scratch))
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        problem, accepted = None, False
        try:
            accepted = read()
        except SwiftliteError as error:
            problem = None if len(str(error)) <= LONGEST_MESSAGE else f"a message of {len(str(error)):,} characters"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            problem = _described(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._folders = None
        problem = problem or next(iter(self._trespasses), None)
        return Verdict(FINDING, problem) if problem else Verdict(ACCEPTED if accepted else REFUSED)

    def _see(self, event: str, arguments: tuple) -> None:
        if self._folders is None:
            return
        folders, self._folders = self._folders, None  # looking at a path is no business of the reader
        try:
            if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
                self._opened(os.path.realpath(os.fsdecode(arguments[0])), arguments[2], *folders)
            elif event in FORBIDDEN and not _within(arguments[0], folders[1]):
                self._trespasses.append(f"{event} {arguments[0]!r:.200}")
        except ValueError:  # a NUL in the name: nothing is opened
            return
        finally:
            self._folders = folders

    def _opened(self, path: str, flags: int, folder: Path, scratch: Path) -> None:
        if _within(path, scratch):
            return
        if flags & WRITES and path != os.devnull:
            self._trespasses.append(f"opens {path} for writing")
        elif not _within(path, folder) and not path.startswith(self._readable):
            self._trespasses.append(f"opens {path}")


def _within(path: object, folder: Path) -> bool:
    return isinstance(path, str | os.PathLike) and Path(os.path.realpath(path)).is_relative_to(folder)


def _project() -> Path:
    return Path(__file__).resolve().parent.parent.parent


def _too_long(*_: object) -> None:
    raise TooLong


def _described(error: BaseException) -> str:
    """The error, and the last place in the project it came through: the same for inputs that share a cause."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/swiftlite/" in frame.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {at}: {error!s:.200}"
