"""What a run needs of a device's memory, and what is chosen by that: the layout of `--parallel auto`, recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.config.methods import pack_capacity
from swiftlite.models.anatomy import dissect, has_head_norms, why_alone
from swiftlite.models.quantize import BLOCK, count_quantizable
from swiftlite.models.tuners import count_parameters
from swiftlite.objectives.head import CHUNK_BYTES
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.stages import StagePlan, choose_schedule, plan_stages
from swiftlite.planning.choose import (
    STATE_BYTES,
    USABLE,
    Choice,
    Need,
    choose_data_layout,
    moment_bytes,
    trained_bytes,
)
from swiftlite.planning.communication import ModelShape
from swiftlite.planning.footprint import Blocks, Footprint, NumberBytes, Work, footprint
from swiftlite.planning.memory import Kept, Written, activation_bytes_per_token, layer_keeps
from swiftlite.training.divide import spares_cheap_results
from swiftlite.training.flops import FlopCounter
from swiftlite.training.precision import Precision

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig


OF_HOST = 0.5  # of the room on a CPU, for activations


def weights_dtype(config: RunConfig, precision: Precision) -> torch.dtype:
    """Of the base's weights, and so of hidden states between layers."""
    return precision.dtype if config.tuner == "lora" else precision.masters


def estimate_need(
    config: RunConfig,
    model_config: PretrainedConfig,
    model: nn.Module,
    base: PreTrainedModel,
    precision: Precision,
    device: torch.device,
) -> Need:
    trained, total = count_parameters(model)
    weights, size, spared = weights_dtype(config, precision), precision.dtype.itemsize, 0.0
    if config.quantization != "none":
        spared = count_quantizable(dissect(base).layers) * (size - 1 / 2 - size / BLOCK)
    per_token = activation_bytes_per_token(model_config, precision.dtype, hidden_dtype=weights)
    cast = total if weights != precision.dtype else trained if precision.masters != precision.dtype else 0
    frozen_bytes, units = weights.itemsize - spared / max(1, total - trained), _unit_sizes(base)
    outside = units[-1] * weights.itemsize if weights != precision.dtype else 0  # of layers, whose type FSDP leaves
    return Need(
        trained=trained,
        frozen=total - trained,
        frozen_bytes=frozen_bytes,
        copies=size * cast,
        gathered=round(trained * size + (total - trained) * min(frozen_bytes, size) + outside),
        largest_unit=size * max(units),
        activations=per_token * config.micro_batch_size * pack_capacity(config),
        trained_bytes=trained_bytes(
            moments=moment_bytes(config.optimizer, device.type),
            pure_bf16=config.pure_bf16,
            no_gradients=config.optimizer_in_backward,
        ),
    )


def _unit_sizes(base: PreTrainedModel) -> list[int]:
    """Parameters of each decoder layer, and of the rest."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in dissect(base).layers]
    return [*layers, count_parameters(base)[1] - sum(layers)]


def copy_bytes(need: Need, precision: Precision) -> float:
    """What the weights of a second, undivided model take. It is loaded as the first one is, with masters."""
    return need.trained * precision.masters.itemsize + need.frozen * need.frozen_bytes


def bears_copy(choice: Choice, copy: float, room: float, held: Footprint | None, free: int) -> bool:
    """Whether a second model takes little of what the states leave, and fits beside the peak where that is known."""
    share = copy / choice.layout.shards
    fits = held is None or held.total + share <= USABLE * free
    return not choice.offload and share < room / 4 and fits


def choose_layout(config: RunConfig, need: Need, free: int, layout: Layout) -> Choice:
    """What the flags say, or under `--parallel auto` what fits."""
    offload = config.offload == "cpu"
    free_to_choose = config.parallel == "auto" and config.sharding is None and config.mesh is None and not offload
    if not free_to_choose or layout.data_ranks == 1 or layout.expert_parallel > 1:
        return Choice(layout, offload, "")
    return choose_data_layout(layout, need, free)


def room_left(choice: Choice, need: Need, mesh: Mesh, free: int) -> float:
    """Bytes that weights, gradients and optimizer states will leave free."""
    elsewhere, layout = choice.offload and mesh.device.type != "cpu", choice.layout
    copies = need.gathered if layout.dp_replicate > 1 else need.copies
    copies = copies if layout.dp_shard * layout.cp == 1 else 0
    return USABLE * free - (0 if elsewhere else (need.states + copies) / layout.shards)


@dataclass
class Outline:
    """A model before it is divided, on `meta`, tuned as it will be, and what layouts take of it.

    kernels: whose are used, `liger` or another's.
    """

    base: PreTrainedModel
    model_config: PretrainedConfig
    need: Need
    precision: Precision
    device: torch.device
    kernels: str

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
    def alone(self) -> str | None:
        return why_alone(self.base)

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
        share = masters / STATE_BYTES["weights"]
        gradient = 0 if config.optimizer_in_backward else STATE_BYTES["gradients"] * share
        moments = moment_bytes(config.optimizer, self.device.type)
        in_layers = sum(part.count - part.trained for part in (*self.blocks.layers, *self.blocks.experts))
        spared = (stored - self.need.frozen_bytes) * self.need.frozen  # by 4 bits, which layers alone have
        frozen = stored - spared / max(1, in_layers)
        return NumberBytes(masters, gradient, moments, frozen, stored, self.precision.dtype.itemsize)

    def holds(self, config: RunConfig, layout: Layout, stages: StagePlan | None) -> Footprint:
        """What the fullest device does. config: with every setting of memory settled."""
        mode = config.activation_checkpointing
        spared = "selective" if spares_cheap_results(config, self.device) else "none"
        work = Work(
            tokens=config.micro_batch_size * pack_capacity(config),
            micro_batches=config.gradient_accumulation_steps,
            kept=self._keeps({"none": spared, "offload": "full"}.get(mode, mode), config),
            recomputed=self._keeps("none", config),
            hidden=self.model_config.get_text_config().hidden_size,
            chunk=CHUNK_BYTES[self.device.type],
            divides_tokens=self.device.type != "cpu" and not config.compile,
            accumulates=not config.sync_every_microbatch,
            offload=config.offload == "cpu",
            models=2 if config.reference == "model" else 1,
        )
        return footprint(self.blocks, layout, stages, self.number_bytes(config), work)

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


def choose_checkpointing(
    config: RunConfig, outline: Outline, choice: Choice, room: float, free: int
) -> tuple[str, Footprint | None]:
    """(how layers are recomputed, what a GPU will hold): `auto` is the first of none, selective and full with which all
    fits. room: bytes that states leave; free: of the device without them. What a CPU will hold is not known as well.
    """
    if outline.device.type == "cpu":
        return checkpointing_on_host(config, outline.model_config, outline.device, outline.precision, room), None
    stages, offload = outline.stages(config, choice.layout), "cpu" if choice.offload else "none"
    for mode in open_modes(config, outline.device):
        settled = config.model_copy(update={"activation_checkpointing": mode, "offload": offload})
        held = outline.holds(settled, choice.layout, stages)
        if held.total <= USABLE * free:
            break
    return mode, held


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
