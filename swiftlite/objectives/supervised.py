"""The losses of SFT and pretraining as pure functions of token log-probabilities."""

from __future__ import annotations

import torch


def supervised_loss(logprobs: torch.Tensor, step_tokens: int) -> torch.Tensor:
    """Sum of `-log p` over this micro-batch's trained tokens, divided by N of the whole step.

    logprobs: `[n]`, the trained positions only; step_tokens: N, the trained tokens of the global step over all
    micro-batches and data ranks. Summed over them this is the mean over the step's tokens, so neither the split into
    micro-batches nor the layout changes it. An empty micro-batch gives an exact zero that still has a gradient.
    """
    return -logprobs.sum() / step_tokens


def dynamic_loss(logprobs: torch.Tensor, step_tokens: int) -> torch.Tensor:
    """The same sum with each token's `-log p` multiplied by its own p, which gets no gradient.

    Dynamic Fine-Tuning, arXiv 2508.05629. logprobs, step_tokens: as in `supervised_loss`; N stays the
    number of tokens, whatever they weigh.
    """
    return -(logprobs.detach().exp() * logprobs).sum() / step_tokens
