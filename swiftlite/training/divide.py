"""Cuts a model on `meta` along every dimension of the mesh, in the one order that works.

Quantized matrices -> pipeline stages -> tensor parallelism -> experts -> activation checkpointing -> compile per layer
-> FSDP over the data ranks. Adapters are in the model already: added later, they would stay whole on each rank and
their gradients would never meet.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.checkpoint.catalog import stored_tensors
from swiftlite.config.losses import weighs_by_probability
from swiftlite.config.methods import PAIRED, PREFERENCE, SAMPLING, pack_capacity
from swiftlite.dtensors import is_fsdp_module
from swiftlite.models.anatomy import balances_router, dissect, parts_beside_text, why_alone
from swiftlite.models.checkpointing import set_activation_checkpointing
from swiftlite.models.compiled import compile_layers
from swiftlite.models.experts import use_autocast_experts
from swiftlite.models.kernels import fp8
from swiftlite.models.kernels.embedding import use_direct_embeddings
from swiftlite.models.kernels.half_products import HALF, use_half_products
from swiftlite.models.kernels.last_layer import spare_last_mlp
from swiftlite.models.kernels.lora import fuse_adapters
from swiftlite.models.kernels.norms import fuse_norms, widen_layer_norms
from swiftlite.models.kernels.products import onednn_serves, rounded, use_fast_products
from swiftlite.models.kernels.rotation import fuse_rotations
from swiftlite.models.quantize import quantize
from swiftlite.models.tuners import count_parameters
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.parallel.data import DataParallel, shard_over_data
from swiftlite.parallel.experts import apply_expert_parallel, build_expert_mesh, shard_experts
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.pipeline import Pipeline, cut_model
from swiftlite.parallel.stages import choose_schedule, plan_stages
from swiftlite.planning.memory import activation_bytes_per_token
from swiftlite.training.flops import FlopCounter
from swiftlite.training.lanes import cut_step
from swiftlite.training.share import CPU_FORWARD_TOKENS, Rounded, Sharing
from swiftlite.training.step import DirectStep, StepRunner

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.pipeline import Stage
    from swiftlite.training.pipeline_step import StageScorer
    from swiftlite.training.precision import Precision


# Cheap results are kept up to so many bytes, since making them again costs 4 to 6% of a step: less where oneDNN's
# programs have their place in memory already.
CHEAP_BYTES, BESIDE_PROGRAMS = 128 << 20, 64 << 20


@dataclass
class Part:
    """What one process has of the model: all of it, or a pipeline stage.

    scorer: the module whose forward runs it; model: of `scorer`, with adapters or not; stage: None where it is all.
    """

    scorer: TokenScorer | StageScorer
    model: nn.Module
    base: PreTrainedModel
    stage: Stage | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name in the whole model, tensor, whether it counts here: of two tied copies one does)."""
        for name, tensor in stored_tensors(self.model):
            if self.stage is None:
                yield name, tensor, True
            else:
                yield self.stage.full_name(name), tensor, self.stage.counts(name)


@dataclass
class Divided:
    """parts: this process's, in order; runner: how they run a step; share: what of a step is this process's."""

    parts: list[Part]
    runner: StepRunner
    share: Sharing

    @property
    def scorers(self) -> list[TokenScorer]:
        """The modules that `runner` runs."""
        return [part.scorer for part in self.parts]


def divide(
    model: nn.Module,
    base: PreTrainedModel,
    mesh: Mesh,
    options: DataParallel,
    precision: Precision,
    checkpointing: str,
    config: RunConfig,
) -> Divided:
    """Cut `model` (`base` or a peft model around it). Where there is a pipeline, it stays whole and copies are cut.

    Raises UserError where the architecture cannot be cut.
    """
    layout = mesh.layout
    kept = activation_bytes_per_token(base.config, precision.dtype, "selective")  # about what is left on a CPU
    alone = why_alone(base) is not None
    tokens, lanes = (None, 1) if alone else cut_step(config, mesh, base, count_parameters(model)[0], kept)
    at_once = lanes * (tokens or config.micro_batch_size * pack_capacity(config))
    share = Sharing(
        mesh=mesh,
        micro_batch_size=config.micro_batch_size,
        flops=FlopCounter(base),
        lanes=lanes,
        cut_tokens=tokens,
        in_pieces=not config.optimizer_in_backward,
        alike=balances_router(base.config),
        rounded=None if alone else _row_length(config, mesh, base, precision),
        side_by_side=_side_by_side(config, mesh, base) if alone else None,
    )
    if layout.pp == 1:
        _quantize(base, config)
        direct = mesh.device.type == "cpu" and mesh.stored is None and not config.optimizer_in_backward
        if direct:
            use_direct_embeddings(model)
            if precision.dtype == HALF and config.fp8 == "none" and not config.compile:  # fp8 exchanges plain layers
                use_half_products(model)
        scorer = TokenScorer(model, base, summed=_is_summed(config), direct=direct, alone=alone)
        parts = [Part(scorer, model, base)]
        runner: StepRunner = DirectStep(
            scorer,
            precision,
            mesh,
            config.seed,
            sync_every_microbatch=config.sync_every_microbatch,
            lanes=lanes,
            rematerialize=drops_cheap_results(config, base.config, precision, mesh.device, at_once),
            keep_gradients=direct,
        )
    else:
        parts, runner = _cut_to_stages(model, base, mesh, precision, config)
        # From a stage's first backward on its weights stay whole in any case (PyTorch's stages see to that), so giving
        # them back after forwards would save nothing and have them gathered again for each micro-batch.
        options = replace(options, resharding=False)
    expert_mesh = build_expert_mesh(layout, mesh.device) if layout.expert_parallel > 1 else None
    for part in parts:
        _divide_part(part, mesh, expert_mesh, options, checkpointing, config)
        if config.neftune_noise_alpha and (part.stage is None or part.stage.is_first):
            part.scorer.add_noise(config.neftune_noise_alpha)
    return Divided(parts, runner, share)


def spares_cheap_results(config: RunConfig, device: torch.device) -> bool:
    """Whether cheap results can be made again in the backward pass (`swiftlite.models.kernels.rematerialize`)."""
    return device.type == "cpu" and not config.compile and config.pipeline_parallel_size == 1


def drops_cheap_results(
    config: RunConfig, model_config: PretrainedConfig, precision: Precision, device: torch.device, tokens: int
) -> bool:
    """Whether cheap results are made again: where they can be, and are many. tokens: of the micro-batches that run at a
    time."""
    of = {mode: activation_bytes_per_token(model_config, precision.dtype, mode) for mode in ("none", "selective")}
    most = BESIDE_PROGRAMS if onednn_serves(device, precision.dtype) else CHEAP_BYTES
    return spares_cheap_results(config, device) and (of["none"] - of["selective"]) * tokens > most


def _cut_to_stages(
    model: nn.Module, base: PreTrainedModel, mesh: Mesh, precision: Precision, config: RunConfig
) -> tuple[list[Part], StepRunner]:
    from swiftlite.training.pipeline_step import PipelineStep, StageScorer

    layout = mesh.layout
    schedule = choose_schedule(config.pipeline_schedule, base.config.get_text_config().num_hidden_layers, layout.pp)
    plan = plan_stages(base, layout.pp, schedule, length=config.max_length)
    _quantize(base, config)  # stages are planned by the numbers that matrices have
    hidden_dtype = base.get_input_embeddings().weight.dtype
    stages = cut_model(model, base, plan, mesh.place("pp"))
    summed = _is_summed(config) and not schedule.splits_backward  # which runs the head's backward twice
    parts = [Part(StageScorer(stage, hidden_dtype, summed=summed), stage.model, stage.base, stage) for stage in stages]
    pipeline = Pipeline(stages, plan, mesh.group("pp"))
    return parts, PipelineStep(pipeline, [part.scorer for part in parts], precision, mesh, config.seed)


def _is_summed(config: RunConfig) -> bool:
    """Whether the loss is a plain sum over tokens, all of one weight."""
    return config.method not in (*PREFERENCE, *SAMPLING) and not weighs_by_probability(config)


def _side_by_side(config: RunConfig, mesh: Mesh, base: PreTrainedModel) -> int:
    """Tokens of a forward pass over documents in rows of their own, as `Sharing` takes it."""
    if config.method in PAIRED or balances_router(base.config):  # whose loss would be of other micro-batches
        return 0
    tokens = config.micro_batch_size * pack_capacity(config)
    return min(tokens, CPU_FORWARD_TOKENS) if mesh.device.type == "cpu" else tokens


def _row_length(config: RunConfig, mesh: Mesh, base: PreTrainedModel, precision: Precision) -> Rounded | None:
    """How long rows should be in place of their lengths, where layers have fast products. oneDNN's do without where
    routers count every token, or slices have their own padding; 8-bit products cannot, for each slice of a row."""
    if config.fp8 != "none":
        return functools.partial(fp8.rounded, slices=mesh.layout.cp)
    fast = not config.compile and onednn_serves(mesh.device, precision.dtype)
    return rounded if fast and mesh.layout.cp == 1 and not balances_router(base.config) else None


def _quantize(base: PreTrainedModel, config: RunConfig) -> None:
    """Pack what is frozen. Raises UserError where nothing can be."""
    if config.quantization != "none":
        quantize(dissect(base).layers, config.quantization)


def _divide_part(
    part: Part,
    mesh: Mesh,
    expert_mesh: DeviceMesh | None,
    options: DataParallel,
    checkpointing: str,
    config: RunConfig,
) -> None:
    anatomy, experts, again, by_tokens = dissect(part.base), [], nullcontext, _divides_tokens(mesh, config)
    widen_layer_norms(part.base)
    if mesh.layout.tp > 1:
        from swiftlite.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(part.model, part.base, mesh.stored["tp"], sequence_parallel=by_tokens)
    elif config.tuner == "lora":
        fuse_adapters(part.model)
    if config.fp8 != "none":
        fp8.use_fp8(anatomy.layers, config.fp8)
    elif not config.compile:
        use_fast_products(part.base)
        fuse_norms(part.base)
        fuse_rotations(part.base)
        if not by_tokens and (part.stage is None or part.stage.is_last):
            again = spare_last_mlp(anatomy.layers[-1])
    if mesh.device.type != "cpu":  # where casting an expert's weights takes longer than the few tokens that meet it
        use_autocast_experts(part.base)
    if expert_mesh is not None:
        experts = apply_expert_parallel(part.base, expert_mesh)
    set_activation_checkpointing(part.base, anatomy, checkpointing, again=again, compiled=config.compile)
    if config.compile:
        compile_layers(anatomy.layers)
    if experts:
        shard_experts(experts, expert_mesh, **options.unit(mesh.device))
    shard_over_data(part.scorer, anatomy.layers, mesh, options, parts_beside_text(part.base).values())
    if is_fsdp_module(part.scorer):
        torch.distributed.fsdp.register_fsdp_forward_method(part.scorer, "check")


def _divides_tokens(mesh: Mesh, config: RunConfig) -> bool:
    """Whether tensor-parallel ranks divide tokens between the blocks of a layer. gloo has no reduce-scatter: it sums
    whole tensors in its place, and gathering them again is one message more. And what is divided by tokens is a DTensor
    whose length changes, which compiled layers cannot hand on (torch 2.11 to 2.13)."""
    wanted = {"auto": mesh.device.type != "cpu" and not config.compile, "always": True, "never": False}
    return mesh.layout.tp > 1 and wanted[config.sequence_parallel]
