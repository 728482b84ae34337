"""What a run needs of a device's memory, and what is chosen by that: the layout of `--parallel auto`, recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.config.methods import pack_capacity
from swiftlite.models.anatomy import dissect, has_head_norms
from swiftlite.models.quantize import BLOCK, count_quantizable
from swiftlite.models.tuners import count_parameters
from swiftlite.parallel.mesh import Mesh
from swiftlite.planning.choose import USABLE, Choice, Need, choose_data_layout, moment_bytes, trained_bytes
from swiftlite.planning.memory import BY_TRANSFORMERS, Written, activation_bytes_per_token
from swiftlite.training.divide import spares_cheap_results
from swiftlite.training.precision import Precision

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig


# Of a GPU's room for the head's chunk and the sum of its gradients, one layer's backward, and what fragments leave.
WORKSPACE, OF_GPU, OF_HOST = 3 << 30, 0.8, 0.5


def weights_dtype(config: RunConfig, precision: Precision) -> torch.dtype:
    """Of the base's weights, and so of hidden states between layers."""
    return precision.dtype if config.tuner == "lora" else precision.masters


def how_written(config: RunConfig, base: PreTrainedModel, device: torch.device, kernels: str) -> Written:
    """On a GPU norms are one node of the graph in any case, gates by Liger's kernels or compiled. kernels: whose are
    used, `liger` or another's."""
    on_gpu = device.type == "cuda"
    return Written(on_gpu, on_gpu and (config.compile or kernels == "liger"), has_head_norms(base))


def estimate_need(
    config: RunConfig,
    model_config: PretrainedConfig,
    model: nn.Module,
    base: PreTrainedModel,
    precision: Precision,
    device: torch.device,
    written: Written = BY_TRANSFORMERS,
) -> Need:
    """written: the layers are."""
    trained, total = count_parameters(model)
    weights, size, spared = weights_dtype(config, precision), precision.dtype.itemsize, 0.0
    if config.quantization != "none":
        spared = count_quantizable(dissect(base).layers) * (size - 1 / 2 - size / BLOCK)
    per_token = activation_bytes_per_token(model_config, precision.dtype, hidden_dtype=weights, written=written)
    cast = total if weights != precision.dtype else trained if precision.masters != precision.dtype else 0
    return Need(
        trained=trained,
        frozen=total - trained,
        frozen_bytes=weights.itemsize - spared / max(1, total - trained),
        copies=size * cast,
        largest_unit=size * max(_unit_sizes(base)),
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
    copies = need.copies if layout.dp_shard * layout.cp == 1 else 0
    return USABLE * free - (0 if elsewhere else (need.states + copies) / layout.shards)


def choose_checkpointing(
    config: RunConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    precision: Precision,
    room: float,
    written: Written = BY_TRANSFORMERS,
) -> str:
    """`auto`: of none, selective and full the first whose activations of a micro-batch fit into their part of the room.

    Where no cheap results are kept in any case, none keeps about what selective does elsewhere, and that is of no use.
    Nor does selective go with zero-bubble.
    """
    if config.activation_checkpointing != "auto":
        return config.activation_checkpointing
    tokens = (config.micro_batch_size if device.type == "cuda" else 1) * pack_capacity(config)
    spared, hidden, room = spares_cheap_results(config, device), weights_dtype(config, precision), part_of(room, device)
    for mode in ("none",) if spared or config.pipeline_schedule == "zero-bubble" else ("none", "selective"):
        kept = "selective" if spared else mode
        if activation_bytes_per_token(model_config, precision.dtype, kept, hidden, written) * tokens < room:
            return mode
    return "full"


def part_of(room: float, device: torch.device) -> float:
    """Bytes of the room that activations may take."""
    return min(OF_GPU * room, room - WORKSPACE) if device.type == "cuda" else OF_HOST * room
