"""What sets the training methods apart: what a step counts, what it needs beforehand, and what is told of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.config.losses import losses_of
from swiftlite.config.methods import passes
from swiftlite.data.mismatched import mismatched_packs
from swiftlite.errors import RunError
from swiftlite.objectives.preference import Preference, RunningReward
from swiftlite.objectives.reward import RewardModel
from swiftlite.objectives.unpaired import Unpaired, metric_means, reference_point
from swiftlite.training.evaluation import Evaluation, MemoryErrors
from swiftlite.training.losses import (
    OF_ENGINE,
    OF_SETS,
    PairLoss,
    PolicyLoss,
    RewardLoss,
    RowLoss,
    StepLoss,
    TaughtLoss,
    TokenLoss,
    means_of_sets,
)
from swiftlite.training.reference import LiveReference, Place, Reference

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.order import Pack, StepBatch
    from swiftlite.objectives.scorer import TokenScorer
    from swiftlite.training.divide import Divided
    from swiftlite.training.rollouts.policy_batches import PolicyBatches
    from swiftlite.training.share import StepShare
    from swiftlite.training.teacher import Teacher

MakeLoss = Callable[[int], StepLoss]  # from what the loss is divided by
OTHER_WEIGHTS = 0.2  # nats a token between engine and model: more than rounding makes, even to 4 bits
OLDER_WEIGHTS = 1.0  # the same where it answers by those before the last step
START_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


class Method(ABC):
    """One method, and what most of them have in common. state: what a checkpoint keeps of it, as JSON; passes: how
    often a step's minibatches are learnt from; looks_ahead: whether it begins with the next step before that."""

    state: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    passes = 1
    looks_ahead = False
    learns_nothing = "no trained token in the whole step"  # why a step can be without any

    def minibatches(self, batch: StepBatch, following: StepBatch | None) -> Sequence[StepBatch]:
        """What the step's updates learn from, one after the other: the step itself, or what is made of it now.
        following: the next step of a method that looks ahead, if there is one."""
        return [batch]

    @abstractmethod
    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        """What a minibatch needs before the step's first micro-batch. kind: train or eval."""

    def prepare_evaluation(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        """The same for rows of which nothing is learnt."""
        return self.prepare(batch, share, kind)

    def evaluate(self, batch: StepBatch, model: Divided, memory_errors: MemoryErrors, kind: str) -> Evaluation:
        """As `Evaluator.evaluate`."""
        mine, make_loss = self.prepare_evaluation(batch, model.share(batch.packs), kind)
        with memory_errors("the evaluation", mine.micro_batches):
            loss, sums = model.runner.evaluate(mine.micro_batches, make_loss(1))
        return Evaluation(loss, self.count(mine), Counter(sums))

    def results(self, found: Evaluation) -> dict[str, float | None]:
        """As `Evaluator.results`."""
        return {"loss": found.loss} | self.metrics(found.sums, found.count)

    def trial(self, share: StepShare) -> StepLoss:
        """A loss that takes as much memory as a step's, of rows that nothing is learnt from or known of."""
        return TokenLoss(share.trained_tokens)

    def count(self, share: StepShare) -> int:
        """What the loss of a step is the mean over: pairs, or single answers."""
        return share.documents

    def start_value(self, share: StepShare) -> float | None:
        """The loss that the first step must have, None where that depends on the model."""
        return None

    def metrics(self, sums: dict[str, float], count: int) -> dict[str, float | None]:
        """For metrics.jsonl."""
        of_all = {name: value / max(1, count) for name, value in sums.items() if not name.startswith(OF_SETS)}
        return of_all | means_of_sets(sums)

    def not_finite(self, loss: float, sums: dict[str, float]) -> tuple[str, str]:
        """(what is not finite of a step where loss or gradient are not, what may help)."""
        what = "gradient norm" if math.isfinite(loss) else "loss"
        return what, "look at these rows, lower --learning-rate or use --precision fp32"

    def after(self, sums: dict[str, float], count: int) -> None:  # noqa: B027 - most carry nothing from step to step
        """Note what a training step gave."""


class Supervised(Method):
    """SFT and pretraining."""

    def __init__(self, scorers: Sequence[TokenScorer], *, dynamic: bool = False) -> None:
        """scorers: of the trained model, of which more will be asked; dynamic: as in `TokenLoss`."""
        self._dynamic = dynamic
        for scorer in scorers:
            scorer.judge()

    def trial(self, share: StepShare) -> StepLoss:
        return TokenLoss(share.trained_tokens, judged=True)

    def count(self, share: StepShare) -> int:
        return share.trained_tokens

    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        return share, partial(TokenLoss, dynamic=self._dynamic, judged=True, data_sets=batch.data_sets)

    def prepare_evaluation(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        """The cross-entropy in any case: -p log p is least both where p is 1 and where it is 0, so it tells no better
        model from a worse one."""
        return share, partial(TokenLoss, judged=True, data_sets=batch.data_sets)


class Distilled(Supervised):
    """SFT and pretraining with a teacher, which evaluations do without: their loss is the cross-entropy of the text."""

    def __init__(self, scorers: Sequence[TokenScorer], teacher: Teacher) -> None:
        super().__init__(scorers)
        self._teacher = teacher

    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        taught = replace(share, micro_batches=self._teacher.teach(share.micro_batches))
        return taught, partial(TaughtLoss, data_sets=batch.data_sets)

    def not_finite(self, loss: float, sums: dict[str, float]) -> tuple[str, str]:
        if math.isfinite(loss) or not math.isfinite(sums["cross_entropy"]):
            return super().not_finite(loss, sums)
        return "KL to the teacher", "check the teacher's weights, look at these rows or use --precision fp32"


class Paired(Method):
    """DPO and its kin."""

    def __init__(self, preference: Preference, reference: Reference | None) -> None:
        self._preference, self._reference = preference, reference
        self.state = asdict(RunningReward())

    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        running = RunningReward(**self.state).mean
        share = share if self._reference is None else with_reference(share, self._reference, Place(kind))
        return share, lambda count: PairLoss(self._preference, count, running, batch.data_sets)

    def start_value(self, share: StepShare) -> float | None:
        return self._preference.step_zero()

    def after(self, sums: dict[str, float], count: int) -> None:
        running = RunningReward(**self.state)
        self.state = asdict(running.after(sums["rewards/chosen"], sums["rewards/rejected"], count))


class Rewarded(Method):
    """Reward models."""

    def __init__(self, model: RewardModel, *, starts_at_zero: bool) -> None:
        """starts_at_zero: the score head is new."""
        self._model, self._starts_at_zero = model, starts_at_zero

    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        return share, lambda count: RewardLoss(self._model, count, batch.data_sets)

    def start_value(self, share: StepShare) -> float | None:
        return self._model.step_zero() if self._starts_at_zero and not share.margins else None


class Judged(Method):
    """KTO: single answers, each wanted or not."""

    def __init__(
        self,
        unpaired: Unpaired,
        reference: Reference,
        model: Divided,
        mismatched: Callable[[StepBatch], list[Pack]],
    ) -> None:
        """model: the trained one; mismatched: each step's prompts with other rows' answers."""
        self._unpaired, self._reference, self._mismatched = unpaired, reference, mismatched
        self._policy, self._share, self._mesh = LiveReference(model), model.share, model.share.mesh

    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        z0 = self._reference_point(batch, kind) if self._unpaired.needs_mismatched else 0.0
        share = with_reference(share, self._reference, Place(kind))
        return share, lambda count: RowLoss(self._unpaired, count, z0, batch.data_sets)

    def _reference_point(self, batch: StepBatch, kind: str) -> float:
        packs = self._mismatched(batch)
        if not packs:
            return 0.0
        batches, place = self._share(packs).micro_batches, Place(kind, batch.step)
        policy, reference = self._policy.sums(batches, place), self._reference.sums(batches, place)
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for mine, theirs in zip(policy, reference, strict=True):
            total += (mine - theirs.to(mine.device)).sum()
        total /= self._mesh.layout.cp  # each of the ranks of a row knows all of it
        rows = sum(len(pack) for pack in packs)
        return reference_point(self._mesh.sum_over_data(total), rows).item()

    def start_value(self, share: StepShare) -> float | None:
        if not share.documents:
            return None
        return self._unpaired.step_zero(share.desirable, share.documents - share.desirable)

    def metrics(self, sums: dict[str, float], count: int) -> dict[str, float | None]:
        return metric_means(sums) | means_of_sets(sums)


class Reinforced(Method):
    """GRPO and its kin: the model's own answers, as much as they are better than others to the same prompt."""

    learns_nothing = "each prompt's answers have the same reward"

    def __init__(
        self,
        policy_batches: PolicyBatches,
        reference: LiveReference | None,
        sampler: LiveReference | None,
        config: RunConfig,
    ) -> None:
        """reference: that the model is held to, or its teacher, if there is one; sampler: the trained model itself,
        where a step has several updates."""
        self._policy_batches, self._reference, self._sampler = policy_batches, reference, sampler
        self.passes, self.looks_ahead = passes(config), bool(config.engine_url) and config.engine_ahead
        if config.cut_answers == "skip":
            self.learns_nothing += ", or they are cut"

    def minibatches(self, batch: StepBatch, following: StepBatch | None) -> Sequence[StepBatch]:
        return self._policy_batches(batch, following)

    def prepare(self, batch: StepBatch, share: StepShare, kind: str) -> tuple[StepShare, MakeLoss]:
        batches = share.micro_batches
        if self._reference is not None:
            told = self._reference.tokens(batches)
            batches = [replace(one, reference=of) for one, of in zip(batches, told, strict=True)]
        if self._sampler is not None:
            told = self._sampler.tokens(batches)
            batches = [replace(one, sampled=of) for one, of in zip(batches, told, strict=True)]
        return replace(share, micro_batches=batches), lambda _count: PolicyLoss(batch.policy)

    def count(self, share: StepShare) -> int:
        return share.trained_tokens

    def after(self, sums: dict[str, float], count: int) -> None:
        """Raises RunError where an engine answers by other weights than those that learn."""
        distance = abs(sums.get(OF_ENGINE, 0.0)) / max(1, count)
        if distance > (OLDER_WEIGHTS if self.looks_ahead else OTHER_WEIGHTS):
            raise RunError(
                f"the engine answers by other weights than the model's: they are {distance:.2g} nats a token apart",
                where="--engine-url",
                fix="let it serve the model that is trained, in bf16 or fp32, and go on with --resume auto",
            )

    def metrics(self, sums: dict[str, float], count: int) -> dict[str, float | None]:
        means = super().metrics(sums, count) if count else dict.fromkeys(sums)  # of no token there is none
        return self._policy_batches.told | means


def with_reference(share: StepShare, reference: Reference, place: Place) -> StepShare:
    """The share with the reference's values beside each answer."""
    sums = reference.sums(share.micro_batches, place)
    batches = [
        replace(batch, completions=replace(batch.completions, reference=values.to(batch.input_ids.device)))
        for batch, values in zip(share.micro_batches, sums, strict=True)
    ]
    return replace(share, micro_batches=batches)


def check_start(method: Method, share: StepShare, loss: float, dtype: torch.dtype) -> None:
    """Before the first update policy and reference are equal, and the loss is known. Raises RunError where it is not.

    Source of the values: the losses' own formulas with equal log-probabilities.
    """
    wanted = method.start_value(share)
    if wanted is not None and abs(loss - wanted) > START_TOLERANCE[dtype] * max(1.0, abs(wanted)):
        raise RunError(
            f"the first step's loss is {loss:.6f}, but {wanted:.6f} where policy and reference are the same model",
            fix="remove the cached reference values (--cache-dir); if it stays, please report model and flags",
        )


def preference_of(config: RunConfig) -> Preference | Unpaired | RewardModel | None:
    """The loss that the flags describe, None for methods without. Raises UserError."""
    if config.method == "dpo":
        losses = tuple(losses_of(config.method, config.loss))
        return Preference(losses, config.beta, config.label_smoothing, config.rpo_alpha, config.simpo_gamma)
    if config.method == "kto":
        ((name, _),) = losses_of(config.method, config.loss)
        return Unpaired(name, config.beta, config.desirable_weight, config.undesirable_weight)
    return RewardModel(config.center_rewards) if config.method == "rm" else None


def mismatched_of(config: RunConfig, bos: int | None) -> Callable[[StepBatch], list[Pack]]:
    """Each step's packs of prompts with other rows' answers. bos: the tokenizer's."""
    return lambda batch: mismatched_packs(batch.packs, config.max_length, bos)
