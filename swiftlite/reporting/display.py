"""What a person sees of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from swiftlite.reporting.board import FRAME, GAP_OF_FACTS, WIDEST, Board
from swiftlite.reporting.curves import EVALUATIONS
from swiftlite.reporting.words import duration, plain, short, told

REFRESH_PER_SECOND = 2  # drawing takes milliseconds that a run on a CPU would miss
SECONDS_BETWEEN_LINES = 10.0  # of a long phase in a log

MOST_REPEATED = 20  # messages

Update = Callable[..., None]  # update(done, total=None)


class LiveDisplay:
    """For terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._cut: list[str] = []  # facts that are too long for the panel
        self._again: list[str] = []  # warnings, and messages that are

    @contextmanager
    def phase(self, text: str, total: int | None = None) -> Iterator[Update]:
        """Show that something takes its time; yields `update(done, total)`."""
        columns = (
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30, complete_style="cyan"),
            TextColumn("{task.fields[count]}", style="dim", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, refresh_per_second=8) as progress:
            task = progress.add_task(text, total=total, count="")

            def update(done: int, total: int | None = total) -> None:
                count = f"{done:,}/{total:,}" if total else f"{done:,}"
                progress.update(task, completed=done, total=total, count=count)

            yield update
            took = progress.tasks[0].elapsed or 0.0
        self._console.print(Text("✓ ", style="green"), Text(text), Text(f" {took:.1f} s", style="dim"), sep="")

    @property
    def _room(self) -> int:
        """Columns of a line in the panel."""
        return min(self._console.width, WIDEST) - FRAME

    def start(self, board: Board) -> None:
        room = self._room - max(map(len, board.facts), default=0) - GAP_OF_FACTS
        self._cut = [f"{name}: {fact}" for name, fact in board.facts.items() if cell_len(fact) > room]
        self._live = Live(board, console=self._console, refresh_per_second=REFRESH_PER_SECOND)
        self._live.start()

    def row(self, row: dict[str, Any], board: Board) -> None:
        """The panel is drawn from the board a few times a second, not here."""

    def message(self, text: str) -> None:
        """While the panel stands it shows the last messages itself; warnings and what it must cut are said again below
        it at the end."""
        if self._live is None:
            self._console.print(Text(f"• {text}"))
        elif text.startswith("warning") or cell_len(f"• {text}") > self._room:
            self._again = [*self._again, text][-MOST_REPEATED:]

    def close(self) -> None:
        """Draw a last time and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            for text in [*self._cut, *self._again]:
                self._console.print(Text(f"• {text}"), overflow="fold")
            self._again = []

    def summary(self, lines: dict[str, str]) -> None:
        self.close()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for key, value in lines.items():
            grid.add_row(Text(key), Text(value, style="bold" if key in ("loss", "reward", "try it") else ""))
        title, width = Text("done", style="bold"), min(self._console.width, WIDEST)
        panel = Panel(grid, title=title, title_align="left", border_style="green", padding=(0, 2), width=width)
        self._console.print(panel)


class PlainDisplay:
    """For files, pipes and logs: one line a logged step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open = True

    def _say(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"  # of a stream that may know no more than ASCII
        try:
            if self._open:
                print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except OSError:  # whoever read the lines has gone, which is no reason to end a training run
            self._open = False

    @contextmanager
    def phase(self, text: str, total: int | None = None) -> Iterator[Update]:
        """A line at the end, and one every few seconds where it takes long; yields `update(done, total)`."""
        started = said = time.monotonic()

        def update(done: int, total: int | None = total) -> None:
            nonlocal said
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                self._say(f"{text}: {done:,}" + (f" of {total:,}" if total else "") + f", {duration(said - started)}")

        yield update
        self._say(f"{text}: done in {time.monotonic() - started:.1f} s")

    def start(self, board: Board) -> None:
        self._pairs(board.facts)

    def _pairs(self, pairs: dict[str, str]) -> None:
        width = max(map(len, pairs), default=0) + 2
        for key, value in pairs.items():
            self._say(f"{key + ':':{width}}{value}")

    def row(self, row: dict[str, Any], board: Board) -> None:
        digits = len(str(board.total))
        parts = [f"step {row['step']:>{digits}}/{board.total}", f"epoch {row.get('epoch', 0):.2f}"]
        parts += [f"reward {short(row['reward']):>8}"] if row.get("reward") is not None else []
        parts += [f"loss {short(row['loss']):>8}"] if "loss" in row else []
        parts += [f"grad {short(row['grad_norm'], 3):>7}"] if "grad_norm" in row else []
        parts += [f"lr {row['learning_rate']:.2e}"] if "learning_rate" in row else []
        parts += [f"{row['tokens_per_second']:>7,.0f} tokens/s"] if "tokens_per_second" in row else []
        parts += [f"{row['trained_tokens_per_second']:,.0f} trained"] if "trained_tokens_per_second" in row else []
        parts += [f"{row['padded_tokens_per_second']:,.0f} padded"] if "padded_tokens_per_second" in row else []
        parts += [f"{row['peak_memory_gib']:.2f} GiB"] if "peak_memory_gib" in row else []
        parts += [f"{board.remaining} left"]
        extra = {k: v for k, v in row.items() if k in EVALUATIONS or ("/" in k and v is not None)}
        self._say("  ".join([*parts, *(f"{plain(key)} {told(key, value)}" for key, value in extra.items())]))

    def message(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Nothing is kept open."""

    def summary(self, lines: dict[str, str]) -> None:
        self._pairs(lines)


def open_display(stream: TextIO | None = None) -> LiveDisplay | PlainDisplay:
    """A live panel where the output is a terminal that can draw one, else plain lines."""
    stream = stream or sys.stdout
    if stream.isatty():
        console = Console(file=stream)
        if not console.is_dumb_terminal and console.encoding.startswith("utf"):
            return LiveDisplay(console)
    return PlainDisplay(stream)
