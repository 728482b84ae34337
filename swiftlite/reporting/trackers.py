"""Experiment trackers behind `--report-to`, each imported only when asked for."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from swiftlite.environment import variable_for_now
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


class MLflow:
    """A run of MLflow, which a run that is continued finds again by its tag. Numbers travel while the next steps are
    computed.

    Source: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
    """

    TAG = "swiftlite_run"
    MOST_PARAMS, LONGEST_PARAM = 100, 6000  # in a request; characters
    MOST_WAITING = 100  # rows that have not arrived yet
    FEW_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"  # 14 s at the start, in which nobody sees what is waited for
    NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")

    def __init__(self, output: Path, run_name: str, run_id: str, start_step: int, settings: dict[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client, self._sent = MlflowClient(), deque[Future[None]]()
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        with variable_for_now(*self.FEW_RETRIES):
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
            before = self._client.search_runs([experiment], f"tags.{self.TAG} = '{run_id}'", max_results=1)
        if before:
            self._run = before[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=run_name, tags={self.TAG: run_id}).info.run_id
        self._tell_settings(settings)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _tell_settings(self, settings: dict[str, Any]) -> None:
        """Once: MLflow takes no other value for one that it has."""
        from mlflow.entities import Param

        rest = iter(Param(key, str(value)[: self.LONGEST_PARAM]) for key, value in settings.items())
        while some := list(itertools.islice(rest, self.MOST_PARAMS)):
            self._client.log_batch(self._run, params=some)

    def log(self, row: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(self.NOT_IN_NAMES.sub("_", key), value, now, step) for key, value in row.items()]
        self._sent.append(self._sender.submit(self._client.log_batch, self._run, metrics=numbers))
        self._arrived(self.MOST_WAITING)

    def close(self, unfinished: str | None = None) -> None:
        state = "FINISHED"
        if unfinished:
            state = "FAILED" if unfinished.startswith("failed") else "KILLED"
        try:
            self._arrived(0)
        finally:
            self._sender.shutdown(cancel_futures=True)
            self._client.set_terminated(self._run, state)

    def _arrived(self, waiting: int) -> None:
        """Until no more rows are waiting. Raises what MLflow says of those that are through."""
        while self._sent and (self._sent[0].done() or len(self._sent) > waiting):
            self._sent.popleft().result()


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
    "mlflow": MLflow,
    "wandb": _open_wandb,
    "swanlab": _open_swanlab,
    "trackio": _open_trackio,
}
FIXES = {
    "tensorboard": "see that --output-dir can be written",
    "mlflow": "see that MLFLOW_TRACKING_URI names a server or folder that can be reached",
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "swanlab": "run `swanlab login`, or set SWANLAB_MODE=offline",
    "trackio": "see that trackio's folder (TRACKIO_DIR) can be written",
}
