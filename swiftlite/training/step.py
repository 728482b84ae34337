"""One global step: every micro-batch forward and backward, gradients summed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swiftlite.data.batches import MicroBatch
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.context import slice_for_context
from swiftlite.parallel.data import reduce_at_last_micro_batch
from swiftlite.parallel.mesh import Mesh
from swiftlite.training.precision import Precision


@dataclass(frozen=True)
class StepOutcome:
    """loss: of the global step, the mean over its trained tokens; micro_losses: the shares of it computed here."""

    loss: float
    micro_losses: list[float]
    router_loss: float | None


class StepRunner(Protocol):
    """The two ways to run a step: directly, or through the stages of a pipeline."""

    def train(self, step: int, batches: Sequence[MicroBatch], tokens: int, scale: float, count: int) -> StepOutcome:
        """Add the gradients of `scale` x the global step's loss to the parameters.

        batches: this data rank's, equally many on each; tokens: N, the trained tokens of the whole step; count: its
        micro-batches that are not empty, over all data ranks.
        """

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """The sum of -log p over the trained tokens of these micro-batches on all data ranks."""


class DirectStep:
    """Runs micro-batches one after another."""

    def __init__(
        self, scorer: TokenScorer, precision: Precision, mesh: Mesh, seed: int, *, sync_every_microbatch: bool = False
    ) -> None:
        self._scorer, self._precision, self._mesh, self._seed = scorer, precision, mesh, seed
        self._sync_always = sync_every_microbatch

    def train(self, step: int, batches: Sequence[MicroBatch], tokens: int, scale: float, count: int) -> StepOutcome:
        """As `StepRunner.train`. Reads the device once, at the end."""
        losses, routers = [], []
        for index, batch in enumerate(batches):
            number = index * self._mesh.layout.data_ranks + self._mesh.data_rank
            torch.manual_seed(derive_seed(self._seed, step, number))  # dropout depends on the step, not on history
            last = index == len(batches) - 1
            reduce_at_last_micro_batch(self._scorer, self._sync_always or last, self._mesh.layout.sharding)
            with self._precision.compute(self._mesh.device):
                scores = self._scorer(self._mine(batch))
                loss = supervised_loss(scores.logprobs, max(1, tokens))
            losses.append(loss.detach())
            if scores.router_loss is not None:  # a mean per micro-batch, not per token
                part = scores.router_loss * (bool(batch.tokens) / count)
                routers.append(part.detach())
                loss = loss + part
            (loss * scale).backward()
        return self._outcome(losses, routers)

    def _mine(self, batch: MicroBatch) -> MicroBatch:
        """What of a micro-batch this process computes, on its device."""
        return slice_for_context(batch, self._mesh.group("cp")).to(self._mesh.device)

    def _outcome(self, losses: list[torch.Tensor], routers: list[torch.Tensor]) -> StepOutcome:
        shares = torch.stack(losses)
        sums = torch.stack([shares.sum(), torch.stack(routers).sum() if routers else shares.new_zeros(())])
        loss, router = self._mesh.sum_over_data(sums).tolist()
        return StepOutcome(loss, shares.tolist(), router if routers else None)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """As `StepRunner.evaluate`."""
        total = torch.zeros((), device=self._mesh.device)
        for batch in batches:
            with self._precision.compute(self._mesh.device):
                total -= self._scorer(self._mine(batch)).logprobs.sum()
        return self._mesh.sum_over_data(total).item()


def derive_seed(seed: int, step: int, index: int) -> int:
    """A 63-bit seed that is a function of the run's seed, the step and the micro-batch only."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
