"""The training loop: one global step after another until the plan is done, with evaluation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swiftlite.data.batches import MicroBatch
from swiftlite.models.compiled import nothing_compiled
from swiftlite.parallel.mesh import Mesh
from swiftlite.training.best import evaluated_in_words
from swiftlite.training.evaluation import evaluate_rows
from swiftlite.training.failures import PATIENCE, LossSpike, NotFinite, SpikeWatch, list_rows, memory_errors, unfit_rows
from swiftlite.training.flops import peak_flops
from swiftlite.training.interval import Interval
from swiftlite.training.losses import TokenLoss
from swiftlite.training.methods import Method, check_start
from swiftlite.training.noise import with_noise
from swiftlite.training.optimizer import Updates, UpdatesInBackward, make_moments, set_rate
from swiftlite.training.precision import LossScale, Precision
from swiftlite.training.profiler import StepProfiler
from swiftlite.training.progress import Progress
from swiftlite.training.schedule import rate_at, schedule_notes, warmup_steps
from swiftlite.training.share import Sharing, StepShare
from swiftlite.training.step import StepOutcome, StepRunner
from swiftlite.training.stopping import Stopped
from swiftlite.training.untouched import without_gradient
from swiftlite.training.warm_check import longest_share, tokens_of_longest

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.order import BatchPlan, StepBatch

COUNTED = ("tokens", "trained_tokens", "padded_tokens")  # of a step, each with its rate a second


class Save(Protocol):
    """Writes a checkpoint of the present state. last: the run ends behind it."""

    def __call__(self, *, last: bool) -> None: ...


class Listener(Protocol):
    """Who is told about the run: the reporter in a real run."""

    def log(self, row: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class Parts:
    """Everything a loop works with. uncounted: ids of trained parameters whose gradient another process counts;
    checks_start: nothing random stands between the first step's loss and its known value; ample_memory: every step will
    fit without a trial; profiler: of `--profile`.
    """

    config: RunConfig
    plan: BatchPlan
    eval_plan: BatchPlan | None
    runner: StepRunner
    share: Sharing
    method: Method
    checks_start: bool
    ample_memory: bool
    modules: list[torch.nn.Module]
    trained: list[tuple[str, torch.nn.Parameter]]
    uncounted: set[int]
    optimizer: torch.optim.Optimizer
    precision: Precision
    mesh: Mesh
    memory_gib: Callable[[], float]
    profiler: StepProfiler | None = None


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
        self._scale = parts.precision.loss_scale()
        if progress.loss_scale and progress.loss_scale["dynamic"] == self._scale.dynamic:  # the precision is the same
            self._scale = LossScale(**progress.loss_scale)
        self._spikes = SpikeWatch(progress.recent_losses)
        self._peak = peak_flops(parts.mesh.device, parts.precision.dtype)
        config = parts.config
        kind = UpdatesInBackward if config.optimizer_in_backward else Updates
        trained = [parameter for _, parameter in parts.trained]
        self._updates = kind(parts.optimizer, trained, parts.uncounted, parts.mesh)
        total = parts.plan.total_steps
        self._warmup = warmup_steps(total, config.warmup_steps, config.warmup_ratio)
        every = config.log_steps, config.eval_steps, config.save_steps
        self._logs, self._evaluates, self._saves = (Interval.of(one, total) for one in every)

    def run(self) -> None:
        """Train to the end of the plan. Raises Stopped where the run was asked to, StepFailed, LossSpike."""
        total, config = self._parts.plan.total_steps, self._parts.config
        for module in self._parts.modules:
            module.train()
        if self._has_ended():
            return
        for note in schedule_notes(config, total, self._warmup, self._parts.plan.steps_per_epoch):
            self._listener.message(f"note: {note}")
        if config.warm_check and not self._parts.ample_memory:
            self._warm_up()
            self._alive()
        clock = time.perf_counter()
        for batch, share, data_seconds in self._prepared_steps():
            now = batch.step, self.progress.epoch, batch.epoch
            row = self._step(batch, share)
            self._alive()
            self._profile()
            last = batch.step == total
            reason, peak = self._agree(self._stop_requested(), self._parts.memory_gib())
            row |= self._speed(row, share, time.perf_counter() - clock, data_seconds, peak)
            found = None
            if self._parts.eval_plan is not None and self._evaluates.is_due(*now, last):
                found, asked = self._evaluate(row)
                reason = asked or reason
                self._alive()
            first = config.log_first_step and batch.step == 1
            if self._logs.is_due(*now, last) or first or found is not None:
                self._listener.log(row)
            reason = None if last else reason  # it has ended by itself
            stops = self._out_of_patience()
            ends = last or bool(reason) or stops
            calm = ends or not self._spikes.count  # weights that may be spoilt do not push good ones out
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
        """Memory is taken as in the heaviest step to come; nothing is learnt. Raises OutOfMemory."""
        parts = self._parts
        share = longest_share(parts.config, parts.plan, parts.share, self.progress.step)
        if share is None:
            return
        make_moments(parts.optimizer)
        with self._memory_errors("the check of the longest rows", share.micro_batches):
            parts.runner.train(0, share.micro_batches, TokenLoss(share.trained_tokens), self._scale.value, share.count)
        parts.optimizer.zero_grad(set_to_none=True)
        longest, peak = tokens_of_longest(share), parts.memory_gib()
        self._listener.message(f"the longest micro-batch, {longest:,} tokens, fits: {peak:.2f} GiB of memory")

    def _memory_errors(self, doing: str, batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """The weights may be saved afterwards where nobody else waits for this process."""
        parts = self._parts
        return memory_errors(doing, batches, parts.config, sound=parts.mesh.stored is None and self._updates.at_once)

    def _agree(self, reason: float | None, peak: float) -> tuple[float | None, float]:
        """(a reason to stop that any process has, the largest peak memory): all have to stop at the same step."""
        values = torch.tensor([float(reason or 0), peak], dtype=torch.float64, device=self._parts.mesh.device)
        number, peak = self._parts.mesh.largest(values).tolist()
        return number or None, peak

    def _prepared_steps(self) -> Iterator[tuple[StepBatch, StepShare, float]]:
        steps = self._parts.plan.steps(self.progress.step)
        while True:
            started = time.perf_counter()
            with unfit_rows():
                batch = next(steps, None)
            if batch is None:
                return
            found = time.perf_counter()
            batch, answered = self._parts.method.answered(batch), time.perf_counter()
            noisy = self._parts.config.neftune_noise_alpha > 0
            packs = with_noise(batch.packs, self._parts.config.seed, batch.step) if noisy else batch.packs
            share = self._parts.share(packs)
            yield batch, share, found - started + time.perf_counter() - answered

    def _profile(self) -> None:
        profiler = self._parts.profiler
        if profiler is not None and profiler.step():
            self._listener.message(profiler.words())

    def _step(self, batch: StepBatch, share: StepShare) -> dict[str, Any]:
        parts, config = self._parts, self._parts.config
        rate = rate_at(
            batch.step,
            peak=config.learning_rate,
            kind=config.lr_scheduler,
            total=parts.plan.total_steps,
            warmup=self._warmup,
            minimum=config.min_lr or config.learning_rate * config.min_lr_ratio,
            decay_ratio=config.decay_ratio,
        )
        set_rate(parts.optimizer, rate)
        method = parts.method
        share, make_loss = method.prepare(batch, share, "train")
        count = method.count(share)
        learning = self._updates.during_backward() if share.trained_tokens else nullcontext()
        with self._memory_errors(f"step {batch.step}", share.micro_batches), learning:
            outcome = parts.runner.train(
                batch.step, share.micro_batches, make_loss(count), self._scale.value, share.count
            )
        if self.progress.step == 0 and parts.config.compile and (warning := nothing_compiled()):
            self._listener.message(f"warning: {warning}")
        if self.progress.step == 0 and parts.checks_start:
            check_start(method, share, outcome.loss, parts.precision.dtype)
        norm = self._updates.norm(config.max_grad_norm, self._scale.value)
        if self._may_update(batch.step, share, outcome, norm):
            self._watch_loss(batch.step, share, outcome)
            self._updates.finish()
            method.after(outcome.sums, count)
        if math.isfinite(outcome.loss):  # a loss that is no number is so at any scale
            self._scale.update(overflowed=not math.isfinite(norm))
        parts.optimizer.zero_grad(set_to_none=True)
        self.progress.step, self.progress.epoch = batch.step, batch.epoch
        self.progress.loss_scale, self.progress.method = asdict(self._scale), method.state
        row = {
            "step": batch.step,
            "epoch": round(batch.epoch, 6),
            "loss": outcome.loss if math.isfinite(outcome.loss) else None,
            "learning_rate": rate,
            "grad_norm": norm if math.isfinite(norm) else None,
            "trained_tokens": share.trained_tokens,
            "tokens": share.tokens,
            "padded_tokens": outcome.padded_tokens,
        } | method.metrics(outcome.sums, count)
        return row if outcome.router_loss is None else row | {"router_loss": outcome.router_loss}

    def _may_update(self, step: int, share: StepShare, outcome: StepOutcome, norm: float) -> bool:
        """False where the update is skipped, which is said. Raises RunError on non-finite numbers by default."""
        if share.trained_tokens == 0:
            self._skip(step, self._parts.method.learns_nothing)
            return False
        if self.progress.step == 0:
            self._look_for_gradients(step, norm)
        if math.isfinite(outcome.loss) and math.isfinite(norm):
            return True
        if math.isfinite(outcome.loss) and self._scale.can_shrink:
            self._listener.message(f"step {step}: fp16 gradients overflowed, loss scale halved")
            return False
        what, fix = self._parts.method.not_finite(outcome.loss, outcome.sums)
        if self._parts.config.on_nonfinite == "skip":
            self._skip(step, f"{what} is not finite")
            return False
        raise NotFinite(
            f"the {what} of step {step} is not finite",
            where=self._rows(_not_finite(share, outcome)),
            fix=f"{fix}; --on-nonfinite skip leaves such steps out and counts them",
            sound=self._updates.at_once,
        )

    def _look_for_gradients(self, step: int, norm: float) -> None:
        """Say what of the trained tensors learns nothing in the first step, and most likely in none."""
        config = self._parts.config
        if norm == 0.0:
            where = ""
        elif config.optimizer_in_backward or config.method == "rm":
            return  # they are gone; a new score head is zero, and gives what is before it none
        elif places := without_gradient(self._parts.trained, self._parts.mesh):
            where = f" for {', '.join(places[:3])}{' and others' if len(places) > 3 else ''}"
        else:
            return
        self._listener.message(
            f"warning: the gradient of step {step} is zero{where}: what is trained there learns nothing"
        )

    def _watch_loss(self, step: int, share: StepShare, outcome: StepOutcome) -> None:
        """Say where the loss jumps. Raises LossSpike where it does not come down again."""
        if not self._spikes.is_spike(outcome.loss):
            return
        rows = self._rows([_heaviest_loss(share, outcome)])
        self._listener.message(f"step {step}: loss {outcome.loss:.4g} is {self._spikes.words()}; {rows}")
        if self._spikes.count < PATIENCE:
            return
        if self._parts.config.on_loss_spike == "warn":
            self._spikes.accept()
            return
        raise LossSpike(
            f"the loss of step {step} and of the {PATIENCE - 1} before it is {self._spikes.words()}",
            where=rows,
            fix="look at these rows, lower --learning-rate and go on with --resume auto: no checkpoint was saved "
            "since; --on-loss-spike warn trains on",
        )

    def _skip(self, step: int, why: str) -> None:
        self.progress.skipped_steps.append(step)
        self._listener.message(f"step {step} skipped: {why} ({len(self.progress.skipped_steps)} so far)")

    def _evaluate(self, row: dict[str, Any]) -> tuple[float | None, float | None]:
        """Add an evaluation to the row of a step. (What it is the better for the less it is, or None with the reason to
        stop that came before its end: what is left of the time a scheduler gives is for the checkpoint).
        """
        parts, reason = self._parts, None

        def going_on(_done: int) -> bool:
            nonlocal reason
            reason, _ = self._agree(self._stop_requested(), 0.0)
            return reason is None

        plan, method = parts.eval_plan, parts.method
        found = evaluate_rows(plan, method, parts.runner, parts.share, parts.modules, self._memory_errors, going_on)
        if found is None:
            self._listener.message(f"step {row['step']} is not evaluated: the run was asked to stop")
            return None, reason
        loss, progress = found.loss, self.progress
        if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
            progress.best_loss, progress.evaluations_without_gain = loss, 0
        else:
            progress.evaluations_without_gain += 1
        row |= {f"eval_{name}": value for name, value in method.results(found).items()}
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
        self, row: dict[str, Any], share: StepShare, seconds: float, data_seconds: float, peak_gib: float
    ) -> dict[str, Any]:
        flops = self._parts.share.flops.step(share.lengths) / self._parts.mesh.layout.world  # of one device
        rates = {f"{kind}_per_second": round(row[kind] / seconds, 2) for kind in COUNTED}
        return rates | {
            "step_seconds": round(seconds, 6),
            "data_seconds": round(data_seconds, 6),
            "peak_memory_gib": round(peak_gib, 4),
            "mfu": None if self._peak is None else round(flops / seconds / self._peak, 4),
        }

    def _rows(self, batches: Sequence[MicroBatch]) -> str:
        """The rows of these micro-batches and of those that the other processes name."""
        return list_rows(self._parts.mesh.gather([where for batch in batches for where in batch.where]))


def _not_finite(share: StepShare, outcome: StepOutcome) -> list[MicroBatch]:
    """The micro-batches whose loss is not finite here; all where only the gradient is not."""
    batches = share.micro_batches
    bad = [b for b, loss in zip(batches, outcome.micro_losses, strict=True) if not math.isfinite(loss)]
    return bad if bad or not math.isfinite(outcome.loss) else batches


def _heaviest_loss(share: StepShare, outcome: StepOutcome) -> MicroBatch:
    """The micro-batch here whose trained tokens have the highest loss."""
    means = [loss / max(1, b.trained_tokens) for b, loss in zip(share.micro_batches, outcome.micro_losses, strict=True)]
    return share.micro_batches[means.index(max(means))]
