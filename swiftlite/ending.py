"""How processes end: by Ctrl-C, SIGTERM and SIGHUP before training answers them itself, with their parent, and at
once.

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
SECONDS_FOR_THE_FIRST = 5  # of a machine's processes, to tell why all of them end, before another one ends or tells it

# What asks a run to end. The last comes where the terminal or the ssh connection is gone; Windows has none.
STOPPING = tuple(number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP"))
ENDED = {
    128 + number: {"SIGINT": "interrupted", "SIGTERM": "terminated"}.get(number.name, "hung up") for number in STOPPING
}

_seen: list[int] = []


def end_on_signals() -> None:
    """From now on SIGTERM and SIGHUP raise SystemExit, and SIGINT KeyboardInterrupt, where whoever started this process
    lets them through."""
    _seen.clear()
    for number in STOPPING:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # in the background, by nohup
            signal.signal(number, _end)


def is_hangup(number: int) -> bool:
    return signal.Signals(number).name == "SIGHUP"


def answered() -> tuple[int, ...]:
    """What asks a run to end, without a SIGHUP that is ignored, as `nohup` wants it."""
    return tuple(n for n in STOPPING if not (is_hangup(n) and signal.getsignal(n) is signal.SIG_IGN))


def seen_signal() -> int | None:
    """The signal that came first."""
    return _seen[0] if _seen else None


def raise_seen_signal() -> None:
    """Raise again what a signal raised and somebody caught. Nothing where no signal came."""
    if _seen:
        raise_signal(_seen[0])


def _end(number: int, _frame: FrameType | None) -> None:
    if not _seen and number != signal.SIGINT:
        with suppress(OSError):  # the terminal is gone
            os.write(2, f"{ENDED[128 + number]}\n".encode())  # print is not safe in a signal handler
    _seen.append(number)
    raise_signal(number)


class _Interrupted(KeyboardInterrupt):
    """By SIGINT."""


class _Ended(SystemExit):
    """By another signal."""


class EndedAtOnce(SystemExit):
    """Of one of several processes that a signal ended where it stood: others may wait for it, until it is gone."""


def raise_signal(number: int) -> None:
    """End the program as a signal of this number does."""
    raise _Interrupted if number == signal.SIGINT else _Ended(128 + number)


def is_of_a_signal(error: BaseException) -> bool:
    """Whether an exception is one of `raise_signal`, or of Python itself where nobody else answers signals, rather than
    of some code that ends the program: of several processes only the one that runs it would end."""
    of_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, (_Interrupted, _Ended, KeyboardInterrupt) if of_python else (_Interrupted, _Ended))


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
