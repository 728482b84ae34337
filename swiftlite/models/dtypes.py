"""The number types that flags name, and which of them a device is fast at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftlite.config.names import codes_section
from swiftlite.config.types import DTYPE, plain_word
from swiftlite.errors import UserError
from swiftlite.models.processor import instructions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BF16_PRODUCTS = {"amx_bf16", "avx512_bf16"}  # extensions of x86


def named_dtype(name: str, where: str, *, kind: str = "number type") -> torch.dtype | None:
    """What the flag `where` names, None for `auto`. Raises UserError for a name that is none."""
    word = plain_word(name)
    word = DTYPE.get(word, word)
    if word != "auto" and word not in DTYPES:
        raise UserError(f"unknown {kind} {name!r}", where=where, fix=f"give auto, {', '.join(DTYPES)}")
    return DTYPES.get(word)


def source_dtype(config: PretrainedConfig) -> torch.dtype:
    """That of a model's files; where they hold codes and nothing says of what, bf16, which engines make of them."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return torch.bfloat16 if codes_section(config.to_dict()) else torch.float32


def added_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which many numbers of a type are added up: fp32 for those of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def fast_at_bf16(device: torch.device) -> bool:
    """Whether it multiplies bf16 several times as fast as fp32, and does not have to emulate it. Of CPUs Intel's with
    AMX have seven times the rate, and those with AVX-512's dot products of bf16 (AMD's Zen 4 and later) twice."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return not instructions().isdisjoint(BF16_PRODUCTS)
