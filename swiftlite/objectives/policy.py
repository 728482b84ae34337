"""The losses of policy gradients over the model's own answers, as pure functions of token log-probabilities.

Of an answer of n tokens with advantage A, sampled by the policy as it was before the step:

    sum over tokens of  share * (-min(r A, clip(r) A) + b (exp(d) - d - 1)),   r = p / p_sampled,   d = log ref - log p

With a teacher that counts w a token's A is (1 - w) A + w (log teacher - log p_sampled). Over what the model itself
samples, the latter gives the gradient of KL(model || teacher) without the teacher's whole distribution
(on-policy distillation, arXiv 2306.13649 and 2306.08543).

The ratio r has the gradient of log p where it is 1: in the first update of a step, which clips nothing. In later ones
`clip` keeps it between 1 - low and 1 + high, beyond which a token teaches no more (PPO, arXiv 1707.06347, Eq. 7). The
other term estimates the KL to the reference (http://joschu.net/blog/kl-approx.html, k3).

An engine that draws the answers does so by other kernels and in other types, from another p_drawn. The first term then
counts min(p_sampled / p_drawn, cap) times: what is learnt is what the model's own answers would teach, but for the cap,
which bounds the variance (truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456).

share is 1 over what the loss counts, the answers and tokens of an update:

    dapo      all tokens alike (arXiv 2503.14476, Eq. 8)
    grpo      answers alike, and the tokens of each: 1 / (answers * n) (arXiv 2402.03300, Eq. 3)
    dr_grpo   answers alike, with as many tokens as they may have (arXiv 2503.20783)
    gspo      as grpo; r is of the whole answer, the geometric mean of its tokens' (arXiv 2507.18071, Eq. 5 and 7)
    cispo     as dapo; -min(r A, clip(r) A) is -A min(r, 1 + high) log p, and only log p has a gradient, so that each
              token teaches (arXiv 2506.13585, Eq. 4 and 5)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Policy:
    """loss: one of the above; beta: b; teacher: w, 0 without one; answers, tokens: of the whole update, with those that
    are not trained because they have no advantage; longest: tokens that an answer may have; clip: low and high, None
    where answers are learnt from once, by the weights that gave them; cap: None where no engine draws the answers."""

    loss: str
    beta: float
    teacher: float
    answers: int
    tokens: int
    longest: int
    clip: tuple[float, float] | None = None
    cap: float | None = None

    @property
    def of_answers(self) -> bool:
        """Whether a ratio is of an answer, not of a token."""
        return self.loss == "gspo"

    def shares(self, lengths: torch.Tensor) -> torch.Tensor:
        """What each token of an answer counts. lengths: int64 `[answers here]`; fp32 of the same shape."""
        if self.loss in ("dapo", "cispo"):
            return torch.full_like(lengths, 1 / self.tokens, dtype=torch.float32)
        counted = torch.full_like(lengths, self.longest) if self.loss == "dr_grpo" else lengths
        return 1 / (self.answers * counted).float()

    def weights(self, sampled: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what each token counts for having been drawn by an engine, whether that is the cap, 1 or 0), fp32 `[n]`.
        sampled, drawn: log p by the model and by the engine, without gradient."""
        ratio = (sampled - drawn).exp()
        return ratio.clamp(max=self.cap), (ratio > self.cap).float()

    def ahead(self, sampled: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
        """A of each token, fp32 `[n]`. sampled: log p when it was drawn, without gradient; advantages: of its answer;
        reference: log p there of the reference or teacher, None without one, or in a micro-batch of nothing."""
        if not self.teacher or reference is None:
            return advantages
        return (1 - self.teacher) * advantages + self.teacher * (reference - sampled)

    def distance(
        self, logprobs: torch.Tensor, reference: torch.Tensor | None
    ) -> tuple[torch.Tensor | float, torch.Tensor]:
        """(what holds each token to the reference, an estimate of its KL to reference or teacher without gradient)."""
        if reference is None:
            return 0.0, torch.zeros_like(logprobs)
        d = reference - logprobs
        if self.teacher:
            return 0.0, -d.detach()
        kl = d.exp() - d - 1
        return self.beta * kl, kl.detach()

    def surrogate(
        self, log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, whether the ratio is at its bound, 1 or 0), of each token or answer. log_ratio: log r."""
        ratio = log_ratio.exp()
        low, high = self.clip or (math.inf, math.inf)
        if self.loss == "cispo":
            counted = ratio.detach().clamp(max=1 + high)
            return -advantages * counted * logprobs, (counted < ratio).float()
        bounded = torch.where(advantages > 0, ratio > 1 + high, (ratio < 1 - low) & (advantages < 0))
        return -advantages * torch.where(bounded, ratio.detach().clamp(1 - low, 1 + high), ratio), bounded.float()
