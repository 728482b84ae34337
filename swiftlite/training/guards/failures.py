"""What ends a run in the middle of a step: numbers that are none, losses that jump, memory that does not suffice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from swiftlite.data.batches import MicroBatch
from swiftlite.data.build import UnfitRow
from swiftlite.errors import RunError, is_out_of_memory, memory_told

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

WINDOW, FEWEST = 50, 20  # losses that a new one is compared with
LEAST_JUMP, RANGES = 1.0, 3.0  # of a spike, above the highest of them: in nats, and in how far they lie apart
PATIENCE = 3  # spikes one after another that end a run


class StepFailed(RunError):
    """A step could not be finished. sound: the weights are those of the step before, and every process is here and may
    save them.
    """

    def __init__(self, what: str, *, where: str, fix: str, sound: bool) -> None:
        super().__init__(what, where=where, fix=fix)
        self.sound = sound


class NotFinite(StepFailed):
    """Loss or gradient of a step are no numbers. Every process raises it."""


class OutOfMemory(StepFailed):
    """A process ran out of memory. The others, if there are any, wait for it in vain."""


class LossSpike(RunError):
    """The loss has left its range and does not come back: what the weights are worth is unknown."""


@contextmanager
def unfit_rows() -> Iterator[None]:
    """A row that a stream cannot use ends the run as a step that fails, with the weights of the step before."""
    try:
        yield
    except UnfitRow as error:
        raise StepFailed(error.what, where=error.where or "", fix=error.fix or "", sound=True) from error


@contextmanager
def memory_errors(
    doing: str, batches: Sequence[MicroBatch], config: RunConfig, *, sound: bool, learns: bool = True
) -> Iterator[None]:
    """Turn what the device raises when its memory is full into OutOfMemory. doing: what needs it; batches: with what,
    none where the model answers; sound: the weights may be saved afterwards; learns: there are gradients, and what they
    need.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = f"{config.answers_at_once:,} answers at a time, of up to {config.max_new_tokens:,} tokens"
        fix = "lower --answers-at-once, --max-new-tokens or --max-length"
        if batches:
            longest = max(batches, key=lambda batch: batch.input_ids.shape[1])
            where = f"a micro-batch of {longest.input_ids.shape[1]:,} tokens: {list_rows(longest.where)}"
            fix = _less_memory(config, learns)
        what = f"the device ran out of memory in {doing}"
        raise OutOfMemory(what, where=where, fix=fix, sound=sound) from error


def other_memory_errors(*, learns: bool = True) -> AbstractContextManager[None]:
    """Turn what is raised outside of steps into a RunError."""
    smaller = "--tuner lora and --quantization nf4" if learns else "--quantization nf4"
    recompute = ", or use --activation-checkpointing full" if learns else ""
    return memory_told(
        "the device ran out of memory",
        fix=f"where the model was being loaded, divide it (--parallel fsdp) or use {smaller}; "
        f"else lower --micro-batch-size or --max-length{recompute}",
    )


def _less_memory(config: RunConfig, learns: bool) -> str:
    """What of the flags that save memory is not in use yet, the cheapest first."""
    advice = []
    if config.micro_batch_size > 1:
        advice.append("--micro-batch-size 1")
    if learns and config.activation_checkpointing not in ("full", "offload"):
        advice.append("--activation-checkpointing full")
    if learns and config.tuner == "full" and not config.from_scratch:
        advice.append("--tuner lora")
    if config.offload == "none":
        advice.append("--offload cpu")
    return f"use {', '.join([*advice, 'a smaller --max-length'])} or more devices with --parallel fsdp"


def list_rows(rows: Sequence[str]) -> str:
    """Rows by file and line, the first dozen of them."""
    return "rows " + ", ".join(rows[:12]) + (f" and {len(rows) - 12} more" if len(rows) > 12 else "")


class SpikeWatch:
    """Compares each step's loss with those before. A spike lies above the highest of the last 50 by more than three
    times the distance between the highest and the lowest, and by more than 1.
    """

    def __init__(self, recent: list[float]) -> None:
        """recent: the losses so far, the last ones; changed in place, so that a checkpoint can keep them."""
        self._recent = recent
        self.count = 0

    def is_spike(self, loss: float) -> bool:
        """Note a loss. `count`: how many spikes there have been one after another."""
        recent = self._recent
        if len(recent) >= FEWEST and loss > max(recent) + max(LEAST_JUMP, RANGES * (max(recent) - min(recent))):
            self.count += 1
            return True
        self.count = 0
        recent.append(loss)
        del recent[:-WINDOW]
        return False

    def words(self) -> str:
        """The range of the losses before."""
        return f"far above the last {len(self._recent)} ({min(self._recent):.3g} to {max(self._recent):.3g})"

    def accept(self) -> None:
        """Begin anew: this is how high the loss is now."""
        self._recent.clear()
        self.count = 0
