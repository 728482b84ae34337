"""LoRA's forward pass in one product with the result of the base layer, instead of a product, a scaling and a sum.

peft casts the input to the adapter's type, scales and adds, each a tensor as large as the layer's output. Here the
second product adds itself to the output, in the type that the output has.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn


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
            result = self.base_layer(x, *args, **kwargs)
            if self.disable_adapters:
                return result
            [name] = self.active_adapters
            inner = F.linear(x, self.lora_A[name].weight)
            outer, scaling = self.lora_B[name].weight.T, self.scaling[name]
            return torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), outer, alpha=scaling).view(result.shape)

    return FusedLinear
