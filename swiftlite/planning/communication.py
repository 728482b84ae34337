"""Bytes that a rank sends in one optimizer step, for a layout and a model, before either exists.

Every entry is the mean over all ranks of a run, of ring algorithms: of n ranks each sends (n - 1) / n of what an
all-gather gives or a reduce-scatter takes, and twice that in an all-reduce (Patarasu and Yuan, Bandwidth optimal
all-reduce algorithms, 2009). What a rank receives is as much. A handful of numbers a step (losses, the gradient norm,
counts of tokens, a mixture's router loss) is left out, and so is what recomputed layers send again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from swiftlite.models.anatomy import attention_heads, dissect, head_sizes, parts_beside_text
from swiftlite.models.experts import find_experts
from swiftlite.models.matrices import is_matrix
from swiftlite.parallel.context import divide_heads
from swiftlite.parallel.stages import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.config.layout import Layout

REDUCED = 4  # bytes of a gradient that is whole or on its way: always fp32
HOST = "host"  # in place of a dimension
NORMALIZER = 4  # of a token's largest logit, its logit and its sum: always fp32
PIPELINE_ROUND = 64  # tokens


@dataclass(frozen=True)
class Traffic:
    """dimension: of the mesh, `efsdp` and `ep` those of experts, or `host`; size: bytes that a rank sends in a step, or
    copies from and to its host's memory, the mean."""

    dimension: str
    collective: str
    what: str
    size: float


@dataclass(frozen=True)
class Parameters:
    """How many there are, all and trained. whole: those of norms, which tensor parallelism does not divide; matrices:
    shapes of the trained ones that are matrices where the modules are of decoder layers."""

    count: int
    trained: int
    whole: int
    whole_trained: int
    matrices: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(modules: list[nn.Module], without: set[int] = frozenset()) -> Parameters:
        """Those below some modules, each once, but for the ids in `without`."""
        places = ((m, name, p) for top in modules for m in top.modules() for name, p in _own(m))
        found = {id(p): (p, "Norm" in type(m).__name__, is_matrix(m, name)) for m, name, p in places}
        kept = [(p.numel(), p.requires_grad, norm) for key, (p, norm, _) in found.items() if key not in without]
        matrices = (p for key, (p, _, matrix) in found.items() if matrix and p.requires_grad and key not in without)
        return Parameters(
            count=sum(number for number, _, _ in kept),
            trained=sum(number for number, trained, _ in kept if trained),
            whole=sum(number for number, _, norm in kept if norm),
            whole_trained=sum(number for number, trained, norm in kept if trained and norm),
            matrices=tuple(tuple(p.shape) for p in matrices),
        )

    def on_each(self, ranks: int) -> tuple[float, float]:
        """(all, trained) on one of the ranks of tensor parallelism."""
        divided = (self.count - self.whole) / ranks, (self.trained - self.whole_trained) / ranks
        return divided[0] + self.whole, divided[1] + self.whole_trained


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


@dataclass(frozen=True)
class ModelShape:
    """What of a causal language model decides its traffic.

    layers: of all decoder layers but for experts, experts: of those, ends: of embedding, last norm and head, tied:
    the parameters that embedding and head share; depth: layers, mixtures: those with experts; head_norms: numbers.
    """

    layers: Parameters
    experts: Parameters
    ends: Parameters
    tied: int
    depth: int
    mixtures: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    chosen: int

    @staticmethod
    def of(base: PreTrainedModel) -> ModelShape:
        """base: on any device (`meta` will do), whole, with its adapters and with what is frozen marked so."""
        anatomy, config = dissect(base), base.config.get_text_config()
        values = config.to_dict()
        mixtures = [experts for _, experts in find_experts(anatomy.layers)]
        in_experts = {id(p) for mixture in mixtures for p in mixture.parameters()}
        in_layers = {id(p) for p in anatomy.layers.parameters()}
        idle = {id(p) for part in parts_beside_text(base).values() for p in part.parameters()}
        shared = {id(p) for p in anatomy.embedding.parameters()} & {id(p) for p in anatomy.head.parameters()}
        return ModelShape(
            layers=Parameters.of([anatomy.layers], in_experts),
            experts=Parameters.of(mixtures),
            ends=Parameters.of([base], in_layers | idle),
            tied=sum(p.numel() for p in anatomy.head.parameters() if id(p) in shared and p.requires_grad),
            depth=len(anatomy.layers),
            mixtures=len(mixtures),
            hidden=config.hidden_size,
            heads=attention_heads(config),
            kv_heads=values.get("num_key_value_heads") or attention_heads(config),
            head_size=head_sizes(config)[0],
            chosen=values.get("num_experts_per_tok") or 1,
        )


@dataclass(frozen=True)
class Step:
    """What a step computes on one data rank, and in which types.

    tokens: of a micro-batch, as whole rows; trained: those of them that have a label; micro_batches: of a step;
    compute: bytes of a number in products of matrices; stored: those of weights as they are kept and of hidden states
    between layers (4 in full tuning; 2 where LoRA's base is bf16); schedule: None without a pipeline; frozen: bytes of
    a layer's frozen number as it is gathered, where those are fewer than in products; masters: of a trained number;
    offload: weights and gradients wait in the host's memory; paged: bytes of moments of a trained number that do;
    orthogonalized: bytes of a number of the matrices that Muon orthogonalises, 0 where it does not.
    """

    tokens: int
    trained: int
    micro_batches: int
    compute: int = 2
    stored: int = 4
    sync_every_microbatch: bool = False
    schedule: Schedule | None = None
    frozen: float | None = None
    masters: float = 4
    offload: bool = False
    paged: float = 0
    orthogonalized: int = 0


def step_traffic(layout: Layout, model: ModelShape, step: Step) -> list[Traffic]:
    """Everything that a rank sends in a step, an entry for each kind; without those that are zero.

    Experts' traffic supposes that all experts get equally many tokens.
    """
    plan = _Plan(layout, model, step)
    parts = (plan.weights(), plan.expert_weights(), plan.tensor(), plan.pipeline(), plan.context(), plan.experts())
    parts += (plan.matrices(), plan.host())  # at last: what runs beside arithmetic first hides no copies as well
    return [entry for part in parts for entry in part if entry.size > 0]


def row_in_pipeline(tokens: int) -> int:
    """Tokens of a micro-batch with its padding: a multiple, so that there are few shapes and a schedule is seldom built
    again."""
    return -(-tokens // PIPELINE_ROUND) * PIPELINE_ROUND


def _ring(ranks: int) -> float:
    """The share of a tensor that a rank sends in an all-gather, a reduce-scatter or an even all-to-all."""
    return (ranks - 1) / ranks


class _Plan:
    """One method for each dimension of the mesh. `p`, `t`, `c` and the like are sizes of dimensions."""

    def __init__(self, layout: Layout, model: ModelShape, step: Step) -> None:
        self.layout, self.model, self.step = layout, model, step
        self.micro_batches, self.row = step.micro_batches, step.tokens
        if step.schedule is not None:
            self.micro_batches = step.schedule.micro_batches(step.micro_batches, layout.pp)
            self.row = row_in_pipeline(step.tokens)
        self.tokens = -(-self.row // layout.cp)  # of a micro-batch on one rank

    # --- weights and gradients ----------------------------------------------------------------------------------------

    def weights(self) -> Iterator[Traffic]:
        """FSDP2 over `dp_shard x cp`, replicas over `dp_replicate` (ZeRO, arXiv 1910.02054, section 7).

        A layer is gathered in the compute type: with full sharding before each forward and (but for the last one, whose
        backward follows at once) each backward, with grad_op and in a pipeline once a step. Embedding, norm and head
        are gathered as they are stored, once a step.
        Gradients are scattered once, in fp32, and what a rank keeps of them is summed over the replicas.
        """
        layout = self.layout
        layers, trained = self._layers(experts=layout.expert_parallel == 1)
        ends, ends_trained = self._ends()
        frozen = self.step.compute if self.step.frozen is None else min(self.step.frozen, self.step.compute)
        in_layers = trained * self.step.compute + (layers - trained) * frozen
        gathered = self._gathers() * in_layers + self._gathers(ends=True) * ends * self.step.stored
        yield from self._share("fsdp", layout.dp_shard * layout.cp, gathered, trained + ends_trained)

    def _layers(self, *, experts: bool) -> tuple[float, float]:
        """(all, trained) numbers of all layers on a rank of tensor parallelism, with their experts or without."""
        model, tp = self.model, self.layout.tp
        layers, trained = model.layers.on_each(tp)
        return layers + experts * model.experts.count / tp, trained + experts * model.experts.trained / tp

    def _ends(self) -> tuple[float, float]:
        """The same of embedding, norm and head; in a pipeline both ends have a copy of a tied weight."""
        model, tp = self.model, self.layout.tp
        ends, trained = model.ends.on_each(tp)
        copied = model.tied / tp if self.layout.pp > 1 else 0
        return ends + copied, trained + copied

    def expert_weights(self) -> Iterator[Traffic]:
        """The same of experts that whole ranks hold: over `efsdp`, the ranks with the same experts."""
        layout, model, ep = self.layout, self.model, self.layout.expert_parallel
        if ep > 1:
            gathered = self._gathers() * model.experts.count / ep * self.step.compute
            yield from self._share("efsdp", layout.dp_shard * layout.cp // ep, gathered, model.experts.trained / ep)

    def _gathers(self, *, ends: bool = False) -> float:
        """How often in a step, in the mean over layers."""
        if self.step.schedule is not None:
            return 1
        if self.layout.sharding == "full" and not ends:
            return (2 - 1 / self.model.depth) * self.micro_batches
        return self.micro_batches if self.step.sync_every_microbatch else 1

    def _reductions(self) -> int:
        return self.micro_batches if self.step.sync_every_microbatch and self.step.schedule is None else 1

    def _share(self, dimension: str, shards: int, gathered: float, trained: float) -> Iterator[Traffic]:
        """gathered: bytes of all units whole, as often as they are; trained: parameters whose gradients are summed."""
        p, replicas = self.layout.pp, self.layout.dp_replicate
        reduced = self._reductions() * REDUCED * trained / p
        yield Traffic(dimension, "all-gather", "weights", _ring(shards) * gathered / p)
        yield Traffic(dimension, "reduce-scatter", "gradients", _ring(shards) * reduced)
        yield Traffic("dp_replicate", "all-reduce", "gradients", 2 * _ring(replicas) * reduced / shards)

    def matrices(self) -> Iterator[Traffic]:
        """Each to the process that orthogonalises it, and back to all who hold parts of it. Experts' travel between
        replicas alone: each is whole somewhere, but where expert parallelism leaves fewer of them than ranks."""
        layout, replicas = self.layout, self.layout.dp_replicate
        ranks = layout.dp_shard * layout.cp * layout.tp
        dimension = "dp_replicate" if replicas > 1 else "tp" if layout.tp == ranks else "fsdp"
        for parameters, parts in ((self.model.layers, ranks), (self.model.experts, 1)):
            numbers = sum(math.prod(shape) for shape in parameters.matrices) / layout.pp / ranks
            sent = numbers / replicas * (1 - 1 / parts + replicas - 1 / parts)
            yield Traffic(dimension, "all-to-all", "matrices", sent * self.step.orthogonalized)

    # --- the host's memory --------------------------------------------------------------------------------------------

    def host(self) -> Iterator[Traffic]:
        """Each rank's shard of what is gathered is copied from there before it, and of gradients back after they are
        reduced; moments that are paged come and go once a step."""
        step, layout = self.step, self.layout
        layers, trained = self._layers(experts=True)
        ends, ends_trained = self._ends()
        ranks = layout.pp * layout.dp_shard * layout.cp
        if step.offload:
            frozen = step.stored if step.frozen is None else step.frozen
            of_layers = trained * step.masters + (layers - trained) * frozen
            of_ends = ends_trained * step.masters + (ends - ends_trained) * step.stored
            gathered = self._gathers() * of_layers + self._gathers(ends=True) * of_ends
            reduced = self._reductions() * (trained + ends_trained) * step.masters
            yield Traffic(HOST, "copy", "weights", gathered / ranks)
            yield Traffic(HOST, "copy", "gradients", reduced / ranks)
        yield Traffic(HOST, "copy", "moments", 2 * step.paged * (trained + ends_trained) / ranks)

    # --- tensor parallelism -------------------------------------------------------------------------------------------

    def tensor(self) -> Iterator[Traffic]:
        """Tensor and sequence parallelism (arXiv 1909.08053 and 2205.05198).

        A block gathers its input as hidden states are stored and scatters its sums in the compute type; the backward
        does the opposite, each gradient in the type of its value. Around the layers of a stage hidden states are
        divided and gathered once. A mixture gathers its input, sums its output whole (as its gradient), and divides
        it again.
        """
        t, p, model, step = self.layout.tp, self.layout.pp, self.model, self.step
        if t == 1:
            return
        hidden = _ring(t) * self.micro_batches * self.tokens * model.hidden / p
        blocks, stages = 2 * model.depth - model.mixtures, p * (step.schedule.per_rank if step.schedule else 1)
        gathered = blocks * (step.stored + step.compute) + (2 * model.mixtures + 2 * stages) * step.stored
        yield Traffic("tp", "all-gather", "hidden states", hidden * gathered)
        yield Traffic("tp", "reduce-scatter", "hidden states", hidden * blocks * (step.stored + step.compute))
        ring = 2 * _ring(t) * self.micro_batches / p
        per_token = model.hidden * (step.stored + step.compute) + model.chosen * step.stored
        mixture = model.mixtures * self.tokens * per_token
        yield Traffic("tp", "all-reduce", "mixtures' hidden states", ring * mixture)
        yield Traffic("tp", "all-reduce", "embeddings", ring * self.tokens * model.hidden * step.stored)
        head = step.trained / self.layout.cp * (3 * NORMALIZER + model.hidden * step.stored)
        yield Traffic("tp", "all-reduce", "normalizers and the head's gradient", ring * head)
        shared = 2 * model.depth * model.hidden * model.kv_heads * model.head_size if model.kv_heads < t else 0
        summed = ring * (shared * bool(model.layers.trained) + model.layers.whole_trained) * step.stored
        yield Traffic("tp", "all-reduce", "gradients of whole weights", summed)

    # --- pipeline -----------------------------------------------------------------------------------------------------

    def pipeline(self) -> Iterator[Traffic]:
        """Hidden states over each border between stages on different ranks, and gradients back (arXiv 1806.03377)."""
        schedule, p, model = self.step.schedule, self.layout.pp, self.model
        if schedule is None:
            return
        borders = p * schedule.per_rank - 1 - schedule.v_shaped  # the bottom of a V lies inside a rank
        state = self.tokens * model.hidden * self.step.stored
        yield Traffic("pp", "send", "hidden states and gradients", 2 * borders * self.micro_batches * state / p)
        shards = self.layout.tp * self.layout.dp_shard * self.layout.cp
        tied = 0 if schedule.v_shaped else 2 * REDUCED * model.tied / shards / p
        yield Traffic("pp", "send", "gradients of the tied embedding", tied)

    # --- context parallelism ------------------------------------------------------------------------------------------

    def context(self) -> Iterator[Traffic]:
        """Heads of queries, keys, values and outputs exchanged (DeepSpeed Ulysses, arXiv 2309.14509, section 3.2), or
        keys and values gathered where there are fewer heads than ranks (arXiv 2407.21783, section 3.3.2). Of a row that
        is one document: of several, those that lie whole on a rank are not sent.
        """
        c, t, model = self.layout.cp, self.layout.tp, self.model
        if c == 1:
            return
        heads, kv_heads = model.heads // t, max(1, model.kv_heads // t)
        number = self.micro_batches * model.depth * self.tokens * model.head_size * self.step.compute / self.layout.pp
        if heads < c:
            for collective, what in (("all-gather", "keys and values"), ("all-to-all", "their gradients")):
                yield Traffic("cp", collective, what, number * 2 * kv_heads * (c - 1))
            return
        shares = divide_heads(heads, kv_heads, c)
        travelling = sum(2 * len(share.key_of_query) + 2 * (share.keys.stop - share.keys.start) for share in shares)
        yield Traffic("cp", "all-to-all", "queries, keys, values and outputs", 2 * number * travelling * _ring(c))

    # --- expert parallelism -------------------------------------------------------------------------------------------

    def experts(self) -> Iterator[Traffic]:
        """Each token to its experts and back, forward and backward (GShard, arXiv 2006.16668, section 3.2)."""
        ep, model = self.layout.expert_parallel, self.model
        rows = self.micro_batches * model.mixtures * self.tokens * model.chosen / self.layout.pp
        yield Traffic("ep", "all-to-all", "tokens", 4 * _ring(ep) * rows * model.hidden * self.step.compute)
