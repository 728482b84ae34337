"""The counters of a run, which a checkpoint keeps in `trainer_state.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftlite.checkpoint.state import as_saved, damaged_state
from swiftlite.training.precision import LossScale


@dataclass
class Progress:
    """What the loop knows beside tensors; saved with every checkpoint. best_loss: of all evaluations; best_step: of the
    saved ones with an evaluation the best, whose loss is best_step_loss.
    """

    step: int = 0
    epoch: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    best_step_loss: float | None = None
    evaluations_without_gain: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)


def saved_progress(state: dict[str, Any], checkpoint: Path, method: dict[str, Any]) -> Progress:
    """The counters of `trainer_state.json`. method: the state of a fresh method. Raises UserError for other ones."""
    progress = as_saved(Progress, state["progress"], checkpoint)
    if progress.loss_scale:
        as_saved(LossScale, progress.loss_scale, checkpoint)
    half = (progress.best_step is None) != (progress.best_step_loss is None)
    if progress.step < 0 or half or _types(progress.method) != _types(method):
        raise damaged_state(checkpoint, "progress")
    return progress


def _types(values: dict[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in values.items()}
