"""How often a run saves, evaluates or logs: every so many steps, or so often in an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swiftlite.config.types import NEVER, times_an_epoch

ROUNDING = 1e-6  # of an epoch, whose parts are sums of fractions


@dataclass(frozen=True)
class Interval:
    """steps: from one time to the next; an_epoch: times an epoch. One of them is None, both where there is no time."""

    steps: int | None = None
    an_epoch: int | None = None

    @classmethod
    def of(cls, every: int | float | str | None, total: int) -> Interval:
        """Of a setting such as `--save-steps` in a run of `total` steps; of a part of the run the steps are rounded up,
        as transformers does."""
        if every is None or every == NEVER:
            return cls()
        if isinstance(every, str):
            return cls(an_epoch=times_an_epoch(every))
        return cls(steps=every if isinstance(every, int) else math.ceil(total * every))

    def is_due(self, step: int, before: float, after: float, last: bool) -> bool:
        """Whether it is time after a step, counted from 1, as it is after the last one. before, after: epochs done."""
        if self.an_epoch is not None:
            return last or self._passed(after) > self._passed(before)
        return self.steps is not None and (last or step % self.steps == 0)

    def times_left(self, step: int, epoch: float, total: int, steps_per_epoch: int | None) -> int:
        """How often it is still time after that step of a run of `total`, at most. steps_per_epoch: None where it is
        not known."""
        if self.steps is not None:
            return math.ceil(total / self.steps) - step // self.steps
        if self.an_epoch is None:
            return 0
        left = total - step
        if steps_per_epoch is not None:
            left = min(left, math.ceil(total / steps_per_epoch * self.an_epoch - ROUNDING) - self._passed(epoch))
        return left

    def step_of(self, time: int, steps_per_epoch: int | None) -> int | None:
        """The step of the first, second... time; None where that is not known, or never."""
        if self.steps is not None:
            return time * self.steps
        return math.ceil(time * steps_per_epoch / self.an_epoch) if self.an_epoch and steps_per_epoch else None

    def _passed(self, epochs: float) -> int:
        return math.floor(epochs * self.an_epoch + ROUNDING)
