"""The device of a run and the number type it computes in; trained weights are fp32 masters in every mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

FP16_FIRST_SCALE = 2.0**16


def pick_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class Precision:
    """name: `fp32`, `bf16` or `fp16`; dtype: what matrix products run in."""

    name: str
    dtype: torch.dtype

    @contextlib.contextmanager
    def compute(self, device: torch.device) -> Iterator[None]:
        """Where the forward pass runs: autocast, with fp32 weights cast for each product, or nothing for fp32."""
        if self.dtype == torch.float32:
            yield
        else:
            with torch.autocast(device.type, self.dtype):
                yield

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Dynamic loss scaling (arXiv 1710.03740), active in fp16 only."""
        return torch.amp.GradScaler(device.type, init_scale=FP16_FIRST_SCALE, enabled=self.name == "fp16")


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(name: str, device: torch.device) -> Precision:
    """`auto` is bf16 where the device is fast at it, else fp32."""
    if name == "auto":
        name = "bf16" if fast_at_bf16(device) else "fp32"
    return Precision(name, DTYPES[name])


def fast_at_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    info = Path("/proc/cpuinfo")
    return info.is_file() and "amx_bf16" in info.read_text()
