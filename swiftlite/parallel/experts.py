"""Expert parallelism: the experts of each layer divided over ranks, tokens travelling to them by all-to-all.

`ep` regroups the data ranks. Each rank of an expert group holds whole experts, `count / ep` of them, and computes them
for the tokens of the whole group; ranks that hold the same experts shard and sum them by FSDP over `efsdp`
(GShard, arXiv 2006.16668; the mesh is that of DeepSpeed-MoE, arXiv 2201.05596). Everything else stays divided as it is
without expert parallelism, the router included. A rank's gradient of an expert already is a sum over its group's
tokens, so sums over `efsdp` and `dp_replicate` complete it: nothing is averaged.

Fused experts (`[experts, ...]` parameters) are reached through transformers' experts interface; a layer's own code and
the kernel that computes the experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from swiftlite.dtensors import is_fsdp_module, local
from swiftlite.errors import UserError
from swiftlite.models.experts import ExpertsView, find_experts
from swiftlite.parallel.exchange import exchange
from swiftlite.parallel.mesh import device_mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from transformers import PreTrainedModel

    from swiftlite.config.layout import Layout

NAME = "swiftlite_expert_parallel"
EXPERT_MESH = ("pp", "dp_replicate", "efsdp", "ep", "tp")


def build_expert_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """All processes with `dp_shard x cp` regrouped as `efsdp x ep`. Every process of the run calls it."""
    sizes = layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp // layout.expert_parallel
    return device_mesh(device.type, (*sizes, layout.expert_parallel, layout.tp), EXPERT_MESH)


def check_expert_parallel(base: PreTrainedModel, layout: Layout) -> None:
    """Refuse a model or a layout whose experts cannot be divided. base: on `meta` will do, adapters added.

    Raises UserError, naming the nearest layout that works.
    """
    size = layout.expert_parallel
    if size == 1:
        return
    found = dict(find_experts(base))
    if not found:
        raise UserError(
            f"{type(base).__name__} has no experts that --expert-parallel-size could divide",
            fix="use --expert-parallel-size 1",
        )
    if layout.tp > 1:
        raise UserError(
            f"--expert-parallel-size {size} with --tensor-parallel-size {layout.tp}: each would divide the experts",
            fix="use --tensor-parallel-size 1, or --expert-parallel-size 1 (tensor parallelism deals out experts too)",
        )
    for name, experts in found.items():
        _check_experts(name, experts, size)


def _check_experts(name: str, experts: nn.Module, size: int) -> None:
    if _has_adapter(name):
        raise UserError(
            "LoRA on the experts themselves cannot be divided over expert-parallel ranks",
            where=name,
            fix="name the linear layers of attention with --target-modules, or use --expert-parallel-size 1",
        )
    odd = [key for key, p in experts.named_parameters() if "." in key or p.shape[0] != experts.num_experts]
    if odd:
        raise UserError(f"the experts share a parameter, {odd[0]}", where=name, fix="use --expert-parallel-size 1")
    if experts.num_experts % size:
        near = max(n for n in range(1, size) if experts.num_experts % n == 0)
        raise UserError(
            f"--expert-parallel-size {size} does not divide the {experts.num_experts} experts of a layer",
            fix=f"use --expert-parallel-size {near}",
        )


def _has_adapter(name: str) -> bool:
    return name.endswith(".base_layer")


def experts_of(layer: nn.Module) -> list[nn.Module]:
    """The fused experts of a decoder layer that can be gathered apart from the rest of it.

    An adapter on the experts themselves computes their weights before it calls them: these stay with their layer.
    """
    return [experts for name, experts in find_experts(layer) if not _has_adapter(name)]


def apply_expert_parallel(base: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over `mesh["ep"]`, in place; after adapters, before `shard_experts`.

    Each parameter `[experts, ...]` of the experts becomes a DTensor, `Shard(0)` on `ep`: rank r of the group holds
    experts `r * experts / ep` and on. Works on `meta`. Returns the modules of experts, for `shard_experts`.
    """
    from torch.distributed.tensor import DTensor, Shard
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found = [experts for _, experts in find_experts(base)]
    ALL_EXPERTS_FUNCTIONS.register(NAME, expert_parallel_forward)
    for experts in found:
        own = type(experts).forward.__wrapped__  # what transformers calls eager
        compute = ALL_EXPERTS_FUNCTIONS.get_interface(experts.config._experts_implementation, own)
        experts.expert_parallel = ExpertGroup(mesh.get_group("ep"), compute)
        for name, parameter in experts.named_parameters():
            count, rank = parameter.shape[0] // mesh["ep"].size(), mesh.get_local_rank("ep")
            part = parameter.detach()[rank * count : (rank + 1) * count].clone()
            divided = DTensor.from_local(part, mesh["ep"], [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    base.set_experts_implementation(NAME)
    return found


def hand_out_copies(experts: nn.Module) -> None:
    """Before it becomes an FSDP unit: FSDP notices by a unit's output when its backward begins, and would miss it where
    that is a view which the model changes in place.
    """
    experts.register_forward_hook(lambda _module, _inputs, output: output.clone() if output._is_view() else output)


def shard_experts(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> None:
    """Make each layer's experts an FSDP unit over `efsdp` (and `dp_replicate`); before the layers become units.

    Where a rank holds fewer experts than there are ranks to share them, each expert is cut instead of dealt out.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    copies = mesh["dp_replicate", "efsdp"] if mesh["dp_replicate"].size() > 1 else mesh["efsdp"]
    ranks, groups = mesh["efsdp"].size(), mesh["ep"].size()
    for experts in modules:
        hand_out_copies(experts)
        weights = list(experts.parameters())
        cut = experts.num_experts // groups < ranks and all(p.shape[1] % ranks == 0 for p in weights)
        unit = fully_shard(
            experts,
            mesh=copies,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            shard_placement_fn=lambda _, cut=cut: Shard(1 if cut else 0),
        )
        assert is_fsdp_module(unit)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


@dataclass(frozen=True)
class ExpertGroup:
    """group: the ranks that divide a layer's experts; compute: transformers' function that runs those of one rank."""

    group: dist.ProcessGroup
    compute: Callable[..., torch.Tensor]


@torch.compiler.disable  # how many rows travel depends on the data: the compiled layer is cut here
def expert_parallel_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, wherever they are.

    hidden_states: `[tokens, hidden]`, this rank's; top_k_index: int64 `[tokens, k]`, counted over all experts;
    top_k_weights: `[tokens, k]`. Returns `[tokens, hidden]`. All ranks of the group call it together.
    """
    group, compute = experts.expert_parallel.group, experts.expert_parallel.compute
    size = dist.get_world_size(group)
    here = ExpertsView(experts, local, num_experts=experts.num_experts // size)  # as if they were all there are
    chosen, order = top_k_index.flatten().sort(stable=True)  # rows for one rank, and for one expert, lie together
    edges = torch.searchsorted(chosen, torch.arange(experts.num_experts + 1, device=chosen.device))
    leaving = edges.diff().view(size, here.num_experts)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    send, receive = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
    rows = hidden_states[order // top_k_index.shape[1]].to(next(experts.parameters()).dtype)  # what computes, travels
    rows = exchange(rows, send, receive, group)
    numbers = torch.arange(here.num_experts, device=chosen.device).repeat(size)
    numbers = numbers.repeat_interleave(arriving.flatten(), output_size=sum(receive))
    results = exchange(_compute(compute, here, rows, numbers), receive, send, group)
    results = results[order.argsort()].view(*top_k_index.shape, -1)
    return (results * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _compute(
    compute: Callable[..., torch.Tensor], here: ExpertsView, rows: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Expert `numbers[i]` of this rank on row i, unweighted: `[rows, hidden]`."""
    count = len(rows)
    if not count:  # one row of zeros: without a gradient here the others' collectives would wait for this rank
        rows, numbers = F.pad(rows, (0, 0, 0, 1)), F.pad(numbers, (0, 1))
    return compute(here, rows, numbers[:, None], rows.new_ones(len(rows), 1))[:count]
