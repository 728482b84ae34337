"""`metrics.jsonl` and `answers.jsonl`: one JSON object a step, each line complete or not there."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from swiftlite.reporting.files import disk_errors, write_whole
from swiftlite.untrusted import parse_json

METRICS, ANSWERS = "metrics.jsonl", "answers.jsonl"
MOST_STEPS = 2**53  # a larger number is damage, and none that can be drawn


class MetricsFile:
    """Appends rows. On resume the rows of steps that are trained again are dropped first."""

    def __init__(self, output: Path, start_step: int = 0, name: str = METRICS) -> None:
        """damage: which lines of a run that goes on were left out, in words, if any. Raises RunError where the file
        cannot be written."""
        self._path = output / name
        rows = _read(output, name) if start_step else []  # one from the start is evaluated again before its first step
        self.damage = _in_words(rows)
        kept = [row for row in rows if row is not None and row["step"] <= start_step]
        text = "".join(map(_line, kept))
        write_whole(self._path, lambda path: path.write_text(text, encoding="utf-8"))
        self._kept = kept if name == METRICS else []  # nobody asks for former answers
        self._file = self._path.open("a", encoding="utf-8")

    def take_kept(self) -> list[dict[str, Any]]:
        """The rows of the run before, once: those of a long one take hundreds of MiB."""
        kept, self._kept = self._kept, []
        return kept

    def write(self, row: dict[str, Any]) -> None:
        """Append a row and hand it to the system. Raises RunError where the disk is full."""
        with disk_errors(self._path):
            if not self._is_open():
                self.close()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(_line(row))
            self._file.flush()

    def _is_open(self) -> bool:
        """Whether the file of this name is the one that is open: rows in one that was removed are seen by nobody."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file; a row that did not fit on the disk was reported before."""
        try:
            self._file.close()
        except OSError:
            return


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for what is no number."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The rows of a run; lines that are no row, such as a last one cut off by a kill, are left out."""
    return [row for row in _read(output) if row is not None]


def damage_in_words(output: Path) -> str | None:
    """How many lines of a run's metrics are no row of a step; None where every line is one."""
    return _in_words(_read(output))


def _in_words(rows: list[dict[str, Any] | None]) -> str | None:
    damaged = sum(row is None for row in rows)
    lines = "a line that holds" if damaged == 1 else f"{damaged:,} lines that hold"
    return f"left out of {METRICS}: {lines} no step" if damaged else None


def _read(output: Path, name: str = METRICS) -> list[dict[str, Any] | None]:
    """A row a line, None for one that holds none; blank lines are none."""
    path = output / name
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [_row(line) for line in text.splitlines() if line.strip()]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    known = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < MOST_STEPS
    return finite(row) if known else None
