"""The number types that flags name, and which of them a device is fast at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def named_dtype(name: str, where: str, *, kind: str = "number type") -> torch.dtype:
    """What the flag `where`, which also takes `auto`, names. Raises UserError for a name that is none."""
    if name not in DTYPES:
        raise UserError(f"unknown {kind} {name!r}", where=where, fix=f"give auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def source_dtype(config: PretrainedConfig) -> torch.dtype:
    """That of a model's files."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def added_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which many numbers of a type are added up: fp32 for those of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def fast_at_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    info = Path("/proc/cpuinfo")
    return info.is_file() and "amx_bf16" in info.read_text()
