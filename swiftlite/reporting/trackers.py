"""Experiment trackers behind `--report-to`, each imported only when asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from swiftlite.errors import UserError, first_line
from swiftlite.imports import import_package
from swiftlite.untrusted import masked, without_secrets

PROJECT = "swiftlite"
PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "swanlab": "SWANLAB_PROJ_NAME"}  # which a project given to `init` hides


class Tracker(Protocol):
    """Takes the numbers of one logged step at a time."""

    def log(self, row: dict[str, float], step: int) -> None: ...

    def close(self, unfinished: str | None = None) -> None:
        """unfinished: how the run ended before its last step, in words."""


def check_trackers(names: Iterable[str]) -> None:
    """Raises UserError where a tracker's package is not installed, or cannot be imported."""
    for name in names:
        import_package(name, f"--report-to {name}", name)


def open_trackers(
    names: Iterable[str], output: Path, run_name: str, run_id: str, start_step: int, settings: dict[str, Any]
) -> dict[str, Tracker]:
    """Start each tracker. run_id: the same whenever a run is continued; settings: the resolved configuration.

    Raises UserError where one does not start, such as without an account.
    """
    opened: dict[str, Tracker] = {}
    for name in names:
        try:
            opened[name] = OPENERS[name](output, run_name, run_id, start_step, masked(settings))
        except Exception as error:  # every package has errors of its own, and none of them is ours
            for tracker in opened.values():
                with suppress(Exception):  # the first error counts
                    tracker.close(f"{name} does not start")
            raise UserError(
                f"{name} does not start: {without_secrets(first_line(error))[:200]}",
                where=f"--report-to {name}",
                fix=FIXES[name],
            ) from error
    return opened


class TensorBoard:
    """Event files in OUT/tensorboard; rows of steps that are trained again replace the old ones."""

    def __init__(self, output: Path, run_name: str, run_id: str, start_step: int, settings: dict[str, Any]) -> None:
        # By this name it asks whether to leave TensorFlow out, which takes seconds to import, where that works at all.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(output / "tensorboard"), purge_step=start_step + 1 if start_step else None)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, row: dict[str, float], step: int) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key if "/" in key else f"train/{key}", value, step)

    def close(self, unfinished: str | None = None) -> None:
        self._writer.close()


class RunTracker:
    """wandb, swanlab and trackio share one small interface: init, log, finish."""

    def __init__(self, package: str, **settings: Any) -> None:
        self._package, self._name = importlib.import_module(package), package
        project = os.environ.get(PROJECT_VARIABLES.get(package, "")) or PROJECT
        self._package.init(project=project, **settings)

    def log(self, row: dict[str, float], step: int) -> None:
        self._package.log(row, step=step)

    def close(self, unfinished: str | None = None) -> None:
        self._package.finish(**(_ending(self._name, without_secrets(unfinished)) if unfinished else {}))


def _ending(package: str, words: str) -> dict[str, Any]:
    """What `finish` is told, or the run would stand there as one that went to its end; trackio has no word for it."""
    if package == "wandb":
        return {"exit_code": 1}
    state = "crashed" if words.startswith("failed") else "aborted"
    return {"state": state, "error": words} if package == "swanlab" else {}


def _open_wandb(output: Path, run_name: str, run_id: str, start_step: int, settings: dict[str, Any]) -> Tracker:
    return RunTracker("wandb", name=run_name, id=run_id, resume="allow", dir=str(output), config=settings)


def _open_swanlab(output: Path, run_name: str, run_id: str, start_step: int, settings: dict[str, Any]) -> Tracker:
    return RunTracker(
        "swanlab", name=run_name, id=run_id, resume="allow", log_dir=str(output / "swanlab"), config=settings
    )


def _open_trackio(output: Path, run_name: str, run_id: str, start_step: int, settings: dict[str, Any]) -> Tracker:
    # trackio knows a run by its name alone, so the id keeps two runs in folders of one name apart
    return RunTracker("trackio", name=f"{run_name}-{run_id[:6]}", resume="allow", config=settings)


OPENERS: dict[str, Callable[[Path, str, str, int, dict[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _open_wandb,
    "swanlab": _open_swanlab,
    "trackio": _open_trackio,
}
FIXES = {
    "tensorboard": "see that --output-dir can be written",
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "swanlab": "run `swanlab login`, or set SWANLAB_MODE=offline",
    "trackio": "see that trackio's folder (TRACKIO_DIR) can be written",
}
