"""Ctrl-C and SIGTERM before training answers them itself: they end the program, also where a library swallows them.

They come as exceptions, and some libraries catch all of those around an import that they try, so that the program went
on as if nothing had been. What was seen is kept, and asked for where the next part begins.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

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
