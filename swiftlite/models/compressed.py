"""Matrices in 8 or 4 bits as the library compressed-tensors stores them, which vLLM, SGLang and transformers read.

A matrix is codes times scales: one scale for a row, or for a group of neighbours in a row. A scale follows from the
largest number that it is for, and a code is the nearest one: no data are needed. Engines round what enters a layer in
the same way, token by token, where a format says so.
Formats and arithmetic: https://github.com/vllm-project/compressed-tensors (`calculate_qparams`, `pack_to_int32`); the
schemes are FP8_DYNAMIC, W8A8 and W4A16 of https://docs.vllm.ai/projects/llm-compressor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swiftlite.config.names import COMPRESSED_TENSORS

GROUPS = (128, 64, 32)  # that vLLM's fast kernels of 4 bits know, the usual one first
CODES_OF_WORD = 8  # codes of 4 bits in an int32
WEIGHT, PACKED, SCALE, SHAPE = "weight", "weight_packed", "weight_scale", "weight_shape"  # names of a layer's tensors


@dataclass(frozen=True)
class Format:
    """How numbers become codes. name: compressed-tensors'; bits: of a code; kind: float or int; codes: their type in
    memory; lowest, largest: of a code; steps: scales that the largest number is, half the way from lowest to largest;
    grouped: a scale is for a group and codes are packed; rounds_inputs: engines round what enters a layer, too."""

    name: str
    bits: int
    kind: str
    codes: torch.dtype
    lowest: float
    largest: float
    steps: float
    grouped: bool = False
    rounds_inputs: bool = True


_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_NORMAL_FP8 = torch.finfo(torch.float8_e4m3fn).smallest_normal
_EXPONENT = 0x7F800000  # the bits of an fp32 that hold it

FORMATS = {
    "fp8": Format("float-quantized", 8, "float", torch.float8_e4m3fn, -_LARGEST_FP8, _LARGEST_FP8, _LARGEST_FP8),
    "int8": Format("int-quantized", 8, "int", torch.int8, -128, 127, 127.5),
    "int4": Format("pack-quantized", 4, "int", torch.int8, -8, 7, 7.5, grouped=True, rounds_inputs=False),
}


def nearest(values: torch.Tensor, form: Format, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of fp32 `[..., n]`, as numbers of `form.codes`, and a scale `[..., 1]` of type `dtype` for each n."""
    codes, scales = _in_fp32(values, form, dtype)
    return codes.to(form.codes), scales


def round_inputs(x: torch.Tensor, form: Format) -> torch.Tensor:
    """What an engine makes of `[..., inputs]` before it multiplies: one scale for each token."""
    codes, scales = _in_fp32(x.float(), form, torch.float32)
    return codes.mul_(scales).to(x.dtype)


def round_matrix(matrix: torch.Tensor, form: Format, group: int | None, dtype: torch.dtype) -> torch.Tensor:
    """fp32 `[outputs, inputs]`: what the codes stand for that `pack` makes of a matrix which files have in `dtype`.
    group, dtype: as of `pack`."""
    values = matrix.to(dtype).float().reshape(len(matrix), -1, group or matrix.shape[1])
    codes, scales = _in_fp32(values, form, dtype)
    return codes.mul_(scales.float()).view(matrix.shape)


def _in_fp32(values: torch.Tensor, form: Format, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What `nearest` gives, the codes as fp32."""
    largest = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True))
    scales = (largest / form.steps).to(dtype)
    scales[scales == 0] = 1  # zeros, or numbers too small for the type: their codes are 0
    codes = (values / scales.float()).clamp_(form.lowest, form.largest)
    return (_to_float8(codes) if form.kind == "float" else codes.round_()), scales


def _to_float8(values: torch.Tensor) -> torch.Tensor:
    """fp32 of at most 448, in place, as the nearest numbers that float8_e4m3fn has. PyTorch's casts there and back give
    the same, one number at a time on a CPU. A number has 3 bits behind its first, and none is smaller than 2^-9; a sum
    with 2^20 times the power of two below it ends at the last of those bits."""
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=_SMALLEST_NORMAL_FP8)
    shift = power.mul_(1.5 * 2**20)  # and half of it, for sums with a negative number to have as many bits
    return values.add_(shift).sub_(shift)


def pack(matrix: torch.Tensor, form: Format, group: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a layer, by their names in it. matrix: fp32 `[outputs, inputs]`; group: how many numbers of a row
    share a scale, None for all of them; dtype: of scales `[outputs, inputs / group]`."""
    outputs, inputs = matrix.shape
    codes, scales = nearest(matrix.reshape(outputs, -1, group or inputs), form, dtype)
    codes, scales = codes.reshape(outputs, inputs), scales.squeeze(-1)
    if not form.grouped:
        return {WEIGHT: codes, SCALE: scales}
    return {PACKED: _pack_words(codes), SCALE: scales, SHAPE: torch.tensor([outputs, inputs])}


def stored(shape: tuple[int, int], form: Format, group: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """Shape and type of what `pack` makes of a matrix `[outputs, inputs]`, by their names."""
    outputs, inputs = shape
    scales = {SCALE: ((outputs, inputs // (group or inputs)), dtype)}
    if not form.grouped:
        return {WEIGHT: ((outputs, inputs), form.codes)} | scales
    return {PACKED: ((outputs, inputs // CODES_OF_WORD), torch.int32)} | scales | {SHAPE: ((2,), torch.int64)}


def config_section(form: Format, group: int | None, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. ignored: layers that an engine would take for linear ones of the format."""
    code = {"num_bits": form.bits, "type": form.kind, "symmetric": True}
    strategy = {"strategy": "group", "group_size": group} if form.grouped else {"strategy": "channel"}
    scheme = {
        "targets": ["Linear"],
        "format": form.name,
        "weights": code | strategy | {"dynamic": False},
        "input_activations": code | {"strategy": "token", "dynamic": True} if form.rounds_inputs else None,
        "output_activations": None,
    }
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": form.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _pack_words(codes: torch.Tensor) -> torch.Tensor:
    """int32 `[outputs, inputs / 8]` of codes -8 to 7: each plus 8, the first one in the lowest bits."""
    digits = (codes + 8).to(torch.int32).view(len(codes), -1, CODES_OF_WORD)
    words = digits[..., 0].clone()
    for place in range(1, CODES_OF_WORD):
        words |= digits[..., place] << 4 * place
    return words
