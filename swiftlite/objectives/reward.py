"""The loss of a reward model as a pure function of scores: Bradley-Terry, with margin and centring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from swiftlite.errors import UserError


@dataclass(frozen=True)
class RewardModel:
    """centring: c, the weight that draws the sum of a pair's rewards to 0. Raises UserError where it is below 0."""

    centring: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.centring < math.inf:
            what = f"the centring weight {self.centring:g} is no finite number from 0 on"
            raise UserError(what, fix="give 0 (none) or a number such as 0.01")

    def per_pair(
        self, chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """-log s(r_w - r_l - m) + c (r_w + r_l)^2 of each pair, fp32 `[pairs]`; the mean over pairs is the caller's.

        chosen, rejected: `[pairs]`, the scores r_w and r_l; margin: `[pairs]`, how much better the chosen one is said
        to be, m, or None for 0. Margin: arXiv 2307.09288, Eq. 2. Centring: arXiv 2312.09244, Eq. 2.
        """
        chosen, rejected = chosen.double(), rejected.double()
        ahead = chosen - rejected if margin is None else chosen - rejected - margin
        loss = -logsigmoid(ahead)
        if self.centring:
            loss = loss + self.centring * (chosen + rejected).square()
        return loss.float()

    def step_zero(self) -> float:
        """The loss of a pair without margin where the score head is all zeros."""
        return math.log(2)


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over these pairs, fp32 scalars: to be added over micro-batches and ranks, then divided by the step's pairs.

    chosen, rejected: rewards `[pairs]`. `rewards/accuracy` counts pairs whose chosen reward is the larger; equal ones
    do not count.
    """
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    sums = {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/accuracy": (chosen > rejected).sum(),
        "rewards/margin": (chosen - rejected).sum(),
    }
    return {name: value.float() for name, value in sums.items()}
