"""The training loop: one global step after another until the plan is done, with evaluation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swiftlite.data.batches import MicroBatch, collate
from swiftlite.errors import RunError
from swiftlite.training.flops import FlopCounter, peak_flops
from swiftlite.training.optimizer import clip_gradients, set_rate
from swiftlite.training.precision import Precision
from swiftlite.training.schedule import rate_at, warmup_steps
from swiftlite.training.step import DirectStep, StepOutcome

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.order import BatchPlan, Pack, StepBatch

SMALLEST_FP16_SCALE = 1.0  # overflow at this loss scale is no matter of scaling any more
# A CPU gains little from a forward pass over more tokens than this, and pays for each in memory. The split of a step
# into forward passes does not change the sums, so a micro-batch is run in smaller pieces there.
CPU_FORWARD_TOKENS = 1024


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal asked the run to stop; the step was finished and a checkpoint saved."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Listener(Protocol):
    """Who is told about the run: the reporter in a real run."""

    def log(self, row: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class Progress:
    """What the loop knows beside tensors; saved with every checkpoint."""

    step: int = 0
    epoch: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    scaler: dict[str, Any] = field(default_factory=dict)


@dataclass
class Parts:
    """Everything a loop works with."""

    config: RunConfig
    plan: BatchPlan
    eval_plan: BatchPlan | None
    runner: DirectStep
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    device: torch.device
    flops: FlopCounter
    memory_gib: Callable[[], float]


class Loop:
    """Runs the plan from `progress.step` on; `save` writes a checkpoint of the present state."""

    def __init__(
        self,
        parts: Parts,
        progress: Progress,
        listener: Listener,
        save: Callable[[], None],
        stop_requested: Callable[[], int | None],
    ) -> None:
        self._parts, self.progress, self._listener = parts, progress, listener
        self._save, self._stop_requested = save, stop_requested
        self._trained = [p for p in parts.model.parameters() if p.requires_grad]
        self._scaler = parts.precision.scaler(parts.device)
        if progress.scaler:
            self._scaler.load_state_dict(progress.scaler)
        self._peak = peak_flops(parts.device, parts.precision.dtype)
        config = parts.config
        self._warmup = warmup_steps(parts.plan.total_steps, config.warmup_steps, config.warmup_ratio)

    def run(self) -> None:
        """Train to the end of the plan. Raises Stopped after a signal, RunError where numbers are not finite."""
        total, config = self._parts.plan.total_steps, self._parts.config
        self._parts.model.train()
        clock = time.perf_counter()
        for batch, micro_batches, data_seconds in self._prepared_steps():
            row = self._step(batch, micro_batches)
            last = batch.step == total
            row |= self._speed(micro_batches, time.perf_counter() - clock, data_seconds)
            if self._parts.eval_plan is not None and self._due(config.eval_steps, batch.step, last):
                row["eval_loss"] = self._evaluate()
            if last or batch.step % config.log_steps == 0 or "eval_loss" in row:
                self._listener.log(row)
            signal = self._stop_requested()
            if signal or self._due(config.save_steps, batch.step, last):
                self._save()
            clock = time.perf_counter()  # evaluation and saving are no part of a step
            if signal:
                raise Stopped(signal)
            if self._should_stop_early():
                patience = config.early_stopping_patience
                self._listener.message(f"stopped at step {batch.step}: no better eval loss for {patience} evaluations")
                return

    def _prepared_steps(self) -> Iterator[tuple[StepBatch, list[MicroBatch], float]]:
        steps = self._parts.plan.steps(self.progress.step)
        while True:
            started = time.perf_counter()
            batch = next(steps, None)
            if batch is None:
                return
            micro_batches = self._split(batch)
            yield batch, micro_batches, time.perf_counter() - started

    def _split(self, batch: StepBatch) -> list[MicroBatch]:
        """Micro-batches of at most `micro_batch_size` packs."""
        size = self._parts.config.micro_batch_size
        limit = CPU_FORWARD_TOKENS if self._parts.device.type == "cpu" else None
        pieces: list[list[Pack]] = [[]]
        tokens = 0
        for pack in batch.packs:
            length = sum(len(sequence.input_ids) for sequence in pack)
            if pieces[-1] and (len(pieces[-1]) == size or (limit is not None and tokens + length > limit)):
                pieces.append([])
                tokens = 0
            pieces[-1].append(pack)
            tokens += length
        return [collate(piece) for piece in pieces]

    def _step(self, batch: StepBatch, micro_batches: list[MicroBatch]) -> dict[str, Any]:
        parts, config = self._parts, self._parts.config
        rate = rate_at(
            batch.step,
            peak=config.learning_rate,
            kind=config.lr_scheduler,
            total=parts.plan.total_steps,
            warmup=self._warmup,
            minimum_ratio=config.min_lr_ratio,
            decay_ratio=config.decay_ratio,
        )
        set_rate(parts.optimizer, rate)
        outcome = parts.runner.train(batch.step, micro_batches, self._scaler)
        self._scaler.unscale_(parts.optimizer)
        norm = clip_gradients(self._trained, config.max_grad_norm).item()
        tokens = sum(b.trained_tokens for b in micro_batches)
        if self._may_update(batch.step, micro_batches, outcome, norm, tokens):
            self._scaler.step(parts.optimizer)
        self._scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        self.progress.step, self.progress.epoch = batch.step, batch.epoch
        self.progress.scaler = self._scaler.state_dict()
        row = {
            "step": batch.step,
            "epoch": round(batch.epoch, 6),
            "loss": outcome.loss if math.isfinite(outcome.loss) else None,
            "learning_rate": rate,
            "grad_norm": norm if math.isfinite(norm) else None,
            "trained_tokens": tokens,
            "tokens": sum(b.tokens for b in micro_batches),
        }
        return row if outcome.router_loss is None else row | {"router_loss": outcome.router_loss}

    def _may_update(
        self, step: int, micro_batches: list[MicroBatch], outcome: StepOutcome, norm: float, tokens: int
    ) -> bool:
        """False where the update is skipped, which is said. Raises RunError on non-finite numbers by default."""
        if tokens == 0:
            self._skip(step, "no trained token in the whole step")
            return False
        if math.isfinite(outcome.loss) and math.isfinite(norm):
            return True
        if self._scaler.is_enabled() and math.isfinite(outcome.loss) and self._scaler.get_scale() > SMALLEST_FP16_SCALE:
            self._listener.message(f"step {step}: fp16 gradients overflowed, loss scale halved")
            return True  # the scaler itself leaves the weights alone, and lowers its scale
        what = "loss" if not math.isfinite(outcome.loss) else "gradient norm"
        if self._parts.config.on_nonfinite == "skip":
            self._skip(step, f"{what} is not finite")
            return False
        raise RunError(
            f"the {what} of step {step} is not finite",
            where=_rows(micro_batches, outcome),
            fix="look at these rows, lower --learning-rate or use --precision fp32; "
            "--on-nonfinite skip leaves such steps out and counts them",
        )

    def _skip(self, step: int, why: str) -> None:
        self.progress.skipped_steps.append(step)
        self._listener.message(f"step {step} skipped: {why} ({len(self.progress.skipped_steps)} so far)")

    def _evaluate(self) -> float:
        parts = self._parts
        parts.model.eval()
        total, tokens = 0.0, 0
        for batch in parts.eval_plan.steps():
            part, count = parts.runner.evaluate(self._split(batch))
            total, tokens = total + part, tokens + count
        parts.model.train()
        loss = total / max(1, tokens)
        progress = self.progress
        if progress.best_loss is None or loss < progress.best_loss:
            progress.best_loss, progress.best_step, progress.evaluations_without_gain = loss, progress.step, 0
        else:
            progress.evaluations_without_gain += 1
        return loss

    def _should_stop_early(self) -> bool:
        patience = self._parts.config.early_stopping_patience
        return patience is not None and self.progress.evaluations_without_gain >= patience

    def _speed(self, micro_batches: list[MicroBatch], seconds: float, data_seconds: float) -> dict[str, Any]:
        tokens = sum(b.tokens for b in micro_batches)
        lengths = [n for b in micro_batches for n in torch.diff(b.cu_seqlens).tolist()]
        flops = self._parts.flops.step(lengths)
        return {
            "tokens_per_second": round(tokens / seconds, 2),
            "step_seconds": round(seconds, 6),
            "data_seconds": round(data_seconds, 6),
            "peak_memory_gib": round(self._parts.memory_gib(), 4),
            "mfu": None if self._peak is None else round(flops / seconds / self._peak, 4),
        }

    @staticmethod
    def _due(every: int | None, step: int, last: bool) -> bool:
        return last or (every is not None and every > 0 and step % every == 0)


def _rows(micro_batches: list[MicroBatch], outcome: StepOutcome) -> str:
    """The rows of the micro-batches whose loss is not finite; of all where only the gradient is not."""
    bad = [b for b, loss in zip(micro_batches, outcome.micro_losses, strict=True) if not math.isfinite(loss)]
    rows = [where for b in bad or micro_batches for where in b.where]
    return "rows " + ", ".join(rows[:12]) + (f" and {len(rows) - 12} more" if len(rows) > 12 else "")
