"""A step of prompts -> the model's answers to them as documents to learn from.

Each prompt is answered several times, and an answer's advantage is by how much its reward is better than that of the
others: the policy gradient with a group as its own baseline (GRPO, arXiv 2402.03300). By default a step is learnt from
once, by the weights that gave its answers, so each token's probability ratio is 1 and nothing has to be clipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.config.losses import clip_range, policy_loss
from swiftlite.config.methods import learns_again, teacher_share
from swiftlite.data.order import Pack, StepBatch
from swiftlite.data.order import Sequence as Document
from swiftlite.data.packing import best_fit_decreasing
from swiftlite.data.tokens.preference_tokens import Group, Preference
from swiftlite.objectives.policy import Policy
from swiftlite.training.rollouts.rewards import Rollout
from swiftlite.training.rollouts.worker import RolloutGroup, RolloutWorker, SamplingOptions, of_calls, of_sets

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

LEAST_SPREAD = 1e-4  # added to what rewards are divided by, as in the paper's implementation


@dataclass(frozen=True)
class PolicyBatch(StepBatch):
    """Answers that an update learns from. policy: what the loss has to know of them."""

    policy: Policy


class PolicyBatches:
    """Makes minibatches of each step's prompts."""

    def __init__(
        self,
        config: RunConfig,
        worker: RolloutWorker,
        tell: Callable[[dict[str, Any]], None],
        others: Callable[[StepBatch], Iterator[Document]],
    ) -> None:
        """tell: gets a row of answers.jsonl each step; others: prompts that may take the place of a step's."""
        self._config, self._worker, self._tell, self._others = config, worker, tell, others
        self.told: dict[str, float | None] = {}

    def __call__(self, batch: StepBatch, following: StepBatch | None = None) -> list[PolicyBatch]:
        """The same step with answers in place of its prompts, in as many parts as it has updates. `told` says of them
        what metrics are to have. following: the next step, whose prompts an engine begins to answer meanwhile.

        An answer without an advantage has nothing to teach and is left out, unless the model is held to a reference, or
        a teacher tells of it; `--cut-answers skip` leaves out those without an end. A step in which none is left keeps
        an answer, of which nothing is learnt.
        """
        config, began = self._config, time.perf_counter()
        prompts, groups = self._asked(batch)
        if following is not None:
            self._worker.foresee(following.documents, self._options(following, 0))
        seconds = time.perf_counter() - began
        totals = self._worker.totals(groups)
        equal, wanted = _equal(totals), sum(map(len, batch.packs))
        advantages = self._advantages(totals, equal)
        answers = [answer for group in groups for answer in group.answers]
        self.told = self._of_rewards(totals, equal, groups, of_sets(prompts, batch.data_sets)) if config.reward else {}
        self.told |= {
            "answers/length": sum(answer.tokens for answer in answers) / len(answers),
            "answers/cut": sum(map(self._worker.is_cut, answers)) / len(answers),
            **of_calls(self._worker.calls(groups), len(answers)),
            "sampling_seconds": round(seconds, 6),
        }
        if config.max_resample_times:
            self.told["answers/resampled"] = len(groups) - wanted
        self._tell({"step": batch.step} | groups[0].told(totals[0].tolist()))
        kept = np.sort(np.argsort(equal, kind="stable")[:wanted])
        parts = np.array_split(kept, min(config.minibatches, wanted))
        minibatches = [
            self._policy_batch(batch, prompts, [groups[i] for i in part], advantages[part]) for part in parts
        ]
        untaught = replace(minibatches[0], packs=[[_untaught(prompts[0], groups[0].answers[0])]])
        return [minibatch for minibatch in minibatches if minibatch.packs] or [untaught]

    def _asked(self, batch: StepBatch) -> tuple[list[Document], list[RolloutGroup]]:
        """(the step's prompts, and behind them those asked in place of the ones whose answers all have one reward; the
        answers to each). Source: dynamic sampling in DAPO, arXiv 2503.14476, section 3.2."""
        config, others = self._config, self._others(batch)
        prompts = batch.documents
        groups, wanted = self._rollouts(batch, prompts, 0), len(prompts)
        for _ in range(config.max_resample_times if config.reward else 0):
            missing = wanted - int((~_equal(self._worker.totals(groups))).sum())
            more = list(islice(others, missing))
            if not more:
                break
            groups += self._rollouts(batch, more, len(prompts))
            prompts += more
        return prompts, groups

    def _rollouts(self, batch: StepBatch, prompts: list[Document], first: int) -> list[RolloutGroup]:
        """The answers to prompts whose places in the step begin at `first`."""
        return [
            replace(group, place=first + group.place) for group in self._worker(prompts, self._options(batch, first))
        ]

    def _options(self, batch: StepBatch, first: int) -> SamplingOptions:
        config = self._config
        return SamplingOptions(
            config.samples, config.temperature, lambda _, place: (config.seed, batch.step, first + place)
        )

    def _policy_batch(
        self, batch: StepBatch, prompts: list[Document], groups: list[RolloutGroup], advantages: np.ndarray
    ) -> PolicyBatch:
        """Without packs where nothing is to be learnt from these groups."""
        config = self._config
        documents = [
            document
            for group, of_group in zip(groups, advantages.tolist(), strict=True)
            for document in self._documents(prompts[group.place], group, of_group)
        ]
        lengths = [answer.tokens for group in groups for answer in group.answers if not self._skips(answer)]
        policy = Policy(
            loss=policy_loss(config),
            beta=config.beta,
            teacher=teacher_share(config),
            answers=max(1, len(lengths)),
            tokens=max(1, sum(lengths)),
            longest=config.max_new_tokens,
            clip=clip_range(config) if learns_again(config) else None,
            cap=config.engine_ratio_cap if config.engine_url else None,
        )
        return PolicyBatch(batch.step, batch.epoch, self._packs(documents), policy)

    def _advantages(self, rewards: np.ma.MaskedArray, equal: np.ndarray) -> np.ndarray:
        """fp64 `[prompts, answers]`, 0 for an answer that no function rewards, which the others are not compared with.
        rewards: of the same shape, such answers masked; equal: bool `[prompts]`, whether all rewards are the same."""
        found = rewards - rewards.mean(axis=1, keepdims=True)
        if self._config.scale_rewards == "group":
            found /= rewards.std(axis=1, ddof=1, keepdims=True) + LEAST_SPREAD
        return np.where(equal[:, None], 0.0, found.filled(0.0))

    def _documents(self, prompt: Document, group: RolloutGroup, advantages: list[float]) -> Iterator[Document]:
        """A prompt with the answers that have something to teach: as many behind one prompt as a pack may hold, or each
        behind its own."""
        shares, limit = self._config.share_prompt and self._worker.pads, self._config.max_length
        some: list[tuple[Rollout, float]] = []
        size = len(prompt.input_ids) - 1
        for answer, advantage in zip(group.answers, advantages, strict=True):
            if self._skips(answer) or not (advantage or self._config.beta or self._config.teacher):
                continue
            if some and (not shares or size + 1 + len(answer.ids) > limit):
                yield _document(prompt, some)
                some, size = [], len(prompt.input_ids) - 1
            some.append((answer, advantage))
            size += 1 + len(answer.ids)
        if some:
            yield _document(prompt, some)

    def _skips(self, answer: Rollout) -> bool:
        return self._config.cut_answers == "skip" and self._worker.is_cut(answer)

    def _packs(self, documents: list[Document]) -> list[Pack]:
        if not self._config.packing:
            return [[document] for document in documents]
        lengths = np.asarray([len(document.input_ids) for document in documents], dtype=np.int32)
        return [[documents[i] for i in pack] for pack in best_fit_decreasing(lengths, self._config.max_length)]

    def _of_rewards(
        self, totals: np.ma.MaskedArray, equal: np.ndarray, groups: list[RolloutGroup], masks: dict[str, np.ndarray]
    ) -> dict[str, float | None]:
        """What metrics have of the answers of a step. masks: of `of_sets`."""
        return {
            "reward": _known(totals.mean()),
            "reward_std": _known(totals.std(axis=1).mean()),
            **{f"reward/{name}": _mean(totals[mask].compressed()) for name, mask in masks.items()},
            **{kind: _mean(values.compressed()) for kind, values in self._worker.by_function(groups).items()},
            "answers/equal": float(equal.mean()),
            "answers/unrewarded": float(np.ma.getmaskarray(totals).mean()),
        }


def _equal(totals: np.ma.MaskedArray) -> np.ndarray:
    """Whether the answers to a prompt all have one reward, bool `[prompts]`. totals: of `RolloutWorker.totals`."""
    return np.ma.ptp(totals, axis=1).filled(0.0) == 0


def _known(mean: float) -> float | None:
    """None where all is masked."""
    return None if np.ma.is_masked(mean) else float(mean)


def _mean(known: np.ndarray) -> float | None:
    return float(known.mean()) if len(known) else None


def _document(prompt: Document, answers: list[tuple[Rollout, float]]) -> Document:
    """A prompt with some answers and their advantages, laid out as `Group` says; with one as any document."""
    count, (opening, last) = len(prompt.input_ids), np.split(prompt.input_ids, [-1])
    parts = [np.concatenate([last, np.asarray(answer.ids, dtype=np.int32)]) for answer, _ in answers]
    ids = np.concatenate([opening, *parts])
    trained = np.concatenate([np.zeros(count - 1, dtype=np.bool_), *([False, *answer.own] for answer, _ in answers)])
    lengths, advantages = tuple(map(len, parts)), tuple(advantage for _, advantage in answers)
    layout = Group(count - 1, lengths, advantages) if len(parts) > 1 else Preference(count, margin=advantages[0])
    drawn = None
    if answers[0][0].logprobs is not None:  # of all, or of none
        told = [[0.0, *answer.logprobs] for answer, _ in answers]
        drawn = np.concatenate([np.zeros(count - 1), *told]).astype(np.float32)
    return Document(ids, trained, prompt.where, layout, drawn=drawn)


def _untaught(prompt: Document, answer: Rollout) -> Document:
    """With nothing to learn in it."""
    document = _document(prompt, [(answer, 0.0)])
    return replace(document, trained=np.zeros_like(document.trained))
