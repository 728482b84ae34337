"""What a command writes for programs to read, beside what it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swiftlite.errors import UserError


def check_output(path: Path) -> None:
    """Raises UserError where `--json` could not be written, before the work is done that it tells of."""
    where = f"--json {path}"
    if not path.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=where, fix="make it first, or name another")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError("the file cannot be written", where=where, fix="name another")


def write_output(value: Any, path: Path) -> None:
    path.write_text(as_text(value), encoding="utf-8")


def as_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
