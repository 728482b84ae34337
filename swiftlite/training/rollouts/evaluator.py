"""Held-out prompts -> how good the model's answers to them are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.config.methods import examined_at
from swiftlite.data.order import Sequence as Document
from swiftlite.data.order import StepBatch
from swiftlite.training.evaluation import Evaluation, MemoryErrors
from swiftlite.training.rollouts.worker import RolloutWorker, SamplingOptions, of_calls, of_sets

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.training.divide import Divided

CALLS = "calls", "failed calls"  # of tools


class AnswerEvaluator:
    """Has prompts answered of which nothing is learnt."""

    def __init__(
        self, config: RunConfig, worker: RolloutWorker, tell: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """tell: gets the answers to each prompt."""
        self._config, self._worker, self._tell = config, worker, tell

    def evaluate(self, batch: StepBatch, model: Divided, memory_errors: MemoryErrors, kind: str) -> Evaluation:
        """Its `loss` is the mean reward below zero, so that less of it is better, as of any other.

        Random numbers are a function of the prompt, so that it is answered with the same ones in each evaluation,
        whichever prompts are beside it.
        """
        config = self._config
        options = SamplingOptions(config.eval_samples, examined_at(config), self._key)
        prompts = batch.documents
        with memory_errors("the evaluation", ()):
            groups = self._worker(prompts, options)
        totals, answers = self._worker.totals(groups), [answer for group in groups for answer in group.answers]
        if self._tell is not None:
            for group, of_group in zip(groups, totals.tolist(), strict=True):
                self._tell(group.told(of_group))
        sums = {
            "answers": len(answers),
            "length": sum(answer.tokens for answer in answers),
            "cut": sum(map(self._worker.is_cut, answers)),
            "prompts": int((totals.count(axis=1) > 0).sum()),  # of which an answer is rewarded
            "best": float(totals.max(axis=1).filled(0.0).sum()),
            **_summed("reward", totals),
        }
        if (calls := self._worker.calls(groups)) is not None:
            sums |= dict(zip(CALLS, calls, strict=True))
        of_each = {f"reward/{name}": totals[mask] for name, mask in of_sets(prompts, batch.data_sets).items()}
        for name, values in (of_each | self._worker.by_function(groups)).items():
            sums |= _summed(name, values)
        return Evaluation(-sums["reward"], sums["known reward"], Counter(sums))

    def results(self, found: Evaluation) -> dict[str, float | None]:
        """As `Evaluator.results`."""
        sums = found.sums
        means = {name: _mean(total, sums[f"known {name}"]) for name, total in sums.items() if f"known {name}" in sums}
        best = {"reward_best": _mean(sums["best"], sums["prompts"])} if self._config.eval_samples > 1 else {}
        return {
            "reward": means.pop("reward"),
            **best,
            **means,
            "answers/length": sums["length"] / sums["answers"],
            "answers/cut": sums["cut"] / sums["answers"],
            "answers/unrewarded": (sums["answers"] - sums["known reward"]) / sums["answers"],
            **of_calls(tuple(sums[name] for name in CALLS) if CALLS[0] in sums else None, sums["answers"]),
        }

    def _key(self, prompt: Document, _place: int) -> tuple[object, ...]:
        return (self._config.seed, "evaluation", *prompt.input_ids.tolist())


def _summed(name: str, values: np.ma.MaskedArray) -> dict[str, float]:
    return {name: float(values.filled(0.0).sum()), f"known {name}": int(values.count())}


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
