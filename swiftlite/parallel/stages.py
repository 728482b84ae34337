"""Which decoder layers each stage of a pipeline has, and which schedule runs the stages.

Stages are contiguous ranges of layers. A rank has one of them, or two: interleaved, or folded into a V so that the
first and the last stage lie on the same rank. All schedules are PyTorch's own
(https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.errors import UserError
from swiftlite.models.anatomy import (
    attention_heads,
    attention_windows,
    dissect,
    expert_share,
    head_sizes,
    tokens_in_view,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.layout import Layout

# What a config says of a model whose layers hand each other more than hidden states.
ACROSS_DEPTH = {
    "num_kv_shared_layers": "whose last layers read the keys and values of earlier ones",
    "hidden_size_per_layer_input": "which gives each layer an embedding of its own",
    "altup_num_inputs": "whose layers hand on several streams of hidden states",
}
ROUNDING = 1e-9
# Torch 2.11 adds up the gradients that enter a node by several ways, and 2.11 and 2.12 count twice what enters weights
# by one another's nodes, where a schedule cuts the backward pass in two.
SPLITS_CORRECTLY = torch.__version__ >= "2.13"


@dataclass(frozen=True)
class Schedule:
    """engine: the class in `torch.distributed.pipelining`; per_rank: stages of a rank; v_shaped: rank r has the stages
    r and 2 p - 1 - r instead of r and r + p; splits_backward: gradients of weights are computed after those of inputs,
    which goes wrong without an error where FSDP gives the weights' memory back between the two.
    """

    name: str
    engine: str
    per_rank: int = 1
    v_shaped: bool = False
    splits_backward: bool = False

    def micro_batches(self, wanted: int, ranks: int) -> int:
        """The least number of micro-batches, `wanted` at least, with which the schedule runs on so many ranks."""
        if self.name == "gpipe":
            return max(1, wanted)
        number = max(ranks, wanted)
        while self.engine in ROUNDS and number % (number // ranks):
            number += 1
        return number


# These run rounds of about one micro-batch a rank, all alike.
ROUNDS = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
GPIPE = Schedule("gpipe", "ScheduleGPipe")
ONE_FORWARD_ONE_BACKWARD = Schedule("1f1b", "Schedule1F1B")
INTERLEAVED = Schedule("interleaved-1f1b", "ScheduleInterleaved1F1B", per_rank=2)
ZERO_BUBBLE = Schedule("zero-bubble", "ScheduleInterleavedZeroBubble", splits_backward=True)
ZERO_BUBBLE_V = Schedule("zero-bubble", "ScheduleZBVZeroBubble", per_rank=2, v_shaped=True, splits_backward=True)


def choose_schedule(name: str, layers: int, ranks: int) -> Schedule:
    """The schedule of a `--pipeline-schedule`.

    `zero-bubble` is ZB-V (arXiv 2405.15362), which has next to no bubble in the memory of 1F1B, where there are layers
    for two stages a rank; else ZB-H1 (arXiv 2401.10241).
    """
    if name == "zero-bubble":
        return ZERO_BUBBLE_V if layers >= 2 * ranks else ZERO_BUBBLE
    return {schedule.name: schedule for schedule in (GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED)}[name]


@dataclass(frozen=True)
class StagePlan:
    """ranges: the layers of each stage, from the first stage to the last; ranks: of the pipeline."""

    ranges: tuple[range, ...]
    ranks: int
    schedule: Schedule

    @property
    def stages(self) -> int:
        return len(self.ranges)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that has a stage."""
        if self.schedule.v_shaped and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


def plan_stages(base: PreTrainedModel, ranks: int, schedule: Schedule, *, length: int) -> StagePlan:
    """Divide the layers so that the slowest stage is as fast as can be, and the others as even as can be.

    base: the whole causal language model, on any device; length: tokens of a long document, for the cost of attention.
    """
    return StagePlan(tuple(balance(stage_costs(base, length), ranks * schedule.per_rank)), ranks, schedule)


def stage_costs(base: PreTrainedModel, length: int) -> list[float]:
    """Multiplications a token in the forward pass of each layer, the embedding's with the first, the head's with the
    last one.

    A layer takes one for each weight that a token meets, of experts only the share that is chosen, and for attention
    `2 a d` for each token in view, on average half of a document or the sliding window. The embedding is looked up.
    """
    anatomy, config = dissect(base), base.config.get_text_config()
    per_pair, share = attention_heads(config) * sum(head_sizes(config)), expert_share(config)
    costs = [
        _weights_met(layer, share) + per_pair * tokens_in_view(length, window)
        for layer, window in zip(anatomy.layers, attention_windows(config), strict=True)
    ]
    costs[0] += config.hidden_size
    costs[-1] += sum(p.numel() for p in anatomy.head.parameters())
    return costs


def _weights_met(layer: nn.Module, share: float) -> float:
    """share: of the experts, that a token meets."""
    return sum(p.numel() * (share if ".experts." in f".{name}" else 1.0) for name, p in layer.named_parameters())


def balance(costs: Sequence[float], parts: int) -> list[range]:
    """Cut a sequence into contiguous, non-empty parts.

    The largest sum of a part is as small as possible; among such cuts the one with the least sum of squares is taken.
    """
    total = [0.0, *accumulate(costs)]
    largest = _best_cut(total, parts, lambda best, part: max(best, part))[0]
    allowed = largest * (1 + ROUNDING)
    borders = _best_cut(total, parts, lambda best, part: best + part * part if part <= allowed else float("inf"))[1]
    return [range(start, stop) for start, stop in zip([0, *borders], [*borders, len(costs)], strict=True)]


def _best_cut(total: list[float], parts: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """(value, borders) of the cut with the least value; total: running sums; join: adds a part to a value."""
    count = len(total) - 1
    best = {stop: (join(0.0, total[stop]), []) for stop in range(1, count + 1)}
    for part in range(2, parts + 1):
        best = {
            stop: min(
                (join(best[start][0], total[stop] - total[start]), [*best[start][1], start])
                for start in range(part - 1, stop)
            )
            for stop in range(part, count + 1)
        }
    return best[count]


def check_pipeline(
    model_config: PretrainedConfig, layout: Layout, name: str, micro_batches: int, *, compile_layers: bool = False
) -> None:
    """Refuse, before weights load, a pipeline that this model or schedule cannot take.

    name: of the schedule; micro_batches: of a step on one data rank. Raises UserError naming what works.
    """
    ranks = layout.pp
    if ranks == 1:
        return
    _check_architecture(model_config, ranks)
    layers = model_config.get_text_config().num_hidden_layers
    if layers < ranks:
        raise UserError(
            f"a pipeline of {ranks} stages needs {ranks} layers, but {model_config.model_type} has {layers}",
            where=f"--pipeline-parallel-size {ranks}",
            fix=f"use --pipeline-parallel-size {layers}",
        )
    schedule = choose_schedule(name, layers, ranks)
    if layers < ranks * schedule.per_rank:
        raise UserError(
            f"{name} has {schedule.per_rank} stages on each of {ranks} ranks, which needs "
            f"{ranks * schedule.per_rank} layers, but {model_config.model_type} has {layers}",
            where=f"--pipeline-schedule {name}",
            fix=f"use --pipeline-schedule 1f1b, or --pipeline-parallel-size {max(1, layers // schedule.per_rank)}",
        )
    if schedule.splits_backward and not SPLITS_CORRECTLY:
        raise UserError(
            f"zero-bubble needs torch 2.13 or newer: torch {torch.__version__} computes wrong gradients with it",
            where=f"--pipeline-schedule {name}",
            fix="use --pipeline-schedule interleaved-1f1b, or install a newer torch",
        )
    if schedule.splits_backward and compile_layers:
        raise UserError(
            "zero-bubble computes gradients of weights apart from those of inputs, which compiled layers cannot",
            where="--compile, --pipeline-schedule zero-bubble",
            fix="leave --compile out, or use --pipeline-schedule interleaved-1f1b",
        )
    _check_micro_batches(schedule, micro_batches, ranks)


def _check_architecture(model_config: PretrainedConfig, ranks: int) -> None:
    values = model_config.get_text_config().to_dict()
    for key, what in ACROSS_DEPTH.items():
        if values.get(key):
            raise UserError(
                f"{model_config.model_type} is an architecture {what}, so its layers cannot lie on different ranks",
                where=f"--pipeline-parallel-size {ranks}",
                fix="use --pipeline-parallel-size 1 and --parallel fsdp",
            )


def _check_micro_batches(schedule: Schedule, number: int, ranks: int) -> None:
    above = schedule.micro_batches(number, ranks)
    if above == number:
        return
    fitting = [n for n in range(1, number) if schedule.micro_batches(n, ranks) == n]
    near = " or ".join(str(n) for n in [*fitting[-1:], above])
    raise UserError(
        f"{schedule.name} on {ranks} ranks cannot run {number} micro-batches a step",
        where=f"--num-microbatches {number}",
        fix=f"use --num-microbatches {near}",
    )
