"""Linear layers in bf16 on a CPU that casts nothing twice.

Autocast casts every weight anew in each forward pass, and an input for each layer that reads it; the gradient of each
weight comes out of each micro-batch as a matrix in bf16, which autograd casts and adds to what is there. Where products
take a seventh of their time in fp32 (AMX), that takes longer than they do. Here a weight is cast once a step, an input
once, and products are added to the fp32 gradient as they are made. The numbers are autocast's, but for the gradient of
an input that several layers read: its parts are added in bf16.

Only where nothing takes notice of gradients on their way, as with `swiftlite.models.kernels.embedding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swiftlite.models.kernels.embedding import gradient_of, takes_gradient
from swiftlite.models.kernels.products import PLAIN, ProductSum, no_view

HALF = torch.bfloat16


class HalfCopy:
    """A weight in bf16, for a while. Copies of a layer that have the same weight, as threads do, share it."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._source: int | None = None

    def __deepcopy__(self, _memo: object) -> HalfCopy:
        return self

    def take(self, weight: torch.Tensor) -> None:
        """Be the copy of a weight as it is now."""
        if weight.dtype == HALF:
            self._copy = weight.detach()
        elif self._copy is None:
            self._copy = weight.detach().to(HALF)
        elif weight.requires_grad:  # others are as they were
            self._copy.copy_(weight.detach())
        self._source = weight.data_ptr()

    def drop(self) -> None:
        """Be none any more, but keep the memory."""
        self._source = None

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The copy, if it is this weight's."""
        return self._copy if self._source == weight.data_ptr() else None


class HalfLinear(nn.Linear):
    """A linear layer whose products are in bf16 while there is a copy of its weight, under autocast."""

    in_half: HalfCopy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = half_weight(self)
        if weight is None:
            return super().forward(x)
        return _Product.apply(as_half(x), self.weight, weight, self.bias)


def half_weight(layer: nn.Module) -> torch.Tensor | None:
    """A linear layer's weight in bf16, None where its products are not made here."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == HALF
    return layer.in_half.of(layer.weight) if autocast and isinstance(layer, HalfLinear) else None


def use_half_products(model: nn.Module) -> None:
    """Make every plain linear layer of a model a HalfLinear, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__, module.in_half = HalfLinear, HalfCopy()


def half_layers(model: nn.Module) -> list[HalfLinear]:
    return [module for module in model.modules() if isinstance(module, HalfLinear)]


@contextmanager
def half_weights(layers: Sequence[HalfLinear]) -> Iterator[None]:
    """A context in which the weights of some layers do not change, so that they have copies."""
    for layer in layers:
        if _serves(layer.weight):
            layer.in_half.take(layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            layer.in_half.drop()


def _serves(weight: torch.Tensor) -> bool:
    return type(weight) in PLAIN and (takes_gradient(weight) or not weight.requires_grad)


def as_half(x: torch.Tensor) -> torch.Tensor:
    """`x.to(bf16)`, the same tensor for all who ask for it."""
    if x.dtype == HALF:
        return x
    version, half = getattr(x, "_in_half", (None, None))
    if version != x._version or half.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        half = x.to(HALF)
        x._in_half = x._version, half
    return half


class _Product(torch.autograd.Function):
    """x: bf16 `[..., k]`; weight `[n, k]`, which gets its gradient here; half: the same in bf16; bias: `[n]`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, half: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, half if wants_x else None)
        ctx.weight = weight
        return no_view(F.linear(x, half, None if bias is None else bias.to(HALF)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, half = ctx.saved_tensors
        rows = upstream.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            ProductSum(ctx.weight, HALF, gradient_of(ctx.weight)).add(rows, x.flatten(0, -2))
        grad_x = upstream @ half if ctx.needs_input_grad[0] else None
        return grad_x, None, None, rows.sum(0) if ctx.needs_input_grad[3] else None
