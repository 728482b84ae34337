"""How processes that were started together tell each other from those of an attempt before.

A store that torchrun keeps outlives the processes, and so does what they have noted in it. Its count of restarts does
not tell the attempts apart: of several machines those whose processes failed count, those that only start again beside
them do not, and a process that was replaced before all had met has been counted already.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from swiftlite.errors import UserError
from swiftlite.parallel.heartbeat import ONE_EACH

PAUSE = 0.05  # seconds


def meet_in_store(store: dist.Store, rank: int, size: int, listen: Callable[[], None]) -> str:
    """A name that exactly the living processes of each rank have got, once all of them are here.

    Each notes who it is; the first one reads the names of all and tells each the name of this meeting, again where one
    was replaced meanwhile; it is over when all have come to the same one. listen: is called while waiting.

    Raises UserError where another process has come as the same rank.
    """
    me, told, mine = uuid.uuid4().hex, "", ""
    store.set(f"process/{rank}", me)
    while True:
        if rank == 0:
            told = _tell(store, size, told)
        if store.get(f"process/{rank}").decode() != me:
            raise UserError(f"another process has come as process {rank} of {size}", fix=ONE_EACH)
        meeting = _told(store, rank, me)
        if meeting and meeting != mine:
            mine = meeting
            store.add(f"arrived/{mine}", 1)
        if mine and store.add(f"arrived/{mine}", 0) == size:
            return mine
        listen()
        time.sleep(PAUSE)


def _tell(store: dist.Store, size: int, told: str) -> str:
    """Tell every process the name of the meeting of those that are here. told: the one before."""
    names = [f"process/{rank}" for rank in range(size)]
    if not store.check(names):
        return told
    processes = [name.decode() for name in store.multi_get(names)]
    meeting = hashlib.sha256("".join(processes).encode()).hexdigest()[:32]
    if meeting != told:
        keys = [f"meeting/{rank}" for rank in range(size)]
        store.multi_set(keys, [f"{process} {meeting}" for process in processes])
    return meeting


def _told(store: dist.Store, rank: int, me: str) -> str:
    """The name of the meeting that this process belongs to, empty where it was told none yet."""
    key = f"meeting/{rank}"
    process, _, meeting = store.get(key).decode().partition(" ") if store.check([key]) else ("", "", "")
    return meeting if process == me else ""
