"""Root mean square norms as one node of autograd's graph instead of six, and layer norms of fp32.

The norms of nearly all architectures compute `weight * x / rms(x)`, each in code of its own (arXiv 1910.07467). Nothing
is assumed of a module but the name of its class and that it holds one vector: the first time it runs, its own result
for some numbers is compared with that formula, and a module that computes anything else keeps its own forward.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swiftlite.models.classes import known_as
from swiftlite.models.kernels.products import PLAIN, are_plain_fp32

NAME = "RMSNorm"
EPSILONS = ("variance_epsilon", "eps")  # what classes call the number that is added to the mean square


def fuse_norms(model: nn.Module) -> None:
    """Give each norm of a model a forward pass of one node, in place, used where weight and input are plain tensors: of
    fp32 on a CPU, of one type on a GPU."""
    for module in model.modules():
        if type(module).__name__.endswith(NAME) and _epsilon(module) and _holds_one_vector(module):
            module.__class__ = _fused_class(type(module))


def widen_layer_norms(model: nn.Module) -> None:
    """Let layer norms take what is wider than their weights, in place: where embeddings are trained in fp32 beside
    layers in bf16, hidden states are fp32. On a GPU autocast sees to it; on a CPU PyTorch refuses."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = WideLayerNorm


class WideLayerNorm(nn.LayerNorm):
    """A layer norm that computes in fp32 where its input is fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None or x.dtype != torch.float32 or self.weight.dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), bias, self.eps)


def _epsilon(module: nn.Module) -> float | None:
    return next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)


def _holds_one_vector(module: nn.Module) -> bool:
    """And nothing that the formula has no place for: a bias, a weight that is no parameter and that nobody reads."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return names == ["weight"] and isinstance(module.weight, nn.Parameter) and module.weight.ndim == 1


@functools.cache
def _fused_class(plain: type[nn.Module]) -> type[nn.Module]:
    @known_as(plain)
    class Fused(plain):
        computes_formula: bool | None = None  # known once there was an input

        def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            norm = None if args or kwargs else _norm_of(x, self.weight)
            if norm is None:
                return super().forward(x, *args, **kwargs)
            if self.computes_formula is None:
                self.computes_formula = _computes_formula(self, plain)
            return norm(x, self.weight, _epsilon(self)) if self.computes_formula else super().forward(x)

    return Fused


def _norm_of(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """What computes the formula in one node of `x`, `weight` and the number that is added: None where nothing does."""
    if are_plain_fp32(x, weight, also_under_autocast=True):
        return _RmsNorm.apply
    same = type(x) in PLAIN and type(weight) in PLAIN and x.dtype == weight.dtype
    return _by_pytorch if same and x.is_cuda else None


def _by_pytorch(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Which has a kernel for GPUs that computes in fp32, whatever the type."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


@torch.no_grad()
def _computes_formula(norm: nn.Module, plain: type[nn.Module]) -> bool:
    """Asked with another weight than its own, which may be all ones and then tells nothing; and with numbers whose mean
    is not zero, in a second row about as small as what is added to their mean square."""
    epsilon, device = _epsilon(norm), norm.weight.device
    numbers = torch.linspace(-2, 3, 2 * len(norm.weight), device=device).view(2, -1)
    numbers[1] *= epsilon**0.5
    weight = torch.linspace(0.5, 2, len(norm.weight), device=device)
    asked = copy.copy(norm)
    asked._parameters = {"weight": weight}
    return torch.allclose(
        plain.forward(asked, numbers), normalize(numbers, weight, _inverse_rms(numbers, epsilon)), rtol=1e-5, atol=1e-6
    )


def _inverse_rms(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def normalize(x: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """x: `[..., n]`; weight: `[n]`; inverse_rms: `[..., 1]`."""
    return (x * inverse_rms).mul_(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        inverse_rms = _inverse_rms(x, epsilon)
        ctx.save_for_backward(x, weight, inverse_rms)
        return normalize(x, weight, inverse_rms)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x / rms(x): d x = (w * upstream - n * mean(n * w * upstream)) / rms(x)."""
        x, weight, inverse_rms = ctx.saved_tensors
        product, scale = (x * upstream).flatten(0, -2), inverse_rms.flatten()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mv(product.T, scale)
        if ctx.needs_input_grad[0]:
            along = torch.mv(product, weight).div_(len(weight)).mul_(scale).mul_(scale).mul_(scale)
            grad_x = (upstream * weight).mul_(inverse_rms).addcmul_(x, along.view(inverse_rms.shape), value=-1)
        return grad_x, grad_weight, None
