"""The three streams that a process starts with, made fit to be used."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


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
