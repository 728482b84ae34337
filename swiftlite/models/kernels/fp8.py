"""Matrix products of the layers in 8-bit floats (arXiv 2209.05433), on GPUs that have them, by torchao.

Weights, activations and gradients are rounded to 8 bits for each product; masters and optimizer states stay as they
are, and so do the embedding, the output head, norms and attention. Each token has a scale of its own (torchao's
`rowwise` recipes): with one scale for a whole row of packed documents, a document would be rounded by its neighbours.

Source: https://docs.pytorch.org/ao/stable/workflows/training.html
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.errors import UserError
from swiftlite.models.anatomy import balances_router

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKAGE = "torchao"
MULTIPLE = 16  # of what such a product takes; tokens too, over which the gradient of a weight is summed
OLDEST = (8, 9)  # the compute capability of Ada; Hopper has 9.0


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU that is here, None of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_fp8(config: PretrainedConfig, capability: tuple[int, int] | None) -> None:
    """Raises UserError where a model, or a device of a compute capability, cannot have 8-bit products."""
    if balances_router(config):
        raise UserError(
            "8-bit products need rows of a round length, and a router that is balanced would count the padding",
            where="--fp8",
            fix="leave --fp8 out, or use --router-aux-loss-coef 0",
        )
    if capability is None or capability < OLDEST:
        raise UserError(
            "8-bit floats need a GPU of the generation of Ada or Hopper, or a later one",
            where="--fp8",
            fix="leave --fp8 out",
        )


def rounded(tokens: int, slices: int) -> int:
    """How long a row in so many slices has to be for so many tokens."""
    multiple = MULTIPLE * slices
    return -(-tokens // multiple) * multiple


def use_fp8(layers: nn.ModuleList, recipe: str, *, emulated: bool = False) -> None:
    """Exchange the linear layers that are trained, in place; weights and their names stay as they are.

    recipe: torchao's name; emulated: round to 8 bits, and multiply what was rounded as any device can.
    Raises UserError where there is no such layer.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    check_served(layers)
    convert_to_float8_training(
        layers,
        config=replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated),
        module_filter_fn=lambda module, _name: _is_served(module),
    )


def check_served(layers: nn.ModuleList) -> None:
    """Raises UserError where no layer has a product that 8 bits serve."""
    if not any(map(_is_served, layers.modules())):
        raise UserError(
            f"no trained matrix of the layers has sides that are multiples of {MULTIPLE}",
            where="--fp8",
            fix="leave --fp8 out",
        )


def _is_served(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not module.weight.requires_grad:
        return False
    return not any(side % MULTIPLE for side in module.weight.shape)
