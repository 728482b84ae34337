"""KTO and its kin: single completions labelled desirable or undesirable, as pure functions of log-probabilities.

Of a row (x, y, label): r = log pi(y | x) - log ref(y | x), sums over the completion's tokens; b: beta; s(): the sigmoid
function. The mean over the rows of the global step is the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from swiftlite.errors import UserError


@dataclass(frozen=True)
class RowScores:
    """`[rows]` each. policy: fp64 sums of log p over the completion's tokens; reference: the same sums under the
    reference, without gradient; desirable: bool.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    desirable: torch.Tensor


@dataclass(frozen=True)
class Unpaired:
    """`kto` or `apo_zero_unpaired` with its options. Raises UserError for an unknown name or a number out of range.

    desirable_weight, undesirable_weight: lam_D and lam_U.
    """

    loss: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in ("kto", "apo_zero_unpaired"):
            raise UserError(f"unknown loss `{self.loss}`", fix="the losses are kto, apo_zero_unpaired")
        for flag, value in (
            ("--beta", self.beta),
            ("--desirable-weight", self.desirable_weight),
            ("--undesirable-weight", self.undesirable_weight),
        ):
            if not 0 < value < math.inf:
                raise UserError(f"{flag} {value:g} is no finite number above 0", fix="give a number such as 1.0")

    @property
    def needs_mismatched(self) -> bool:
        """Whether mismatched pairs have to be scored for z0."""
        return self.loss == "kto"

    def per_row(self, scores: RowScores, z0: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Weighted loss of each row, fp32 `[rows]`, of desirable and undesirable rows in any mixture.

        kto, arXiv 2402.01306, Eq. 7: lam_D (1 - s(b (r - z0))) or lam_U (1 - s(b (z0 - r))), z0 from `reference_point`.
        apo_zero_unpaired, arXiv 2408.06266, Eq. 7 row by row: the same with z0 = 0, whatever is given.
        """
        shifted = self.beta * (_logratio(scores) - self._point(z0))
        desirable = scores.desirable.double()
        weight = desirable * self.desirable_weight + (1 - desirable) * self.undesirable_weight
        return (weight * torch.sigmoid((1 - 2 * desirable) * shifted)).float()

    def _point(self, z0: torch.Tensor | float) -> torch.Tensor | float:
        return z0 if self.needs_mismatched else 0.0

    def step_zero(self, desirable: int, undesirable: int) -> float:
        """The mean over a step's rows where policy and reference are equal: 0.5 with weights of 1."""
        weights = desirable * self.desirable_weight + undesirable * self.undesirable_weight
        return 0.5 * weights / (desirable + undesirable)

    def metrics(self, scores: RowScores, z0: torch.Tensor | float = 0.0) -> dict[str, torch.Tensor]:
        """Sums over these rows, fp32 scalars, to be added over micro-batches and ranks and given to `metric_means`.

        `*/chosen` are of desirable rows, `*/rejected` of undesirable ones, `count/*` how many these are. The reward is
        b r; `rewards/accuracy` counts rows on their label's side of z0. `kl/reference` is kto's z0 for every row,
        its estimate of KL(pi || ref).
        """
        ratio = _logratio(scores).detach()
        reward, policy = self.beta * ratio, scores.policy.detach().double()
        above, below = ratio > self._point(z0), ratio < self._point(z0)
        masks = {"chosen": scores.desirable, "rejected": ~scores.desirable}
        sums = {"rewards/accuracy": torch.where(scores.desirable, above, below).sum()}
        for name, mask in masks.items():
            sums[f"rewards/{name}"] = (reward * mask).sum()
            sums[f"logps/{name}"] = (policy * mask).sum()
            sums[f"count/{name}"] = mask.sum()
        if self.needs_mismatched:
            sums["kl/reference"] = torch.full_like(ratio, z0).sum()
        return {name: value.float() for name, value in sums.items()}


def _logratio(scores: RowScores) -> torch.Tensor:
    """r in fp64 `[rows]`: the two sums nearly cancel."""
    return scores.policy.double() - scores.reference.double()


def metric_means(sums: dict[str, float]) -> dict[str, float | None]:
    """The metrics of a step from its sums over all ranks; None where the step has no row of that label."""
    counts = {name: sums[f"count/{name}"] for name in ("chosen", "rejected")}
    means: dict[str, float | None] = {
        f"{kind}/{name}": sums[f"{kind}/{name}"] / count if count else None
        for kind in ("rewards", "logps")
        for name, count in counts.items()
    }
    rows = sum(counts.values())
    for name in ("rewards/accuracy", "kl/reference"):
        if name in sums:
            means[name] = sums[name] / rows if rows else None
    chosen, rejected = means["rewards/chosen"], means["rewards/rejected"]
    means["rewards/margin"] = None if chosen is None or rejected is None else chosen - rejected
    return means


def reference_point(total: torch.Tensor, rows: int) -> torch.Tensor:
    """z0 = max(0, mean of r over mismatched pairs), a scalar without gradient; 0 where there are no such pairs.

    total: scalar, the sum of r over the mismatched pairs (prompt of one row, completion of another) of the whole group,
    all ranks' sums added; rows: how many these are. The group is one of the global row order: tied to a micro-batch or
    a rank, as public tools have it, the loss would change with the layout.
    """
    return (total.detach() / max(rows, 1)).clamp(min=0)
