"""The door into the engine: starts what can run beside the imports, then imports and works, alone or as one of several.

`launch` starts the processes of a layout where nobody else did; each of them, and each that torchrun started, goes
through `work_here`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.layout import Layout, under_torchrun
from swiftlite.data.background import prepared_in_background
from swiftlite.ending import raise_seen_signal
from swiftlite.errors import RunError, UserError
from swiftlite.heap import prepare_heap
from swiftlite.imports import quiet_bitsandbytes
from swiftlite.models.tokenizer import tokenizer_loader
from swiftlite.quick_imports import quick_imports

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

Report = Callable[[BaseException], int]
Work = Callable[..., None]  # work(config, world, layout, began=began)
Load = Callable[[], Work]  # imports it; started processes get it as a pickle


def training() -> Work:
    from swiftlite.training.run import run_training

    return run_training


def launch(config: RunConfig, layout: Layout, report: Report, load: Load = training) -> None:
    """Train as the config says. report: tells the user of an error and returns the exit code; load: imports what each
    process does.

    Raises what the work raises; where there are several processes, the one that fails first reports why, and
    SystemExit is raised with the exit code.
    """
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    with prepared_in_background(config, tokenizer_loader(config), when=first_here):
        if (layout.world > 1 or config.max_restarts) and not under_torchrun(os.environ):
            _start(config, layout, report, load)
        else:
            work_here(config, layout, report, load)


def _start(config: RunConfig, layout: Layout, report: Report, load: Load) -> None:
    """Start this machine's processes, again from the newest checkpoint where they failed while running."""
    from swiftlite.checkpoint.folder import list_checkpoints
    from swiftlite.parallel.start import Machines, start_processes

    if (config.nnodes or 1) > 1 and config.master_addr is None:
        raise UserError(
            f"--nnodes is {config.nnodes}, but no --master-addr says where the machines meet",
            fix="give all of them the address of machine 0 as --master-addr HOST, and each its --node-rank",
        )
    machines = Machines(
        processes=config.nproc_per_node or layout.world // (config.nnodes or 1),
        nodes=config.nnodes or 1,
        node=config.node_rank or 0,
        address=config.master_addr or "127.0.0.1",
        port=config.master_port,
    )
    began = time.monotonic()
    for left in reversed(range(config.max_restarts + 1)):
        try:
            start_processes(machines, work_in_process, config.model_dump(), layout, report, load, began)
        except (RunError, SystemExit) as failure:
            code = report(failure) if left and isinstance(failure, RunError) else getattr(failure, "code", None)
            if not left or code != RunError.exit_code:
                raise
        print(f"starting again from the newest checkpoint; restarts left: {left - 1}", file=sys.stderr)
        if config.resume == "never" or list_checkpoints(Path(config.output_dir)):  # else from that of the other run
            config = config.model_copy(update={"resume": "auto"})
        machines = machines.again()


def work_in_process(values: dict[str, object], layout: Layout, report: Report, load: Load, began: float) -> int:
    """The whole life of a started process. Returns the exit code of a run that ended."""
    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.start import told_before_joining

    with told_before_joining(report):
        work_here(RunConfig.model_validate(values), layout, report, load, began)
    return 0


def work_here(config: RunConfig, layout: Layout, report: Report, load: Load, began: float | None = None) -> None:
    """Do the work in this process, one of the layout's. began: by time.monotonic, which all processes of a machine
    share, the first start of a run that has been started again. Raises what `launch` says."""
    prepare_heap()
    quiet_bitsandbytes()
    with quick_imports():
        from swiftlite.parallel.world import joined
        from swiftlite.training.guards.agreement import agreed

        work = load()

    raise_seen_signal()
    with joined() as world, world.told_once(lambda error: report(_reason(error))):
        work(agreed(config, world), world, layout, began=began)


def _reason(error: BaseException) -> BaseException:
    """The error, or in plain words what torch raises in a collective when a process at the other end has died."""
    text = str(error)
    marks = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting")
    if isinstance(error, RuntimeError) and any(mark in text for mark in marks):
        return RunError("lost contact with another process", where=text.splitlines()[0][:200])
    return error
