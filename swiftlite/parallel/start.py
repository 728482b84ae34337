"""Starts the processes of a run on this machine by torch's elastic launcher, and ends them together.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from swiftlite.ending import (
    SECONDS_FOR_THE_FIRST,
    STOPPING,
    EndedAtOnce,
    answered,
    end_with_parent,
    end_without_finalizing,
    raise_seen_signal,
)
from swiftlite.environment import variable_for_now
from swiftlite.errors import RunError, UserError, first_line
from swiftlite.streams import settle_streams

DEFAULT_PORT = 29500
SECONDS_TO_MEET = 900  # of several machines
SECONDS_TO_ANSWER = 2  # that a handler of signals has, where the main thread is not waiting outside Python
ENDED_WELL = (None, 0, *(128 + number for number in STOPPING))


@dataclass(frozen=True)
class Machines:
    """What this machine starts. processes: here; nodes, node: machines in all and this one's number; address, port: of
    machine 0, needed where there are several.
    """

    processes: int
    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int | None = None

    @property
    def place(self) -> str:
        """Where several meet."""
        return f"{self.address}:{self.port or DEFAULT_PORT}"

    def again(self) -> Machines:
        """For another attempt. Of several machines each notices in its own time that one has failed: those that come
        first must not meet what is left of the attempt before, so they go to another port."""
        return self if self.nodes == 1 else replace(self, port=(self.port or DEFAULT_PORT) + 1)


def start_processes(machines: Machines, body: Callable[..., int], *arguments: Any) -> None:
    """Run `body(*arguments)`, which returns an exit code, in this machine's processes, and wait.

    Raises SystemExit with the exit code of the run, RunError where a process was killed, UserError where the machine
    has too few GPUs.
    """
    with _no_word_of_sockets():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from swiftlite.parallel.world import port_errors

    count = machines.processes
    _check_devices(count)
    if "OMP_NUM_THREADS" not in os.environ:  # all processes share the cores of this machine
        os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // count))
    for chatty in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    if machines.nodes > 1:
        print(f"machine {machines.node} meets {machines.nodes - 1} more at {machines.place}", file=sys.stderr)
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=machines.nodes,
            max_nodes=machines.nodes,
            nproc_per_node=count,
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            signals_to_handle="SIGQUIT",  # the others are passed on
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else each run leaves folders in TMPDIR
            **_rendezvous(machines),
        ),
        _begin,
    )
    asked = multiprocessing.get_context("spawn").RawValue("i", 0)  # the signal that came first; new processes see it

    def pass_on(number: int, _frame: FrameType | None) -> None:
        """The processes finish their step, save and end with the code that tells why; so does this one, behind them."""
        asked.value = asked.value or number
        for process in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    before = {number: signal.signal(number, pass_on) for number in answered()}
    try:
        raise_seen_signal()  # one that the imports above have swallowed; from here on none is
        with (
            _held_back_in_new_processes(),
            _heard_in_a_wait(asked, pass_on),
            _meeting_errors(machines),
            port_errors("--master-port"),
        ):
            codes = launch(os.getpid(), asked, body, *arguments)
    except ChildFailedError as failure:
        raise _verdict(failure, asked.value) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    raise SystemExit(max(codes.values()))


def _cores() -> int:
    """That this process may use: a container or `taskset` may leave it few of the machine's."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


@contextmanager
def _held_back_in_new_processes() -> Iterator[None]:
    """What asks to end waits in a new process until it can answer, in `_begin`: until then it is importing.

    It inherits what the main thread blocks. The handlers of this process are called all the same, since a thread that
    blocks nothing takes the signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # for good in the tracker, which a SIGHUP would end
    resource_tracker.ensure_running()  # to start it later would unblock them again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        ended.set()


@contextmanager
def _heard_in_a_wait(asked: Any, pass_on: Callable[[int, None], None]) -> Iterator[None]:
    """While this machine waits for the others, inside PyTorch, Python calls no handler: a thread answers signals then.

    asked: holds the signal once a handler was called.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while (number := os.read(reading, 1)) and number[0]:
            if number[0] not in STOPPING:
                continue
            time.sleep(SECONDS_TO_ANSWER)
            if not asked.value:
                pass_on(number[0], None)
                if not any(isinstance(child, SpawnProcess) for child in multiprocessing.active_children()):
                    os._exit(128 + number[0])

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")
        listener.join()
        os.close(reading)
        os.close(writing)


def _rendezvous(machines: Machines) -> dict[str, Any]:
    """One machine: a free port of its own. Several: machine 0 at a known place, the others told where."""
    if machines.nodes == 1 and machines.port is None:
        here = {"rdzv_endpoint": "localhost:0", "local_addr": "localhost", "run_id": str(os.getpid())}
        return {"rdzv_backend": "c10d", **here}
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": machines.place,
        "run_id": "swiftlite",
        "rdzv_configs": {"rank": machines.node, "timeout": SECONDS_TO_MEET},
    }


def _no_word_of_sockets() -> AbstractContextManager[None]:
    """Around the first import of PyTorch: a port where nobody listens is told by its C++ in a hundred lines, before
    `_meeting_errors` says it in three. New processes tell everything."""
    return variable_for_now("TORCH_CPP_LOG_LEVEL", "FATAL")


@contextmanager
def _meeting_errors(machines: Machines) -> Iterator[None]:
    """UserError where several machines did not find each other."""
    from torch.distributed import DistNetworkError, DistStoreError

    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        raise UserError(
            f"the {machines.nodes} machines did not meet: {first_line(error)}",
            where=f"machine {machines.node}, {machines.place}",
            fix=f"start all of them within {SECONDS_TO_MEET // 60} minutes, with the --master-addr of machine 0, one "
            "--master-port that is open between them, the same --nnodes and each its own --node-rank",
        ) from error


@contextmanager
def told_before_joining(report: Callable[[BaseException], int]) -> Iterator[None]:
    """In a started process, around everything: an error that comes before the processes know of each other, as one of
    an import does, is told by the first of this machine, or by another where that one is well. Those behind it are
    told by `World.told_once`."""
    try:
        yield
    except Exception as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SECONDS_FOR_THE_FIRST)  # in which this process is ended, where the first one ends too
        raise SystemExit(report(error)) from error


def _check_devices(count: int) -> None:
    import torch

    if torch.cuda.is_available() and (gpus := torch.cuda.device_count()) < count:
        raise UserError(
            f"{count} processes need as many GPUs, this machine has {gpus}",
            where="--nproc-per-node",
            fix=f"use --nproc-per-node {gpus}",
        )


def _begin(parent: int, asked: Any, body: Callable[..., int], *arguments: Any) -> int:
    """First thing in a new process: see to it that it does not outlive the one that started it.

    asked: holds the signal that came before the parent knew of this process, or 0. Returns the exit code of a run that
    ended or was asked to, exits with that of an error.
    """
    end_with_parent(parent)
    settle_streams()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        code = 128 + asked.value if asked.value else body(*arguments)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # not to be met by the others, who may not have had the signal
    except SystemExit as stop:
        if stop.code not in ENDED_WELL or isinstance(stop, EndedAtOnce):
            # Threads of a broken process group may never end, and one that ends well stays until the others have ended.
            os._exit(stop.code)
        code = stop.code or 0
    end_without_finalizing(0)
    return code


def _verdict(failure: Any, asked: int) -> BaseException:
    """What a failed start means: the process that failed first has told why, unless it was killed.

    asked: a signal that this process was sent and passed on, to some before they could end well; else 0.
    """
    failures = failure.failures
    codes = {f.exitcode for f in failures.values()}
    if asked and codes <= {*(-number for number in STOPPING), *ENDED_WELL, 1}:
        return SystemExit(128 + asked)
    if codes <= set(ENDED_WELL):
        return SystemExit(max(codes))
    for rank, found in sorted((rank, f) for rank, f in failures.items() if f.exitcode < 0):
        name = signal.Signals(-found.exitcode).name
        advice = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return RunError(
            f"process {rank} was killed by {name}{advice}",
            fix="run it again; training goes on from its newest checkpoint, if there is one, with --resume auto",
        )
    return SystemExit(max(f.exitcode if f.exitcode in (1, 2) else 1 for f in failures.values()))
