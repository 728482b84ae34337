"""Checkpoints written while training goes on: from a copy in the host's memory, by a thread in each process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from swiftlite.checkpoint.boxes import Holding
from swiftlite.checkpoint.shared import Together, write_together
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.parallel.mesh import Mesh, Patient

Parts = list[tuple[FilePlan, dict[str, list[Holding]]]]


class Saver:
    """Writes one checkpoint at a time."""

    def __init__(self, mesh: Mesh, *, background: bool) -> None:
        """background: by a thread; every process makes its saver at the same place.

        together: the processes, as they wait for one another's disks: longer than in a collective of training.
        """
        self.together: Together = Patient(mesh)
        self._background = background
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def write(
        self, final: Path, create: Callable[[Path], None], parts: Parts, done: Callable[[], None], *, now: bool
    ) -> None:
        """Make the folder `final`, as `write_together`. create: rank 0's part; parts: what this process holds of each
        plan's tensors; done: called when the folder is complete; now: return no sooner, and copy no tensor.

        Raises what went wrong with it where nothing is written in the background, else `finish` does. The one before
        has to be finished.
        """
        if now or not self._background:
            self._write(final, create, parts, done)
            return
        copies = [(plan, {name: _copied(held) for name, held in of.items()}) for plan, of in parts]

        def work() -> None:
            try:
                self._write(final, create, copies, done)
            except BaseException as problem:  # noqa: BLE001 - raised again by whoever asks for the result
                self._problem = problem

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, final: Path, create: Callable[[Path], None], parts: Parts, done: Callable[[], None]) -> None:
        def write(folder: Path) -> None:
            for plan, held in parts:
                plan.write(folder, held)

        write_together(self.together, final, create, write)
        done()

    def finish(self, patience: float | None = None) -> None:
        """Wait until what was begun is written. Raises what went wrong with it, on every process alike.

        patience: seconds after which it is given up.
        """
        if self._thread is not None:
            self._thread.join(patience)
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem


def _copied(held: list[Holding]) -> list[Holding]:
    return [Holding(holding.box, holding.tensor.detach().to("cpu", copy=True)) for holding in held]
