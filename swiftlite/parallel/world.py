"""How the processes of a run find each other: the variables that torchrun sets, one process group, one store of notes.

Source: https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from swiftlite.config.layout import Layout, under_torchrun
from swiftlite.errors import UserError
from swiftlite.parallel.mesh import Mesh, alone, build_mesh, pick_device

PATIENCE = timedelta(minutes=10)  # of a collective; no rank prepares data or reads weights inside one


@contextmanager
def joined(layout: Layout) -> Iterator[Mesh]:
    """This process's place in the mesh, for as long as the block runs. One process of a plain start needs no group.

    Raises UserError where the environment is that of several processes, but incomplete.
    """
    if not under_torchrun(os.environ):
        yield alone()
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            where="environment",
            fix="start by torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE and use --nproc-per-node",
        )
    device = _own_device()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=world, timeout=PATIENCE))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    yield build_mesh(layout, device, dist.PrefixStore("notes", store))
    dist.destroy_process_group()  # not after an error: the others may be in a collective that will never end


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return pick_device()
