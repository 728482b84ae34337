"""LoRA's forward pass in one product with the result of the base layer, instead of a product, a scaling and a sum.

peft casts the input to the adapter's type, scales and adds, each a tensor as large as the layer's output. Here the
second product adds itself to the output, in the type that the output has; in fp32 on a CPU in place, and so does its
gradient to that of the layer's input.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from swiftlite.models.kernels.half_products import as_half, half_weight
from swiftlite.models.kernels.products import FastLinear, are_plain_fp32, linear, no_view, product

LINEAR = (nn.Linear, FastLinear)


def is_lora_b(name: str) -> bool:
    """Whether a parameter of a peft model is the second matrix of a LoRA adapter, on an embedding or elsewhere."""
    return ".lora_B." in name or ".lora_embedding_B." in name


def fuse_adapters(model: nn.Module) -> None:
    """Give every plain adapter of a peft model that forward pass, in place. Others (DoRA, with dropout) stay.

    Not for modules whose matrices other modules' hooks divide, as under tensor parallelism: matrices are read here, not
    called.
    """
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear and _is_plain(module):
            module.__class__ = _fused_class()


def _is_plain(module: nn.Module) -> bool:
    names = module.active_adapters
    if len(names) != 1 or names[0] not in module.lora_A or names[0] in module.lora_variant:
        return False
    return isinstance(module.lora_dropout[names[0]], nn.Identity) and module.lora_B[names[0]].bias is None


@functools.cache
def _fused_class() -> type[nn.Module]:
    """Made when it is needed: importing peft takes a second."""
    from peft.tuners.lora.layer import Linear

    class FusedLinear(Linear):
        """`base(x) + scaling * x @ A.T @ B.T`."""

        def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            base = self.base_layer
            if self.disable_adapters:
                return base(x, *args, **kwargs)
            [name] = self.active_adapters
            into, out_of, scaling = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
            if torch.compiler.is_compiling():  # the compiler adds where the sum is read next
                return base(x, *args, **kwargs) + F.linear(scaling * F.linear(x, into), out_of)
            frozen = type(base) in LINEAR and not any(p.requires_grad for p in base.parameters())
            if frozen and are_plain_fp32(x, base.weight, into, out_of):
                return _Adapted.apply(x, base.weight, base.bias, into, out_of, scaling)
            if half_weight(base) is not None:
                x = as_half(x)
            rows = x.flatten(0, -2)
            result, inner = base(rows, *args, **kwargs), F.linear(rows, into)
            # Elsewhere than in place a GPU would copy the result first. Autocast knows of no operation in place.
            add = torch.Tensor.addmm_ if type(base) is nn.Linear and _may_change(result) else torch.addmm
            added = add(result, inner.to(result.dtype), out_of.to(result.dtype).T, alpha=scaling)
            return added.view(*x.shape[:-1], added.shape[-1])  # of rows without a token too

    return FusedLinear


def _may_change(result: torch.Tensor) -> bool:
    """Whether the result of a linear layer may be changed in place: selective checkpointing keeps it."""
    return result.is_cuda and not is_in_torch_dispatch_mode()


class _Adapted(torch.autograd.Function):
    """The same for a frozen base layer, x `[..., k]`, weight `[n, k]`, into `[r, k]` and out_of `[n, r]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        into: torch.Tensor,
        out_of: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = product(rows, into)
        ctx.save_for_backward(x, inner, weight, into, out_of)
        ctx.scaling = scaling
        base = linear(rows, weight, bias)
        add = torch.addmm if is_in_torch_dispatch_mode() else torch.Tensor.addmm_  # selective checkpointing keeps base
        return no_view(add(base, inner, out_of.T, alpha=scaling).view(*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, weight, into, out_of = ctx.saved_tensors
        rows = upstream.flatten(0, -2).contiguous()
        grad_inner = product(rows, out_of.T).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(rows, weight.T).addmm_(grad_inner, into).view(x.shape)
        grad_into = product(grad_inner.T, x.flatten(0, -2).T, over_tokens=True)
        grad_out_of = product(rows.T, inner.T, over_tokens=True).mul_(ctx.scaling)
        return grad_x, None, None, grad_into, grad_out_of, None
