"""Sums of gradients that travel while the backward pass goes on, on a CPU.

FSDP overlaps messages with computing by CUDA's streams. A CPU has none: FSDP would wait for each unit's sum where it
begins. Here gloo's threads sum up while the next units compute, and the backward pass ends when all sums are there.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

UNDER_WAY = 2  # sums at a time: each holds a unit's whole gradients


class BackgroundReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter for units whose sums nobody reads, or adds to, before the end of the backward pass.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, `set_custom_reduce_scatter`.
    """

    def __init__(self) -> None:
        self._under_way: deque[dist.Work] = deque()
        self._pass = -1  # the backward pass that will wait for them

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        now = torch._C._current_graph_task_id()
        if now == -1:  # a pipeline's schedule sums up behind its passes
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        if now != self._pass:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
            self._pass = now
        if len(self._under_way) == UNDER_WAY:
            self._under_way.popleft().wait()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
        self._under_way.append(work)
        return work

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()
