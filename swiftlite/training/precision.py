"""The device of a run and the number types it computes in and keeps trained weights in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swiftlite.models.dtypes import DTYPES, fast_at_bf16

FP16_FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2000
SMALLEST_FP16_SCALE = 1.0  # overflow at this loss scale is no matter of scaling any more
CPU_WIDTH = 512  # of hidden states, from which a CPU that multiplies fast in bf16 is faster as a whole


@dataclass
class LossScale:
    """Dynamic loss scaling (arXiv 1710.03740): halved after an overflow, doubled after 2,000 steps without one.

    Whether gradients overflowed is read off their global norm, which every process of a run knows alike.
    """

    value: float
    good_steps: int = 0
    dynamic: bool = True

    def update(self, *, overflowed: bool) -> None:
        if not self.dynamic:
            return
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value = max(self.value / 2, SMALLEST_FP16_SCALE)
        elif self.good_steps == STEPS_TO_GROW:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def can_shrink(self) -> bool:
        return self.dynamic and self.value > SMALLEST_FP16_SCALE


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return "CPU, 1 thread" if threads == 1 else f"CPU, {threads} threads"


@dataclass(frozen=True)
class Precision:
    """name: `fp32`, `bf16` or `fp16`; dtype: what matrix products run in; masters: what trained weights are kept in;
    fp8: torchao's recipe for products of the layers in 8 bits, or `none`."""

    name: str
    dtype: torch.dtype
    masters: torch.dtype = torch.float32
    fp8: str = "none"

    @property
    def words(self) -> str:
        masters = "" if self.masters == torch.float32 else " without fp32 masters"
        return self.name + masters + (f", products in 8 bits ({self.fp8})" if self.fp8 != "none" else "")

    @contextlib.contextmanager
    def compute(self, device: torch.device) -> Iterator[None]:
        """Where the forward pass runs: autocast, with masters cast for each product, or nothing for fp32."""
        if self.dtype == torch.float32:
            yield
        else:
            with torch.autocast(device.type, self.dtype):
                yield

    def loss_scale(self) -> LossScale:
        return LossScale(FP16_FIRST_SCALE) if self.name == "fp16" else LossScale(1.0, dynamic=False)


def resolve_precision(
    name: str, device: torch.device, *, pure_bf16: bool = False, fp8: str = "none", width: int = 0
) -> Precision:
    """`auto` is bf16 where the device is fast at it or the weights are bf16, else fp32. width: of hidden states; 0 of a
    mixture, where few tokens meet an expert."""
    if name == "auto":
        wide = device.type != "cpu" or width >= CPU_WIDTH
        name = "bf16" if pure_bf16 or (wide and fast_at_bf16(device)) else "fp32"
    return Precision(name, DTYPES[name], torch.bfloat16 if pure_bf16 else torch.float32, fp8)
