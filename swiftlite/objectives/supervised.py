"""The loss of SFT and pretraining as a pure function of token log-probabilities."""

from __future__ import annotations

import torch


def supervised_loss(logprobs: torch.Tensor, step_tokens: int) -> torch.Tensor:
    """Sum of `-log p` over this micro-batch's trained tokens, divided by N of the whole step.

    logprobs: `[n]`, the trained positions only; step_tokens: N, the trained tokens of the global step over all
    micro-batches and data ranks. Summed over them this is the mean over the step's tokens, so neither the split into
    micro-batches nor the layout changes it. An empty micro-batch gives an exact zero that still has a gradient.
    """
    return -logprobs.sum() / step_tokens
