"""Sums of gradients that travel while the backward pass goes on, on a CPU.

FSDP overlaps messages with computing by CUDA's streams. A CPU has none: FSDP would wait for each unit's sum where it
begins. Here gloo's threads sum up while the next units compute, and the backward pass ends when all sums are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.profiler import record_function

Begin = Callable[[bool], dist.Work | None]
UNDER_WAY = 2  # sums at a time: each holds a unit's whole gradients


class BackgroundSums:
    """FSDP's sums for units whose gradients nobody reads, or adds to, before the end of the backward pass.

    Units have theirs from `of_unit`.
    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, `set_custom_reduce_scatter` and
    `set_all_reduce_hook`.
    """

    def __init__(self, replicas: dist.ProcessGroup | None = None) -> None:
        self._replicas = replicas
        self._over_shards: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._over_replicas: list[dist.Work] = []
        self._pass = -1  # the backward pass that will wait for them

    def over_shards(self, begin: Begin, output: torch.Tensor, *, async_op: bool) -> dist.Work | None:
        """Sum up into `output`. begin: starts FSDP's own sum, in the background if it is given True; async_op: what
        FSDP would give it."""
        if not self._in_pass():
            return begin(async_op)
        if len(self._over_shards) == UNDER_WAY:
            self._finish_shards()
        work = begin(True)
        self._over_shards.append((work, output))
        return work

    def of_unit(self) -> SumsOfUnit:
        return SumsOfUnit(self, self._replicas)

    def over_replicas(self, output: torch.Tensor) -> None:
        """Sum up over replicas what `over_shards` sums up, or all gradients where there is one shard."""
        if not self._in_pass():
            dist.all_reduce(output, group=self._replicas)
        elif not self._over_shards:
            self._begin_replicas(output)

    def _in_pass(self) -> bool:
        """Whether a backward pass is under way, and will wait; a pipeline's schedule sums up behind its passes."""
        now = torch._C._current_graph_task_id()
        if now not in (-1, self._pass):
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
            self._pass = now
        return now != -1

    def _finish_shards(self) -> None:
        """Wait for the oldest sum over shards, and go on to its replicas."""
        work, output = self._over_shards.popleft()
        work.wait()
        if self._replicas is not None:
            self._begin_replicas(output)

    def _begin_replicas(self, output: torch.Tensor) -> None:
        self._over_replicas.append(dist.all_reduce(output, group=self._replicas, async_op=True))

    def wait(self) -> None:
        """Until all that are under way are there."""
        with record_function("rs_wait of sums in the background"):
            while self._over_shards:
                self._finish_shards()
            while self._over_replicas:
                self._over_replicas.pop().wait()


class SumsOfUnit(DefaultReduceScatter):
    """One unit's. A layer that a model runs several times may have several in a backward pass: the first for gradients
    of earlier micro-batches. FSDP adds the others to it, so each has to be there by then.
    """

    def __init__(self, sums: BackgroundSums, replicas: dist.ProcessGroup | None) -> None:
        self._sums, self._replicas = sums, replicas
        self._pass, self._is_later, self._begun = -1, False, False

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._begin()
        begin = partial(super().__call__, output_tensor, input_tensor, group, op)
        return begin(async_op) if self._is_later else self._sums.over_shards(begin, output_tensor, async_op=async_op)

    def over_replicas(self, output: torch.Tensor) -> None:
        if not self._begun:  # there is one shard, and so no sum over shards before this one
            self._begin()
        self._begun = False
        if self._is_later:
            dist.all_reduce(output, group=self._replicas)
        else:
            self._sums.over_replicas(output)

    def _begin(self) -> None:
        now = torch._C._current_graph_task_id()
        self._is_later, self._pass, self._begun = now == self._pass != -1, now, True
        if self._is_later:
            self._sums.wait()
