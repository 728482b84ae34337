"""One pass over rows of which nothing is learnt: the evaluations of a run, and `swiftlite eval`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from swiftlite.data.batches import MicroBatch
from swiftlite.training.reference import evaluating

if TYPE_CHECKING:
    from swiftlite.data.order import BatchPlan, StepBatch
    from swiftlite.training.divide import Divided

MemoryErrors = Callable[[str, Sequence[MicroBatch]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Evaluation:
    """total: the summed loss of `count` trained tokens, pairs or answers, the smaller the better; sums: what the method
    makes its numbers of."""

    total: float = 0.0
    count: int = 0
    sums: Counter[str] = field(default_factory=Counter)

    @property
    def loss(self) -> float:
        """The mean; NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def __add__(self, other: Evaluation) -> Evaluation:
        sums = Counter(self.sums)
        sums.update(other.sums)  # `+` of counters leaves out what is negative
        return Evaluation(self.total + other.total, self.count + other.count, sums)


class Evaluator(Protocol):
    """What rows are judged by: a method by its loss, an `AnswerEvaluator` by answers."""

    def evaluate(self, batch: StepBatch, model: Divided, memory_errors: MemoryErrors, kind: str) -> Evaluation:
        """What comes of a step's rows, as `evaluate_rows` gets the other arguments."""

    def results(self, found: Evaluation) -> dict[str, float | None]:
        """The numbers of all that was evaluated, by their names behind `eval_`."""


def evaluate_rows(
    plan: BatchPlan,
    evaluator: Evaluator,
    model: Divided,
    memory_errors: MemoryErrors,
    going_on: Callable[[int], bool],
    kind: str = "eval",
) -> Evaluation | None:
    """The plan's rows, each once; every process of the world calls it.

    memory_errors: (what is being done, with which micro-batches); going_on: asked before each step, with the steps
    done, and None is returned where it says no; kind: whose rows a method's reference knows these as.
    """
    found = Evaluation()
    with evaluating(model.scorers):
        for done, batch in enumerate(plan.steps()):
            if not going_on(done):
                return None
            found += evaluator.evaluate(batch, model, memory_errors, kind)
    return found
