"""Experiment trackers behind `--report-to`, each imported only when asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from swiftlite.errors import UserError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab", "trackio": "trackio"}
SECRETS = ("token", "key", "password", "secret")


class Tracker(Protocol):
    """Takes one row a step."""

    def log(self, row: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def check_trackers(names: Iterable[str]) -> None:
    """Raises UserError where a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"--report-to {name} needs the package {PACKAGES[name]}",
                fix=f"pip install 'swiftlite[{name}]', or leave it out of --report-to",
            )


def open_trackers(names: Iterable[str], output: Path, run_name: str, settings: dict[str, Any]) -> list[Tracker]:
    """Start each tracker. settings: the resolved configuration, shown where the tracker shows such."""
    shown = {key: value for key, value in settings.items() if not any(mark in key for mark in SECRETS)}
    return [OPENERS[name](output, run_name, shown) for name in names]


class TensorBoard:
    def __init__(self, output: Path, run_name: str, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(output / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, row: dict[str, float], step: int) -> None:
        for key, value in row.items():
            self._writer.add_scalar(f"train/{key}", value, step)

    def close(self) -> None:
        self._writer.close()


class RunTracker:
    """wandb, swanlab and trackio share one small interface: init, log, finish."""

    def __init__(self, package: str, output: Path, run_name: str, settings: dict[str, Any]) -> None:
        self._package = importlib.import_module(package)
        where = {"wandb": {"dir": str(output)}, "swanlab": {"logdir": str(output / "swanlab")}}.get(package, {})
        self._package.init(project="swiftlite", name=run_name, config=settings, **where)

    def log(self, row: dict[str, float], step: int) -> None:
        self._package.log(row, step=step)

    def close(self) -> None:
        self._package.finish()


OPENERS = {
    "tensorboard": TensorBoard,
    "wandb": lambda *args: RunTracker("wandb", *args),
    "swanlab": lambda *args: RunTracker("swanlab", *args),
    "trackio": lambda *args: RunTracker("trackio", *args),
}
