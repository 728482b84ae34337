"""Tensors and modules that a mesh divides, told from plain ones without importing what divides them.

torch.distributed.tensor brings sympy and half of torch's compiler with it: 0.4 s and 40 MiB for every process, which
one that trains alone does without. Where it was never imported, or postponed (`swiftlite.postponed`), nothing is
divided.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return _is_of(tensor, "torch.distributed.tensor", "DTensor")


def is_fsdp_module(module: nn.Module) -> TypeGuard[FSDPModule]:
    return _is_of(module, "torch.distributed.fsdp", "FSDPModule")


def _is_of(value: Any, package: str, kind: str) -> bool:
    cls = vars(sys.modules[package]).get(kind) if package in sys.modules else None
    return cls is not None and isinstance(value, cls)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that a mesh divides; any other as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placed_as(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """This process's part of something that is divided as `like` is, which may lie on another device."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor(part, like._spec, requires_grad=False)


def is_sharding(placement: Placement) -> bool:
    """Whether a placement of a DTensor divides it."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return isinstance(placement, Shard | _StridedShard)
