"""Losses of preference pairs as pure functions of the completions' log-probabilities.

Of a pair (x, y_w, y_l), chosen and rejected: log pi(y | x) is the *sum* of the completion's token log-probabilities.

    D_w = log pi(y_w) - log ref(y_w), D_l likewise      log-ratios
    h = D_w - D_l                                       b: beta, s(): the sigmoid function
    a = log pi(y) / |y|                                 the mean over the completion's tokens

Losses are made in fp64 from fp64 sums: differences of sums of hundreds and thousands cancel, and a few numbers cost
nothing. The mean over the pairs of the global step is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import logsigmoid

from swiftlite.errors import UserError
from swiftlite.objectives.reward import reward_metrics

DISCOPOP_TEMPERATURE = 0.05  # tau of arXiv 2406.08414, Eq. 5, as its authors set it
SIMPO_GAMMA = 0.5  # where none is given
NEAR_ONE = -(2.0**-24)  # log-probabilities above this belong to probabilities that are 1 in fp32, of infinite odds


@dataclass(frozen=True)
class PairScores:
    """Log-probabilities of pairs, `[pairs]` each; the policy's with a gradient, the reference's without.

    chosen, rejected: fp64 sums of log p over the completion's tokens; chosen_tokens, rejected_tokens: how many tokens
    these are, at least 1; reference_*: the same sums under the reference, or None for losses without one.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    reference_chosen: torch.Tensor | None = None
    reference_rejected: torch.Tensor | None = None

    def double(self) -> PairScores:
        """The same in fp64."""
        given = (getattr(self, field.name) for field in fields(self))
        return PairScores(*(None if value is None else value.double() for value in given))


@dataclass(frozen=True)
class _Terms:
    """What the formulas are written in: fp64 `[pairs]` each, and the options."""

    scores: PairScores
    options: Preference
    running_reward: float

    @property
    def chosen_logratio(self) -> torch.Tensor:
        """D_w."""
        return self.scores.chosen - self.scores.reference_chosen

    @property
    def rejected_logratio(self) -> torch.Tensor:
        """D_l."""
        return self.scores.rejected - self.scores.reference_rejected

    @property
    def chosen_reward(self) -> torch.Tensor:
        """b D_w."""
        return self.options.beta * self.chosen_logratio

    @property
    def rejected_reward(self) -> torch.Tensor:
        """b D_l."""
        return self.options.beta * self.rejected_logratio

    @property
    def logit(self) -> torch.Tensor:
        """b h."""
        return self.chosen_reward - self.rejected_reward

    @property
    def chosen_mean(self) -> torch.Tensor:
        """a_w."""
        return self.scores.chosen / self.scores.chosen_tokens

    @property
    def rejected_mean(self) -> torch.Tensor:
        """a_l."""
        return self.scores.rejected / self.scores.rejected_tokens


def sigmoid(t: _Terms) -> torch.Tensor:
    """-log s(b h), DPO, arXiv 2305.18290, Eq. 7.

    With label smoothing -(1 - e) log s(b h) - e log s(-b h), cDPO, ericmitchell.ai/cdpo.pdf, Eq. 3.
    """
    e = t.options.label_smoothing
    return -(1 - e) * logsigmoid(t.logit) - e * logsigmoid(-t.logit)


def hinge(t: _Terms) -> torch.Tensor:
    """max(0, 1 - b h): SLiC, arXiv 2305.10425, on DPO's log-ratios as in RSO, arXiv 2309.06657."""
    return torch.relu(1 - t.logit)


def ipo(t: _Terms) -> torch.Tensor:
    """(h' - 1 / (2 b))^2, arXiv 2310.12036, Eq. 17; h' from log-ratios per token, b is the paper's tau."""
    per_token = t.chosen_logratio / t.scores.chosen_tokens - t.rejected_logratio / t.scores.rejected_tokens
    return (per_token - 1 / (2 * t.options.beta)).square()


def robust(t: _Terms) -> torch.Tensor:
    """[-(1 - e) log s(b h) + e log s(-b h)] / (1 - 2 e), arXiv 2403.00409: DPO's mean where a share e of labels is
    wrong.
    """
    e = t.options.label_smoothing
    return (-(1 - e) * logsigmoid(t.logit) + e * logsigmoid(-t.logit)) / (1 - 2 * e)


def exo_pair(t: _Terms) -> torch.Tensor:
    """KL((p, 1 - p) || (1 - e, e)) with p = s(b h), arXiv 2402.00856, Eq. 16."""
    e = t.options.label_smoothing
    chosen = torch.sigmoid(t.logit) * (logsigmoid(t.logit) - math.log1p(-e))
    return chosen + torch.sigmoid(-t.logit) * (logsigmoid(-t.logit) - math.log(e))


def nca_pair(t: _Terms) -> torch.Tensor:
    """-log s(b D_w) - 0.5 log s(-b D_w) - 0.5 log s(-b D_l), arXiv 2402.05369."""
    against = 0.5 * (logsigmoid(-t.chosen_reward) + logsigmoid(-t.rejected_reward))
    return -logsigmoid(t.chosen_reward) - against


def bco_pair(t: _Terms) -> torch.Tensor:
    """-log s(b D_w - d) - log s(-(b D_l - d)), arXiv 2404.04656; d: `RunningReward` (TRL 1 has none: d = 0)."""
    d = t.running_reward
    return -logsigmoid(t.chosen_reward - d) - logsigmoid(-(t.rejected_reward - d))


def sppo_hard(t: _Terms) -> torch.Tensor:
    """(D_w - 1 / (2 b))^2 + (D_l + 1 / (2 b))^2, arXiv 2405.00675, Eq. 4.7 with winning probabilities of 1 and 0; 1 / b
    is its eta.
    """
    half = 1 / (2 * t.options.beta)
    return (t.chosen_logratio - half).square() + (t.rejected_logratio + half).square()


def apo_zero(t: _Terms) -> torch.Tensor:
    """1 - s(b D_w) + s(b D_l), arXiv 2408.06266, Eq. 7."""
    return torch.sigmoid(-t.chosen_reward) + torch.sigmoid(t.rejected_reward)


def apo_down(t: _Terms) -> torch.Tensor:
    """s(b D_w) + 1 - s(b h), arXiv 2408.06266, Eq. 8."""
    return torch.sigmoid(t.chosen_reward) + torch.sigmoid(-t.logit)


def discopop(t: _Terms) -> torch.Tensor:
    """(1 - m) (-log s(z)) + m e^-z with z = b h, m = s(z / tau), arXiv 2406.08414, Eq. 5.

    m e^-z is one exponential: apart, a very negative z makes it 0 * inf.
    """
    z, sharp = t.logit, t.logit / DISCOPOP_TEMPERATURE
    return torch.sigmoid(-sharp) * -logsigmoid(z) + torch.exp(logsigmoid(sharp) - z)


def simpo(t: _Terms) -> torch.Tensor:
    """-log s(b (a_w - a_l) - gamma), arXiv 2405.14734, Eq. 6."""
    gamma = SIMPO_GAMMA if t.options.simpo_gamma is None else t.options.simpo_gamma
    return -logsigmoid(t.options.beta * (t.chosen_mean - t.rejected_mean) - gamma)


def cpo(t: _Terms) -> torch.Tensor:
    """-log s(b (log pi(y_w) - log pi(y_l))) + NLL(y_w), arXiv 2401.08417; NLL per token, as in its authors' code."""
    return sft(t) - logsigmoid(t.options.beta * (t.scores.chosen - t.scores.rejected))


def orpo(t: _Terms) -> torch.Tensor:
    """NLL(y_w) - b log s(log odds_w - log odds_l), arXiv 2403.07691, Eq. 6 and 7.

    odds = p / (1 - p), p = e^a; b is its lambda; NLL per token of the completion (of the prompt too in TRL).
    """
    return sft(t) - t.options.beta * logsigmoid(_log_odds(t.chosen_mean) - _log_odds(t.rejected_mean))


def _log_odds(logprob: torch.Tensor) -> torch.Tensor:
    below = logprob.clamp(max=NEAR_ONE)
    return below - torch.log(-torch.expm1(below))


def sft(t: _Terms) -> torch.Tensor:
    """NLL(y_w) = -a_w, per token; also the RPO term of arXiv 2404.19733, which adds alpha times it.

    A mean over the pair's own tokens: TRL's, over all tokens of a micro-batch, changes with the split into them.
    """
    return -t.chosen_mean


@dataclass(frozen=True)
class Loss:
    """One row of the table.

    per_pair: `[pairs]` from the terms; needs_reference; takes_label_smoothing; step_zero: the value where policy and
    reference are equal, of the options, or None where it depends on the model.
    """

    per_pair: Callable[[_Terms], torch.Tensor]
    needs_reference: bool = True
    takes_label_smoothing: bool = False
    step_zero: Callable[[Preference], float] | None = None


def _exo_at_zero(options: Preference) -> float:
    e = options.label_smoothing
    return -math.log(2) - 0.5 * (math.log1p(-e) + math.log(e))


def _discopop_at_zero(options: Preference) -> float:
    return 0.5 * math.log(2) + 0.5


LOSSES = {
    "sigmoid": Loss(sigmoid, takes_label_smoothing=True, step_zero=lambda options: math.log(2)),
    "hinge": Loss(hinge, step_zero=lambda options: 1.0),
    "ipo": Loss(ipo, step_zero=lambda options: 1 / (4 * options.beta**2)),
    "robust": Loss(robust, takes_label_smoothing=True, step_zero=lambda options: math.log(2)),
    "exo_pair": Loss(exo_pair, takes_label_smoothing=True, step_zero=_exo_at_zero),
    "nca_pair": Loss(nca_pair, step_zero=lambda options: 2 * math.log(2)),
    "bco_pair": Loss(bco_pair, step_zero=lambda options: 2 * math.log(2)),
    "sppo_hard": Loss(sppo_hard, step_zero=lambda options: 1 / (2 * options.beta**2)),
    "apo_zero": Loss(apo_zero, step_zero=lambda options: 1.0),
    "apo_down": Loss(apo_down, step_zero=lambda options: 1.0),
    "discopop": Loss(discopop, step_zero=_discopop_at_zero),
    "simpo": Loss(simpo, needs_reference=False),
    "cpo": Loss(cpo, needs_reference=False),
    "orpo": Loss(orpo, needs_reference=False),
    "sft": Loss(sft, needs_reference=False),
}
PER_TOKEN_REWARDS = ("simpo", "orpo")  # what they compare is a mean over tokens


@dataclass(frozen=True)
class Preference:
    """A weighted sum of losses with their options. Raises UserError for options that no loss named would follow.

    losses: (name in LOSSES, weight) each; beta: b, and lambda of orpo; label_smoothing: e in [0, 0.5), of sigmoid,
    robust and exo_pair (which needs e > 0); rpo_alpha: weight of the added NLL of the chosen completion per token;
    simpo_gamma: the target margin of simpo, SIMPO_GAMMA where None.
    """

    losses: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0
    simpo_gamma: float | None = None

    def __post_init__(self) -> None:
        check_losses(self)
        check_numbers(self)
        check_label_smoothing(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.losses)

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses compares with a reference."""
        return any(LOSSES[name].needs_reference for name in self.names)

    def per_pair(self, scores: PairScores, running_reward: float = 0.0) -> torch.Tensor:
        """The weighted sum of the losses of each pair, fp32 `[pairs]`. running_reward: d of bco_pair."""
        terms = _Terms(scores.double(), self, running_reward)
        total = sum(weight * LOSSES[name].per_pair(terms) for name, weight in self.losses)
        if self.rpo_alpha:
            total = total + self.rpo_alpha * sft(terms)
        return total.float()

    def step_zero(self) -> float | None:
        """The loss of every pair where policy and reference are equal; None where that depends on the model."""
        if self.rpo_alpha or any(LOSSES[name].step_zero is None for name in self.names):
            return None
        return sum(weight * LOSSES[name].step_zero(self) for name, weight in self.losses)

    def rewards(self, scores: PairScores) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards of the chosen and rejected completions, fp64 `[pairs]` each, without gradient.

        With a reference b D_w and b D_l, sums over tokens also for ipo. Without one beta times the log-probability
        that is compared: its mean over the completion's tokens for simpo and orpo, its sum for cpo and sft.
        """
        terms = _Terms(scores.double(), self, 0.0)
        if self.needs_reference:
            chosen, rejected = terms.chosen_reward, terms.rejected_reward
        elif any(name in PER_TOKEN_REWARDS for name in self.names):
            chosen, rejected = self.beta * terms.chosen_mean, self.beta * terms.rejected_mean
        else:
            chosen, rejected = self.beta * terms.scores.chosen, self.beta * terms.scores.rejected
        return chosen.detach(), rejected.detach()

    def metrics(self, scores: PairScores) -> dict[str, torch.Tensor]:
        """`reward_metrics` of `rewards`, and `logps/*`, whole completions' log-probabilities: sums over these pairs.

        With a reference also `kl/reference`, a pair's mean of log ref(y) - log pi(y): in the mean over answers that the
        reference would give that is KL(ref || pi), of data from elsewhere an estimate, which may be negative.
        """
        policy = {"logps/chosen": scores.chosen, "logps/rejected": scores.rejected}
        if self.needs_reference:
            terms = _Terms(scores.double(), self, 0.0)
            policy["kl/reference"] = -(terms.chosen_logratio + terms.rejected_logratio) / 2
        sums = {name: value.detach().double().sum().float() for name, value in policy.items()}
        return reward_metrics(*self.rewards(scores)) | sums


def check_losses(preference: Preference) -> None:
    """Raise UserError where there is no loss, an unknown one, one twice, or a weight that is not above 0."""
    if not preference.losses:
        raise UserError("no preference loss is named", fix=f"name one of {', '.join(LOSSES)}")
    for name, weight in preference.losses:
        if name not in LOSSES:
            raise UserError(f"unknown preference loss `{name}`", fix=f"the losses are {', '.join(LOSSES)}")
        if not 0 < weight < math.inf:
            raise UserError(f"{name}:{weight:g} has no finite weight above 0", fix="give one such as 1.0")
    if len(set(preference.names)) < len(preference.losses):
        raise UserError("a preference loss is named twice", fix="add the weights up and keep one")


def check_numbers(preference: Preference) -> None:
    """Raise UserError for a beta, rpo_alpha or simpo_gamma out of range, or a simpo_gamma that nothing would use."""
    if not 0 < preference.beta < math.inf:
        raise UserError(f"--beta {preference.beta:g} is no finite number above 0", fix="give a number such as 0.1")
    if not 0 <= preference.rpo_alpha < math.inf:
        raise UserError(f"--rpo-alpha {preference.rpo_alpha:g} is no finite number from 0 on", fix="give 0 for no term")
    if preference.simpo_gamma is None:
        return
    if not 0 <= preference.simpo_gamma < math.inf:
        what = f"--simpo-gamma {preference.simpo_gamma:g} is no finite number from 0 on"
        raise UserError(what, fix="give a number such as 0.5")
    if "simpo" not in preference.names:
        raise UserError("--simpo-gamma has no effect without the loss simpo", fix="leave it out, or use --loss simpo")


def check_label_smoothing(preference: Preference) -> None:
    """Raise UserError where label smoothing is out of range, would not act on a loss, or is missing for exo_pair.

    `sft` beside other losses is let through: it compares nothing, so it has no label to smooth.
    """
    e, takes = preference.label_smoothing, [name for name, loss in LOSSES.items() if loss.takes_label_smoothing]
    if not 0 <= e < 0.5:
        raise UserError(f"--label-smoothing must be in [0, 0.5), it is {e:g}", fix="give the share of wrong labels")
    if "exo_pair" in preference.names and e == 0:
        raise UserError("exo_pair needs label smoothing: its loss holds log e", fix="give --label-smoothing 0.001")
    deaf = [name for name in preference.names if name not in takes and (name != "sft" or len(preference.losses) == 1)]
    if e > 0 and deaf:
        fix = f"leave it out, or use {', '.join(takes[:-1])} or {takes[-1]}"
        raise UserError(f"--label-smoothing does not act on the loss {', '.join(deaf)}", fix=fix)


@dataclass(frozen=True)
class RunningReward:
    """d of bco_pair: the mean reward of both completions of all pairs of the steps so far; 0 before the first.

    A step's own rewards are known only after all its micro-batches, so d of a step comes from the steps before it.
    Then neither layout nor micro-batches change it. To be saved with a checkpoint.
    """

    total: float = 0.0
    pairs: int = 0

    @property
    def mean(self) -> float:
        return self.total / (2 * self.pairs) if self.pairs else 0.0

    def after(self, chosen: float, rejected: float, pairs: int) -> RunningReward:
        """The state behind a step. chosen, rejected: sums of rewards over the `pairs` of the global step, all ranks."""
        return RunningReward(self.total + chosen + rejected, self.pairs + pairs)
