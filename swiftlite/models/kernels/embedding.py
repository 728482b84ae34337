"""Gradients of the vocabulary's matrices, added where they belong instead of being handed through autograd.

An embedding's gradient has a few hundred rows that are not zero, and autograd makes all of them: a matrix as large as
the vocabulary in every backward pass. Where the head has the same weight, its own gradient waits for that one to the
end. On one device without hooks on gradients neither is needed: both add to the weight's `.grad` on their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class DirectEmbedding(nn.Embedding):
    """An embedding that adds the rows of its gradient to its weight's `.grad`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids)
        if not (torch.is_grad_enabled() and takes_gradient(self.weight)):
            return found
        return _Rows.apply(found.detach(), self.weight, ids, self.padding_idx)


def use_direct_embeddings(model: nn.Module) -> None:
    """Make every plain embedding of a model a DirectEmbedding, in place."""
    for module in model.modules():
        if type(module) is nn.Embedding and not (module.sparse or module.scale_grad_by_freq or module.max_norm):
            module.__class__ = DirectEmbedding


def takes_gradient(weight: torch.Tensor) -> bool:
    """Whether gradients can be added to a tensor's `.grad` as they are: it is trained, in fp32."""
    return weight.requires_grad and weight.is_leaf and weight.dtype == torch.float32


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    """Its `.grad`, to be added to in place: zeros where there was none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class _Rows(torch.autograd.Function):
    """Rows that were looked up, with a backward pass of their own."""

    @staticmethod
    def forward(
        ctx: Any, found: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return found.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        rows, ids, weight = grad.reshape(-1, grad.shape[-1]), ids.reshape(-1), ctx.weight
        if ctx.padding is not None:  # whose row is not trained
            rows = rows.masked_fill((ids == ctx.padding)[:, None], 0)
        gradient_of(weight).index_add_(0, ids, rows)
        return None, None, None, None
