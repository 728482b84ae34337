"""What is known of the windows of a streamed data set that somebody has read, kept beside the token cache; and what
a run has read so far.

With it a later step is found without tokenising what comes before, and the audit of a run that goes on counts the rows
of the windows that it passes over. It is a shortcut: without it the steps are the same.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swiftlite.data.audit import CHANGED, CUT, unused_columns
from swiftlite.data.rows.formats import count_columns
from swiftlite.errors import UserError


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


@dataclass
class Tally:
    """What windows held, as far as they were read. capacity: tokens of a full pack."""

    capacity: int
    totals: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)

    def add(self, record: WindowRecord) -> None:
        """Count a window."""
        self.totals.update(record.totals)
        self.dropped.update(record.dropped)
        count_columns(self.unused, record.unused)

    def numbers(self) -> dict[str, Any]:
        """Of tokens and packs."""
        packs, room = self.totals["packs"], self.totals["packs"] * self.capacity
        return {
            "tokens": self.totals["tokens"],
            "trained_tokens": self.totals["trained_tokens"],
            "packs": packs,
            "fill": round(self.totals["tokens"] / room, 4) if room else 0.0,
        }

    def audit(self) -> dict[str, Any]:
        """As `build_audit` has it."""
        rows = {key: self.totals[key] for key in ("read", "used", *CUT)}
        rows |= {key: self.totals[key] for key in CHANGED if self.totals[key]}
        rows |= {"dropped": dict(self.dropped.most_common())} | unused_columns([self.unused])
        return {"rows": rows} | self.numbers()


def read_records(path: Path) -> dict[int, WindowRecord]:
    """By the window's number; a line that was cut off by a crash is left out."""
    found: dict[int, WindowRecord] = {}
    with suppress(OSError):
        for line in path.read_bytes().split(b"\n"):  # a record may have other ends of lines
            with suppress(ValueError, TypeError):
                window, record = json.loads(line)
                found[window] = WindowRecord(**record)
    return found


def check_writable(path: Path) -> None:
    """Raises UserError where the cache cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise UserError(
            f"cannot write to the cache: {error.strerror or error}", where=str(path), fix="choose another --cache-dir"
        ) from error


def append_record(path: Path, window: int, record: WindowRecord) -> None:
    """A disk that is full meanwhile ends no run: what is missing here is found again by reading."""
    line = json.dumps([window, asdict(record)], ensure_ascii=False).encode() + b"\n"
    with suppress(OSError), path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            line = line if file.read(1) == b"\n" else b"\n" + line  # behind one that was cut off
        file.write(line)
