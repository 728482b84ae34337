"""Starts a function in several real processes that form a gloo world, for tests of what several ranks do.

Starting a process costs seconds (it imports torch and transformers), so a test starts one world and tries many things
in it: `run_world(4, body, argument)` calls `body(rank, argument)` in each and returns what each returned, rank by rank.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 300  # of silence after which a world is given up


def run_world(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Raises AssertionError with the traceback of the first rank that failed."""
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(rank, size, folder, body, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        _wait(processes, Path(folder))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(size)]


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


def _rank(rank: int, size: int, folder: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    from swiftlite.ending import end_without_finalizing
    from swiftlite.training import divide

    divide.CHEAP_BYTES = divide.BESIDE_PROGRAMS = 0  # cheap results are made again, as those of a large model are
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        result = body(rank, *arguments)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        (Path(folder) / f"failure-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()
    end_without_finalizing(0)
