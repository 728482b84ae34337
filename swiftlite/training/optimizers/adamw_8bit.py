"""AdamW that keeps each moment in a byte: blocks of 256 numbers share a scale (arXiv 2110.02861).

The arithmetic is that of bitsandbytes, on CPU and CUDA. Checkpoints hold the moments in fp32 as those of any run do, so
a run goes on in another layout, or with the other optimizer. The table of signed values is symmetric, which
bitsandbytes' own is not: then a block that is taken apart and put together again has the same bytes, and a run that
goes on from a checkpoint stays the same bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swiftlite.checkpoint.state import COUNTER, MOMENTS
from swiftlite.dtensors import local, placed_as
from swiftlite.training.optimizers.adamw_bf16 import AdamWBf16, in_fp32

BLOCK = 256  # numbers that share a scale; the CUDA kernel knows no other count
PIECE = BLOCK << 12  # numbers that are packed at a time, and on a CPU updated
SMALLEST = 4096  # numbers of a tensor whose moments are worth packing


@dataclass
class PackedMoment:
    """codes: uint8, of n numbers in the moment's shape; scales: fp32 `[ceil(n / 256)]`, the largest magnitude of each
    block; table: fp32 `[256]`, the value of each code."""

    codes: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor

    @classmethod
    def pack(cls, values: torch.Tensor, table: torch.Tensor) -> PackedMoment:
        """The nearest codes. values: fp32.

        Written out here: what `unpack` gave has to become the same codes again, which bitsandbytes' own search through
        the table misses now and then on a CPU.
        """
        packed = cls.zeros(values.shape, table)
        borders, tiny = (table[1:] + table[:-1]) / 2, torch.finfo(torch.float32).tiny
        pieces = zip(
            values.flatten().split(PIECE),
            packed.codes.view(-1).split(PIECE),
            packed.scales.split(PIECE // BLOCK),
            strict=True,
        )
        for numbers, codes, scales in pieces:
            blocks = F.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
            scales.copy_(blocks.abs().amax(1))
            found = torch.bucketize(blocks / scales.clamp(min=tiny)[:, None], borders, out_int32=True)
            codes.copy_(found.view(-1)[: numbers.numel()])
        return packed

    @classmethod
    def zeros(cls, shape: torch.Size, table: torch.Tensor) -> PackedMoment:
        """Of this shape, before the first update."""
        [zero] = (table == 0).nonzero()[0].tolist()
        codes = torch.full(shape, zero, dtype=torch.uint8, device=table.device)
        return cls(codes, table.new_zeros(-(-codes.numel() // BLOCK)), table)

    def unpack(self) -> torch.Tensor:
        """fp32."""
        return torch.ops.bitsandbytes.dequantize_blockwise(self.codes, self.scales, self.table, BLOCK, torch.float32)


class AdamW8bit(AdamWBf16):
    """`AdamWBf16`, but for tensors of 4,096 numbers on this process and more.

    Needs the package bitsandbytes.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        import bitsandbytes  # noqa: F401 - registers the operators

        super().__init__(groups, **options)

    def _is_apart(self, parameter: nn.Parameter) -> bool:
        return _is_packed(parameter) or super()._is_apart(parameter)

    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if not _is_packed(parameter):
            super()._update(group, parameter)
            return
        if parameter not in self.state:
            self.begin(parameter)
        state, chance = self.state[parameter], self._chance(parameter)
        state[COUNTER] += 1
        mean, square = (state[kind] for kind in MOMENTS)
        flat = [part.view(-1) for part in (local(parameter), mean.codes, square.codes)]
        pieces = (local(parameter.grad).reshape(-1), *flat, mean.scales, square.scales)
        for gradient, weights, codes, squares, scales, square_scales in _pieces(*pieces):
            with in_fp32(weights, chance) as exact:
                torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                    "adam",
                    gradient.float(),
                    exact,
                    codes,
                    squares,
                    *group["betas"],
                    0.0,  # beta3 and alpha of another optimizer
                    0.0,
                    group["eps"],
                    int(state[COUNTER]),
                    group["lr"],
                    mean.table,
                    square.table,
                    scales,
                    square_scales,
                    group["weight_decay"],
                    1.0,  # times the gradient
                )

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """As `AdamWBf16.moments`; what is packed in the host's memory: a GPU that needs it has no room for more."""
        return {
            kind: placed_as(parameter, value.unpack().cpu()) if isinstance(value, PackedMoment) else value
            for kind, value in self.state[parameter].items()
        }

    def begin(self, parameter: nn.Parameter) -> None:
        if not _is_packed(parameter):
            super().begin(parameter)
            return
        tables = _tables(parameter.device)
        fresh = {kind: PackedMoment.zeros(local(parameter).shape, tables[kind]) for kind in MOMENTS}
        self.state[parameter] = {COUNTER: torch.zeros(())} | fresh

    def put_moments(self, parameter: nn.Parameter, moments: dict[str, torch.Tensor]) -> None:
        """Go on from these, as `moments` gives them."""
        super().put_moments(parameter, moments)
        if _is_packed(parameter):
            tables = _tables(parameter.device)
            self.state[parameter] |= {kind: PackedMoment.pack(local(moments[kind]), tables[kind]) for kind in MOMENTS}


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Four flat tensors and two of a scale for each block, in pieces of whole blocks; on a GPU as one piece.

    On a CPU the update unpacks all that it is given: pieces bound the memory that this takes, and are updated faster.
    """
    if tensors[0].is_cuda:
        yield tensors
        return
    yield from zip(*(t.split(PIECE) for t in tensors[:4]), *(t.split(PIECE // BLOCK) for t in tensors[4:]), strict=True)


def _is_packed(parameter: nn.Parameter) -> bool:
    return local(parameter).numel() >= SMALLEST


@functools.cache
def _tables(device: torch.device) -> dict[str, torch.Tensor]:
    """What the codes of each moment stand for."""
    from bitsandbytes.functional import create_dynamic_map

    signed = create_dynamic_map(signed=True)
    signed[0] = -1.0
    mean, square = MOMENTS
    return {mean: signed.to(device), square: create_dynamic_map(signed=False).to(device)}
