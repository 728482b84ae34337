"""The losses of policy gradients over the model's own answers, as pure functions of token log-probabilities.

Of an answer of n tokens with advantage A, sampled by the policy as it is:

    sum over tokens of  share * (-A r + b (exp(d) - d - 1)),   r = p / p_sampled,   d = log ref - log p

The ratio r is 1, since a step is learnt from once, and has the gradient of log p; so nothing is clipped. The other term
estimates the KL to the reference (http://joschu.net/blog/kl-approx.html, k3). share is 1 over what the loss counts:

    dapo      all tokens of the step alike (arXiv 2503.14476, Eq. 8)
    grpo      answers alike, and the tokens of each: 1 / (answers * n) (arXiv 2402.03300, Eq. 3)
    dr_grpo   answers alike, with as many tokens as they may have (arXiv 2503.20783)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Policy:
    """loss: `dapo`, `grpo` or `dr_grpo`; beta: b; answers, tokens: of the whole step, with those that are not trained
    because they have no advantage; longest: tokens that an answer may have."""

    loss: str
    beta: float
    answers: int
    tokens: int
    longest: int

    def shares(self, lengths: torch.Tensor) -> torch.Tensor:
        """What each token of an answer counts. lengths: int64 `[answers here]`; fp32 of the same shape."""
        if self.loss == "dapo":
            return torch.full_like(lengths, 1 / self.tokens, dtype=torch.float32)
        counted = lengths if self.loss == "grpo" else torch.full_like(lengths, self.longest)
        return 1 / (self.answers * counted).float()

    def per_token(
        self, logprobs: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss of each token, its KL to the reference without gradient), all fp32 `[n]`. advantages: of each token's
        answer; reference: log p there, None without one."""
        loss = -advantages * (logprobs - logprobs.detach()).exp()
        if reference is None:
            return loss, torch.zeros_like(loss)
        d = reference - logprobs
        kl = d.exp() - d - 1
        return loss + self.beta * kl, kl.detach()
