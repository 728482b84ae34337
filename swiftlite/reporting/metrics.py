"""`metrics.jsonl`: one JSON object a logged step, each line complete or not there."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class MetricsFile:
    """Appends rows. On resume the rows of steps that are trained again are dropped first."""

    def __init__(self, output: Path, start_step: int) -> None:
        path = output / FILE
        kept = [row for row in read_metrics(output) if row["step"] <= start_step]
        partial = path.with_name(f".{FILE}.partial")
        partial.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: dict[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The rows of a run; a last line cut off by a kill is left out."""
    path = output / FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
