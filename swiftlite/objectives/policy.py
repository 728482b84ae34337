"""The losses of policy gradients over the model's own answers, as pure functions of token log-probabilities.

Of an answer of n tokens with advantage A, sampled by the policy as it is:

    sum over tokens of  share * (-A r + b (exp(d) - d - 1)),   r = p / p_sampled,   d = log ref - log p

With a teacher that counts w a token's A is (1 - w) A + w (log teacher - log p), without gradient. Over what the model
itself samples, the latter gives the gradient of KL(model || teacher) without the teacher's whole distribution
(on-policy distillation, arXiv 2306.13649 and 2306.08543).

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
    """loss: `dapo`, `grpo` or `dr_grpo`; beta: b; teacher: w, 0 without one; answers, tokens: of the whole step, with
    those that are not trained because they have no advantage; longest: tokens that an answer may have."""

    loss: str
    beta: float
    teacher: float
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
        """(loss of each token, an estimate of its KL to the reference without gradient), all fp32 `[n]`. advantages: of
        each token's answer; reference: log p there of the reference or teacher, None without one."""
        ratio = (logprobs - logprobs.detach()).exp()
        if reference is None:
            return -advantages * ratio, torch.zeros_like(logprobs)
        d = reference - logprobs
        if self.teacher:
            ahead = d.detach()
            return -((1 - self.teacher) * advantages + self.teacher * ahead) * ratio, -ahead
        kl = d.exp() - d - 1
        return -advantages * ratio + self.beta * kl, kl.detach()
