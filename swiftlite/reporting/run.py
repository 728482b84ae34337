"""The reporter of a run: phases before it, rows and messages while it runs, a summary behind it."""

from __future__ import annotations

import os
import shlex
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from swiftlite import __version__
from swiftlite.config.methods import SAMPLING
from swiftlite.errors import RunError, UserError, first_line, kind_and_words
from swiftlite.reporting.board import Board
from swiftlite.reporting.curves import EVALUATIONS
from swiftlite.reporting.display import Update, open_display
from swiftlite.reporting.files import disk_errors, read_run_state, write_run_state
from swiftlite.reporting.metrics import ANSWERS, MetricsFile, finite
from swiftlite.reporting.trackers import Tracker, check_trackers, open_trackers
from swiftlite.reporting.words import duration, in_one_line, plain, short, told
from swiftlite.untrusted import without_secrets

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

MOST_MESSAGES = 1000  # kept in run.json; all of them are shown
SECONDS_TO_KEEP = 30  # after which run.json is written again


class Reporter(Protocol):
    """Who is told what happens in a run."""

    def phase(self, text: str, total: int | None = None) -> AbstractContextManager[Update]: ...
    def start(self, total_steps: int, facts: dict[str, str], *, start_step: int = 0) -> None: ...
    def log(self, row: dict[str, Any]) -> None: ...
    def answers(self, row: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def finish(self, model: Path) -> None: ...


class QuietReporter(AbstractContextManager["QuietReporter"]):
    """Of the processes of a run one speaks; the others have this."""

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def phase(self, text: str, total: int | None = None) -> AbstractContextManager[Update]:
        return nullcontext(lambda done, total=None: None)

    def start(self, total_steps: int, facts: dict[str, str], *, start_step: int = 0) -> None:
        """Rank 0 tells of it."""

    def log(self, row: dict[str, Any]) -> None:
        """Rank 0 tells of it."""

    def answers(self, row: dict[str, Any]) -> None:
        """Rank 0 tells of it."""

    def message(self, text: str) -> None:
        """Rank 0 tells of it."""

    def finish(self, model: Path) -> None:
        """Rank 0 tells of it."""


def to_merge(config: RunConfig) -> str:
    """What of an adapter serving engines refuse (docs/reliability.md has what was tried), in words; empty where they
    take it as it is."""
    if config.tuner != "lora":
        return ""
    kinds = {"DoRA": config.dora, "whole modules": config.modules_to_save, "new tokens": config.new_tokens}
    return " and ".join(words for words, asked in kinds.items() if asked)


class RunReporter:
    """Use as a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, config: RunConfig, output: Path, stream: TextIO | None = None) -> None:
        """stream: stdout unless given. Raises UserError where a tracker of `--report-to` is not installed."""
        check_trackers(config.report_to)
        self._config, self._output = config, output
        self._display = open_display(stream)
        self._began = time.monotonic()
        self._running: _Running | None = None

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()
        if self._running is not None:
            self._running.close(error, self._display.message)
            if not self._running.finished:
                with suppress(Exception):  # what ended the run is told, not this
                    _draw(self._output)

    def phase(self, text: str, total: int | None = None) -> AbstractContextManager[Update]:
        """Show that something takes its time; yields `update(done, total=None)`."""
        return self._display.phase(text, total)

    def start(self, total_steps: int, facts: dict[str, str], *, start_step: int = 0) -> None:
        """Open trackers and metrics in the output folder, which is made if need be, and show the run.

        start_step: rows of metrics.jsonl behind it are dropped. Raises UserError where a tracker does not start, with
        nothing changed on disk.
        """
        facts = {key: in_one_line(value) for key, value in facts.items()}
        self._running = _Running(self._config, self._output, total_steps, facts, start_step)
        self._display.start(self._running.board)
        if damage := self._running.damage:
            self.message(damage)

    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl: ints, floats and None, with `step`. Raises RunError where the disk is full."""
        row = finite(row)  # a step of which nothing is learnt has means of nothing
        self._running.log(row, self.message)
        self._display.row(row, self._running.board)

    def answers(self, row: dict[str, Any]) -> None:
        """One row of answers.jsonl: what the model said in a step. Raises RunError where the disk is full."""
        self._running.answers.write(row)

    def message(self, text: str) -> None:
        """Something that happened, such as a saved checkpoint."""
        text = in_one_line(text)
        if self._running is not None:
            self._running.say(text)
        self._display.message(text)

    def finish(self, model: Path) -> None:
        """Show the summary: what became of the loss, how long it took, where the model lies, what to do next."""
        running = self._running
        lines = {}
        board = running.board
        if board.first is not None:
            lines[board.curve] = f"{short(board.first)} → {short(board.last)} (smoothed {short(board.smooth)})"
        for key in filter(board.evaluated.__contains__, EVALUATIONS):
            lines[plain(key)] = told(key, board.evaluated[key])
        lines["time"] = duration(time.monotonic() - self._began) + running.speed()
        lines["model"] = str(model)
        if self._config.method != "rm":  # which gives scores, not answers
            name, merged = shlex.quote(str(model)), to_merge(self._config)
            lines["try it"] = f"swiftlite infer --model {name}"
            merge = f"swiftlite export --model {name} --output-dir FOLDER first: engines take no adapter with {merged}"
            lines["serve it"] = merge if merged else f"swiftlite serve --model {name}"
        running.write_state("finished")
        running.finished = True
        try:
            _draw(self._output)
        except RunError:  # the disk
            raise
        except Exception as error:  # the model is saved: curves that cannot be drawn do not make it a failure
            said = f"the curves and report.html cannot be drawn: {kind_and_words(error)[:200]}"
            self.message(f"warning: {error.what if isinstance(error, UserError) else said}")
            running.write_state("finished")  # with the message
        self._display.summary(lines)


def _draw(output: Path) -> None:
    """Curves and page of what was logged so far."""
    from swiftlite.reporting.page import write_report_page
    from swiftlite.reporting.plots import write_loss_plot

    write_report_page(output)
    write_loss_plot(output)


class _Running:
    """What is open between `start` and the end."""

    def __init__(
        self, config: RunConfig, output: Path, total_steps: int, facts: dict[str, str], start_step: int
    ) -> None:
        self._output = output
        self._started = time.monotonic()
        before = read_run_state(output) if start_step else {}
        run_id = before.get("id") or uuid.uuid4().hex[:21]
        self._trackers = _start_trackers(config, output, run_id, start_step)
        self._state = {
            "swiftlite": __version__,
            "id": run_id,
            "started": before.get("started") or datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "state": "running",
            "total_steps": total_steps,
            "facts": facts,
            "messages": [m for m in before.get("messages", []) if m["step"] <= start_step],
        }
        self._seconds_before = before.get("seconds", 0.0)
        self._metrics = MetricsFile(output, start_step)
        self.answers = MetricsFile(output, start_step, ANSWERS) if config.method in SAMPLING else None
        self.damage = self._metrics.damage
        kept = self._metrics.take_kept()
        self.board = Board(total_steps, facts, start_step, kept)
        self.finished = False
        self._tokens, self._token_seconds = 0, 0.0
        self.write_state("running")

    def log(self, row: dict[str, Any], message: Callable[[str], None]) -> None:
        """message: told where a tracker fails, which ends that tracker and not the run."""
        self._metrics.write(row)
        self.board.add(row)
        if row.get("tokens_per_second") and row.get("tokens"):
            self._tokens += row["tokens"]
            self._token_seconds += row["tokens"] / row["tokens_per_second"]
        if time.monotonic() - self._kept_at > SECONDS_TO_KEEP:
            self._keep()
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, row["step"])
            except Exception as error:  # a tracker that breaks must not end hours of training
                del self._trackers[name]
                message(f"warning: {name} failed and is left out from here on: {without_secrets(str(error))[:200]}")

    def say(self, text: str) -> None:
        self.board.say(text)
        self._state["messages"] = [*self._state["messages"], {"step": self.board.step, "text": text}][-MOST_MESSAGES:]
        self._keep()

    def _keep(self) -> None:
        """What a run that is killed leaves to the one that goes on, and to `swiftlite report` meanwhile."""
        if not self.finished:
            with suppress(RunError):  # a full disk is told by what has to be saved
                self.write_state("running")

    def speed(self) -> str:
        """Mean over the logged steps."""
        return f", {self._tokens / self._token_seconds:,.0f} tokens/s" if self._token_seconds else ""

    def write_state(self, state: str) -> None:
        seconds = self._seconds_before + time.monotonic() - self._started
        self._state |= {"state": state, "seconds": round(seconds, 1)}
        self._kept_at = time.monotonic()
        write_run_state(self._output, self._state)

    def close(self, error: BaseException | None, message: Callable[[str], None]) -> None:
        """error: what ends the run, if anything; nothing that goes wrong here may hide it. message: as for `log`."""
        self._metrics.close()
        if self.answers is not None:
            self.answers.close()
        unfinished = None if self.finished else self._how_it_ended(error)
        if unfinished:
            with suppress(RunError):
                self.write_state(unfinished)
        for name, tracker in self._trackers.items():
            try:
                tracker.close(unfinished)
            except Exception as failure:
                said = f"warning: {name} may lack the last steps: {without_secrets(str(failure))[:200]}"
                message(in_one_line(said))

    def _how_it_ended(self, error: BaseException | None) -> str:
        at = f"at step {self.board.step:,} of {self.board.total:,}"
        if isinstance(error, Exception):
            return f"failed {at}: {first_line(error)}"
        return f"stopped {at}"  # by a signal, or the end of the block without `finish`


def _start_trackers(config: RunConfig, output: Path, run_id: str, start_step: int) -> dict[str, Tracker]:
    """Make the folder and start them; where one does not start, what they made in it goes, as a folder that holds
    something else than a run is refused."""
    name, settings = config.run_name or output.resolve().name, config.model_dump(mode="json")
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        before = os.listdir(output)
    try:
        return open_trackers(list(dict.fromkeys(config.report_to)), output, name, run_id, start_step, settings)
    except BaseException:
        for made in set(config.report_to).difference(before):  # each in a folder of its name
            shutil.rmtree(output / made, ignore_errors=True)
        with suppress(OSError):  # it holds something
            output.rmdir()
        raise
