"""Starts a function in several real processes, for tests of what several ranks do.

A process that imports torch and transformers costs seconds, so ranks are forks of one that has done so (`preloaded`)
and has started no thread: `run_world(4, body, argument)` calls `body(rank, argument)` in each of a gloo world and
returns what each returned, rank by rank. A test tries many things in one world all the same.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

SECONDS = 300  # of silence after which a world is given up


def run_world(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Raises AssertionError with the traceback of the first rank that failed."""
    return run_ranks(size, _in_group, body, *arguments)


def run_ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Of processes that join each other by themselves, as torchrun would have started them."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    world["TORCHELASTIC_USE_AGENT_STORE"] = True
    return _run([world | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)], body, arguments)


def run_swiftlite(size: int, *words: Any) -> list[str]:
    """What the command says in each of so many processes. Raises AssertionError with that where it ends badly."""
    line = [*map(str, words)]
    return _run([{}], _command, (line,)) if size == 1 else run_ranks(size, _command, line)


def _run(environments: list[dict[str, Any]], body: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, environment, folder, body, arguments) for rank, environment in enumerate(environments)]
        processes = [context.Process(target=_rank, args=each) for each in given]
        for process in processes:
            process.start()
        _wait(processes, Path(folder))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(len(given))]


def _wait(processes: list[Any], folder: Path) -> None:
    """Until all have ended well; the first failure ends the others."""
    from multiprocessing.connection import wait

    running = {process.sentinel: (rank, process) for rank, process in enumerate(processes)}
    try:
        while running:
            ended = wait(list(running), timeout=SECONDS)
            assert ended, f"no rank of {sorted(rank for rank, _ in running.values())} ended in {SECONDS} s"
            for sentinel in ended:
                rank, process = running.pop(sentinel)
                process.join()
                note = folder / f"failure-{rank}"
                text = note.read_text() if note.is_file() else f"exit code {process.exitcode}"
                assert process.exitcode == 0, f"rank {rank}:\n{text}"
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _rank(
    rank: int, environment: dict[str, Any], folder: str, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()}, OMP_NUM_THREADS="1")
    import torch

    from swiftlite.ending import end_without_finalizing

    torch.set_num_threads(1)
    try:
        result = body(rank, *arguments)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (Path(folder) / f"failure-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    end_without_finalizing(0)


def _command(_rank: int, words: list[str]) -> str:
    code, text = end_of_command(words)
    assert code == 0, text
    return text


def end_of_command(words: list[str]) -> tuple[int, str]:
    """(exit code, what it says) of the command, in a process of its own: it takes the streams away."""
    from swiftlite.cli.app import main

    with tempfile.TemporaryFile("w+") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        with pytest.raises(SystemExit) as end:
            main(words)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        said.seek(0)
        return end.value.code, said.read()


def _in_group(rank: int, body: Callable[..., Any], *arguments: Any) -> Any:
    import torch.distributed as dist

    from swiftlite.training import divide

    divide.CHEAP_BYTES = divide.BESIDE_PROGRAMS = 0  # cheap results are made again, as those of a large model are
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        result = body(rank, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result
