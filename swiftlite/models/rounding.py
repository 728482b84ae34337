"""Quantization-aware training: linear layers multiply what `swiftlite export --quantization` will write of them.

Weights are rounded to their codes in each forward pass, and what enters a layer where engines round that too, while the
weights themselves stay as exact as ever; gradients go through the rounding as if it were not there (the
straight-through estimator, arXiv 1308.3432; of weights and activations arXiv 1712.05877, section 3). So a model learns
to bear it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swiftlite.models.compressed import Format, round_inputs, round_matrix
from swiftlite.models.kernels.products import linear, no_view, product


@dataclass(frozen=True)
class Rounding:
    """form: of codes; group: how many numbers of a row share a scale, None for all of them; dtype: that files will have
    weights and scales in, to which a weight is rounded before it becomes codes."""

    form: Format
    group: int | None
    dtype: torch.dtype

    def weight(self, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[outputs, inputs]` as its codes stand for it, in the type of products."""
        return round_matrix(matrix, self.form, self.group, self.dtype).to(dtype)

    def inputs(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[..., inputs]` as an engine multiplies it."""
        return (round_inputs(x, self.form) if self.form.rounds_inputs else x).to(dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that multiplies rounded numbers."""

    rounding: Rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Product.apply(x, self.weight, self.bias, self.rounding, dtype)


def use_rounding(model: nn.Module, names: Iterable[str], rounding: Rounding) -> None:
    """Make linear layers of a model, by their names in it, round what they multiply, in place."""
    for name in names:
        layer = model.get_submodule(name)
        layer.__class__, layer.rounding = RoundedLinear, rounding


class _Product(torch.autograd.Function):
    """Rounds again in the backward pass, so that nothing is kept beside what any linear layer keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rounding: Rounding,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad  # of a frozen layer the input is not kept
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.rounding, ctx.dtype, ctx.of_x, ctx.of_weight = rounding, dtype, x.dtype, weight.dtype
        added = None if bias is None else bias.to(dtype)
        return no_view(linear(rounding.inputs(x, dtype), rounding.weight(weight, dtype), added))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), rounding, upstream = ctx.saved_tensors, ctx.rounding, upstream.contiguous()
        grad_x = grad_weight = grad_bias = None
        rows = upstream.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grad_x = product(upstream, rounding.weight(weight, ctx.dtype).T).to(ctx.of_x)
        if ctx.needs_input_grad[1]:
            inputs = rounding.inputs(x, ctx.dtype).flatten(0, -2)
            grad_weight = product(rows.T, inputs.T, over_tokens=True).to(ctx.of_weight)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(ctx.of_weight)
        return grad_x, grad_weight, grad_bias, None, None
