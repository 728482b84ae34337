"""What a person sees of a run: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
SMOOTHING = 0.9


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as small bars, scaled to their own range."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def duration(seconds: float) -> str:
    """`8s`, `4m 05s`, `3h 07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def short(value: float | None, digits: int = 4) -> str:
    """A number a person reads at a glance."""
    if value is None:
        return "not finite"
    return f"{value:.1e}" if value != 0 and abs(value) < 1e-3 else f"{value:,.{digits}f}"


class Board:
    """The state behind the live panel; `render` turns it into what Rich draws."""

    def __init__(self, total: int, facts: dict[str, str], start_step: int) -> None:
        self.total, self.facts, self.step = total, facts, start_step
        self.row: dict[str, Any] = {}
        self.losses: list[float] = []
        self.smooth: float | None = None
        self.eval_loss: float | None = None
        self.events: deque[str] = deque(maxlen=3)
        self.seconds: deque[float] = deque(maxlen=30)
        self.started = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        self.row, self.step = row, row["step"]
        loss = row.get("loss")
        if loss is not None:
            self.losses.append(loss)
            self.smooth = loss if self.smooth is None else SMOOTHING * self.smooth + (1 - SMOOTHING) * loss
        if row.get("eval_loss") is not None:
            self.eval_loss = row["eval_loss"]
        if row.get("step_seconds") is not None:
            self.seconds.append(row["step_seconds"])

    @property
    def remaining(self) -> str:
        if not self.seconds:
            return "…"
        return duration((self.total - self.step) * sum(self.seconds) / len(self.seconds))

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._facts(), Text(), self._bar(), Text(), self._numbers()]
        if self.losses:
            parts += [Text(), Text(sparkline(self.losses, 60), style="cyan")]
        if self.events:
            parts += [Text(), *(Text(f"• {event}", style="dim") for event in self.events)]
        return Panel(Group(*parts), title="[bold]swiftlite[/]", border_style="blue", padding=(1, 2))

    def _facts(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        for key, value in self.facts.items():
            grid.add_row(key, value)
        return grid

    def _bar(self) -> Text:
        share = self.step / self.total if self.total else 1.0
        width = 40
        filled = round(width * share)
        bar = Text()
        bar.append("━" * filled, style="green").append("━" * (width - filled), style="bright_black")
        epoch = self.row.get("epoch")
        bar.append(f"  step {self.step:,} of {self.total:,}", style="bold")
        bar.append(f"  epoch {epoch:.2f}" if epoch is not None else "")
        return bar.append(f"  {duration(time.monotonic() - self.started)} gone, {self.remaining} to go", style="dim")

    def _numbers(self) -> Table:
        row = self.row
        cells = [
            ("loss", short(row.get("loss")) if row else "…"),
            ("smoothed", short(self.smooth) if self.smooth is not None else "…"),
            ("eval loss", short(self.eval_loss) if self.eval_loss is not None else "–"),
            ("learning rate", f"{row['learning_rate']:.2e}" if row else "…"),
            ("grad norm", short(row.get("grad_norm"), 3) if row else "…"),
            ("tokens/s", f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else "…"),
            ("step", f"{row['step_seconds']:.2f} s" if "step_seconds" in row else "…"),
            ("memory", f"{row['peak_memory_gib']:.2f} GiB" if "peak_memory_gib" in row else "…"),
            ("MFU", f"{row['mfu']:.1%}" if row.get("mfu") is not None else "–"),
        ]
        cells += [(key, short(value)) for key, value in row.items() if "/" in key and value is not None]
        grid = Table.grid(padding=(0, 3))
        for _ in range(3):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(style="bold", justify="right", no_wrap=True)
        for start in range(0, len(cells), 3):
            grid.add_row(*(text for cell in cells[start : start + 3] for text in cell))
        return grid


class LiveDisplay:
    """For terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._board: Board | None = None

    @contextmanager
    def phase(self, text: str) -> Iterator[Callable[[int, int | None], None]]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as progress:
            task = progress.add_task(text, total=None, count="")
            yield lambda done, total=None: progress.update(
                task, completed=done, total=total, count=f"{done:,}" + (f" of {total:,}" if total else "")
            )
        self._console.print(f"[green]✓[/] {text}", highlight=False)

    def start(self, board: Board) -> None:
        self._board = board
        self._live = Live(board.render(), console=self._console, refresh_per_second=4, get_renderable=board.render)
        self._live.start()

    def row(self, row: dict[str, Any]) -> None:
        """The panel is drawn from the board four times a second, not here."""

    def message(self, text: str) -> None:
        if self._board is not None:
            self._board.events.append(text)
        else:
            self._console.print(f"• {text}", highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, text: str) -> None:
        self.close()
        self._console.print(Panel(text, border_style="green", padding=(1, 2)))


class PlainDisplay:
    """For files, pipes and logs: one line a logged step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._board: Board | None = None

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def phase(self, text: str) -> Iterator[Callable[[int, int | None], None]]:
        started = time.monotonic()
        yield lambda done, total=None: None
        self._say(f"{text}: done in {time.monotonic() - started:.1f} s")

    def start(self, board: Board) -> None:
        self._board = board
        for key, value in board.facts.items():
            self._say(f"{key + ':':12} {value}")

    def row(self, row: dict[str, Any]) -> None:
        board = self._board
        text = f"step {row['step']:>{len(str(board.total))}}/{board.total}  loss {short(row.get('loss'))}"
        text += f"  lr {row['learning_rate']:.2e}  grad {short(row.get('grad_norm'), 3)}"
        text += f"  {row['tokens_per_second']:,.0f} tok/s  {row['peak_memory_gib']:.2f} GiB  {board.remaining} to go"
        extra = {k: v for k, v in row.items() if (k == "eval_loss" or "/" in k) and v is not None}
        self._say(text + "".join(f"  {key.replace('_', ' ')} {short(value)}" for key, value in extra.items()))

    def message(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Nothing is kept open."""

    def summary(self, text: str) -> None:
        self._say(Text.from_markup(text).plain)


def open_display(stream: TextIO | None = None) -> LiveDisplay | PlainDisplay:
    """A live panel where the output is a terminal, else plain lines."""
    stream = stream or sys.stdout
    return LiveDisplay(Console(file=stream)) if stream.isatty() else PlainDisplay(stream)
