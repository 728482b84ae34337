"""Collectives that have a backward: what one process sends forward, its gradient brings back.

Each is its own transpose: an all-to-all goes back as an all-to-all with the sizes swapped, and a gathered tensor, of
which every process uses all rows, goes back as a sum of slices. No gradient is averaged.
Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange(
    values: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all along the first dimension.

    values: `[sum(send), ...]`, the rows for each process of the group in turn; send, receive: rows for and from each.
    Returns `[sum(receive), ...]`, the rows from each in turn.
    """
    return _Exchange.apply(values, list(send), list(receive), group)


def gather_rows(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather along the first dimension: `[n, ...]` of each process, n alike everywhere -> `[size * n, ...]`."""
    return _GatherRows.apply(values, group)


def sum_parts(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every process's `values`, on each of them.

    Each goes on to compute the same with it, so a process's gradient of the sum is that of its own part: nothing
    travels back.
    """
    return _SumParts.apply(values, group)


def _all_to_all(values: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = values.new_empty((sum(receive), *values.shape[1:]))
    dist.all_to_all_single(result, values.contiguous(), receive, send, group=group)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (send, receive), group
        return _all_to_all(values, send, receive, group)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        send, receive = ctx.sizes
        return _all_to_all(upstream, receive, send, ctx.group), None, None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        result = values.new_empty((size * values.shape[0], *values.shape[1:]))
        dist.all_gather(list(result.chunk(size)), values.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        size = dist.get_world_size(ctx.group)
        sizes = [upstream.shape[0] // size] * size
        parts = _all_to_all(upstream, sizes, sizes, ctx.group)  # a reduce-scatter that every backend has
        return parts.view(size, -1, *upstream.shape[1:]).sum(0), None
