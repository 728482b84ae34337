"""What asks a run to stop after its step: a signal, or the end of the time it was given."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swiftlite.config.types import seconds_of
from swiftlite.ending import answered, is_hangup, raise_signal

TIME_IS_UP = 0.5  # beside the numbers of signals, of which SIGHUP is 1, and below them: a signal goes first


class Stopped(Exception):  # noqa: N818 - not an error
    """The run was asked to stop; the step was finished and a checkpoint saved. reason: a signal, or TIME_IS_UP."""

    def __init__(self, reason: float) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def words(self) -> str:
        return "after its time was up" if self.reason == TIME_IS_UP else f"by signal {int(self.reason)}"

    @property
    def exit_code(self) -> int:
        """0 where the user asked for it beforehand."""
        return 0 if self.reason == TIME_IS_UP else 128 + int(self.reason)


@contextmanager
def stop_requests(stop_after: str | None, began: float) -> Iterator[Callable[[], float | None]]:
    """Yields a function that gives a reason to stop, or None.

    stop_after: a checked `Duration`, counted from `began` (of time.monotonic). SIGINT and SIGTERM ask once; another one
    a second later ends the run at once, with the exit code of the first. A terminal signals every process of a run, and
    the one that started them passes it on: what follows at once is the same signal. SIGHUP asks as well, unless it is
    ignored; nobody is impatient where it comes again, since the shell and the system each send one.
    """
    seen: list[int] = []
    first = 0.0
    end = None if stop_after is None else began + seconds_of(stop_after)

    def note(number: int, _frame: object) -> None:
        nonlocal first
        if seen and not is_hangup(number) and time.monotonic() - first > 1:
            raise_signal(seen[0])
        if not seen:
            seen.append(number)
            first = time.monotonic()

    def reason() -> float | None:
        if seen:
            return seen[0]
        return TIME_IS_UP if end is not None and time.monotonic() >= end else None

    before = {number: signal.signal(number, note) for number in answered()}
    try:
        yield reason
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
