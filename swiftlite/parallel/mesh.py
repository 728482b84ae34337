"""The processes of a run as one mesh, `pp x dp_replicate x dp_shard x cp x tp`, and the sums over its dimensions.

Weights are sharded over `dp_shard` and `cp` together (both compute gradients of the same weights for different tokens),
so the mesh that holds them is `pp x dp_replicate x fsdp x tp`. Every reduction over data is a plain SUM.
Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.DeviceMesh
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiftlite.config.layout import Layout
from swiftlite.dtensors import is_dtensor, is_sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

T = TypeVar("T")
SPLIT = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
STORED = ("pp", "dp_replicate", "fsdp", "tp")
PATIENCE = timedelta(hours=2)  # of a process whose part is done for one that is slow
REGROUPED = {"efsdp": "fsdp", "ep": "fsdp"}  # experts lie on a mesh of their own


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
        return 0 if self.stored is None else self._mesh_with(dimension).get_local_rank(dimension)

    def size(self, dimension: str) -> int:
        return 1 if self.stored is None else self._mesh_with(dimension)[dimension].size()

    def _mesh_with(self, dimension: str) -> DeviceMesh:
        return self.split if dimension in SPLIT else self.stored

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """The processes along a dimension, None where this one is alone there."""
        return None if self.size(dimension) == 1 else self._mesh_with(dimension).get_group(dimension)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum in place over everyone who sees other tokens: dp_replicate, dp_shard and cp. Returns `values`."""
        return self.sum_over(values, "dp_replicate", "fsdp")

    def sum_over(self, values: torch.Tensor, *dimensions: str) -> torch.Tensor:
        """Sum in place along some dimensions. Returns `values`."""
        for dimension in dimensions:
            if (group := self.group(dimension)) is not None:
                dist.all_reduce(values, group=group)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum in place over all processes. Returns `values`."""
        if self.stored is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def copies(self, tensor: torch.Tensor) -> int:
        """How many processes of a pipeline stage hold the same part of a tensor."""
        return math.prod(size for size, _ in self._copying(tensor))

    def is_first_copy(self, tensor: torch.Tensor) -> bool:
        """Whether this process is the first of those that hold the same part of a tensor."""
        return all(place == 0 for _, place in self._copying(tensor))

    def _copying(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """(size, this process's place) of each dimension along which processes hold the same part of a tensor."""
        return _copying(self, tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else _copying(self, None, ())

    def any(self, here: bool) -> bool:
        """Whether something holds in at least one process."""
        if self.stored is None:
            return here
        return bool(self.largest(torch.tensor(float(here), device=self.device)).item())

    def collect(self, value: T) -> list[T]:
        """Every process's value, in the order of ranks."""
        return [value] if self.stored is None else gather_objects(value)

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        if self.stored is None:
            return value
        held = [value]
        dist.broadcast_object_list(held)
        return held[0]

    def gather(self, texts: list[str]) -> list[str]:
        """The texts of all processes, each once, in the order of ranks."""
        return list(dict.fromkeys(text for part in self.collect(texts) for text in part))


@cache  # asked for each tensor in each step, and a mesh takes its time to say how large it is
def _copying(mesh: Mesh, own: DeviceMesh | None, placements: tuple[Placement, ...]) -> list[tuple[int, int]]:
    """own: the mesh of a DTensor, which has these placements."""
    found: list[tuple[int, int]] = []
    covered = {"pp"}
    if own is not None:
        for dimension, (name, placement) in enumerate(zip(own.mesh_dim_names, placements, strict=True)):
            covered |= {name, REGROUPED.get(name, name)}
            if not is_sharding(placement):
                found.append((own.size(dimension), own.get_coordinate()[dimension]))
    return found + [(mesh.size(name), mesh.place(name)) for name in STORED if name not in covered]


class Patient:
    """The processes of a mesh, as they wait for what each does alone, such as writing to its disk: in a group of their
    own, beside the collectives of training, and longer than in these."""

    def __init__(self, mesh: Mesh) -> None:
        """Every process makes its own at the same place."""
        self.rank, self.size = mesh.rank, mesh.layout.world
        self._group = None if mesh.stored is None else dist.new_group(backend="gloo", timeout=PATIENCE)

    def any(self, here: bool) -> bool:
        """As `Mesh.any`."""
        if self._group is None:
            return here
        value = torch.tensor(float(here))
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def collect(self, value: T) -> list[T]:
        """As `Mesh.collect`."""
        return [value] if self._group is None else gather_objects(value, self._group)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every process of a group (all of them by default), in the order of ranks."""
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def pick_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def backend_for(device: torch.device) -> str:
    """Of a process group: gloo for what lies on the host, NCCL between GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@cache
def device_mesh(kind: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once: its process groups hold threads and connections, and DTensor remembers a mesh by its shape."""
    return init_device_mesh(kind, sizes, mesh_dim_names=names)


def build_mesh(layout: Layout, device: torch.device, *, grouped: bool = False) -> Mesh:
    """The mesh of a layout. With more than one process a process group must stand.

    grouped: one process gets a mesh and a group of its own too, which FSDP wants for offloading.
    """
    if layout.world == 1 and not grouped:
        return Mesh(layout, device)
    if layout.world == 1 and not dist.is_initialized():
        dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    whole = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    stored, split = device_mesh(device.type, whole, STORED), device_mesh(device.type, sizes, SPLIT)
    assert math.prod(sizes) == dist.get_world_size()
    return Mesh(layout, device, stored, split)
