"""What the fullest device of a layout holds at the peak of a step, before weights load.

P numbers in a unit of FSDP are kept in shards and are whole while they are used; what each part of the sum is of stands
beside it. Source of the terms: ZeRO, arXiv 1910.02054, section 3, and for pipelines Megatron-LM, arXiv 2104.04473,
section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from torch import nn

from swiftlite.models.anatomy import dissect, parts_beside_text
from swiftlite.models.experts import find_experts
from swiftlite.parallel.stages import StagePlan
from swiftlite.planning.communication import REDUCED, Parameters, row_in_pipeline
from swiftlite.planning.memory import Kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.config.layout import Layout

# fp32 master weight and gradient, and AdamW's two moments. Source: ZeRO, arXiv 1910.02054, section 3.1
STATE_BYTES = {"weights": 4, "gradients": 4, "moments": 8}
TRAINED_BYTES = sum(STATE_BYTES.values())
PACKED_MOMENTS = 2 * (1 + 4 / 256)  # of adamw_8bit: a byte, and a scale for 256
# Of a matrix that is orthogonalised: parts, whole, normalised and next, and two products of at most its size.
MATRIX_COPIES = 6
LIVE_UNITS = 2  # of FSDP: the one that computes and the one that is gathered meanwhile


def moment_bytes(optimizer: str, device_type: str) -> float:
    """What both moments of a trained number take on the device. optimizer: as `--optimizer` has it, under Muon of what
    is no hidden matrix."""
    if optimizer == "paged_adamw" and device_type != "cpu":
        return 0
    return PACKED_MOMENTS if optimizer == "adamw_8bit" else STATE_BYTES["moments"]


def matrix_moment_bytes(optimizer: str, device_type: str) -> float:
    """The same of a hidden matrix, of which Muon keeps the momentum alone."""
    return STATE_BYTES["moments"] / 2 if optimizer == "muon" else moment_bytes(optimizer, device_type)


@dataclass(frozen=True)
class Blocks:
    """Parameters of a model, part by part. layers: without their experts; tied: the head has none of its own; idle:
    those that no text goes through."""

    layers: tuple[Parameters, ...]
    experts: tuple[Parameters, ...]
    embedding: Parameters
    head: Parameters
    rest: Parameters
    tied: bool
    idle: Parameters

    @staticmethod
    def of(base: PreTrainedModel) -> Blocks:
        """base: on any device (`meta` will do), whole, with its adapters and with what is frozen marked so."""
        anatomy = dissect(base)
        mixtures = [[experts for _, experts in find_experts(layer)] for layer in anatomy.layers]
        in_experts = {id(p) for mixture in mixtures for experts in mixture for p in experts.parameters()}
        embedded, headed, layered = (_ids(part) for part in (anatomy.embedding, anatomy.head, anatomy.layers))
        idle = list(parts_beside_text(base).values())
        elsewhere = embedded | headed | layered | {key for part in idle for key in _ids(part)}
        return Blocks(
            layers=tuple(Parameters.of([layer], in_experts) for layer in anatomy.layers),
            experts=tuple(Parameters.of(mixture) for mixture in mixtures),
            embedding=Parameters.of([anatomy.embedding]),
            head=Parameters.of([anatomy.head], embedded),
            rest=Parameters.of([base], elsewhere),
            tied=bool(embedded & headed),
            idle=Parameters.of(idle),
        )


def _ids(part: nn.Module) -> set[int]:
    return {id(parameter) for parameter in part.parameters()}


@dataclass(frozen=True)
class NumberBytes:
    """Bytes of a number of the model. weight, gradient, moments: of a trained one; frozen: of another one in a layer,
    on average; stored: of one that is in no layer; compute: in products of matrices. matrix_moments: of a hidden
    matrix; orthogonalized: of one that Muon orthogonalises meanwhile, 0 where it does not."""

    weight: float
    gradient: float
    moments: float
    frozen: float
    stored: int
    compute: int
    matrix_moments: float = STATE_BYTES["moments"]
    orthogonalized: int = 0


@dataclass(frozen=True)
class Work:
    """What a device does in a step. tokens: of a micro-batch, as whole rows; micro_batches: of a step on one data rank;
    kept: what a layer keeps of a token; recomputed: what it keeps where nothing is made again; hidden: their width;
    chunk: bytes of logits at a time; divides_tokens: tensor-parallel ranks do, between blocks; accumulates: gradients
    are not reduced before the last micro-batch; offload: states are in the host's memory; models: whose weights are
    there, of which one is trained.
    """

    tokens: int
    micro_batches: int
    kept: Kept
    recomputed: Kept
    hidden: int
    chunk: int
    divides_tokens: bool = True
    accumulates: bool = True
    offload: bool = False
    models: int = 1


@dataclass(frozen=True)
class Footprint:
    """Bytes on a device. gathered: weights that are whole for a moment or for a step, and copies of them in the type of
    products; workspace: of a layer in its backward pass and of the output head."""

    weights: float
    gradients: float
    moments: float
    gathered: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(astuple(self))

    @property
    def states(self) -> float:
        """Of the model and its optimizer, as they are kept."""
        return self.weights + self.gradients + self.moments

    @property
    def resident(self) -> float:
        """The same with what is whole in a step, whatever the tokens."""
        return self.states + self.gathered

    def parts(self) -> Iterable[tuple[str, float]]:
        """(name, bytes) of each part."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def footprint(blocks: Blocks, layout: Layout, plan: StagePlan | None, of: NumberBytes, work: Work) -> Footprint:
    """Of the device that holds most. plan: of the pipeline, None where there is none."""
    return max(footprints(blocks, layout, plan, of, work), key=lambda rank: rank.total)


def footprints(blocks: Blocks, layout: Layout, plan: StagePlan | None, of: NumberBytes, work: Work) -> list[Footprint]:
    """Of a device of each pipeline rank."""
    if plan is None:
        return [_Device(blocks, layout, of, work, range(len(blocks.layers)), 1.0).holds()]
    ranks = []
    for place in range(layout.pp):
        stages = plan.stages_of(place)
        layers = [layer for stage in stages for layer in plan.ranges[stage]]
        ends = 0 in stages, plan.stages - 1 in stages
        device = _Device(blocks, layout, of, work, layers, in_flight(plan, place, work.micro_batches), ends)
        ranks.append(device.holds())
    return ranks


def in_flight(plan: StagePlan, place: int, micro_batches: int) -> float:
    """Micro-batches whose activations of its own layers a pipeline rank keeps at a time (arXiv 2104.04473, section 2.2;
    of ZB-V: arXiv 2405.15362)."""
    ranks, per_rank = plan.ranks, plan.schedule.per_rank
    if plan.schedule.name == "gpipe":
        return micro_batches
    if plan.schedule.splits_backward:
        return min(micro_batches, ranks)
    if per_rank == 1:
        return min(micro_batches, ranks - place)
    chunks = 2 * (ranks - place - 1) + (per_rank - 1) * ranks + 1  # warm-up, and the one that is computed
    return min(per_rank * micro_batches, chunks) / per_rank


class _Device:
    """A device of one pipeline rank. layers: its own; flights: micro-batches whose activations it keeps at a time;
    ends: whether it has the embedding, and the head."""

    def __init__(
        self,
        blocks: Blocks,
        layout: Layout,
        of: NumberBytes,
        work: Work,
        layers: Iterable[int],
        flights: float,
        ends: tuple[bool, bool] = (True, True),
    ) -> None:
        self.blocks, self.layout, self.of, self.work, self.flights = blocks, layout, of, work, flights
        self.has_head, self.idle = ends[1], blocks.idle.count if ends[0] else 0
        self.layers, self.shards = list(layers), layout.dp_shard * layout.cp
        self.by_fsdp = self.shards * layout.dp_replicate > 1 or work.offload
        self.units = [self._layer(layer, layout.expert_parallel) for layer in self.layers]
        self.stored = [self._layer(layer, 1) for layer in self.layers]  # experts' shards are fewer by as much
        parts = [blocks.embedding] if ends[0] or blocks.tied else []
        parts += [blocks.head, blocks.rest] if ends[1] else []
        self.ends = _sum(part.on_each(layout.tp) for part in parts)

    def _layer(self, place: int, groups: int) -> tuple[float, float]:
        """(all, trained) numbers of a layer on this device when it is whole, of its experts one of so many groups."""
        tp, experts = self.layout.tp, self.blocks.experts[place]
        divided = tp * groups  # one of which is 1
        return _sum([self.blocks.layers[place].on_each(tp), (experts.count / divided, experts.trained / divided)])

    def holds(self) -> Footprint:
        weights, _, moments = (0.0, 0.0, 0.0) if self.work.offload else self._states()
        weights *= self.work.models
        activations, workspace = self._of_tokens()
        workspace = self._beside_matrices(activations, workspace)
        return Footprint(weights, self._gradients(), moments, self._gathered(), activations, workspace)

    def _states(self) -> tuple[float, float, float]:
        in_layers, trained_there = _sum(self.stored)
        trained = trained_there + self.ends[1]
        weights = trained * self.of.weight
        weights += (in_layers - trained_there) * self.of.frozen
        weights += (self.ends[0] - self.ends[1] + self.idle) * self.of.stored
        matrices = sum(math.prod(shape) for layer in self.layers for shape in self._matrices(layer)) / self.layout.tp
        moments = (trained - matrices) * self.of.moments + matrices * self.of.matrix_moments
        return weights / self.shards, trained * self.of.gradient / self.shards, moments / self.shards

    def _matrices(self, layer: int) -> tuple[tuple[int, ...], ...]:
        return self.blocks.layers[layer].matrices + self.blocks.experts[layer].matrices

    def _beside_matrices(self, activations: float, workspace: float) -> float:
        """The workspace where matrices are orthogonalised: when activations are gone, or during the backward pass."""
        largest = max((self._together(shape) for layer in self.layers for shape in self._matrices(layer)), default=0)
        needed = MATRIX_COPIES * largest * self.of.orthogonalized
        return max(workspace, needed - activations) if self.of.gradient else workspace + needed

    def _together(self, shape: tuple[int, ...]) -> float:
        """Numbers of a matrix, or of those in a batch that a rank has at a time: experts are dealt out where there are
        enough of them."""
        *batch, rows, columns = shape
        ranks = self.layout.tp * self.shards
        of_batch = [count / (ranks if count >= ranks else self.layout.expert_parallel) for count in batch]
        return rows * columns * math.prod(of_batch)

    def _gradients(self) -> float:
        """Whole until the last micro-batch where they add up, and of two units and the ends where not."""
        if not self.by_fsdp:
            return self._states()[1]
        _, trained = _sum([*self.units, self.ends])
        if self.of.gradient and (self.layout.pp > 1 or (self.work.accumulates and self.work.micro_batches > 1)):
            return trained * REDUCED
        shard = 0 if self.work.offload else self._states()[1]
        largest = max((trained for _, trained in self.units), default=0)
        return shard + (largest * LIVE_UNITS + self.ends[1]) * REDUCED * (self.shards > 1)

    def _gathered(self) -> float:
        """Layers are gathered in the type of products, or quantized; embedding, norm and head as they are stored, and
        autocast casts them. FSDP copies what one rank holds as well, of replicas. Without FSDP autocast has copies of
        the trained weights for a micro-batch."""
        cast = self.of.compute if self.of.weight != self.of.compute else 0
        if not self.by_fsdp:
            return _sum([*self.units, self.ends])[1] * cast
        ends = self.ends[0] * self.of.stored + self.ends[1] * cast
        whole = self.layout.pp > 1 or self.layout.sharding != "full"
        frozen = min(self.of.frozen, self.of.compute)
        units = [(count - trained) * frozen + trained * self.of.compute for count, trained in self.units]
        return ends + (sum(units) if whole else min(LIVE_UNITS, len(units)) * max(units, default=0))

    def _of_tokens(self) -> tuple[float, float]:
        """(what layers keep, what one of them and the head need meanwhile)."""
        work, layout = self.work, self.layout
        row = work.tokens if layout.pp == 1 else row_in_pipeline(work.tokens)
        tokens = row / layout.cp
        divided = layout.tp if work.divides_tokens else 1

        def of(kept: Kept) -> float:
            return tokens * (kept.hidden / divided + kept.inner / layout.tp)

        workspace = of(work.recomputed)
        if self.has_head:
            head = self.blocks.embedding if self.blocks.tied else self.blocks.head
            workspace += work.chunk + 2 * tokens * work.hidden * self.of.stored
            workspace += head.on_each(layout.tp)[1] * REDUCED * (work.micro_batches > 1)  # a micro-batch's own gradient
        return self.flights * len(self.units) * of(work.kept), workspace


def _sum(numbers: Iterable[tuple[float, float]]) -> tuple[float, float]:
    pairs = list(numbers)
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
