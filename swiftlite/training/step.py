"""One global step on one process: every micro-batch forward and backward, gradients summed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftlite.data.batches import MicroBatch
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.training.precision import Precision


@dataclass(frozen=True)
class StepOutcome:
    """loss: of the global step, the mean over its trained tokens; micro_losses: each micro-batch's share of it."""

    loss: float
    micro_losses: list[float]
    router_loss: float | None


class DirectStep:
    """Runs micro-batches one after another on this process (the pipeline will be the other way to run a step)."""

    def __init__(self, scorer: TokenScorer, precision: Precision, device: torch.device, seed: int) -> None:
        self._scorer, self._precision, self._device, self._seed = scorer, precision, device, seed

    def train(self, step: int, batches: Sequence[MicroBatch], scaler: torch.amp.GradScaler) -> StepOutcome:
        """Add the gradients of the global step's loss to the parameters. Reads the device once, at the end."""
        tokens = max(1, sum(batch.trained_tokens for batch in batches))
        losses, routers = [], []
        for index, batch in enumerate(batches):
            torch.manual_seed(derive_seed(self._seed, step, index))  # dropout depends on the step, not on history
            with self._precision.compute(self._device):
                scores = self._scorer(batch.to(self._device))
                loss = supervised_loss(scores.logprobs, tokens)
            losses.append(loss.detach())
            if scores.router_loss is not None:  # a mean per micro-batch, not per token
                routers.append(scores.router_loss.detach())
                loss = loss + scores.router_loss / len(batches)
            scaler.scale(loss).backward()
        shares = torch.stack(losses).tolist()
        router = torch.stack(routers).mean().item() if routers else None
        return StepOutcome(sum(shares), shares, router)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(sum of -log p, trained tokens) of some micro-batches."""
        total = torch.zeros((), device=self._device)
        for batch in batches:
            with self._precision.compute(self._device):
                total -= self._scorer(batch.to(self._device)).logprobs.sum()
        return total.item(), sum(batch.trained_tokens for batch in batches)


def derive_seed(seed: int, step: int, index: int) -> int:
    """A 63-bit seed that is a function of the run's seed, the step and the micro-batch only."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
