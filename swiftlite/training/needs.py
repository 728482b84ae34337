"""What a run needs of a device's memory, and what is chosen by that: the layout of `--parallel auto`, recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from swiftlite.config.methods import SAMPLING, answers, asked_at_once, examines, keeps_second, pack_capacity
from swiftlite.models.anatomy import dissect, has_head_norms
from swiftlite.models.compressed import FORMATS
from swiftlite.models.quantize import bytes_a_number, count_quantizable
from swiftlite.models.sampling import DRAWN_BYTES
from swiftlite.models.tuners import count_parameters
from swiftlite.objectives.head import CHUNK_BYTES
from swiftlite.parallel.stages import StagePlan, choose_schedule, plan_stages
from swiftlite.planning.choose import USABLE, Choice, Try, data_layouts, explained, first_that_fits, tries
from swiftlite.planning.communication import ModelShape
from swiftlite.planning.footprint import (
    STATE_BYTES,
    Blocks,
    Footprint,
    NumberBytes,
    Work,
    footprint,
    footprints,
    matrix_moment_bytes,
    moment_bytes,
)
from swiftlite.planning.memory import (
    Kept,
    Written,
    activation_bytes_per_token,
    cache_bytes_per_token,
    layer_keeps,
)
from swiftlite.training.divide import spares_cheap_results
from swiftlite.training.flops import FlopCounter
from swiftlite.training.optimizers.muon import orthogonalized_in
from swiftlite.training.precision import Precision
from swiftlite.training.rollouts.reward_models import bytes_of_reward_models

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig


TOLD_BYTES = 16  # of each likely token that a teacher tells: fp32 probability and id, and the id as an index
OF_HOST = 0.5  # of the room on a CPU, for activations
ROUNDED_BYTES = 12  # of each number while it is rounded: as fp32, its code, and what that is made with
# What tokens take of a CPU's memory, over what layers keep and work with: products pack weights, messages have buffers,
# what was freed is not given back. Of six runs of two processes with 74 M parameters the peak was 0.9 to 1.2 of the
# sum, which `USABLE` leaves room for.
ON_HOST = 2


def weights_dtype(config: RunConfig, precision: Precision) -> torch.dtype:
    """Of the base's weights, and so of hidden states between layers."""
    return precision.dtype if config.tuner == "lora" else precision.masters


@dataclass(frozen=True)
class Beside:
    """A model that lies beside the trained one and is not trained. base: on `meta`; weights: its bytes as a whole."""

    base: PreTrainedModel
    weights: float
    flops: FlopCounter


@dataclass
class Outline:
    """A model before it is divided, on `meta`, tuned as it will be, and what layouts take of it.

    kernels: whose are used, `liger` or another's; trained, frozen: parameters; packed: of them, those of
    quantized matrices; evaluates: there is no backward pass; beside: a teacher, if there is one; reward_models: bytes
    of those that each process has.
    """

    base: PreTrainedModel
    model_config: PretrainedConfig
    precision: Precision
    device: torch.device
    kernels: str
    trained: int
    frozen: int
    packed: int
    evaluates: bool
    beside: Beside | None
    reward_models: int

    @staticmethod
    def of(
        config: RunConfig,
        base: PreTrainedModel,
        model_config: PretrainedConfig,
        precision: Precision,
        device: torch.device,
        kernels: str,
        beside: Beside | None = None,
        *,
        evaluates: bool = False,
    ) -> Outline:
        """base: with its adapters, and with what is frozen marked so. Raises UserError for an idle `--quantization`."""
        trained, total = count_parameters(base)
        return Outline(
            base=base,
            model_config=model_config,
            precision=precision,
            device=device,
            kernels=kernels,
            trained=trained,
            frozen=total - trained,
            packed=0 if config.quantization == "none" else count_quantizable(dissect(base).layers),
            evaluates=evaluates,
            beside=beside,
            reward_models=bytes_of_reward_models(config, device) if answers(config) else 0,
        )

    @property
    def layers(self) -> int:
        return self.model_config.get_text_config().num_hidden_layers

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.base)

    @cached_property
    def head_norms(self) -> bool:
        return has_head_norms(self.base)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.base)

    @cached_property
    def flops(self) -> FlopCounter:
        return FlopCounter(self.base)

    def stages(self, config: RunConfig, layout: Layout) -> StagePlan | None:
        """Of the pipeline, None where there is none."""
        if layout.pp == 1:
            return None
        schedule = choose_schedule(config.pipeline_schedule, self.layers, layout.pp)
        return plan_stages(self.base, layout.pp, schedule, length=config.max_length)

    def number_bytes(self, config: RunConfig) -> NumberBytes:
        masters, stored = self.precision.masters.itemsize, weights_dtype(config, self.precision).itemsize
        size, learns, kind = self.precision.dtype.itemsize, not self.evaluates, self.device.type
        keeps_gradients = learns and not config.optimizer_in_backward
        orthogonalizes = learns and config.optimizer == "muon"
        in_layers = sum(part.count - part.trained for part in (*self.blocks.layers, *self.blocks.experts))
        spared = self.packed * (size - bytes_a_number(config.quantization, size)) if self.packed else 0
        return NumberBytes(
            weight=masters,
            gradient=STATE_BYTES["gradients"] * (masters / STATE_BYTES["weights"]) if keeps_gradients else 0,
            moments=moment_bytes(config.optimizer, kind) if learns else 0,
            frozen=stored - spared / max(1, in_layers),
            stored=stored,
            compute=size,
            matrix_moments=matrix_moment_bytes(config.optimizer, kind) if learns else 0,
            orthogonalized=orthogonalized_in(self.device).itemsize if orthogonalizes else 0,
        )

    def holds(self, config: RunConfig, layout: Layout, stages: StagePlan | None) -> Footprint:
        """What the fullest device does. config: with every setting of memory settled."""
        work = self._work(config)
        held = footprint(self.blocks, layout, stages, self.number_bytes(config), work)
        held = replace(held, workspace=held.workspace + self._of_rounding(config, work.tokens / layout.cp))
        if not work.offload:
            held = replace(held, weights=held.weights + self._beside_on_each(layout))
        if answers(config):
            held = self._with_answers(held, config, layout)
        if self.device.type == "cpu":
            held = replace(held, activations=ON_HOST * held.activations, workspace=ON_HOST * held.workspace)
        return replace(held, activations=held.activations + self._told(config, layout, work))

    def _work(self, config: RunConfig) -> Work:
        return Work(
            tokens=config.micro_batch_size * pack_capacity(config),
            micro_batches=config.gradient_accumulation_steps,
            kept=self._kept(config),
            recomputed=self._keeps("none", config),
            hidden=self.model_config.get_text_config().hidden_size,
            chunk=CHUNK_BYTES[self.device.type],
            divides_tokens=self.device.type != "cpu" and not config.compile,
            accumulates=not config.sync_every_microbatch,
            offload=config.offload == "cpu" and self.device.type != "cpu",  # where states lie in the same memory
            models=2 if keeps_second(config) else 1,
        )

    def _beside_on_each(self, layout: Layout) -> float:
        """Bytes of the teacher on a device, if there is one."""
        shards = layout.tp * layout.pp * layout.dp_shard * layout.cp
        return 0 if self.beside is None else self.beside.weights / shards

    def on_host(self, config: RunConfig, choice: Choice) -> float:
        """Bytes of weights, gradients and optimizer state in a machine's memory, of a process on average: the ranks of
        a pipeline, of which one may hold twice what another does, share it. Without reward models, which may stay in
        their files."""
        on_cpu, layout = self.device.type == "cpu", choice.layout
        if not (on_cpu or choice.offload):
            return 0
        settled = config.model_copy(update={"activation_checkpointing": choice.checkpointing})
        work = replace(self._work(settled), offload=False)  # which counts states where they are kept
        ranks = footprints(self.blocks, layout, self.stages(config, layout), self.number_bytes(config), work)
        states = fmean(rank.states if on_cpu else rank.weights + rank.moments for rank in ranks)
        copied = self._copy_for_answers(config, layout) if on_cpu and answers(config) else 0
        return states + self._beside_on_each(layout) + copied

    def _of_rounding(self, config: RunConfig, tokens: float) -> float:
        """Bytes for the largest matrix, which is rounded anew for each product, and for what it meets."""
        if config.qat == "none":
            return 0
        shapes = [p.shape for p in dissect(self.base).layers.parameters() if p.ndim == 2]
        inputs = tokens * max(columns for _, columns in shapes) if FORMATS[config.qat].rounds_inputs else 0
        return ROUNDED_BYTES * (max(rows * columns for rows, columns in shapes) + inputs)

    def _told(self, config: RunConfig, layout: Layout, work: Work) -> float:
        """Bytes of what a teacher tells of a whole step, if there is one: of its text, or of a rank's slices of it;
        next to nothing of answers, of which it tells one number a token."""
        if self.beside is None or config.method in SAMPLING:
            return 0
        at_each = min(config.teacher_tokens, self.beside.base.config.get_text_config().vocab_size)
        return TOLD_BYTES * at_each * work.tokens * work.micro_batches / layout.cp

    def _with_answers(self, held: Footprint, config: RunConfig, layout: Layout) -> Footprint:
        """With reward models, and the whole copy that answers where a model is divided, or its states are elsewhere;
        and at least what a batch of answers takes, at which time nothing is kept for a backward pass. Engines have
        memory of their own."""
        if config.engine_url:
            return replace(held, weights=held.weights + self.reward_models)
        rows = self._answers_at_once(config, layout)
        cache = cache_bytes_per_token(self.model_config, self.precision.dtype) * rows * config.max_length
        drawn = rows * self.model_config.get_text_config().vocab_size * DRAWN_BYTES
        weights = held.weights + self.reward_models + self._copy_for_answers(config, layout)
        return replace(held, weights=weights, activations=max(held.activations, cache + drawn))

    def _copy_for_answers(self, config: RunConfig, layout: Layout) -> float:
        """Bytes of the whole model that answers, if that is another."""
        copied = layout.world > 1 or config.offload == "cpu"
        return (self.trained + self.frozen) * self.precision.dtype.itemsize * copied

    def _answers_at_once(self, config: RunConfig, layout: Layout) -> int:
        """That a process draws, of a step or of an evaluation."""
        learns = config.method in SAMPLING and not self.evaluates
        asked = [(config.global_batch_size, config.samples)] if learns else []
        if self.evaluates or examines(config):
            asked.append((asked_at_once(config), config.eval_samples))
        mine = max(math.ceil(prompts / layout.world) * samples for prompts, samples in asked)
        return min(config.answers_at_once, mine)

    def _kept(self, config: RunConfig) -> Kept:
        """Of a token for the backward pass, if there is one."""
        if self.evaluates:
            return Kept(0, 0)
        mode = config.activation_checkpointing
        spared = "selective" if spares_cheap_results(config, self.device) else "none"
        return self._keeps({"none": spared, "offload": "full"}.get(mode, mode), config)

    def _keeps(self, mode: str, config: RunConfig) -> Kept:
        written, hidden_dtype = how_written(config, self), weights_dtype(config, self.precision)
        return layer_keeps(self.model_config, self.precision.dtype, mode, hidden_dtype, written)


def how_written(config: RunConfig, outline: Outline) -> Written:
    """On a GPU norms are one node of the graph in any case, gates by Liger's kernels or compiled."""
    on_gpu = outline.device.type == "cuda"
    gate = config.compile or outline.kernels == "liger"
    return Written(on_gpu, on_gpu and gate, outline.head_norms)


def open_modes(config: RunConfig, device: torch.device) -> tuple[str, ...]:
    """How layers may be recomputed, the least first. Where no cheap results are kept in any case, none keeps about what
    selective does elsewhere, and that is of no use. Nor does selective go with zero-bubble."""
    if config.activation_checkpointing != "auto":
        return (config.activation_checkpointing,)
    spared = spares_cheap_results(config, device) or config.pipeline_schedule == "zero-bubble"
    return ("none", "full") if spared else ("none", "selective", "full")


def choose(config: RunConfig, outline: Outline, free: int, layout: Layout) -> Choice:
    """What the flags say, and what fits of what they leave open: the layout of data ranks under `--parallel auto`, and
    how layers are recomputed. free: bytes of a device before weights load."""
    offloads = config.offload == "cpu"
    given = config.parallel != "auto" or config.sharding is not None or config.mesh is not None or offloads
    fixed = given or layout.data_ranks == 1 or layout.expert_parallel > 1
    layouts = (layout,) if fixed else data_layouts(layout)
    stages = outline.stages(config, layout)

    def holds(one: Try) -> Footprint:
        settled = {"activation_checkpointing": one.checkpointing, "offload": "cpu" if one.offload else "none"}
        return outline.holds(config.model_copy(update=settled), one.layout, stages)

    if outline.device.type == "cpu":  # where states on the CPU are no way out
        tried = (Try(one, offloads, _mode_on_host(config, outline, free, holds, one)) for one in layouts)
    elif fixed:
        tried = (Try(layout, offloads, mode) for mode in open_modes(config, outline.device))
    else:
        tried = tries(layouts, open_modes(config, outline.device))
    choice = first_that_fits(tried, holds, free)
    return choice if fixed else explained(choice, holds, free)


def _mode_on_host(
    config: RunConfig, outline: Outline, free: int, holds: Callable[[Try], Footprint], layout: Layout
) -> str:
    room = USABLE * free - holds(Try(layout, False, "full")).resident
    return checkpointing_on_host(config, outline.model_config, outline.device, outline.precision, room)


def checkpointing_on_host(
    config: RunConfig, model_config: PretrainedConfig, device: torch.device, precision: Precision, room: float
) -> str:
    """On a CPU, which other programs use too: the first whose activations of a row fit into half of the room."""
    modes, hidden = open_modes(config, device), weights_dtype(config, precision)
    for mode in modes[:-1]:
        kept = "selective" if spares_cheap_results(config, device) else mode
        row = activation_bytes_per_token(model_config, precision.dtype, kept, hidden) * pack_capacity(config)
        if row < OF_HOST * room:
            return mode
    return modes[-1]
