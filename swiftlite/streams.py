"""The three streams that a process starts with, made fit to be used."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


def settle_streams() -> None:
    """Streams that were closed (`>&-`, some services) lead nowhere from here on: Python has None for them, and the
    next file to be opened would get their number, and what libraries print. Letters that the others cannot write
    (`LC_ALL=C`) are written as `\\u27e6` instead of ending the run."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the smallest number that is free, which is this one
            os.set_inheritable(number, True)  # or other files would get it in the processes that this one starts
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")


class _Lasting(FileIO):
    """Takes what cannot be written any more as if it were."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def outlive_readers() -> None:
    """From here on stdout and stderr take everything, also where the terminal or the reader of a pipe has gone: lines
    that nobody sees are no reason to end a training run. Streams that somebody else has put there stay."""
    for name, first in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        stream = getattr(sys, name)
        if stream is first and isinstance(stream, TextIOWrapper):
            with suppress(OSError):
                stream.flush()
            raw = BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
            how = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, TextIOWrapper(raw, **how))
