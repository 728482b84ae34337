"""`--json` of commands that look: what they show, for programs to read."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swiftlite.cli.model_options import at_home
from swiftlite.errors import RunError, UserError

FLAG = "--json"
TO_STDOUT = "-"  # in place of a file: what is shown goes to stderr then


def check_output(where: str | None, flag: str = FLAG) -> None:
    """Raises UserError where the file could not be written, before the work is done that it tells of."""
    if where in (None, TO_STDOUT):
        return
    path = at_home(Path(where), flag)
    if not path.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=f"{flag} {where}", fix="make it first, or name another")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError("the file cannot be written", where=f"{flag} {where}", fix="name another")


def write_output(value: Any, where: str | None) -> None:
    """Nothing where no file was named; null for what is not finite. Raises RunError where it cannot be written."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if where == TO_STDOUT:
        sys.stdout.write(text)
    elif where is not None:
        with _written(where, FLAG):
            at_home(Path(where), FLAG).write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    """With None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_line(value: Any, where: str, flag: str) -> None:
    """Add a line to a file of them, whole or not at all. Raises RunError where it cannot be written."""
    rest = memoryview(f"{json.dumps(value, ensure_ascii=False)}\n".encode())
    with _written(where, flag), at_home(Path(where), flag).open("ab", buffering=0) as file:
        began = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(began)
            raise


@contextmanager
def _written(where: str, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"the file cannot be written: {error.strerror}"
        raise RunError(problem, where=f"{flag} {where}", fix="free space, or name another file") from error
