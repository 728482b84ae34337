"""Data parallelism by FSDP2: what the data ranks share and how their gradients meet.

Every sharding is one call of `fully_shard` on the mesh `dp_replicate x fsdp`: plain data parallelism has replicas only,
full sharding has one replica, hybrid has both. Each reduction is a SUM: the loss is divided by the tokens of the global
step before the backward, so nothing is left to average.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swiftlite.dtensors import is_fsdp_module
from swiftlite.parallel.experts import experts_of, hand_out_copies
from swiftlite.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class DataParallel:
    """dtype: what units compute in; gradients are always reduced in fp32. sharding: full, grad_op or none.

    offload: keep parameters, gradients and optimizer state on the CPU; min_params: smaller layers are no unit of
    their own; resharding False keeps whole weights between forward and backward whatever `sharding` says;
    background_sums: gradients may be summed up until the end of the backward pass, as nobody reads or adds to a sum
    before it; evaluates: there is no backward pass, so weights that are divided are never kept whole.
    """

    dtype: torch.dtype
    sharding: str
    offload: bool = False
    min_params: int = 0
    resharding: bool = True
    background_sums: bool = False
    evaluates: bool = False

    def unit(self, device: torch.device) -> dict[str, Any]:
        """The options of `fully_shard` for a layer."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        pinned = device.type == "cuda"
        resharding = self.sharding != "none" if self.evaluates else self.sharding == "full" and self.resharding
        return {
            "reshard_after_forward": resharding,
            "mp_policy": _policy(self.dtype),
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if self.offload else OffloadPolicy(),
        }

    def root(self, device: torch.device) -> dict[str, Any]:
        """Those of what is left: its weights stay as they are, and autocast casts them where a product wants it."""
        return self.unit(device) | {"reshard_after_forward": False, "mp_policy": _policy(torch.float32)}


def shard_over_data(
    root: nn.Module, layers: Iterable[nn.Module], mesh: Mesh, options: DataParallel, idle: Iterable[nn.Module] = ()
) -> None:
    """Make each layer a unit of its own and the rest of `root` (embedding, norm, head) another, in place.

    root: the module whose `forward` starts a step; layers: decoder layers, in order; idle: modules that never run. A
    layer's experts are a unit too, so that attention and router can run while they are gathered.
    """
    if mesh.size("dp_replicate") * mesh.size("fsdp") == 1 and not options.offload:
        return
    from torch.distributed.fsdp import fully_shard

    in_background = mesh.device.type == "cpu" and options.background_sums  # a GPU has streams for it
    copies = mesh.size("dp_replicate") > 1 and not in_background  # that FSDP is to know of
    shared = mesh.stored["dp_replicate", "fsdp"] if copies else mesh.stored["fsdp"]
    of_layers = [_units(layer, options.min_params) for layer in _apart(layers)]
    units = [unit for of_layer in of_layers for unit in of_layer]
    for experts in (unit for of_layer in of_layers for unit in of_layer[1:]):
        hand_out_copies(experts)
    for unit in reversed(units):  # the inner before the outer
        fully_shard(unit, mesh=shared, **options.unit(mesh.device))
    fully_shard(root, mesh=shared, ignored_params=_shard_idle(idle, shared), **options.root(mesh.device))
    for unit in (root, *units):
        if shared.size() > 1:  # else FSDP would divide all the same
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # the other half of a plain SUM, on gloo and NCCL alike
    if of_layers and of_layers[-1]:  # its backward follows at once: given back, it would be gathered again for that
        of_layers[-1][0].set_reshard_after_forward(False)
    _prefetch(of_layers)
    if mesh.device.type == "cpu":  # it has no streams, on which messages would travel while units compute
        root._set_unshard_async_op(True)
    if in_background:
        _sum_in_background([root, *units], mesh)


def _shard_idle(parts: Iterable[nn.Module], mesh: DeviceMesh) -> set[nn.Parameter]:
    """Divide weights that are never gathered, in place, as FSDP would: its units all have to run. Returns them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    divided: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for part in parts for module in part.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in divided:
                placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0) if parameter.ndim else Replicate()]
                shards = distribute_tensor(parameter.detach(), mesh, placements)
                divided[parameter] = nn.Parameter(shards, requires_grad=parameter.requires_grad)
            setattr(module, name, divided[parameter])
    return set(divided.values())


def _sum_in_background(units: list[nn.Module], mesh: Mesh) -> None:
    from swiftlite.parallel.reduction import BackgroundSums

    replicated = mesh.size("dp_replicate") > 1
    sums = BackgroundSums(mesh.stored["dp_replicate"].get_group() if replicated else None)
    for unit in units:
        of_unit = sums.of_unit()
        unit.set_custom_reduce_scatter(of_unit)
        if replicated:
            unit.set_all_reduce_hook(of_unit.over_replicas)


def _apart(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that share no weights with another one (as Zamba's do): two units cannot have the same, so what is shared
    stays with the rest of the model."""
    layers = list(layers)
    owners = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    return [layer for layer in layers if all(owners[id(parameter)] == 1 for parameter in layer.parameters())]


def _units(layer: nn.Module, min_params: int) -> list[nn.Module]:
    """The layer and then what is a unit inside it, but for what is too small and what expert parallelism has taken."""
    inner = [experts for experts in experts_of(layer) if not is_fsdp_module(experts)]
    return [unit for unit in (layer, *inner) if _parameters(unit) >= max(1, min_params)]


def _parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """dtype: to compute in; fp32 leaves weights as they are."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    cast = None if dtype == torch.float32 else dtype
    return MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _prefetch(of_layers: list[list[nn.Module]]) -> None:
    """Gather a unit's weights while the one before it computes: a layer is entered before its experts both ways."""
    forward = [unit for of_layer in of_layers for unit in of_layer]
    backward = [unit for of_layer in reversed(of_layers) for unit in of_layer]
    for unit, following in pairwise(forward):
        unit.set_modules_to_forward_prefetch([following])
    for unit, following in pairwise(backward):
        unit.set_modules_to_backward_prefetch([following])


def reduce_at_last_micro_batch(root: nn.Module, is_last: bool, sharding: str) -> None:
    """Gradients of earlier micro-batches are added up here, and travel once a step. No-op without FSDP.

    What lies whole on each rank between forward and backward stays whole until the last micro-batch, instead of being
    gathered again for the next: the peak, with all of it and the unsharded gradients, is the same.
    """
    if is_fsdp_module(root):
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)
        root.set_reshard_after_backward(is_last, recurse=sharding != "full")


def reshard(root: nn.Module) -> None:
    """Give whole weights back after forward passes without a backward, which would have done it."""
    for module in root.modules():
        if is_fsdp_module(module):
            module.reshard()
