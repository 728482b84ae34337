"""Weights that files hold as codes beside scales, read as the numbers that these stand for.

Many models are published so: in 8-bit floats with a scale for each block of 128 x 128 (DeepSeek V3, Qwen3's FP8 models;
transformers' `fp8`), in 4-bit floats with a power of two for each 32 (gpt-oss; `mxfp4`, OCP Microscaling Formats 1.0),
in whole numbers or 8-bit floats with a scale for each row or group (`compressed-tensors`), or as bitsandbytes has them:
NF4 or FP4 (arXiv 2305.14314) and whole numbers. What of a tensor is asked for is read and multiplied, nothing else.
What these tensors are is told by `swiftlite.checkpoint.described`, which also checks that they fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the highest of four bits is the sign
BLOCK = 32  # of mxfp4
EXPONENT_BIAS = 127
WORD = 32  # bits

Read = Callable[[str, "tuple[slice, ...] | None"], torch.Tensor]  # a tensor of the files by its name, or a part of it
Part = tuple[slice, ...] | None


class Codes(Protocol):
    """A tensor that is made of others. shape: its own; names: of those."""

    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        """fp32, of the whole or a part."""


@dataclass(frozen=True)
class Grid:
    """A number for each block of a tensor. name: in the files; shape: there; blocks: how many numbers of the tensor
    share one, for each of its dimensions; groups: the place of each column's block, None where these are in order."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    groups: torch.Tensor | None = None

    def read(self, raw: Read, wanted: list[range], *, exponents: bool = False) -> torch.Tensor:
        """fp32, one for each number of a part of the tensor, or one that stands for many. exponents: bytes are."""
        places = [_blocks_of(numbers, block) for numbers, block in zip(wanted, self.blocks, strict=True)]
        if self.groups is not None:
            places[-1] = slice(None)
        values = raw(self.name, tuple(places[: len(self.shape)]) or None)
        values = torch.exp2(values.float() - EXPONENT_BIAS) if exponents else values.float()
        values = values.reshape([*values.shape, *[1] * (len(wanted) - values.dim())])
        for dim in reversed(range(len(wanted))):  # which makes the large copy last
            numbers, block = wanted[dim], self.blocks[dim]
            if dim == len(wanted) - 1 and self.groups is not None:
                values = values.index_select(dim, self.groups[numbers.start : numbers.stop])
            elif values.shape[dim] > 1 and block > 1:
                values = _repeated(values, block, dim).narrow(dim, numbers.start % block, len(numbers))
        return values


@dataclass(frozen=True)
class Scaled:
    """`(codes - zeros) * scales / divisor`. codes: a name; zeros: None for none; exponents: scales are bytes that are
    exponents of 2."""

    shape: tuple[int, ...]
    codes: str
    scales: Grid
    zeros: Grid | None = None
    exponents: bool = False
    divisor: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return (self.codes, self.scales.name, *([self.zeros.name] if self.zeros else []))

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        codes, wanted = raw(self.codes, part).float(), _ranges(self.shape, part)
        if self.zeros is not None:
            codes -= self.zeros.read(raw, wanted)
        return codes.mul_(self.scales.read(raw, wanted, exponents=self.exponents) / self.divisor)


@dataclass(frozen=True)
class Packed:
    """The same of codes of 2, 4 or 8 bits, several in 32 bits, the first in the lowest; half their range is zero.
    zeros: packed in the same way down the columns where `zeros_packed`."""

    shape: tuple[int, ...]
    codes: str
    scales: Grid
    bits: int
    zeros: Grid | None = None
    zeros_packed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.codes, self.scales.name, *([self.zeros.name] if self.zeros else []))

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        rows, columns = wanted = _ranges(self.shape, part)
        words = _blocks_of(columns, WORD // self.bits)
        codes = _unpacked(raw(self.codes, (slice(rows.start, rows.stop), words)), self.bits)
        codes = codes.narrow(1, columns.start % (WORD // self.bits), len(columns))
        if self.zeros is not None:
            codes -= self.zeros.read(self._unpacked_zeros(raw), wanted)
        return codes.mul_(self.scales.read(raw, wanted))

    def _unpacked_zeros(self, raw: Read) -> Read:
        """Reads zeros as if the files held them by themselves."""
        if not self.zeros_packed:
            return raw

        def read(name: str, part: Part) -> torch.Tensor:
            rows, groups = _ranges(self.zeros.shape, part)
            words = raw(name, (_blocks_of(rows, WORD // self.bits), slice(groups.start, groups.stop)))
            return _unpacked(words.T, self.bits).T.narrow(0, rows.start % (WORD // self.bits), len(rows))

        return read


@dataclass(frozen=True)
class Microscaled:
    """The experts of a layer, `[experts, inputs, outputs]`, in files `[experts, outputs, inputs]` as two 4-bit floats a
    byte, the first in the lower half, and an exponent for each 32 of the inputs."""

    shape: tuple[int, ...]
    blocks: str
    scales: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.blocks, self.scales

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        experts, inputs, outputs = _ranges(self.shape, part)
        groups = _blocks_of(inputs, BLOCK)
        place = (slice(experts.start, experts.stop), slice(outputs.start, outputs.stop), groups)
        numbers = _looked_up(raw(self.blocks, (*place, slice(None))), _fp4_pairs())
        exponents = raw(self.scales, place).float() - EXPONENT_BIAS
        numbers = numbers.mul_(torch.exp2(exponents)[..., None]).flatten(2)
        return numbers.narrow(2, inputs.start % BLOCK, len(inputs)).transpose(1, 2)


@dataclass(frozen=True)
class Tabled:
    """bitsandbytes' four bits, two codes a byte, the first in the upper half: places of a table, with a scale for each
    so many numbers of the flat tensor; the scales may be codes themselves. state: as its file says it; width: bytes of
    what the codes are stored as."""

    shape: tuple[int, ...]
    codes: str
    described: str
    state: Mapping[str, Any]
    width: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        nested = ("nested_absmax", "nested_quant_map") if "nested_offset" in self.state else ()
        return self.codes, self.described, *(f"{self.codes}.{more}" for more in ("absmax", "quant_map", *nested))

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        rows, *others = _ranges(self.shape, part)
        row = math.prod(self.shape[1:])
        numbers = range(rows.start * row, rows.stop * row)
        stored = raw(self.codes, (_blocks_of(numbers, 2 * self.width), slice(None))).contiguous()
        table = raw(f"{self.codes}.quant_map", None).float()
        values = _looked_up(stored.view(torch.uint8).flatten(), torch.cartesian_prod(table, table))
        values = values.narrow(0, numbers.start % (2 * self.width), len(numbers))
        block = self.state["blocksize"]
        scales = _repeated(self._scales(raw, _blocks_of(numbers, block)), block, 0)
        values *= scales.narrow(0, numbers.start % block, len(numbers))
        return values.view(len(rows), *self.shape[1:])[:, *(slice(r.start, r.stop) for r in others)]

    def _scales(self, raw: Read, part: slice) -> torch.Tensor:
        scales = raw(f"{self.codes}.absmax", (part,))
        if "nested_offset" not in self.state:
            return scales.float()
        table, largest = (raw(f"{self.codes}.nested_{more}", None).float() for more in ("quant_map", "absmax"))
        blocks = torch.arange(part.start, part.stop) // self.state["nested_blocksize"]
        return table[scales.int()] * largest[blocks] + self.state["nested_offset"]


@cache
def _fp4_pairs() -> torch.Tensor:
    """The two numbers of each byte, `[256, 2]`, the first in its lower half."""
    values = torch.tensor([*FP4, *(-value for value in FP4)])
    return torch.cartesian_prod(values, values).flip(1)


def _looked_up(codes: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """fp32 `[..., 2 n]`, for each byte of `[..., n]` the two numbers that `pairs`, `[256, 2]`, has."""
    at_once = pairs.contiguous().view(torch.int64).flatten()
    return at_once.index_select(0, codes.flatten().int()).view(torch.float32).view(*codes.shape[:-1], -1)


def _repeated(values: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Each value so many times, in a fraction of `repeat_interleave`'s time."""
    sizes = [*values.shape[: dim + 1], count, *values.shape[dim + 1 :]]
    return values.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 `[rows, codes]`, less half their range, of int32 `[rows, words]`."""
    in_bytes = words.contiguous().view(torch.uint8)
    codes = torch.stack([in_bytes >> place & (1 << bits) - 1 for place in range(0, 8, bits)], dim=-1)
    return codes.flatten(1).float().sub_(1 << bits - 1)


def _ranges(shape: tuple[int, ...], part: Part) -> list[range]:
    return [range(size)[wanted] for size, wanted in zip(shape, part or (slice(None),) * len(shape), strict=True)]


def _blocks_of(numbers: range, block: int) -> slice:
    """The blocks that hold some of a row of numbers."""
    return slice(numbers.start // block, max(numbers.start // block, -(-numbers.stop // block)))
