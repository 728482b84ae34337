"""Micro-batches side by side: on a CPU each thread runs micro-batches of its own, instead of a part of each operation.

Threads that divide an operation wait for each other at its end, and most operations of a small model end after
microseconds. Lanes wait for each other once a step. They share the weights; each has gradients of its own, which are
added in the lanes' order, so that a step gives the same numbers every time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from swiftlite.models.anatomy import balances_router, has_dropout
from swiftlite.training.balance import spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.mesh import Mesh

Result = TypeVar("Result")
LANE_TOKENS = 512  # of a micro-batch, about: at most what a core's caches like
LOPSIDED = 1.1  # the busiest lane to the mean of all: from there on, waiting for it costs more than lanes gain
GRADIENT_BYTES = 256 << 20  # of all lanes but the first
# That a lane keeps for the backward pass: where it is more, operations are large enough to be divided among threads. A
# second lane gained a few hundredths for two fifths more memory on LoRA of a model of 135 M parameters.
ACTIVATION_BYTES = 256 << 20


def cut_step(
    config: RunConfig, mesh: Mesh, base: PreTrainedModel, trained: int, kept_per_token: int
) -> tuple[int | None, int]:
    """(tokens of a micro-batch, about; lanes) where a step is cut into smaller ones than `--micro-batch-size` allows,
    whatever pack a document is in; (None, 1) where documents stay in their packs.

    trained: parameters, of which each lane has gradients; kept_per_token: bytes for the backward pass. Lanes together
    hold no more tokens than `--micro-batch-size` allows. Documents stay where several processes share the work, where
    random numbers are drawn on the way (threads have one generator), where a loss is a mean per micro-batch, and where
    a gradient is used at once.
    """
    alone = config.compile or config.optimizer_in_backward
    if mesh.device.type != "cpu" or mesh.layout.world > 1 or alone or has_dropout(base) or balances_router(base.config):
        return None, 1
    allowed = config.micro_batch_size * config.max_length
    if allowed <= LANE_TOKENS:
        return None, 1
    if kept_per_token * LANE_TOKENS > ACTIVATION_BYTES:
        return LANE_TOKENS, 1
    by_memory = 1 + GRADIENT_BYTES // (4 * max(1, trained))
    return LANE_TOKENS, min(torch.get_num_threads(), by_memory, allowed // LANE_TOKENS)


class Lanes:
    """Copies of a module that share its parameters and buffers, each run by a thread of its own."""

    def __init__(self, module: nn.Module, count: int) -> None:
        self._modules, self._count = [module], count
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix="lane") if count > 1 else None

    def map(self, work: Callable[[nn.Module, int], Result], sizes: Sequence[float]) -> list[Result]:
        """`work(module, number)` for each number of a size, in their order; gradients end up in the module itself.

        sizes: how much work each is; lanes get equally much, or where that cannot be, all threads share each operation.
        Raises what the work raises, once no thread runs any more.
        """
        module = self._modules[0]
        numbers = spread(range(len(sizes)), self._count, sizes.__getitem__)
        for lane in numbers[1::2]:  # what needs most memory comes last there, and not in two lanes at a time
            lane.reverse()
        busiest = max(sum(sizes[number] for number in lane) for lane in numbers)
        if self._pool is None or busiest * self._count > LOPSIDED * sum(sizes):
            return [work(module, number) for number in range(len(sizes))]
        if len(self._modules) == 1:  # not before the first step: weights and hooks are in their place by then
            self._modules += [_twin(module) for _ in range(self._count - 1)]
        threads = torch.get_num_threads()

        def lane(twin: nn.Module, numbers: list[int]) -> dict[int, Result]:
            torch.set_num_threads(max(1, threads // self._count))
            return {number: work(twin, number) for number in numbers}

        mine, *theirs = zip(self._modules, numbers, strict=True)
        others = [self._pool.submit(lane, *their) for their in theirs]
        try:
            found = lane(*mine)
        finally:
            wait(others)
            torch.set_num_threads(threads)
        for other in others:
            found |= other.result()
        for twin in self._modules[1:]:
            _hand_over(twin, module)
        return [found[number] for number in range(len(sizes))]


def _twin(module: nn.Module) -> nn.Module:
    shared = {id(buffer): buffer for buffer in module.buffers()}
    shared |= {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, shared)


def _hand_over(twin: nn.Module, module: nn.Module) -> None:
    """Add the twin's gradients to the module's."""
    for theirs, mine in zip(twin.parameters(), module.parameters(), strict=True):
        if theirs.grad is not None:
            mine.grad = theirs.grad if mine.grad is None else mine.grad.add_(theirs.grad)
            theirs.grad = None
