"""AdamW whose moments stay in the host's memory and visit the GPU, piece by piece, for each update.

A GPU then holds 8 of the 16 bytes of a trained parameter. Unlike bitsandbytes' paged optimizers (arXiv 2305.14314,
section 3), which leave it to the driver what to evict, all but small tensors are in pinned memory at all times: what a
run takes is known before it begins. The update itself is `torch.optim.AdamW`'s, bit for bit.
"""

from __future__ import annotations

import torch
from torch import nn

from swiftlite.checkpoint.state import COUNTER, MOMENTS
from swiftlite.dtensors import local, placed_as
from swiftlite.training.optimizers.adamw_bf16 import AdamWBf16

SMALLEST = 1 << 16  # numbers of a tensor whose moments are worth the way


class PagedAdamW(AdamWBf16):
    """`AdamWBf16`, but for where the moments are of tensors of 65,536 numbers on this process and more."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. When it returns, the host may read the moments."""
        super().step(closure)
        devices = {parameter.device for parameter in self.state if parameter.is_cuda}
        for device in devices:  # moments are on their way back, and what reads them next may be the host
            torch.cuda.current_stream(device).synchronize()

    def _is_apart(self, parameter: nn.Parameter) -> bool:
        return _is_paged(parameter) or super()._is_apart(parameter)

    def begin(self, parameter: nn.Parameter) -> None:
        if not _is_paged(parameter):
            super().begin(parameter)
            return
        host = {"dtype": torch.float32, "pin_memory": parameter.is_cuda}
        zeros = {kind: torch.zeros(local(parameter).shape, **host) for kind in MOMENTS}
        self.state[parameter] = {COUNTER: torch.zeros(())} | zeros

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Of a parameter that was updated: divided over processes as the parameter is."""
        return {
            kind: placed_as(parameter, value) if kind in MOMENTS and _is_paged(parameter) else value
            for kind, value in self.state[parameter].items()
        }

    def put_moments(self, parameter: nn.Parameter, moments: dict[str, torch.Tensor]) -> None:
        """Go on from these, as `moments` gives them."""
        if not _is_paged(parameter):
            super().put_moments(parameter, moments)
            return
        self.begin(parameter)
        for kind, value in self.state[parameter].items():
            value.copy_(local(moments[kind]))


def _is_paged(parameter: nn.Parameter) -> bool:
    return local(parameter).numel() >= SMALLEST
