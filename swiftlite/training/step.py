"""One global step: every micro-batch forward and backward, gradients summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from swiftlite.data.batches import MicroBatch
from swiftlite.models.kernels.half_products import half_layers, half_weights
from swiftlite.models.kernels.rematerialize import rematerialized
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.parallel.context import slice_for_context
from swiftlite.parallel.data import reduce_at_last_micro_batch, reshard
from swiftlite.parallel.mesh import Mesh
from swiftlite.seeds import derive_seed
from swiftlite.training.gradients import KeptGradients
from swiftlite.training.lanes import Lanes
from swiftlite.training.losses import StepLoss, answer_sums, reported
from swiftlite.training.precision import Precision


@dataclass(frozen=True)
class StepOutcome:
    """loss: of the global step; micro_losses: the shares of it computed here; sums: what the `StepLoss` names, of the
    global step; padded_tokens: of the global step, all that went through the model."""

    loss: float
    micro_losses: list[float]
    router_loss: float | None
    sums: dict[str, float]
    padded_tokens: int


class StepRunner(Protocol):
    """The two ways to run a step: directly, or through the stages of a pipeline."""

    def train(
        self, step: int, batches: Sequence[MicroBatch], step_loss: StepLoss, scale: float, count: int, update: int = 0
    ) -> StepOutcome:
        """Add the gradients of `scale` x the global step's loss to the parameters.

        batches: this data rank's, equally many on each; count: the step's micro-batches that are not empty, over all
        data ranks; update: of the step, which may have several.
        """

    def evaluate(self, batches: Sequence[MicroBatch], step_loss: StepLoss) -> tuple[float, dict[str, float]]:
        """(loss, the sums that `step_loss` names) over these micro-batches on all data ranks."""

    def score(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """log p of the answers of each of these micro-batches, fp64 `[answers]`, without gradient."""

    def told(self, batches: Sequence[MicroBatch], count: int | None = None) -> list[torch.Tensor]:
        """What a model says of the trained tokens of each micro-batch, or of this rank's slice of it, without gradient:
        log p of each, or of a teacher what it tells (see `TokenScorer.tell_likeliest`). batches: all of a step; count:
        tokens that a teacher tells of at each place."""


class DirectStep:
    """Runs micro-batches one after another, or several at a time in lanes."""

    def __init__(
        self,
        scorer: TokenScorer,
        precision: Precision,
        mesh: Mesh,
        seed: int,
        *,
        sync_every_microbatch: bool = False,
        lanes: int = 1,
        rematerialize: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        """lanes: micro-batches that are trained at a time, each in a thread; rematerialize: make cheap results again in
        the backward pass instead of keeping them; keep_gradients: use their memory again in the next step."""
        self._scorer, self._precision, self._mesh, self._seed = scorer, precision, mesh, seed
        self._sync_always = sync_every_microbatch
        self._lanes, self._half_layers = Lanes(scorer, lanes), half_layers(scorer)
        self._forward = rematerialized if rematerialize else nullcontext
        self._gradients = KeptGradients(scorer) if keep_gradients else None

    def train(
        self, step: int, batches: Sequence[MicroBatch], step_loss: StepLoss, scale: float, count: int, update: int = 0
    ) -> StepOutcome:
        """As `StepRunner.train`. Reads the device once, at the end."""

        def train_one(scorer: TokenScorer, index: int) -> tuple[torch.Tensor, torch.Tensor | None, int]:
            number = index * self._mesh.layout.data_ranks + self._mesh.data_rank
            seed_dropout(self._seed, step, update, number)
            last = index == len(batches) - 1
            reduce_at_last_micro_batch(scorer, self._sync_always or last, self._mesh.layout.sharding)
            return self._train_one(scorer, batches[index], step_loss, scale, count)

        with self._gradients.of_step() if self._gradients else nullcontext(), half_weights(self._half_layers):
            done = self._lanes.map(train_one, [batch.cost for batch in batches])
        values, routers, lengths = zip(*done, strict=True)
        known = [router for router in routers if router is not None]
        router = torch.stack(known).sum() if known else None
        return whole_outcome(torch.stack(values), router, sum(lengths), step_loss, self._mesh)

    def _train_one(
        self, scorer: TokenScorer, batch: MicroBatch, step_loss: StepLoss, scale: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """(what is reported of a micro-batch, its share of the router loss, its tokens with padding)."""
        mine, router = self._mine(batch), None
        with self._precision.compute(self._mesh.device):
            upstream = _upstream(scorer, step_loss, mine, scale) if scorer.wants_upstream else None
            with self._forward():
                scores = scorer(mine, upstream)
            loss, sums = step_loss(scores.logprobs, mine)
        values = reported(loss, sums, mine)
        if scores.router_loss is not None:  # a mean per micro-batch, not per token
            part = scores.router_loss * (bool(batch.tokens) / count)
            router = part.detach()
            loss = loss + part
        (loss * scale).backward()
        return values, router, scorer.tokens_of_pass(mine)

    def _mine(self, batch: MicroBatch) -> MicroBatch:
        """What of a micro-batch this process computes, on its device."""
        return slice_for_context(batch, self._mesh.group("cp")).to(self._mesh.device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], step_loss: StepLoss) -> tuple[float, dict[str, float]]:
        """As `StepRunner.evaluate`."""
        total = torch.zeros(1 + len(step_loss.names), device=self._mesh.device)
        for mine, logprobs in self._logprobs(batches):
            total += reported(*step_loss(logprobs, mine), mine)
        loss, *sums = self._mesh.sum_over_data(total).tolist()
        return loss, dict(zip(step_loss.names, sums, strict=True))

    @torch.no_grad()
    def score(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """As `StepRunner.score`."""
        return [answer_sums(logprobs, mine) for mine, logprobs in self._logprobs(batches)]

    @torch.no_grad()
    def told(self, batches: Sequence[MicroBatch], count: int | None = None) -> list[torch.Tensor]:
        """As `StepRunner.told`."""
        return [told for _, told in self._logprobs(batches)]

    def _logprobs(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        with half_weights(self._half_layers):
            for batch in batches:
                mine = self._mine(batch)
                with self._precision.compute(self._mesh.device):
                    logprobs = self._scorer(mine).logprobs
                yield mine, logprobs
        reshard(self._scorer)


def _upstream(scorer: TokenScorer, step_loss: StepLoss, batch: MicroBatch, scale: float) -> torch.Tensor | None:
    """The gradient of a loss that is a multiple of the sum of log-probabilities, with respect to each of them. None
    where there are none."""
    if not len(batch.learnt):
        return None
    logprobs = torch.zeros(scorer.shape_of(batch), device=batch.learnt.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(step_loss(logprobs, batch)[0] * scale, logprobs)
    return gradient.flatten()[0]


def seed_dropout(seed: int, step: int, update: int, number: int) -> None:
    """Let dropout depend on the step, and not on history. number: of the micro-batch, and of its stage, in the step."""
    torch.manual_seed(derive_seed(seed, step, number, *([update] if update else [])))


def whole_outcome(
    values: torch.Tensor, router: torch.Tensor | None, padded_tokens: int, step_loss: StepLoss, mesh: Mesh
) -> StepOutcome:
    """Of all who see other tokens. values: `[micro-batches, 1 + names]`, router: the router loss if there is one, and
    padded_tokens: those of this process."""
    rest = torch.stack([values.new_zeros(()) if router is None else router, values.new_tensor(padded_tokens)])
    *total, router_loss, count = mesh.sum_over_data(torch.cat([values.sum(0), rest])).tolist()
    sums = dict(zip(step_loss.names, total[1:], strict=True))
    return StepOutcome(total[0], values[:, 0].tolist(), None if router is None else router_loss, sums, round(count))
