"""One step's learning: gradients of what it teaches, then an update of the weights, or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from swiftlite.data.batches import MicroBatch
from swiftlite.models.anatomy import has_dropout
from swiftlite.models.compiled import nothing_compiled
from swiftlite.reporting.memory import peak_memory_gib
from swiftlite.training.guards.failures import PATIENCE, LossSpike, NotFinite, SpikeWatch, list_rows, memory_errors
from swiftlite.training.guards.untouched import without_gradient
from swiftlite.training.guards.warm_check import tokens_of_longest
from swiftlite.training.methods import MakeLoss, Method, check_start
from swiftlite.training.optimizer import Updates, UpdatesInBackward, make_moments, set_rate
from swiftlite.training.precision import LossScale
from swiftlite.training.profiler import StepProfiler
from swiftlite.training.progress import Progress
from swiftlite.training.share import StepShare
from swiftlite.training.step import StepOutcome

if TYPE_CHECKING:
    import torch

    from swiftlite.config.schema import RunConfig
    from swiftlite.data.order import BatchPlan, StepBatch
    from swiftlite.training.evaluation import Evaluator
    from swiftlite.training.setup import Trainee

COUNTED = ("tokens", "trained_tokens", "padded_tokens")  # of a step


class Listener(Protocol):
    """Who is told about the run: the reporter in a real run."""

    def log(self, row: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class Parts:
    """Everything a loop works with. evaluations: of `build_evaluations`; profiler: of `--profile`."""

    config: RunConfig
    plan: BatchPlan
    evaluations: Sequence[tuple[BatchPlan, Evaluator]]
    trainee: Trainee
    method: Method
    optimizer: torch.optim.Optimizer
    profiler: StepProfiler | None


class Learner:
    """Takes the steps of a run, from `progress.step` on."""

    def __init__(self, parts: Parts, progress: Progress, listener: Listener) -> None:
        self._parts, self._progress, self._listener = parts, progress, listener
        self._trainee = trainee = parts.trainee
        self._scale = trainee.precision.loss_scale()
        if progress.loss_scale and progress.loss_scale["dynamic"] == self._scale.dynamic:  # the precision is the same
            self._scale = LossScale(**progress.loss_scale)
        self._spikes = SpikeWatch(progress.recent_losses)
        kind = UpdatesInBackward if parts.config.optimizer_in_backward else Updates
        trained = [parameter for _, parameter in trainee.trained()]
        self._updates = kind(parts.optimizer, trained, trainee.uncounted(), trainee.mesh)

    @property
    def is_spiking(self) -> bool:
        """Whether the last losses were far above those before."""
        return self._spikes.count > 0

    def try_out(self, share: StepShare) -> None:
        """Take memory as the heaviest step to come will; nothing is learnt. Raises OutOfMemory."""
        parts = self._parts
        make_moments(parts.optimizer)
        with self.memory_errors("the check of the longest rows", share.micro_batches):
            runner = self._trainee.divided.runner
            runner.train(0, share.micro_batches, parts.method.trial(share), self._scale.value, share.count)
        parts.optimizer.zero_grad(set_to_none=True)
        longest, peak = tokens_of_longest(share), peak_memory_gib()
        self._listener.message(f"the longest micro-batch, {longest:,} tokens, fits: {peak:.2f} GiB of memory")

    def memory_errors(
        self, doing: str, batches: Sequence[MicroBatch], *, sound: bool = True
    ) -> AbstractContextManager[None]:
        """The weights may be saved afterwards where they are those of a whole step (sound), and nobody else waits for
        this process."""
        sound = sound and self._trainee.mesh.stored is None and self._updates.at_once
        return memory_errors(doing, batches, self._parts.config, sound=sound)

    def step(
        self, batch: StepBatch, minibatches: Sequence[tuple[StepBatch, StepShare]], rate: float
    ) -> tuple[dict[str, Any], list[int]]:
        """(the step's row of metrics.jsonl, the tokens of each document that was learnt from). minibatches: what its
        updates learn from, with this process's share. Raises StepFailed, LossSpike."""
        parts, progress = self._parts, self._progress
        set_rate(parts.optimizer, rate)
        prepared = [parts.method.prepare(minibatch, share, "train") for minibatch, share in minibatches]
        passes = parts.method.passes if any(share.trained_tokens for share, _ in prepared) else 1
        updates, rows = prepared * passes, []
        for number, one in enumerate(updates):
            known = [row["loss"] for row in rows if row["loss"] is not None]
            rows.append(self._update(batch.step, number, *one, known if number + 1 == len(updates) else None))
        progress.step, progress.epoch = batch.step, batch.epoch
        progress.loss_scale, progress.method = asdict(self._scale), parts.method.state
        found = of_updates(rows)
        row = {"step": batch.step, "epoch": round(batch.epoch, 6), "loss": found.pop("loss"), "learning_rate": rate}
        return row | found, [length for share, _ in prepared for length in share.lengths] * passes

    def _update(
        self, step: int, number: int, share: StepShare, make_loss: MakeLoss, before: Sequence[float] | None
    ) -> dict[str, Any]:
        """What is told of an update. number: in the step, from 0; before: losses of the step's others, of its last."""
        parts, method = self._parts, self._parts.method
        count, first = method.count(share), self._progress.step == number == 0
        learning = self._updates.during_backward() if share.trained_tokens else nullcontext()
        with self.memory_errors(f"step {step}", share.micro_batches, sound=number == 0), learning:
            outcome = self._trainee.divided.runner.train(
                step, share.micro_batches, make_loss(count), self._scale.value, share.count, number
            )
        if first and parts.config.compile and (warning := nothing_compiled()):
            self._listener.message(f"warning: {warning}")
        if first and not has_dropout(self._trainee.base):
            check_start(method, share, outcome.loss, self._trainee.precision.dtype)
        norm = self._updates.norm(parts.config.max_grad_norm, self._scale.value)
        if self._may_update(step, number, share, outcome, norm):
            if before is not None:  # the first update's loss says nothing of later ones: a step's mean is compared
                self._watch_loss(step, fmean([*before, outcome.loss]), share, outcome)
            self._updates.finish()
            self._trainee.updates += 1
            method.after(outcome.sums, count)
        if math.isfinite(outcome.loss):  # a loss that is no number is so at any scale
            self._scale.update(overflowed=not math.isfinite(norm))
        parts.optimizer.zero_grad(set_to_none=True)
        told = {
            "loss": outcome.loss if math.isfinite(outcome.loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "trained_tokens": share.trained_tokens,
            "tokens": share.tokens,
            "padded_tokens": outcome.padded_tokens,
        } | method.metrics(outcome.sums, count)
        return told if outcome.router_loss is None else told | {"router_loss": outcome.router_loss}

    def _may_update(self, step: int, number: int, share: StepShare, outcome: StepOutcome, norm: float) -> bool:
        """False where the update is skipped, which is said. Raises RunError on non-finite numbers by default."""
        if share.trained_tokens == 0:
            self._skip(step, number, self._parts.method.learns_nothing)
            return False
        if self._progress.step == number == 0:
            self._look_for_gradients(step, norm)
        if math.isfinite(outcome.loss) and math.isfinite(norm):
            return True
        if math.isfinite(outcome.loss) and self._scale.can_shrink:
            self._listener.message(f"step {step}: fp16 gradients overflowed, loss scale halved")
            return False
        what, fix = self._parts.method.not_finite(outcome.loss, outcome.sums)
        if self._parts.config.on_nonfinite == "skip":
            self._skip(step, number, f"{what} is not finite")
            return False
        raise NotFinite(
            f"the {what} of step {step} is not finite",
            where=self._rows(_not_finite(share, outcome)),
            fix=f"{fix}; --on-nonfinite skip leaves such steps out and counts them",
            sound=self._updates.at_once and number == 0,
        )

    def _look_for_gradients(self, step: int, norm: float) -> None:
        """Say what of the trained tensors learns nothing in the first step, and most likely in none."""
        config = self._parts.config
        if norm == 0.0:
            where = ""
        elif config.optimizer_in_backward or config.method == "rm":
            return  # they are gone; a new score head is zero, and gives what is before it none
        elif places := without_gradient(self._trainee.trained(), self._trainee.mesh):
            where = f" for {', '.join(places[:3])}{' and others' if len(places) > 3 else ''}"
        else:
            return
        self._listener.message(
            f"warning: the gradient of step {step} is zero{where}: what is trained there learns nothing"
        )

    def _watch_loss(self, step: int, loss: float, share: StepShare, outcome: StepOutcome) -> None:
        """Say where the loss of a step jumps. Raises LossSpike where it does not come down again."""
        if not self._spikes.is_spike(loss):
            return
        rows = self._rows([_heaviest_loss(share, outcome)])
        self._listener.message(f"step {step}: loss {loss:.4g} is {self._spikes.words()}; {rows}")
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

    def _skip(self, step: int, number: int, why: str) -> None:
        """A step of which several updates are skipped counts once."""
        skipped = self._progress.skipped_steps
        if skipped[-1:] != [step]:
            skipped.append(step)
        what = f"update {number + 1} of step {step}" if number else f"step {step}"
        self._listener.message(f"{what} skipped: {why} ({len(skipped)} so far)")

    def _rows(self, batches: Sequence[MicroBatch]) -> str:
        """The rows of these micro-batches and of those that the other processes name."""
        return list_rows(self._trainee.mesh.gather([where for batch in batches for where in batch.where]))


def of_updates(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is told of a step's updates as one row: tokens are added up, of the others it is the mean, of those that
    have a number."""
    if len(rows) == 1:
        return rows[0]
    found = {}
    for name in rows[0]:
        known = [row[name] for row in rows if row[name] is not None]
        found[name] = sum(known) if name in COUNTED else fmean(known) if known else None
    return found


def _not_finite(share: StepShare, outcome: StepOutcome) -> list[MicroBatch]:
    """The micro-batches whose loss is not finite here; all where only the gradient is not."""
    batches = share.micro_batches
    bad = [b for b, loss in zip(batches, outcome.micro_losses, strict=True) if not math.isfinite(loss)]
    return bad if bad or not math.isfinite(outcome.loss) else batches


def _heaviest_loss(share: StepShare, outcome: StepOutcome) -> MicroBatch:
    """The micro-batch here whose trained tokens have the highest loss."""
    means = [loss / max(1, b.trained_tokens) for b, loss in zip(share.micro_batches, outcome.micro_losses, strict=True)]
    return share.micro_batches[means.index(max(means))]
