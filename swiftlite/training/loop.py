"""The training loop: one global step after another until the plan is done, with evaluation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swiftlite.reporting.memory import peak_memory_gib
from swiftlite.training.best import evaluated_in_words
from swiftlite.training.evaluation import evaluate_rows
from swiftlite.training.flops import peak_flops
from swiftlite.training.guards.failures import unfit_rows
from swiftlite.training.guards.stopping import Stopped
from swiftlite.training.guards.warm_check import longest_share
from swiftlite.training.interval import Interval
from swiftlite.training.learner import COUNTED, Learner, Listener, Parts
from swiftlite.training.noise import with_noise
from swiftlite.training.progress import Progress
from swiftlite.training.schedule import rate_at, schedule_notes, warmup_steps
from swiftlite.training.share import StepShare

if TYPE_CHECKING:
    from swiftlite.data.order import Pack, StepBatch


class Save(Protocol):
    """Writes a checkpoint of the present state. last: the run ends behind it."""

    def __call__(self, *, last: bool) -> None: ...


class Loop:
    """Runs the plan from `progress.step` on."""

    def __init__(
        self,
        parts: Parts,
        progress: Progress,
        listener: Listener,
        save: Save,
        stop_requested: Callable[[], float | None],
        alive: Callable[[], None],
    ) -> None:
        """stop_requested: gives a reason to stop, or None; alive: is called whenever something has been done."""
        self._parts, self.progress, self._listener = parts, progress, listener
        self._save, self._stop_requested, self._alive = save, stop_requested, alive
        self._learner = Learner(parts, progress, listener)
        self._model, self._mesh = parts.trainee.divided, parts.trainee.mesh
        self._peak = peak_flops(self._mesh.device, parts.trainee.precision.dtype)
        config, total = parts.config, parts.plan.total_steps
        self._warmup = warmup_steps(total, config.warmup_steps, config.warmup_ratio)
        every = config.log_steps, config.eval_steps, config.save_steps
        self._logs, self._evaluates, self._saves = (Interval.of(one, total) for one in every)

    def run(self) -> None:
        """Train to the end of the plan. Raises Stopped where the run was asked to, StepFailed, LossSpike."""
        total, config, trainee = self._parts.plan.total_steps, self._parts.config, self._parts.trainee
        for scorer in self._model.scorers:
            scorer.train()
        if self._has_ended():
            return
        for note in schedule_notes(config, total, self._warmup, self._parts.plan.steps_per_epoch):
            self._listener.message(f"note: {note}")
        if config.warm_check and not trainee.choice.is_ample(trainee.free):
            self._warm_up()
            self._alive()
        if config.eval_on_start and not self.progress.step:
            self._evaluate_start()
            self._alive()
        clock = time.perf_counter()
        for batch, minibatches, data_seconds in self._prepared_steps():
            now = batch.step, self.progress.epoch, batch.epoch
            row, lengths = self._learner.step(batch, minibatches, self._rate(batch.step))
            self._alive()
            self._profile()
            last = batch.step == total
            reason, peak = self._agree(self._stop_requested(), peak_memory_gib())
            row |= self._speed(row, lengths, time.perf_counter() - clock, data_seconds, peak)
            found = None
            if self._parts.evaluations and self._evaluates.is_due(*now, last):
                found, asked = self._evaluate(row)
                reason = asked or reason
                self._alive()
            first = config.log_first_step and batch.step == 1
            if self._logs.is_due(*now, last) or first or found is not None:
                self._listener.log(row)
            reason = None if last else reason  # it has ended by itself
            stops = self._out_of_patience()
            ends = last or bool(reason) or stops
            calm = ends or not self._learner.is_spiking  # weights that may be spoilt do not push good ones out
            if calm and (self._saves.is_due(*now, ends) or reason):
                self._note_best(found)
                self._save(last=ends)
                self._alive()
            clock = time.perf_counter()  # evaluation and saving are no part of a step
            if reason:
                raise Stopped(reason)
            if stops:
                better = f"no better {evaluated_in_words(config)} for {config.early_stopping_patience} evaluations"
                self._listener.message(f"stopped at step {batch.step}: {better}")
                return

    def _has_ended(self) -> bool:
        """Whether the checkpoint is the last of its run, which is said."""
        step, total = self.progress.step, self._parts.plan.total_steps
        patience = self._parts.config.early_stopping_patience
        if step >= total:
            why = f"the checkpoint is of step {step:,}, the run has {total:,}"
        elif self._out_of_patience():
            why = f"the run stopped at step {step:,} by --early-stopping-patience {patience}"
        else:
            return False
        self._listener.message(f"nothing is left to train: {why}")
        return True

    def _warm_up(self) -> None:
        parts = self._parts
        share = longest_share(parts.config, parts.plan, self._model.share, self.progress.step)
        if share is not None:
            self._learner.try_out(share)

    def _rate(self, step: int) -> float:
        config = self._parts.config
        return rate_at(
            step,
            peak=config.learning_rate,
            kind=config.lr_scheduler,
            total=self._parts.plan.total_steps,
            warmup=self._warmup,
            minimum=config.min_lr or config.learning_rate * config.min_lr_ratio,
            decay_ratio=config.decay_ratio,
        )

    def _agree(self, reason: float | None, peak: float) -> tuple[float | None, float]:
        """(a reason to stop that any process has, the largest peak memory): all have to stop at the same step."""
        values = torch.tensor([float(reason or 0), peak], dtype=torch.float64, device=self._mesh.device)
        number, peak = self._mesh.largest(values).tolist()
        return number or None, peak

    def _prepared_steps(self) -> Iterator[tuple[StepBatch, list[tuple[StepBatch, StepShare]], float]]:
        steps, method, following = self._parts.plan.steps(self.progress.step), self._parts.method, None
        while True:
            started = time.perf_counter()
            with unfit_rows():
                batch = following or next(steps, None)
                following = next(steps, None) if method.looks_ahead else None
            if batch is None:
                return
            found = time.perf_counter()
            with self._learner.memory_errors(f"the answers of step {batch.step}", ()):
                parts, answered = method.minibatches(batch, following), time.perf_counter()
            minibatches = [(part, self._model.share(self._packs(part))) for part in parts]
            yield batch, minibatches, found - started + time.perf_counter() - answered

    def _packs(self, batch: StepBatch) -> list[Pack]:
        config = self._parts.config
        return with_noise(batch.packs, config.seed, batch.step) if config.neftune_noise_alpha > 0 else batch.packs

    def _profile(self) -> None:
        profiler = self._parts.profiler
        if profiler is not None and profiler.step():
            self._listener.message(profiler.words())

    def _evaluate_start(self) -> None:
        """Of a run that was asked to stop meanwhile nothing is said: its first step is its last then."""
        row = {"step": 0, "epoch": 0.0}
        if self._parts.evaluations and self._evaluate(row)[0] is not None:
            self._listener.log(row)

    def _evaluate(self, row: dict[str, Any]) -> tuple[float | None, float | None]:
        """Add an evaluation to the row of a step. Returns (its loss as `Evaluation` has it, None), or (None, the reason
        to stop) where the run was asked to before its end: what is left of the time a scheduler gives is for the
        checkpoint."""
        reason = None

        def going_on(_done: int) -> bool:
            nonlocal reason
            reason, _ = self._agree(self._stop_requested(), 0.0)
            return reason is None

        results, errors = {}, self._learner.memory_errors
        for plan, evaluator in self._parts.evaluations:
            found = evaluate_rows(plan, evaluator, self._model, errors, going_on)
            if found is None:
                self._listener.message(f"step {row['step']} is not evaluated: the run was asked to stop")
                return None, reason
            results |= evaluator.results(found)
        loss, progress = found.loss, self.progress
        if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
            progress.best_loss, progress.evaluations_without_gain = loss, 0
        else:
            progress.evaluations_without_gain += 1
        row |= {f"eval_{name}": value for name, value in results.items()}
        return loss, None

    def _note_best(self, loss: float | None) -> None:
        """Before a checkpoint of this step is saved. loss: of its evaluation, if it has one."""
        progress = self.progress
        if loss is None or not math.isfinite(loss):
            return
        if progress.best_step_loss is None or loss < progress.best_step_loss:
            progress.best_step, progress.best_step_loss = progress.step, loss

    def _out_of_patience(self) -> bool:
        patience = self._parts.config.early_stopping_patience
        return patience is not None and self.progress.evaluations_without_gain >= patience

    def _speed(
        self, row: dict[str, Any], lengths: list[int], seconds: float, data_seconds: float, peak_gib: float
    ) -> dict[str, Any]:
        flops = self._model.share.flops.step(lengths) / self._mesh.layout.world  # of one device
        rates = {f"{kind}_per_second": round(row[kind] / seconds, 2) for kind in COUNTED}
        return rates | {
            "step_seconds": round(seconds, 6),
            "data_seconds": round(data_seconds, 6),
            "peak_memory_gib": round(peak_gib, 4),
            "mfu": None if self._peak is None else round(flops / seconds / self._peak, 4),
        }
