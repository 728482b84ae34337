"""Chains of elementwise operations as one kernel on a GPU.

PyTorch runs such a chain operation by operation, and each reads and writes all numbers: on a GPU that is what it costs.
torch.compile makes one Triton kernel of it. Functions that are used so are written in plain PyTorch, and run as they
are on a CPU and where Triton or the C compiler that it calls is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import TypeVar

import torch

from swiftlite.imports import is_installed

Function = TypeVar("Function", bound=Callable)
VOLTA = (7, 0)  # the oldest generation of GPUs that Triton knows
C_COMPILERS = ("gcc", "clang", "cc")  # that Triton looks for, where $CC names none


@functools.cache
def can_fuse() -> bool:
    """Whether Triton can make kernels for the GPU here."""
    compiles = is_installed("triton") and bool(os.environ.get("CC") or any(map(shutil.which, C_COMPILERS)))
    return compiles and torch.cuda.get_device_capability() >= VOLTA


def fused(*, dynamic: bool | None = None) -> Callable[[Function], Function]:
    """A decorator: the function as one kernel where its first argument, a tensor, lies on a GPU. It may change tensors
    in place. dynamic: as `torch.compile` takes it: whether sizes are any from the start, or those that change."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(first: torch.Tensor, *rest: object) -> object:
            return (compiled() if first.is_cuda and can_fuse() else function)(first, *rest)

        @functools.cache
        def compiled() -> Callable:
            return torch.compile(function, dynamic=dynamic)

        return run

    return decorate
