"""The number types that flags name, and which of them a device is fast at."""

from __future__ import annotations

from pathlib import Path

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fast_at_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    info = Path("/proc/cpuinfo")
    return info.is_file() and "amx_bf16" in info.read_text()
