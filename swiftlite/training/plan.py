"""Which layout to train in: every one that so many devices allow, with its memory and time, before weights load.

The model is built on `meta` and tuned as for training; nothing is read but its config.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.config.batch import ACCUMULATION, GLOBAL, MICRO
from swiftlite.config.flags import all_flags
from swiftlite.config.layout import Layout
from swiftlite.config.methods import pack_capacity, passes, step_packs
from swiftlite.config.resolve import Resolved, resolve
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect, experts_of_token, with_router_loss
from swiftlite.models.architecture import import_architecture
from swiftlite.models.experts import find_experts
from swiftlite.models.kernels.fp8 import check_fp8, check_served
from swiftlite.models.tuners import apply_tuner, to_master_precision
from swiftlite.parallel.stages import StagePlan, stage_costs
from swiftlite.planning.choose import USABLE
from swiftlite.planning.communication import Step, step_traffic
from swiftlite.planning.footprint import STATE_BYTES, Footprint
from swiftlite.planning.pace import AGAIN, FORWARD, WITH_ADAPTERS, Pace, step_pace
from swiftlite.planning.search import candidates
from swiftlite.training.guards.fits import check_config, check_layout
from swiftlite.training.needs import Outline, open_modes
from swiftlite.training.optimizers.muon import orthogonalizing_flops
from swiftlite.training.qat import check_rounding
from swiftlite.training.setup import build_base, precision_of
from swiftlite.training.setup_method import count_more_forwards
from swiftlite.training.sources import find_weights
from swiftlite.training.teacher import beside_of, check_teaching_layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.schema import RunConfig
    from swiftlite.planning.devices import Device

ALIKE = 1.05  # times as fast: estimates tell no less apart
MICRO_SIZES = (1, 2, 4, 8)  # rows of a forward pass that are tried where nobody says


@dataclass(frozen=True)
class Proposal:
    """A layout and how it would train. flags: beyond those that were given; limit: bytes that it may take."""

    flags: dict[str, Any]
    config: RunConfig
    layout: Layout
    footprint: Footprint
    pace: Pace
    tokens: int
    limit: float

    @property
    def fits(self) -> bool:
        return self.footprint.total <= self.limit

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.pace.seconds


@dataclass(frozen=True)
class Fleet:
    """per_machine: devices of each of so many machines."""

    device: Device
    machines: int
    per_machine: int

    @property
    def flags(self) -> dict[str, int]:
        """That start as many processes."""
        return {"nproc_per_node": self.per_machine} | ({"nnodes": self.machines} if self.machines > 1 else {})


@dataclass
class Plan:
    """proposals: the best first; refused: what layouts cannot be, each kind once, by its words without numbers."""

    proposals: list[Proposal] = field(default_factory=list)
    refused: dict[str, UserError] = field(default_factory=dict)

    @property
    def best(self) -> Proposal | None:
        return next((proposal for proposal in self.proposals if proposal.fits), None)


def outline_of(
    config: RunConfig, model_config: PretrainedConfig, kind: str, capability: tuple[int, int] | None = None
) -> Outline:
    """kind: of the device, `cuda` or `cpu`; capability: its own. Raises UserError where model, flags or device do not
    fit."""
    check_config(config, model_config)
    model_config = with_router_loss(model_config, config.router_aux_loss_coef)
    if config.fp8 != "none":
        check_fp8(model_config, capability)
    import_architecture(model_config, classifier=config.method == "rm")
    device, described = torch.device(kind), copy.deepcopy(model_config)
    on_device = _with_precision(config, device)
    precision = precision_of(on_device, model_config, device)
    described.num_labels = 1  # of a reward model, which is all that asks
    source, adapter = find_weights(config, None)
    base = build_base(source, config, described, precision)
    model = apply_tuner(base, config, adapter, lambda _: None)
    if config.fp8 != "none":
        check_served(dissect(base).layers)
    if config.qat != "none":
        check_rounding(base, config.qat, device)
    to_master_precision(model, precision.masters)
    beside = beside_of(on_device, device) if config.teacher is not None else None
    return Outline.of(config, base, model_config, precision, device, config.kernels, beside)


def _with_precision(config: RunConfig, device: torch.device) -> RunConfig:
    """With the precision that `auto` is on a GPU, which need not be here to be asked."""
    is_open = config.precision == "auto" and device.type == "cuda"
    return config.model_copy(update={"precision": "bf16"}) if is_open else config


def propose(resolved: Resolved, outline: Outline, fleet: Fleet) -> Plan:
    """Every layout of a fleet, the best first."""
    plan = Plan()
    given = {name: getattr(resolved.config, name) for name in resolved.given}
    shared = {}
    if not {GLOBAL, ACCUMULATION} & given.keys():  # all layouts train the same steps
        with suppress(UserError):
            shared[GLOBAL] = _variant(resolved, fleet, {}).config.global_batch_size
    for flags in candidates(
        given,
        world=fleet.machines * fleet.per_machine,
        per_machine=fleet.per_machine,
        layers=outline.layers,
        row=pack_capacity(resolved.config),
        experts=int(experts_of_token(outline.model_config) and _experts(outline.base)),
    ):
        try:
            variant = _variant(resolved, fleet, shared | flags)
            _check(variant, outline)
        except UserError as error:
            plan.refused.setdefault(re.sub(r"\d+", "", error.what), error)
            continue
        plan.proposals.append(settle(variant, outline, fleet, shared | flags))
    plan.proposals.sort(key=_preference, reverse=True)
    return plan


def settle(resolved: Resolved, outline: Outline, fleet: Fleet, flags: Mapping[str, Any] | None = None) -> Proposal:
    """The best of what a layout leaves open. flags: that it was resolved with, beyond those that were given."""
    return max(_tried(resolved, flags or {}, outline, fleet), key=_preference)


def _preference(proposal: Proposal) -> tuple[bool, float]:
    """What differs by less than `ALIKE` is alike: the first, which is the simpler one, is taken."""
    speed = round(math.log(proposal.tokens_per_second, ALIKE))
    return proposal.fits, speed if proposal.fits else -proposal.footprint.total


def _experts(base: PreTrainedModel) -> int:
    return max((experts.num_experts for _, experts in find_experts(base)), default=0)


def _variant(resolved: Resolved, fleet: Fleet, flags: Mapping[str, Any]) -> Resolved:
    """The same settings with other flags, resolved as a command would, for the fleet's processes, one included: sizes
    that were given would ask for more. Raises UserError."""
    config, by, known = resolved.config, resolved.given, all_flags()
    given = {name: Given(getattr(config, name), known[name].option, by[name]) for name in by}
    sizes = {name: size for name, size in flags.items() if not isinstance(size, int) or size > 1}
    said = {
        name: Given(value, f"{known[name].option} {value}", "flag") for name, value in (fleet.flags | sizes).items()
    }
    return resolve(None, given | said | {"method": Given(config.method, "--method", "flag")}, env={}, needs_rows=False)


def _check(variant: Resolved, outline: Outline) -> None:
    check_layout(variant.config, variant.layout, outline.base)
    if outline.beside is not None:
        check_teaching_layout(variant.config, variant.layout, outline.beside.base)


def _tried(variant: Resolved, flags: Mapping[str, Any], outline: Outline, fleet: Fleet) -> Iterator[Proposal]:
    """One layout with each size of micro-batch, recomputation and way to add gradients up that nobody has settled. The
    micro-batches that it was resolved with are among them."""
    config, layout, given = variant.config, variant.layout, variant.given
    stages = outline.stages(config, layout)
    unevenness = _unevenness(stages, outline, config.max_length)
    micro_sizes = [config.micro_batch_size] if {MICRO, ACCUMULATION} & given.keys() else MICRO_SIZES
    for micro, mode in itertools.product(micro_sizes, open_modes(config, outline.device)):
        count, rest = divmod(config.global_batch_size, micro * layout.data_ranks)
        if rest or (stages and stages.schedule.micro_batches(count, layout.pp) != count):
            continue
        for sync in _syncs(config, layout, count, given):
            chosen = {MICRO: micro, "activation_checkpointing": mode, "sync_every_microbatch": sync}
            settled = config.model_copy(update=chosen | {ACCUMULATION: count})
            held = outline.holds(settled, layout, stages)
            pace = _pace(settled, layout, stages, unevenness, outline, fleet)
            more = {name: value for name, value in chosen.items() if value != getattr(config, name)}
            more |= {GLOBAL: config.global_batch_size} if MICRO in more else {}
            tokens = step_packs(settled) * pack_capacity(settled)
            yield Proposal(
                {name: value for name, value in flags.items() if value != 1} | more,
                settled, layout, held, pace, tokens, USABLE * fleet.device.memory,
            )  # fmt: skip


def _syncs(config: RunConfig, layout: Layout, count: int, given: Mapping[str, str]) -> Sequence[bool]:
    sharded = layout.dp_shard * layout.cp > 1 and layout.pp == 1 and count > 1
    if "sync_every_microbatch" in given or not sharded:
        return [config.sync_every_microbatch]
    return [False, True]


def _pace(
    config: RunConfig, layout: Layout, stages: StagePlan | None, unevenness: float, outline: Outline, fleet: Fleet
) -> Pace:
    row, packs = pack_capacity(config), step_packs(config)
    count = config.gradient_accumulation_steps * packs // config.global_batch_size
    adapted = outline.trained < outline.frozen
    forward = WITH_ADAPTERS if adapted else 1
    again = AGAIN.get(config.activation_checkpointing, AGAIN["full"]) * forward
    work = passes(config) * (1 + again) + count_more_forwards(config) * FORWARD * forward
    on_gpu = outline.device.type != "cpu"
    of = outline.number_bytes(config)
    step = Step(
        tokens=config.micro_batch_size * row,
        trained=config.micro_batch_size * row,
        micro_batches=count * passes(config),
        compute=of.compute,
        stored=of.stored,
        frozen=of.frozen,
        sync_every_microbatch=config.sync_every_microbatch,
        schedule=stages.schedule if stages else None,
        masters=of.weight,
        offload=config.offload == "cpu" and on_gpu,
        paged=STATE_BYTES["moments"] if config.optimizer == "paged_adamw" and on_gpu else 0,
        orthogonalized=of.orthogonalized,
    )
    matrices = (*outline.shape.layers.matrices, *outline.shape.experts.matrices)
    orthogonalizing = sum(map(orthogonalizing_flops, matrices)) if of.orthogonalized else 0
    documents = [config.max_length] * (packs * row // config.max_length)
    taught = FORWARD * outline.beside.flops.step(documents) if outline.beside else 0
    return step_pace(
        layout,
        outline.flops.step(documents) * work + taught + orthogonalizing,
        step_traffic(layout, outline.shape, step),
        fleet.device,
        per_machine=fleet.per_machine,
        micro_batches=count,
        plan=stages,
        unevenness=unevenness,
        sync_every_microbatch=config.sync_every_microbatch,
    )


def _unevenness(stages: StagePlan | None, outline: Outline, length: int) -> float:
    """Work of the slowest pipeline rank over that of the mean one."""
    if stages is None:
        return 1.0
    costs = stage_costs(outline.base, length)
    of_rank = [
        sum(costs[layer] for stage in stages.stages_of(rank) for layer in stages.ranges[stage])
        for rank in range(stages.ranks)
    ]
    return max(of_rank) * len(of_rank) / sum(of_rank)
