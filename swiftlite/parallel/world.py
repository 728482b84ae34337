"""How the processes of a run find each other: the variables that torchrun sets, one process group, one store of notes.

Source: https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from swiftlite.config.layout import under_torchrun
from swiftlite.ending import EndedAtOnce, is_of_a_signal
from swiftlite.errors import RunError, UserError
from swiftlite.parallel.heartbeat import Signs
from swiftlite.parallel.meeting import meet_in_store
from swiftlite.parallel.mesh import backend_for, pick_device

FAILED, INTERRUPTED = "failed", "interrupted"
BECAUSE_OF_ANOTHER = 1  # exit code of a process that fails after another one
# Whoever starts the processes ends all of them when the first one exits: that has to be the one that tells why.
SECONDS_FOR_THE_FIRST = 10
INTERFACE = "GLOO_SOCKET_IFNAME"
PATIENCE = timedelta(minutes=10)  # of a collective; no rank prepares data or reads weights inside one


class AnotherFailed(RunError):
    """Another process has failed and tells why."""


@dataclass(frozen=True)
class World:
    """All processes of a run, before they form a mesh. store: notes that all of them read, None in a run of one; signs:
    of life, which one process of each of several machines gives and listens to."""

    device: torch.device
    rank: int = 0
    size: int = 1
    store: dist.Store | None = None
    signs: Signs | None = None

    def meet(self, place: str) -> None:
        """Wait for all processes. place: a name that is used once. Raises RunError where one of them fails."""
        if self.store is None:
            return
        self.store.add(f"arrived/{place}", 1)
        self._wait(lambda: self.store.add(f"arrived/{place}", 0) == self.size)

    def _wait(self, arrived: Callable[[], bool]) -> None:
        """However long it takes: unlike a collective it has no time-out."""
        while not arrived():
            if self.store.add(FAILED, 0):
                raise AnotherFailed("another process failed")
            if self.store.check([INTERRUPTED]):
                raise KeyboardInterrupt
            if self.signs is not None:
                self.signs.check()
            time.sleep(0.05)

    def fails_first(self) -> bool:
        """Note that this process fails. True for the first that does, which tells the user why."""
        return self.store is None or self.store.add(FAILED, 1) == 1

    def same(self, name: str, text: str) -> str:
        """What rank 0 says. name: used once. Raises RunError where another process fails before."""
        if self.store is None:
            return text
        key = f"same/{name}"
        if self.rank == 0:
            self.store.set(key, text)
        self._wait(lambda: self.store.check([key]))
        return self.store.get(key).decode()

    def least(self, name: str, number: int) -> int:
        """The smallest number that a process says. name: used once. Raises RunError where one of them fails before."""
        if self.store is None:
            return number
        self.store.set(f"least/{name}/{self.rank}", str(number))
        self.meet(f"least/{name}")
        return min(map(int, self.store.multi_get([f"least/{name}/{rank}" for rank in range(self.size)])))

    @contextmanager
    def told_once(self, report: Callable[[BaseException], int]) -> Iterator[None]:
        """Of several processes the first that fails reports why, and each ends with SystemExit and its exit code.

        report: tells the user of an error and returns the exit code. A process on its own raises what it meets.
        """
        try:
            yield
        except BaseException as error:
            if self.store is None:
                raise
            if isinstance(error, SystemExit | KeyboardInterrupt):
                code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code
                if code:  # it may be that one alone is told to end
                    with suppress(RuntimeError):  # the store may have ended before
                        self.store.set(INTERRUPTED, str(code))
                agreed = isinstance(error, SystemExit) and not is_of_a_signal(error)
                raise (SystemExit if agreed else EndedAtOnce)(code) from None
            if (code := self._interrupted()) is not None:  # a collective fails where one of its processes has gone
                raise EndedAtOnce(code) from None
            knows_why = not isinstance(error, AnotherFailed)
            if not knows_why:
                time.sleep(SECONDS_FOR_THE_FIRST)
            if self.fails_first():
                raise SystemExit(report(error)) from error
            if knows_why:
                time.sleep(SECONDS_FOR_THE_FIRST)
            raise SystemExit(BECAUSE_OF_ANOTHER) from error

    def _interrupted(self) -> int | None:
        """The exit code of a process that was told to end, if one was."""
        with suppress(RuntimeError):
            if self.store.check([INTERRUPTED]):
                return int(self.store.get(INTERRUPTED))
        return None

    def within(self, name: str) -> World:
        """The same processes with notes of their own."""
        return self if self.store is None else replace(self, store=dist.PrefixStore(name, self.store))


@contextmanager
def joined() -> Iterator[World]:
    """This process's place among those that torchrun started, for as long as the block runs, or that of one process.

    Raises UserError where the environment is that of several processes, but incomplete.
    """
    if not under_torchrun(os.environ):
        yield World(pick_device())
        if dist.is_initialized():  # FSDP wants a group of this one process for offloading
            dist.destroy_process_group()
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            where="environment",
            fix="start by torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE and use --nproc-per-node",
        )
    device = _own_device()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with port_errors("MASTER_PORT"):
        store = _interruptibly(lambda: next(dist.rendezvous("env://", rank=rank, world_size=size, timeout=PATIENCE))[0])
    signs = _signs(store, size)
    with nullcontext() if signs is None else signs.given():
        # The group would wait for the others where no signal is heard.
        name = meet_in_store(store, rank, size, (lambda: None) if signs is None else signs.check)
        store = dist.PrefixStore(name, store)
        world = World(device, rank, size, dist.PrefixStore("notes", store), signs)
        with _interface_errors():
            dist.init_process_group(
                backend_for(device),
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=PATIENCE,
            )
        yield world
    dist.destroy_process_group()  # not after an error: the others may be in a collective that will never end


def _signs(store: dist.Store, size: int) -> Signs | None:
    """Of the first process of each machine, where there are several."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if here == size or os.environ["LOCAL_RANK"] != "0" or "GROUP_RANK" not in os.environ:
        return None
    machines = int(os.environ.get("GROUP_WORLD_SIZE", size // here))
    return Signs(dist.PrefixStore("signs", store), int(os.environ["GROUP_RANK"]), machines)


@contextmanager
def port_errors(where: str) -> Iterator[None]:
    """UserError where the processes cannot meet at a port because another program has it. where: the port was given."""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            "the port at which the processes meet is in use",
            where=where,
            fix="give another one, or wait until the program that has it has ended",
        ) from error


@contextmanager
def _interface_errors() -> Iterator[None]:
    """UserError where the environment names a network interface that this machine lacks."""
    try:
        yield
    except RuntimeError as error:
        if INTERFACE not in os.environ or "Unable to find address" not in str(error):
            raise
        raise UserError(
            f"this machine has no network interface with an address that is named {os.environ[INTERFACE]}",
            where=INTERFACE,
            fix="name one that `ip addr` shows, or unset it",
        ) from error


def _interruptibly(wait: Callable[[], dist.Store]) -> dist.Store:
    """What a call returns that waits outside Python: in another thread, so that signals are answered meanwhile."""
    made: Future[dist.Store] = Future()

    def run() -> None:
        try:
            made.set_result(wait())
        except Exception as error:  # raised where it is waited for
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return made.result()


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise UserError(
                f"process {local} of this machine has no GPU of its own",
                where="LOCAL_RANK",
                fix=f"start no more processes here than there are GPUs: {count}",
            )
        torch.cuda.set_device(local)
    return pick_device()
