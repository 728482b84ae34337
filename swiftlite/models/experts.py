"""The fused experts of a mixture, and their products in autocast's type.

Autocast knows nothing of the grouped products that transformers' experts run: fp32 masters would be multiplied in fp32,
which on a GPU is many times slower than all around them (https://github.com/pytorch/pytorch/issues/174763).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPED = "grouped_mm"  # transformers' name for them
NAME = f"swiftlite_{GROUPED}"


def find_experts(base: nn.Module) -> list[tuple[str, nn.Module]]:
    """Fused experts, by name: what transformers' `use_experts_implementation` marks with these attributes."""
    return [(name, module) for name, module in base.named_modules() if _is_marked(module)]


def _is_marked(module: nn.Module) -> bool:
    return {"num_experts", "is_transposed", "has_gate"} <= vars(module).keys()


def holds_experts(module: nn.Module) -> bool:
    """Whether it has the matrices of several experts in one parameter, marked or by its class's name."""
    return _is_marked(module) or type(module).__name__.endswith("Experts")


def use_autocast_experts(base: PreTrainedModel) -> None:
    """Let grouped products run in the autocast type, as other layers' do. Nothing changes outside of autocast."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if any(experts.config._experts_implementation == GROUPED for _, experts in find_experts(base)):
        compute = functools.partial(_in_autocast_type, ALL_EXPERTS_FUNCTIONS[GROUPED])
        ALL_EXPERTS_FUNCTIONS.register(NAME, compute)
        base.set_experts_implementation(NAME)


class ExpertsView:
    """Experts as a function should see them: it reads what `change` makes of each attribute, but for its own ones."""

    def __init__(self, experts: nn.Module | ExpertsView, change: Callable[[Any], Any], **own: object) -> None:
        self._experts, self._change = experts, change
        vars(self).update(own)

    def __getattr__(self, name: str) -> object:
        return self._change(getattr(self._experts, name))


def _in_autocast_type(
    compute: Callable[..., torch.Tensor],
    experts: nn.Module | ExpertsView,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What transformers' function `compute` gives, `[tokens, hidden]`."""
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        experts, hidden_states = ExpertsView(experts, functools.partial(_cast, dtype)), hidden_states.to(dtype)
    return compute(experts, hidden_states, top_k_index, top_k_weights)


def _cast(dtype: torch.dtype, value: object) -> object:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
