"""Weights that files hold as codes beside scales, read as the numbers that these stand for.

Many models are published so: in 8-bit floats with a scale for each block of 128 x 128 (DeepSeek V3, Qwen3's FP8 models;
transformers' `fp8`), in 4-bit floats with a power of two for each 32 (gpt-oss; `mxfp4`, OCP Microscaling Formats 1.0),
in whole numbers or 8-bit floats with a scale for each row or group (`compressed-tensors`), or as bitsandbytes has them:
NF4 or FP4 (arXiv 2305.14314) and whole numbers. What of a tensor is asked for is read and multiplied, nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiftlite.checkpoint.safetensors_files import TensorEntry

CODED = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "I8", "U8"}  # types that are no numbers alone
SCALES = ("weight_scale_inv", "weight_scale", "SCB")  # to multiply by, all of them; the last by a 127th of it
QUANT_STATE = ".quant_state.bitsandbytes__"
BESIDE = (
    "weight_zero_point", "weight_g_idx", "weight_shape", "weight_format", "input_scale", "activation_scale",
)  # fmt: skip
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes; the highest of four bits is the sign
BLOCK = 32  # of mxfp4
EXPONENT_BIAS = 127

Read = Callable[[str, "tuple[slice, ...] | None"], torch.Tensor]  # a tensor of the files by its name, or a part of it
Part = tuple[slice, ...] | None


class Codes(Protocol):
    """A tensor that is made of others. shape: its own; names: of those."""

    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        """fp32, of the whole or a part."""


def find_codes(entries: Mapping[str, TensorEntry], raw: Read) -> dict[str, Codes]:
    """The tensors that are written as codes, by the names that they have elsewhere. entries: of the files."""
    found: dict[str, Codes] = {}
    for name, entry in entries.items():
        place, _, kind = name.rpartition(".")
        scales = next((f"{place}.{scale}" for scale in SCALES if f"{place}.{scale}" in entries), None)
        if kind == "weight" and entry.dtype in CODED and scales is not None:
            zeros = f"{place}.weight_zero_point"
            found[name] = Scaled(entry.shape, name, scales, zeros if zeros in entries else None)
        elif kind == "weight_packed" and scales is not None and f"{place}.weight_shape" in entries:
            rows, columns = raw(f"{place}.weight_shape", None).tolist()
            found[f"{place}.weight"] = Packed((rows, columns), name, scales, 32 * entry.shape[1] // columns)
        elif QUANT_STATE in name:
            whole = name.partition(QUANT_STATE)[0]
            state = json.loads(bytes(raw(name, None).tolist()))
            found[whole] = Tabled(tuple(state["shape"]), whole, name, state)
        elif name.endswith("_blocks") and (whole := name.removesuffix("_blocks")) + "_scales" in entries:
            experts, rows, groups, _ = entry.shape
            found[whole] = Microscaled((experts, groups * BLOCK, rows), name, f"{whole}_scales")
    return found


def without_codes(entries: Mapping[str, TensorEntry], found: Mapping[str, Codes]) -> dict[str, TensorEntry]:
    """The entries as if the files held the numbers themselves."""
    parts = {name for codes in found.values() for name in codes.names}
    beside = {f"{name.removesuffix('.weight')}.{more}" for name in found for more in BESIDE}
    plain = {name: entry for name, entry in entries.items() if name not in parts | beside}
    return plain | {
        name: TensorEntry(entries[codes.names[0]].file, "F32", codes.shape) for name, codes in found.items()
    }


@dataclass(frozen=True)
class Scaled:
    """`(codes - zeros) * scales`, a scale for each block. codes, scales, zeros: names; no zeros where None."""

    shape: tuple[int, ...]
    codes: str
    scales: str
    zeros: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.codes, self.scales, *([self.zeros] if self.zeros else []))

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        codes, wanted = raw(self.codes, part).float(), _ranges(self.shape, part)
        if self.zeros is not None:
            codes -= _spread(raw(self.zeros, None), self.shape, wanted)
        scales = raw(self.scales, None)
        return codes.mul_(_spread(scales / 127 if self.scales.endswith("SCB") else scales, self.shape, wanted))


@dataclass(frozen=True)
class Packed:
    """The same of codes of a few bits, several in 32 bits, the first in the lowest; half their range is zero."""

    shape: tuple[int, ...]
    codes: str
    scales: str
    bits: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.codes, self.scales

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        rows, columns = wanted = _ranges(self.shape, part)
        each = 32 // self.bits
        first = columns.start // each
        packed = raw(self.codes, (slice(rows.start, rows.stop), slice(first, -(-columns.stop // each))))
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes = (packed[..., None] >> shifts & (1 << self.bits) - 1).flatten(1) - (1 << self.bits - 1)
        codes = codes[:, columns.start - first * each : columns.stop - first * each].float()
        return codes.mul_(_spread(raw(self.scales, None), self.shape, wanted))


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
        first = inputs.start // BLOCK
        place = (
            slice(experts.start, experts.stop),
            slice(outputs.start, outputs.stop),
            slice(first, -(-inputs.stop // BLOCK)),
        )
        pairs = raw(self.blocks, (*place, slice(None)))
        numbers = _fp4_pairs()[pairs.int()].flatten(3)
        numbers = torch.ldexp(numbers, raw(self.scales, place).int()[..., None] - EXPONENT_BIAS).flatten(2)
        return numbers[..., inputs.start - first * BLOCK : inputs.stop - first * BLOCK].transpose(1, 2)


@dataclass(frozen=True)
class Tabled:
    """bitsandbytes' four bits, two codes a byte, the first in the upper half: places of a table, with a scale for each
    so many numbers of the flat tensor; the scales may be codes themselves. state: as its file says it."""

    shape: tuple[int, ...]
    codes: str
    described: str
    state: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        nested = ("nested_absmax", "nested_quant_map") if "nested_offset" in self.state else ()
        return self.codes, self.described, *(f"{self.codes}.{more}" for more in ("absmax", "quant_map", *nested))

    def read(self, raw: Read, part: Part) -> torch.Tensor:
        rows, *others = _ranges(self.shape, part)
        width = math.prod(self.shape[1:])
        first, last = rows.start * width, rows.stop * width
        pairs = raw(self.codes, (slice(first // 2, -(-last // 2)), slice(None))).flatten().int()
        places = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten()[first % 2 :][: last - first]
        flat = torch.arange(first, last) // self.state["blocksize"]
        numbers = raw(f"{self.codes}.quant_map", None).float()[places] * self._scales(raw)[flat]
        return numbers.view(len(rows), *self.shape[1:])[:, *(slice(r.start, r.stop) for r in others)]

    def _scales(self, raw: Read) -> torch.Tensor:
        scales = raw(f"{self.codes}.absmax", None)
        if "nested_offset" not in self.state:
            return scales.float()
        table, largest = (raw(f"{self.codes}.nested_{more}", None).float() for more in ("quant_map", "absmax"))
        blocks = torch.arange(len(scales)) // self.state["nested_blocksize"]
        return table[scales.int()] * largest[blocks] + self.state["nested_offset"]


def _fp4_pairs() -> torch.Tensor:
    """The two numbers of each byte, `[256, 2]`."""
    values, codes = torch.tensor([*FP4, *(-value for value in FP4)]), torch.arange(256)
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=-1)


def _ranges(shape: tuple[int, ...], part: Part) -> list[range]:
    return [range(size)[wanted] for size, wanted in zip(shape, part or (slice(None),) * len(shape), strict=True)]


def _spread(scales: torch.Tensor, shape: tuple[int, ...], wanted: list[range]) -> torch.Tensor:
    """A scale for each number of a part. scales: one for each block of `shape`, or for each row, or for all."""
    values = torch.exp2(scales.float() - EXPONENT_BIAS) if scales.dtype == torch.uint8 else scales.float()
    values = values.reshape([*values.shape, *[1] * (len(shape) - values.dim())])
    for dim, (size, places) in enumerate(zip(shape, wanted, strict=True)):
        block = _block(size, values.shape[dim])
        values = values.index_select(dim, torch.arange(places.start, places.stop) // block)
    return values


def _block(size: int, count: int) -> int:
    """How many numbers share a scale: a power of two, the last block may have fewer; else equal parts."""
    block = 1 << max(0, -(-size // count) - 1).bit_length()
    return block if -(-size // block) == count else size // count
