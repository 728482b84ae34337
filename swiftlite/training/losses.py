"""What a step makes of log-probabilities: the one place where training methods differ.

A `StepLoss` is the loss of one global step, called for each micro-batch with what the model gave. Everything it has to
know of the whole step (its tokens, its pairs, the reference's values) is in it before the first micro-batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swiftlite.config.methods import TOKEN_ACCURACY
from swiftlite.data.batches import MicroBatch
from swiftlite.objectives.completions import completion_sums
from swiftlite.objectives.policy import Policy
from swiftlite.objectives.preference import PairScores, Preference
from swiftlite.objectives.reward import RewardModel, reward_metrics
from swiftlite.objectives.supervised import dynamic_loss, supervised_loss
from swiftlite.objectives.unpaired import RowScores, Unpaired

Contribution = tuple[torch.Tensor, Sequence[torch.Tensor]]


class StepLoss(Protocol):
    """names: of the sums that come beside the loss."""

    names: tuple[str, ...]

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        """(what goes into the backward, sums under `names` without gradient): added up over micro-batches and data
        ranks they are the step's. logprobs: fp32 `[trained tokens]` of the micro-batch, or of this rank's slice of it.
        """


OF_ENGINE = "kl/engine"  # how far the engine that draws answers is from the model, nats a token
OF_SETS = LOSS_OF, COUNT_OF = "loss/", "count of "  # what the names of a data set's sums begin with


def names_of(data_sets: Sequence[str]) -> tuple[str, ...]:
    """The names of what `sums_of` gives."""
    return (*(LOSS_OF + name for name in data_sets), *(COUNT_OF + name for name in data_sets))


def sums_of(
    data_sets: Sequence[str], numbers: torch.Tensor | None, loss: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The summed loss of each of several data sets, then how much each has of what the loss is a mean over. numbers:
    int64 `[n]`, the data set of each trained token, pair or answer; loss: of those, bool `[n]`, that it is called with.
    """
    masks = [numbers == number for number in range(len(data_sets))]
    return (*map(loss, masks), *(mask.sum() for mask in masks))


def sums_of_losses(data_sets: Sequence[str], numbers: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same of losses `[n]`."""
    return sums_of(data_sets, numbers, lambda mine: losses.detach().where(mine, 0).sum())


def means_of_sets(sums: dict[str, float]) -> dict[str, float | None]:
    """The loss of each data set by its name in metrics.jsonl; None of one that there is nothing of."""
    found = {}
    for name, total in sums.items():
        if name.startswith(LOSS_OF):
            count = sums[COUNT_OF + name.removeprefix(LOSS_OF)]
            found[name] = total / count if count else None
    return found


@dataclass(frozen=True)
class TokenLoss:
    """SFT and pretraining. tokens: N, the trained tokens of the whole step; dynamic: each is weighted by its own
    probability; judged: it is told how many are the likeliest; data_sets: what the several ones that rows are of are
    called."""

    tokens: int
    dynamic: bool = False
    judged: bool = False
    data_sets: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*((TOKEN_ACCURACY,) if self.judged else ()), *names_of(self.data_sets))

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        """logprobs: where they are judged `[trained tokens, 2]`, see `token_logprobs`."""
        # Side by side in memory: numbers that lie apart are added up in another order.
        logprobs, right = (x.contiguous() for x in logprobs.unbind(-1)) if self.judged else (logprobs, None)
        loss, known = dynamic_loss if self.dynamic else supervised_loss, logprobs.detach()
        sums = sums_of(self.data_sets, batch.data_set, lambda mine: loss(known.where(mine, 0), 1))
        return loss(logprobs, max(1, self.tokens)), (*(() if right is None else (right.detach().sum(),)), *sums)


@dataclass(frozen=True)
class TaughtLoss:
    """Knowledge distillation (arXiv 1503.02531, at temperature 1): `(1 - w) CE + w KL(teacher || model)` as a mean over
    the step's trained tokens, of a teacher that says what it finds likeliest. tokens: N of the whole step; data_sets:
    as of `TokenLoss`."""

    tokens: int
    data_sets: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return ("cross_entropy", "kl/teacher", TOKEN_ACCURACY, *names_of(self.data_sets))

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        """logprobs: `[trained tokens, 3]`, see `token_logprobs`. The model's mean log p over text and teacher is what
        is learnt; the teacher's own entropy makes a KL of it."""
        if batch.taught is None:  # of a micro-batch of which nothing is learnt
            return logprobs.sum(), [logprobs.detach().sum()] * len(self.names)
        weight, entropy = batch.taught.weight, batch.taught.entropy()
        means, own, right = logprobs.unbind(-1)
        cross_entropy = -own.detach()
        kl = (-means.detach() - (1 - weight) * cross_entropy) / weight - entropy
        losses = -(means + weight * entropy)
        sums = sums_of_losses(self.data_sets, batch.data_set, losses)
        return losses.sum() / max(1, self.tokens), (cross_entropy.sum(), kl.sum(), right.detach().sum(), *sums)


PAIR_SUMS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracy", "rewards/margin", "logps/chosen", "logps/rejected",
)  # fmt: skip


@dataclass(frozen=True)
class PairLoss:
    """The mean over the step's pairs. running_reward: of bco_pair; data_sets: as of `TokenLoss`."""

    preference: Preference
    pairs: int
    running_reward: float = 0.0
    data_sets: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        kl = ("kl/reference",) if self.preference.needs_reference else ()
        return (*PAIR_SUMS, *kl, *names_of(self.data_sets))

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        answers = batch.completions
        reference = (None, None) if answers.reference is None else by_pair(answers.reference)
        scores = PairScores(*by_pair(answer_sums(logprobs, batch)), *by_pair(answers.tokens), *reference)
        losses = self.preference.per_pair(scores, self.running_reward)
        metrics = self.preference.metrics(scores)
        sums = [metrics[name] for name in self.names if name in metrics]
        of_sets = sums_of_losses(self.data_sets, by_pair(answers.data_set)[0], losses)
        return losses.sum() / max(1, self.pairs), (*sums, *of_sets)


REWARD_SUMS = PAIR_SUMS[:4]


@dataclass(frozen=True)
class RewardLoss:
    """The mean over the step's pairs, of a sequence classifier: it gets scores instead of log-probabilities.
    data_sets: as of `TokenLoss`."""

    model: RewardModel
    pairs: int
    data_sets: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*REWARD_SUMS, *names_of(self.data_sets))

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        scores = logprobs if batch.context is None else batch.context.sum(logprobs)
        chosen, rejected = by_pair(scores)
        margin, _ = by_pair(batch.completions.margin)
        metrics, losses = reward_metrics(chosen, rejected), self.model.per_pair(chosen, rejected, margin)
        of_sets = sums_of_losses(self.data_sets, by_pair(batch.completions.data_set)[0], losses)
        return losses.sum() / max(1, self.pairs), (*(metrics[name] for name in REWARD_SUMS), *of_sets)


ROW_SUMS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracy", "logps/chosen", "logps/rejected", "count/chosen",
    "count/rejected",
)  # fmt: skip


@dataclass(frozen=True)
class RowLoss:
    """The mean over the step's judged answers. z0: the reference point of KTO; data_sets: as of `TokenLoss`."""

    unpaired: Unpaired
    rows: int
    z0: float
    data_sets: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        kl = ("kl/reference",) if self.unpaired.needs_mismatched else ()
        return (*ROW_SUMS, *kl, *names_of(self.data_sets))

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        answers = batch.completions
        scores = RowScores(answer_sums(logprobs, batch), answers.reference, answers.chosen)
        losses = self.unpaired.per_row(scores, self.z0)
        metrics = self.unpaired.metrics(scores, self.z0)
        sums = [metrics[name] for name in self.names if name in metrics]
        of_sets = sums_of_losses(self.data_sets, answers.data_set, losses)
        return losses.sum() / max(1, self.rows), (*sums, *of_sets)


@dataclass(frozen=True)
class PolicyLoss:
    """What the answers that a model has given for this step are to it, by their advantages, which stand where pairs
    have their margin."""

    policy: Policy

    @property
    def names(self) -> tuple[str, ...]:
        kl = ("kl/teacher",) if self.policy.teacher else ("kl/reference",) if self.policy.beta else ()
        clipped = () if self.policy.clip is None else ("clipped",)
        engine = () if self.policy.cap is None else (OF_ENGINE, "engine/capped")
        return ("entropy", *clipped, *engine, *kl)

    def __call__(self, logprobs: torch.Tensor, batch: MicroBatch) -> Contribution:
        policy, answers = self.policy, batch.completions
        shares, advantages = (of[batch.owner] for of in (policy.shares(answers.tokens), answers.margin))
        sampled = logprobs.detach() if batch.sampled is None else batch.sampled
        ahead = policy.ahead(sampled, advantages, batch.reference)
        losses, clipped = policy.surrogate(self._log_ratio(logprobs, sampled, batch), logprobs, ahead)
        held, kl = policy.distance(logprobs, batch.reference)
        surprise = -logprobs.detach().sum()  # of what was sampled: its mean is the entropy
        found = {"entropy": surprise, "clipped": clipped.sum()}
        if policy.cap is not None:
            weights, capped = policy.weights(sampled, batch.drawn)
            losses = losses * weights
            found |= {OF_ENGINE: (batch.drawn - sampled).sum(), "engine/capped": capped.sum()}
        loss = (shares * (losses + held)).sum()
        sums = [found[name] if name in found else kl.sum() for name in self.names]
        if batch.context is not None:  # each rank of a row tells of all of it, see `reported`
            whole = [batch.context.sum(value) for value in (loss.detach(), *sums)]
            loss, sums = loss - loss.detach() + whole[0], whole[1:]
        return loss, tuple(sums)

    def _log_ratio(self, logprobs: torch.Tensor, sampled: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Of each token; where it is of the answer, with the gradient of the token's own part in it."""
        own = logprobs - sampled
        if not self.policy.of_answers:
            return own
        means = answer_sums(own.detach(), batch) / batch.completions.tokens.clamp(min=1)
        return means.float()[batch.owner] + logprobs - logprobs.detach()


def answer_sums(logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """log p of each answer of a micro-batch, fp64 `[answers]`; of a row that several ranks hold, on each of them."""
    sums = completion_sums(logprobs, batch.owner, len(batch.completions))
    return sums if batch.context is None else batch.context.sum(sums)


def by_pair(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the chosen and of the rejected answers, `[pairs]` each: they take turns (see `Completions`). What a mask lets
    through would have to be counted, for which the host waits for a GPU."""
    return values[::2], values[1::2]


def reported(loss: torch.Tensor, sums: Sequence[torch.Tensor], batch: MicroBatch) -> torch.Tensor:
    """`[1 + names]`: this process's share of the numbers of a step. Ranks of a divided row that all know the whole
    row's numbers, which those of answers are, share them out."""
    values = torch.stack([loss.detach(), *(value.detach().to(loss.dtype) for value in sums)])
    return values if batch.context is None or batch.completions is None else values / batch.context.size
