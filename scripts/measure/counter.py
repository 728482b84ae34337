"""Counts what this process sends through torch.distributed, at the calls of its collectives.

Every collective passes PyTorch's dispatcher (FSDP2 and our own as `c10d` operators, DTensor as `_c10d_functional`),
where a dispatch mode sees it with its tensors and its group. Bytes are those of the ring algorithms: of n processes
each sends (n - 1) / n of what an all-gather gives or a reduce-scatter takes, twice that in an all-reduce, and in an
all-to-all what is not for itself. That is what NCCL sends at most; gloo runs some of them otherwise.
Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009;
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Losses, norms, signals and counts of tokens are no traffic that grows with model or batch: a handful of numbers.
FEW = 8


class TrafficCounter(TorchDispatchMode):
    """While it is entered, `sent[ranks of the group, collective]` counts bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[tuple[int, ...], str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        found = COLLECTIVES.get(func.overloadpacket._qualified_op_name)
        if found is not None:
            kind, place, measure = found
            group = _group(args[place])
            size, payload = dist.get_world_size(group), measure(args, group)
            if size > 1 and payload is not None:
                self.sent[tuple(dist.get_process_group_ranks(group)), kind] += payload
        elif func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in SILENT:
            raise NotImplementedError(f"a collective that is not counted: {func}")
        return func(*args, **(kwargs or {}))


def _group(value: Any) -> dist.ProcessGroup:
    if isinstance(value, str):
        return dist.distributed_c10d._resolve_process_group(value)
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _bytes(value: Any) -> int | None:
    """None where there is next to nothing."""
    tensors = _tensors(value)
    if sum(tensor.numel() for tensor in tensors) <= FEW:
        return None
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _share(place: int, factor: Callable[[int], float]) -> Callable[..., int | None]:
    """Bytes of an argument times a factor of the number of processes."""

    def measure(args: tuple[Any, ...], group: dist.ProcessGroup) -> int | None:
        payload = _bytes(args[place])
        return None if payload is None else round(payload * factor(dist.get_world_size(group)))

    return measure


def _to_others(args: tuple[Any, ...], group: dist.ProcessGroup) -> int | None:
    """c10d::alltoall_base_(output, input, group, output sizes, input sizes, ...)."""
    values, sizes, count = args[1], args[4], dist.get_world_size(group)
    if values.numel() <= FEW:
        return None
    rows = sizes or [values.shape[0] // count] * count
    others = sum(rows) - rows[dist.get_rank(group)]
    return others * (values.numel() // max(1, values.shape[0])) * values.element_size()


def _others(size: int) -> float:
    return size - 1


def _other_parts(size: int) -> float:
    return (size - 1) / size


def _twice(size: int) -> float:
    return 2 * (size - 1) / size


def _once(_size: int) -> float:
    return 1.0


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, SEND = "all-to-all", "send"
# operator -> (name, place of the group among the arguments, bytes sent)
COLLECTIVES: dict[str, tuple[str, int, Callable[..., int | None]]] = {
    "c10d::allreduce_": (ALL_REDUCE, 1, _share(0, _twice)),
    "c10d::allgather_": (ALL_GATHER, 2, _share(1, _others)),
    "c10d::_allgather_base_": (ALL_GATHER, 2, _share(1, _others)),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 2, _share(1, _other_parts)),
    "c10d::alltoall_base_": (ALL_TO_ALL, 2, _to_others),
    "c10d::send": (SEND, 1, _share(0, _once)),
    "_c10d_functional::all_reduce": (ALL_REDUCE, 2, _share(0, _twice)),
    "_c10d_functional::all_gather_into_tensor": (ALL_GATHER, 2, _share(0, _others)),
    "_c10d_functional::reduce_scatter_tensor": (REDUCE_SCATTER, 3, _share(0, _other_parts)),
}
SILENT = ("recv_", "wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
