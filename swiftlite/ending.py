"""How processes end: by Ctrl-C and SIGTERM before training answers them itself, with their parent, and at once.

Signals come as exceptions, and some libraries catch all of those around an import that they try, so that the program
went on as if nothing had been. What was seen is kept, and asked for where the next part begins.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG = 1

_seen: list[int] = []


def end_on_signals() -> None:
    """From now on SIGTERM raises SystemExit, and SIGINT KeyboardInterrupt where the shell lets it through."""
    _seen.clear()
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is for what runs in the background
        signal.signal(signal.SIGINT, _end)


def seen_signal() -> int | None:
    """The signal that came first."""
    return _seen[0] if _seen else None


def raise_seen_signal() -> None:
    """Raise again what a signal raised and somebody caught. Nothing where no signal came."""
    if _seen:
        raise_signal(_seen[0])


def _end(number: int, _frame: FrameType | None) -> None:
    if not _seen and number == signal.SIGTERM:
        os.write(2, b"terminated\n")  # print is not safe in a signal handler
    _seen.append(number)
    raise_signal(number)


def raise_signal(number: int) -> None:
    """End the program as a signal of this number does."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def end_with_parent(parent: int) -> None:
    """First thing in a new process: see to it that it does not outlive the one that started it, also where that one is
    killed by SIGKILL. Nothing where the system is not Linux.

    parent: the id of the process that started this one.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def end_without_finalizing(code: int) -> None:
    """Let this process end with `code` when Python starts to take itself apart, which may go wrong in two ways.

    A signal that comes then has Python's own handler no more, and kills. And in a process that has been in a process
    group, DTensor's caches keep gloo's threads alive after the group was destroyed: one that drops the tensors of the
    last collective asks for the interpreter and aborts the process (SIGABRT, "terminate called without an active
    exception"; https://github.com/pytorch/pytorch/pull/179291).
    """
    atexit.register(_end_at_once, code)


def _end_at_once(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, a closed pipe, closed
            stream.flush()
    os._exit(code)
