"""Signs of life between machines, so that nobody waits for ever for a process that was killed elsewhere.

Whoever starts the processes of a machine ends all of them when one ends, but knows nothing of other machines, and a
killed process cannot say that it fails. So one process of each machine notes that it lives, and listens where processes
wait for each other without a time limit.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from swiftlite.errors import RunError, UserError

EVERY = 5.0  # seconds between two signs
SILENCE = 300.0  # seconds after which a machine counts as lost
ONE_EACH = "give each machine its own --node-rank, from 0 on, and let no other run use the same port"


class Signs:
    """Of the machines of a run."""

    def __init__(self, store: dist.Store, machine: int, machines: int) -> None:
        """machine: this one's number."""
        self._store, self._machine, self._machines = store, machine, machines
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last sign, and when it was new
        self._next = 0.0
        self._doubled = False  # whether another machine gives signs as this one

    def check(self) -> None:
        """Listen, if that is due. Raises RunError where a machine has been silent for too long, UserError where two
        have come as this one: the run of the first may have begun without the other."""
        if self._doubled:
            raise UserError(
                f"another machine has come as machine {self._machine}",
                where=socket.gethostname(),
                fix=ONE_EACH,
            )
        now = time.monotonic()
        if now < self._next:
            return
        pause, self._next = now - self._next, now + EVERY
        if pause > 2 * EVERY:  # nobody listened in between, so nothing is known of that time
            self._heard.clear()
        for machine in range(self._machines):
            if machine == self._machine:
                continue
            key = f"machine/{machine}"
            sign = self._store.get(key) if self._store.check([key]) else b""  # it may end before it gives one
            last, since = self._heard.setdefault(machine, (sign, now))
            if sign != last:
                self._heard[machine] = sign, now
            elif now - since > SILENCE:
                host = sign.decode().rpartition(" ")[0]
                named = f"machine {machine} ({host})" if host else f"machine {machine}"
                raise RunError(
                    f"{named} has given no sign of life for {SILENCE:.0f} seconds",
                    fix="see what became of its processes, then start again with --resume auto",
                )

    @contextmanager
    def given(self) -> Iterator[None]:
        """While the block runs, those of this machine."""
        ended = threading.Event()

        def give() -> None:
            count, key, sign = 0, f"machine/{self._machine}", ""
            while not ended.is_set():
                try:
                    self._doubled = self._doubled or (bool(sign) and self._store.get(key).decode() != sign)
                    sign = f"{socket.gethostname()} {os.getpid()}.{count}"
                    self._store.set(key, sign)
                except RuntimeError:  # the store's own process has ended, which others notice as well
                    return
                count += 1
                ended.wait(EVERY)

        thread = threading.Thread(target=give, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(EVERY)  # a store that is gone would have it wait for minutes
