"""The reporter of a run: phases before it, rows and messages while it runs, a summary behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from swiftlite.reporting.display import Board, duration, open_display, short
from swiftlite.reporting.metrics import MetricsFile
from swiftlite.reporting.trackers import Tracker, check_trackers, open_trackers

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


class RunReporter:
    """Use as a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, config: RunConfig, output: Path, stream: TextIO | None = None) -> None:
        """Raises UserError where a tracker of `--report-to` is not installed."""
        check_trackers(config.report_to)
        self._config, self._output = config, output
        self._display = open_display(stream)
        self._metrics: MetricsFile | None = None
        self._trackers: list[Tracker] = []
        self._first: float | None = None
        self._last: float | None = None
        self._tokens = 0
        self._started = time.monotonic()

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()
        if self._metrics is not None:
            self._metrics.close()
        for tracker in self._trackers:
            tracker.close()

    def phase(self, text: str) -> AbstractContextManager[Callable[..., None]]:
        """Show that something takes its time; yields `update(done, total)`."""
        return self._display.phase(text)

    def start(self, total_steps: int, facts: dict[str, str], *, start_step: int = 0) -> None:
        """Open metrics and trackers in the output folder, which must exist, and show the run."""
        self._metrics = MetricsFile(self._output, start_step)
        name = self._config.run_name or self._output.name
        settings = self._config.model_dump(mode="json")
        self._trackers = open_trackers(self._config.report_to, self._output, name, settings)
        self._board = Board(total_steps, facts, start_step)
        self._display.start(self._board)

    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl; `step` is in it."""
        self._metrics.write(row)
        self._board.add(row)
        self._display.row(row)
        self._tokens += row["tokens"]
        if row.get("loss") is not None:
            self._first = row["loss"] if self._first is None else self._first
            self._last = row["loss"]
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        for tracker in self._trackers:
            tracker.log(numbers, row["step"])

    def message(self, text: str) -> None:
        self._display.message(text)

    def finish(self, model: Path) -> None:
        """Show the summary: what became of the loss, how long it took, where the model lies, what to do next."""
        lines = []
        if self._first is not None:
            lines.append(f"loss      {short(self._first)} → [bold]{short(self._last)}[/]")
        lines += [
            f"time      {duration(time.monotonic() - self._started)}",
            f"tokens    {self._tokens:,} in the logged steps",
            f"model     {model}",
            f"try it    swiftlite infer --model {model}",
        ]
        self._display.summary("\n".join(lines))
