"""The processes of a run as one mesh, `pp x dp_replicate x dp_shard x cp x tp`, and the sums over its dimensions.

Weights are sharded over `dp_shard` and `cp` together (both compute gradients of the same weights for different tokens),
so the mesh that holds them is `pp x dp_replicate x fsdp x tp`. Every reduction over data is a plain SUM.
Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.DeviceMesh
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiftlite.config.layout import Layout

SPLIT = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
STORED = ("pp", "dp_replicate", "fsdp", "tp")


@dataclass(frozen=True)
class Mesh:
    """This process's place among all of them.

    stored: the mesh of the weights (`pp, dp_replicate, fsdp, tp`), None in a run of one process; split: how tokens are
    divided (`pp, dp_replicate, dp_shard, cp, tp`), None likewise.
    """

    layout: Layout
    device: torch.device
    stored: DeviceMesh | None = None
    split: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        """Global rank; 0 speaks."""
        return dist.get_rank() if self.stored is not None else 0

    @property
    def data_rank(self) -> int:
        """Which of the `layout.data_ranks` shares of a step this process computes."""
        return self.place("dp_replicate") * self.layout.dp_shard + self.place("dp_shard")

    def place(self, dimension: str) -> int:
        """This process's coordinate along a dimension of either mesh."""
        if self.stored is None:
            return 0
        mesh = self.split if dimension in SPLIT else self.stored
        return mesh.get_local_rank(dimension)

    def size(self, dimension: str) -> int:
        if self.stored is None:
            return 1
        mesh = self.split if dimension in SPLIT else self.stored
        return mesh[dimension].size()

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """The processes along a dimension, None where this one is alone there."""
        if self.size(dimension) == 1:
            return None
        mesh = self.split if dimension in SPLIT else self.stored
        return mesh.get_group(dimension)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum in place over everyone who sees other tokens: dp_replicate, dp_shard and cp. Returns `values`."""
        return self._reduce(values, ("dp_replicate", "fsdp"), dist.ReduceOp.SUM)

    def sum_over(self, values: torch.Tensor, *dimensions: str) -> torch.Tensor:
        """Sum in place along some dimensions. Returns `values`."""
        return self._reduce(values, dimensions, dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum in place over all processes. Returns `values`."""
        return self._reduce(values, STORED, dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, dimensions: tuple[str, ...], operation: dist.ReduceOp) -> torch.Tensor:
        for dimension in dimensions:
            if (group := self.group(dimension)) is not None:
                dist.all_reduce(values, operation, group=group)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.stored is not None:
            dist.barrier()


def build_mesh(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of a layout. With more than one process a process group must stand."""
    if layout.world == 1:
        return Mesh(layout, device)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    stored = init_device_mesh(
        device.type, (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp), mesh_dim_names=STORED
    )
    split = init_device_mesh(device.type, sizes, mesh_dim_names=SPLIT)
    assert math.prod(sizes) == dist.get_world_size()
    return Mesh(layout, device, stored, split)
