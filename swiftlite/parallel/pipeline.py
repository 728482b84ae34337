"""A Hugging Face model cut into pipeline stages, each of which still runs the model's own decoder.

A stage is a copy of the model with the layers of its range only. Hidden states enter it as `inputs_embeds`, a keyword
that every decoder has. What stands before the layers (embedding, learnt positions) stays on the first stage, as does
what no text goes through (a tower for images); what stands behind them (the last norm) and the output head on the last;
everything without weights (rotary embeddings) is on all. That a decoder does nothing else to hidden states on their way
in and out is proven on each model before it is cut: a stage without any layer has to be the identity.

A weight that embedding and head share has a copy on the first and on the last stage. Both get the sum of their
gradients, so they stay equal.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from swiftlite.dtensors import local
from swiftlite.errors import UserError
from swiftlite.models.anatomy import (
    beside_text,
    decoder_of,
    dissect,
    find_balance,
    head_of,
    keep_layers,
    parts_beside_text,
    set_head,
)
from swiftlite.parallel.stages import StagePlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.data.batches import MicroBatch

# Factors that a decoder applies to its input embeddings, whoever made them: 1 behind the first stage.
INPUT_FACTORS = ("embedding_multiplier",)


@dataclass
class Stage:
    """model: what is trained and saved of this stage (with adapters or not); base: the causal language model inside,
    whose embedding and head are `Absent` where another stage has them; names: of each parameter and buffer in `model`
    the name in the whole model; tied: the parameters, by their name in `model`, of which the first and the last stage
    have a copy each.
    """

    model: nn.Module
    base: PreTrainedModel
    index: int
    count: int
    names: dict[str, str]
    tied: frozenset[str]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def full_name(self, local: str) -> str:
        """The name in the whole model of a parameter or buffer of `model`."""
        return self.names[local]

    def counts(self, local: str) -> bool:
        """Whether a parameter belongs into the gradient norm and the files here; of two copies the first one does."""
        return self.is_first or local not in self.tied


class Absent(nn.Module):
    """Stands where a part is on another stage: hidden states pass through, an embedding of numbers adds nothing."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        # A zero without dimensions: added to hidden states it changes neither their shape nor their type.
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


def cut_model(model: nn.Module, base: PreTrainedModel, plan: StagePlan, rank: int) -> list[Stage]:
    """The stages of a pipeline rank, in order. The model stays as it is.

    model: the whole of what is trained, parameters on `meta`; base: the causal language model inside it.
    Raises UserError where the architecture cannot be cut.
    """
    before = _parts_before_layers(base)
    _check_parts(base)
    _check_identity(base, before)
    place = next(name for name, module in model.named_modules() if module is base)
    return [_cut(model, place, plan, index, before) for index in plan.stages_of(rank)]


def _cut(model: nn.Module, place: str, plan: StagePlan, index: int, before: set[str]) -> Stage:
    model = copy.deepcopy(model)
    base = model.get_submodule(place)
    whole = {id(tensor): name for name, tensor in _tensors(model)}  # the first name of a tied one
    ends = base.get_input_embeddings(), head_of(base)
    shared = {id(p) for p in ends[0].parameters()} & {id(p) for p in ends[1].parameters()}
    first, last = index == 0, index == plan.stages - 1
    _prune(base, plan.ranges[index], before, first=first, last=last)
    names = {name: whole[id(tensor)] for name, tensor in _tensors(model)}
    tied = frozenset(name for name, tensor in _tensors(model) if id(tensor) in shared)
    return Stage(model, base, index, plan.stages, names, tied)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _prune(base: PreTrainedModel, layers: range, before: set[str], *, first: bool, last: bool) -> None:
    """Leave a range of layers, and what stands before and behind them where it belongs."""
    anatomy = dissect(base)
    decoder = anatomy.decoder
    if not first:
        _leave_to_first(base)
    for name, part in list(decoder.named_children()):
        if part is anatomy.layers:
            setattr(decoder, name, nn.ModuleList(list(part)[layers.start : layers.stop]))
        elif _is_placed(part) and not (first if name in before else last):
            setattr(decoder, name, Absent())
    if not first:
        base.set_input_embeddings(Absent())
        for name in INPUT_FACTORS:
            if name in vars(decoder):
                setattr(decoder, name, 1.0)
    if not last:
        set_head(base, Absent())
    for config in {id(c): c for c in (base.config.get_text_config(), decoder_of(base).config)}.values():
        keep_layers(config, layers)  # layers themselves read theirs when they were built


def _leave_to_first(base: PreTrainedModel) -> None:
    """Be without what no text goes through."""
    for name in parts_beside_text(base):
        base.set_submodule(name, Absent())
    for name in beside_text(base):  # parameters beside modules
        place, _, leaf = name.rpartition(".")
        setattr(base.get_submodule(place), leaf, None)


def _is_placed(part: nn.Module) -> bool:
    """Whether a part of a decoder belongs to one stage; rotary embeddings and the like are wanted by all."""
    return isinstance(part, nn.Dropout) or any(True for _ in part.parameters())


class _AtFirstLayer(Exception):  # noqa: N818 - not an error
    pass


def _parts_before_layers(base: PreTrainedModel) -> set[str]:
    """Names of the decoder's parts that run before its first layer, found by running it that far without weights."""
    probe = copy.deepcopy(base)
    anatomy, seen = dissect(probe), set()

    def stop(*_: object) -> None:
        raise _AtFirstLayer

    for name, part in list(anatomy.decoder.named_children()):
        if part is anatomy.embedding:
            seen.add(name)
        elif part is not anatomy.layers and _is_placed(part):
            setattr(anatomy.decoder, name, Absent())
            anatomy.decoder.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.add(name))
    anatomy.layers[0].register_forward_pre_hook(stop)
    with contextlib.suppress(_AtFirstLayer):
        _run_decoder(probe)
    return seen


def _run_decoder(base: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """(some hidden states, what the decoder makes of them). Raises UserError where it does not take them."""
    hidden = torch.randn(1, 3, base.config.get_text_config().hidden_size)
    try:
        with torch.no_grad():
            output = decoder_of(base)(
                inputs_embeds=hidden, position_ids=torch.arange(3)[None], attention_mask=None, use_cache=False
            )
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise _refusal(base, "cannot start from hidden states in the middle") from error
    return hidden, output.last_hidden_state


def _check_parts(base: PreTrainedModel) -> None:
    """Refuse weights that no stage would have, or that two layers would share. Raises UserError."""
    anatomy = dissect(base)
    holders = [*anatomy.decoder.children(), anatomy.head]
    known = {id(p) for p in (*(p for holder in holders for p in holder.parameters()), *beside_text(base).values())}
    lost = [name for name, p in base.named_parameters() if id(p) not in known]
    if lost:
        raise _refusal(base, f"has weights outside its layers, embedding, norm and head: {lost[0]}")
    owners: dict[int, int] = {}
    for number, layer in enumerate(anatomy.layers):
        for parameter in layer.parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise _refusal(base, f"has layers that share weights: {owners[id(parameter)]} and {number}")


def _check_identity(base: PreTrainedModel, before: set[str]) -> None:
    """A stage in the middle, without layers, must give back what it gets. Raises UserError."""
    empty = copy.deepcopy(base).train()
    _prune(empty, range(0), before, first=False, last=False)
    hidden, output = _run_decoder(empty)
    if output.shape != hidden.shape or not torch.equal(output, hidden):
        raise _refusal(base, "changes hidden states outside its layers")


def _refusal(base: PreTrainedModel, why: str) -> UserError:
    return UserError(
        f"{type(base).__name__} cannot be cut into pipeline stages: it {why}",
        where="--pipeline-parallel-size",
        fix="use --pipeline-parallel-size 1 and --parallel fsdp",
    )


class Pipeline:
    """This process's stages, and what they share with those of others."""

    def __init__(self, stages: list[Stage], plan: StagePlan, group: dist.ProcessGroup) -> None:
        """stages: what `cut_model` gave; group: the ranks of this pipeline, in the order of `plan`."""
        self.stages, self.plan, self.group = stages, plan, group

    def sum_tied_gradients(self) -> None:
        """Give the two copies of a tied weight the sum of their gradients: once a step, after the last backward."""
        copies = [tied for stage in self.stages if (tied := _tied_gradients(stage))]
        if len(copies) == 2:  # a V, with both ends on this rank
            for first, last in zip(*copies, strict=True):
                last += first
                first.copy_(last)
        elif copies:
            ends = {self.plan.rank_of(0), self.plan.rank_of(self.plan.stages - 1)}
            (other,) = ends - {dist.get_rank(self.group)}
            for gradient in copies[0]:
                _add_from(dist.get_global_rank(self.group, other), gradient, self.group)


def _tied_gradients(stage: Stage) -> list[torch.Tensor]:
    """This process's parts of the gradients of trained tied weights, in an order that both ends agree on."""
    names = sorted(stage.tied, key=stage.full_name)
    trained = [p for p in map(stage.model.get_parameter, names) if p.requires_grad]
    return [local(p.grad) for p in trained]


def _add_from(peer: int, values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """values += the peer's, in place and on both sides; a + b is b + a to the last bit, so both have the same."""
    received = torch.empty_like(values)
    exchange = [dist.P2POp(dist.isend, values, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    values += received


class Routing:
    """The load-balancing loss of a mixture model whose layers lie on several stages.

    `experts * sum over experts of f P`, f the tokens and P the router probability that an expert gets, both as means
    over tokens *and layers* (arXiv 2101.03961, equations 4 to 6). So it is no sum over stages: they hand on the sums
    of f and P, `[2, experts]`, and the last one makes the loss.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        """Raises UserError where the architecture's own loss is another."""
        own, self.experts, self.chosen, self._coefficient = find_balance(base)
        layers = tuple(torch.randn(5, self.experts) for _ in range(2))
        ours = self._loss(self._counts(layers))
        if not torch.allclose(ours, own(layers, self.experts, self.chosen), rtol=1e-5):
            raise UserError(
                f"{type(base).__name__} has a load-balancing loss that cannot be divided over pipeline stages",
                where="--pipeline-parallel-size",
                fix="use --pipeline-parallel-size 1, or --router-aux-loss-coef 0",
            )

    def start(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(2, self.experts, device=device, requires_grad=torch.is_grad_enabled())

    def add(self, so_far: torch.Tensor, layers: tuple[torch.Tensor, ...] | None, batch: MicroBatch) -> torch.Tensor:
        """`so_far` and the counts of a stage's layers, without padding. layers: router logits `[T, experts]` each."""
        if not layers:
            return so_far
        if batch.context is None:
            return so_far + self._counts(tuple(layer[: batch.tokens] for layer in layers))
        return so_far + self._counts(tuple(batch.context.whole_row(layer) for layer in layers))

    def loss(self, counts: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """This rank's part of the micro-batch's loss: of a row divided over context ranks each gives an equal part."""
        share = 1 if batch.context is None else batch.context.size
        return self._coefficient * self._loss(counts) / share

    def _counts(self, layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        probabilities = torch.cat([layer.softmax(-1) for layer in layers]).float()
        chosen = F.one_hot(probabilities.topk(self.chosen, dim=-1).indices, self.experts).sum((0, 1))
        return torch.stack([chosen.float(), probabilities.sum(0)])

    def _loss(self, counts: torch.Tensor) -> torch.Tensor:
        rows = (counts[0].sum() / self.chosen).clamp(min=1)
        return self.experts * (counts[0] * counts[1]).sum() / rows.square()
