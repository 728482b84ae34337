"""What is known of the windows of a streamed data set that somebody has read, kept beside the token cache.

With it a later step is found without tokenising what comes before, and the audit of a run that goes on counts the rows
of the windows that it passes over.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swiftlite.errors import RunError


@dataclass(frozen=True)
class WindowRecord:
    """totals: of rows, tokens and packs by the audit's names; dropped: rows by reason; unused: rows by column that
    nothing was made of; rejected: the bad rows."""

    totals: dict[str, int]
    dropped: dict[str, int]
    unused: dict[str, int]
    rejected: list[dict[str, Any]]

    @property
    def packs(self) -> int:
        return self.totals["packs"]


def read_records(path: Path) -> dict[int, WindowRecord]:
    """By the window's number; a line that was cut off by a crash is left out."""
    found: dict[int, WindowRecord] = {}
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").split("\n"):  # a record may have other ends of lines
            with suppress(ValueError, TypeError):
                window, record = json.loads(line)
                found[window] = WindowRecord(**record)
    return found


def append_record(path: Path, window: int, record: WindowRecord) -> None:
    """Raises RunError where the cache cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([window, asdict(record)], ensure_ascii=False) + "\n")
    except OSError as error:
        raise RunError(
            f"cannot write to the cache: {error.strerror or error}", where=str(path), fix="choose another --cache-dir"
        ) from error
