"""The panel of a running training: what it knows, and how it is drawn for a terminal of any size."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from swiftlite.reporting.curves import Average, Curve, curve_of, evaluated, is_added, number
from swiftlite.reporting.words import BLANK_BRAILLE, braille, duration, plain, short, sparkline, spent, told

FRAME = 6  # columns: borders, and blanks inside them
GAP_OF_FACTS = 2  # columns between a fact and its name
WIDEST = 120  # columns of the panel
TALLEST_CHART, SMALLEST_CHART = 7, 3  # lines
NARROWEST_CHART, SHORTEST_BAR = 24, 8  # columns
NUMBER, GAP = 10, 3  # columns
LONGEST_LABEL, LABEL_END = 20, 8  # columns; of the end, where names differ in it alone
WAITING = "…"
ESSENTIAL = ("model", "data", "output")  # facts that stay on a low terminal


class Board:
    """A Rich renderable; `add` and `say` may come from another thread than the drawing."""

    def __init__(
        self,
        total: int,
        facts: dict[str, str],
        start_step: int = 0,
        rows: Iterable[dict[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rows: of the part of the run that is being continued; clock: seconds."""
        self.total, self.facts, self.step = total, facts, start_step
        self.row: dict[str, Any] = {}
        self.evaluated: dict[str, float | None] = {}  # what was evaluated last, as `eval_loss`, `eval_rewards/margin`
        self.events: deque[str] = deque(maxlen=3)
        self.curve = "loss"  # the key of what is drawn, see `curve_of`
        self.first: float | None = None
        self.last: float | None = None
        self.smooth: float | None = None
        self._average, self._values, self._smooths = Average(total), Curve(), Curve()
        self._logged, self._apart = 0, 1  # the step of the last row, and how far steps of rows are apart
        self._clock, self._started = clock, clock()
        self._marks: deque[tuple[float, int]] = deque([(self._started, start_step)], maxlen=50)
        self._lock = threading.Lock()
        self._changes = 0
        self._drawn_for: tuple[int, int, int] | None = None
        self._drawn: list[_Drawn] = []
        for row in rows:
            self._take(row)
        self._logged = start_step

    def add(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        with self._lock:
            self.row, self.step = row, row["step"]
            if self._marks[-1][1] == self.step:
                self._marks.pop()  # an evaluation before the first step tells nothing of the pace of steps
            self._marks.append((self._clock(), self.step))
            self._take(row)

    def say(self, text: str) -> None:
        """Something that happened, such as a saved checkpoint."""
        with self._lock:
            self.events.append(text)
            self._changes += 1

    def _take(self, row: dict[str, Any]) -> None:
        self._changes += 1
        self._apart, self._logged = max(self._apart, row["step"] - self._logged), row["step"]
        self._average.expect(self.total / self._apart)  # of --log-steps 10, a tenth of the steps
        self.curve, _ = curve_of([row])
        if (value := number(row.get(self.curve))) is not None:
            self.first = value if self.first is None else self.first
            self.last, self.smooth = value, self._average.add(value)
            self._values.add(value)
            self._smooths.add(self.smooth)
        self.evaluated |= {key: number(value) for key, value in row.items() if key.startswith("eval_")}

    @property
    def elapsed(self) -> str:
        """Since the board was made."""
        return duration(self._clock() - self._started)

    @property
    def remaining(self) -> str:
        """From the pace of the last logged steps, evaluations and checkpoints between them included."""
        (first, first_step), (last, last_step) = self._marks[0], self._marks[-1]
        if last_step <= first_step:
            return WAITING
        left = (self.total - self.step) * (last - first) / (last_step - first_step)
        return duration(max(0.0, left - (self._clock() - last)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = min(options.max_width, WIDEST), console.height
        inner = width - FRAME
        with self._lock:
            if self._drawn_for != (self._changes, width, height):
                self._drawn_for = self._changes, width, height
                size = options.update(width=inner)
                self._drawn = [_Drawn(console.render_lines(part, size)) for part in self._parts(inner, height)]
            head, body = self._drawn
            bar = self._bar(inner)
        yield Panel(
            Group(head, bar, body),
            title=Text("swiftlite", style="bold"),
            title_align="left",
            subtitle=Text(self.elapsed),
            subtitle_align="right",
            border_style="cyan",
            padding=(0, 2),
            width=width,
        )

    def _parts(self, inner: int, height: int) -> tuple[RenderableType, RenderableType]:
        """What changes with a row or a message only, above and below the bar."""
        shown = list(self.events)[-3 if height >= 20 else -1 :] if height >= 14 else []
        events = [Text(f"• {event}", style="dim", no_wrap=True, overflow="ellipsis") for event in shown]
        # Lines that are always there: borders 2, blank, bar, blank, and the line below the panel.
        free = height - 6 - len(events) - bool(events)
        facts = self.facts
        if free < len(facts) + 7:
            facts = {k: v for k, v in facts.items() if k in ESSENTIAL and height >= 16}
        body = [Text(), self._body(self._numbers(), inner, free - len(facts))]
        return Group(_pairs(facts), Text()), Group(*body, *([Text(), *events] if events else []))

    def _bar(self, inner: int) -> Text:
        share = self.step / self.total if self.total else 1.0
        label = Text(f"  step {self.step:,}/{self.total:,}", style="bold")
        more = [f"  {self.remaining} left"]
        more += [f"  epoch {self.row['epoch']:.2f}"] if self.row.get("epoch") is not None else []
        for text in more:
            if label.cell_len + len(text) + SHORTEST_BAR <= inner:
                label.append(text, style="dim")
        if label.cell_len + 5 + SHORTEST_BAR <= inner:
            label = Text(f" {share:4.0%}", style="bold") + label
        width = max(0, inner - label.cell_len)
        filled = int(width * share)
        half = filled < width and width * share - filled >= 0.5
        bar = Text().append("━" * filled + "╸" * half, style="green")
        return bar.append("━" * (width - filled - half), style="bright_black").append(label)

    def _body(self, numbers: list[tuple[str, str]], inner: int, free: int) -> RenderableType:
        """The chart with the numbers to its right, or above them, or a line of bars, as the room allows."""
        cell = max(cell_len(label) for label, _ in numbers) + 1 + NUMBER + GAP
        beside = inner - (2 * cell - GAP) - 4
        lines = -(-len(numbers) // 2)
        if beside >= NARROWEST_CHART and free >= lines:
            grid = Table.grid(padding=(0, 4, 0, 0))
            grid.add_row(self._chart(beside, max(lines, min(TALLEST_CHART, free))), _grid(numbers, 2))
            return grid
        columns = max(1, (inner + GAP) // cell)
        numbers = numbers[: columns * max(1, free)]
        cells = _grid(numbers, columns)
        room = free - -(-len(numbers) // columns) - 1
        if room >= SMALLEST_CHART:
            return Group(self._chart(inner, min(TALLEST_CHART, room)), Text(), cells)
        if room >= 0:
            return Group(Text(sparkline(self._values.values, inner), style="cyan", no_wrap=True), cells)
        return cells

    def _chart(self, width: int, height: int) -> RenderableType:
        """The loss or reward so far, each step pale and their moving average bright."""
        values, smooth = self._values.values, self._smooths.values
        if not values:
            return Text("the curve appears here after the first step".ljust(width)[:width], style="dim")
        low, high = min(values), max(values)
        digits = next((some for some in (2, 4, 6) if short(high, some) != short(low, some)), 4)
        labels = [short(high, digits), *[""] * (height - 2), short(low, digits)]
        margin = max(map(len, labels)) + 1
        size = width - margin - 1, height, low, high
        text = Text(no_wrap=True)
        for label, pale, bright in zip(labels, braille(values, *size), braille(smooth, *size), strict=True):
            text.append(f"{label:>{margin - 1}} ", style="dim").append("│", style="bright_black")
            for in_front, cells in groupby(zip(pale, bright, strict=True), key=lambda cell: cell[1] > 0):
                run = "".join(chr(BLANK_BRAILLE + (front or behind)) for behind, front in cells)
                text.append(run, style="bold cyan" if in_front else "dim cyan")
            text.append("\n")
        text.rstrip()
        return text

    def _numbers(self) -> list[tuple[str, str]]:
        row, (on_held_out, called) = self.row, evaluated(self.curve)
        others = {key: value for key, value in self.evaluated.items() if key != on_held_out}

        def shown(key: str, form: Callable[[float], str], empty: str = WAITING) -> str:
            return form(row[key]) if row.get(key) is not None else (told(key, None, "–") if key in row else empty)

        cells = [
            (self.curve, shown(self.curve, short)),
            ("smoothed", short(self.smooth) if self.smooth is not None else WAITING),
            (called, told(on_held_out, self.evaluated[on_held_out], "–") if on_held_out in self.evaluated else "–"),
            ("grad norm", shown("grad_norm", lambda v: short(v, 3))),
            ("learn rate", shown("learning_rate", "{:.2e}".format)),
            ("tokens/s", shown("tokens_per_second", "{:,.0f}".format)),
            ("trained/s", shown("trained_tokens_per_second", "{:,.0f}".format)),
            ("padded/s", shown("padded_tokens_per_second", "{:,.0f}".format)),
            ("step", shown("step_seconds", spent)),
            ("data", shown("data_seconds", spent)),
            ("memory", shown("peak_memory_gib", "{:.2f} GiB".format)),
            ("MFU", f"{row['mfu']:.1%}" if row.get("mfu") is not None else "–"),
        ]
        of_method = {key: value for key, value in row.items() if is_added(key) and key not in self.evaluated}
        added = of_method | others
        words = [plain(key).replace("rewards/", "").replace("token ", "").replace("logps/", "logp ") for key in added]
        for name, value in zip(_cut(words), added.values(), strict=True):
            cells.append((name, short(value, 3) if value is not None else "–"))  # a step may have no rejected answer
        return cells


def _cut(names: list[str]) -> list[str]:
    """Names of data sets and functions, as long as there is room for, and unequal if that can be."""
    starts = [name if cell_len(name) <= LONGEST_LABEL else f"{_start(name, LONGEST_LABEL - 1)}…" for name in names]
    kept = LONGEST_LABEL - LABEL_END - 1
    return [
        start if starts.count(start) == 1 else f"{_start(name, kept)}…{_start(name[::-1], LABEL_END)[::-1]}"
        for name, start in zip(names, starts, strict=True)
    ]


def _start(name: str, columns: int) -> str:
    """As many letters as have room, of which some are two columns wide."""
    return set_cell_size(name, min(columns, cell_len(name))).rstrip()


class _Drawn:
    """Lines that are drawn already: the clock moves more often than the numbers do."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield from line
            yield Segment.line()


def _pairs(facts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, GAP_OF_FACTS), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=max(map(len, facts), default=0))
    grid.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
    for key, value in facts.items():
        grid.add_row(Text(key), Text(value))
    return grid


def _grid(cells: list[tuple[str, str]], columns: int) -> Table:
    """Labels and numbers, filled column by column so that what belongs together stands together."""
    lines = -(-len(cells) // columns)
    label = max(cell_len(label) for label, _ in cells) + 1
    grid = Table.grid()
    for column in range(columns):
        grid.add_column(style="dim", no_wrap=True, width=label)
        grid.add_column(style="bold", justify="right", no_wrap=True, width=NUMBER)
        if column < columns - 1:
            grid.add_column(width=GAP)
    for line in range(lines):
        texts: list[Text] = []
        for column in range(columns):
            at = column * lines + line
            texts += [Text(text) for text in (cells[at] if at < len(cells) else ("", ""))]
            texts += [Text()] if column < columns - 1 else []
        grid.add_row(*texts)
    return grid
