"""Which part of a whole tensor this process holds: boxes of a tensor, and where the placements of a DTensor put them.

One arithmetic serves both directions: reading takes the overlap of what a file holds and what this process holds out
of the file, saving puts the same overlap into it. No tensor is ever gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swiftlite.dtensors import is_dtensor, is_sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A box of a tensor: its first corner and its extent along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """What two boxes of the same tensor have in common, None where that is nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = [min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        shape = tuple(end - first for end, first in zip(ends, start, strict=True))
        return Box(start, shape) if all(extent > 0 for extent in shape) else None

    def slices_of(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        return tuple(
            slice(first - base, first - base + extent)
            for first, extent, base in zip(self.start, self.shape, outer.start, strict=True)
        )


@dataclass(frozen=True)
class Holding:
    """A part of a whole tensor in this process. tensor: a view into the local memory, of the box's shape."""

    box: Box
    tensor: torch.Tensor


def whole(shape: torch.Size | tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def holdings(tensor: torch.Tensor) -> list[Holding]:
    """What this process holds of a tensor: all of a plain one, its shard of a DTensor (nothing where that is empty)."""
    if not is_dtensor(tensor):
        return [Holding(whole(tensor.shape), tensor.detach())]
    local = tensor.detach().to_local()
    return [Holding(local_box(tensor), local)] if local.numel() or not local.ndim else []


def local_box(tensor: DTensor) -> Box:
    """The box of a DTensor's local shard.

    A mesh dimension divides what the ones before it leave, by the rule of `torch.chunk`. FSDP on top of tensor
    parallelism marks its own division `_StridedShard`: it comes last although its mesh dimension stands first.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    start, shape = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    marked = list(enumerate(tensor.placements))
    last = [pair for pair in marked if isinstance(pair[1], _StridedShard)]
    for mesh_dimension, placement in [pair for pair in marked if pair not in last] + last:
        if not is_sharding(placement):
            continue
        dimension, parts = placement.dim, tensor.device_mesh.size(mesh_dimension)
        size = -(-shape[dimension] // parts)
        first = min(shape[dimension], size * coordinate[mesh_dimension])
        start[dimension] += first
        shape[dimension] = min(size, shape[dimension] - first)
    return Box(tuple(start), tuple(shape))
