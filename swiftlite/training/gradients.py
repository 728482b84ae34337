"""Memory of gradients that stays from step to step.

Gradients that are made anew in each step land between the activations that are given back around them, and what is left
there is too small for the next ones: the C library's heap grew by a tenth of a run's memory. In one block of their own
they leave the heap to activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

ALIGNMENT = 64  # bytes, what PyTorch gives every tensor


class KeptGradients:
    """One block for the gradients of a module's parameters, those that are trained in fp32."""

    def __init__(self, module: nn.Module) -> None:
        """The block is made at the first step: the module may still be on `meta`."""
        self._module = module
        self._places: list[tuple[nn.Parameter, torch.Tensor]] = []

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """While gradients are added up. A parameter that got none has none afterwards, as ever."""
        if not self._places:
            self._places = list(_lay_out([p for p in self._module.parameters() if _fits(p)]))
        untouched = []
        for parameter, place in self._places:
            parameter.grad = place.zero_()
            untouched.append(place._version)
        yield
        for (parameter, place), version in zip(self._places, untouched, strict=True):
            if place._version == version:
                parameter.grad = None


def _fits(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype == torch.float32 and parameter.is_contiguous()


def _lay_out(parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each with memory of its shape, one after another."""
    sizes = [-(-4 * parameter.numel() // ALIGNMENT) * ALIGNMENT // 4 for parameter in parameters]
    for parameter, part in zip(parameters, torch.empty(sum(sizes)).split(sizes), strict=True):
        # Views count changes together with what they are views of; `.data` counts its own.
        yield parameter, part[: parameter.numel()].view_as(parameter).data
