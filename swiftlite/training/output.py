"""The output folder of a run: held by one run at a time, known as a run's by its config.yaml, with its rows' audit."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.checkpoint.claim import Claim
from swiftlite.config.save import save_config
from swiftlite.errors import UserError
from swiftlite.reporting.files import disk_errors, write_whole
from swiftlite.training.resume import used_already

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.prepare import PreparedData
    from swiftlite.reporting.run import Reporter


SECONDS_TO_BE_SEEN = 60  # by other machines, through a network file system


class OutputFolder:
    """What the first process of a run does with the folder beside checkpoints and result."""

    def __init__(self, config: RunConfig, claim: Claim, prepared: PreparedData, reporter: Reporter) -> None:
        """claim: on the folder, taken already where that was there before."""
        self.path = Path(config.output_dir)
        self._config, self._claim, self._prepared, self._reporter = config, claim, prepared, reporter

    @contextmanager
    def begun(self) -> Iterator[None]:
        """config.yaml comes before all other files: by it a folder is known as a run's, however soon that is killed.

        It goes again where the block raises, if it was not there before and the folder holds nothing else. Raises
        UserError where another run was quicker.
        """
        path = self.path / "config.yaml"
        is_new = not path.exists()
        self._take()
        self._write_settings()
        try:
            yield
        except BaseException:
            if is_new and self._names() == [path.name]:
                path.unlink()
                with suppress(OSError):  # it may be a place that others have mounted
                    self.path.rmdir()
            raise

    def check_shared(self) -> None:
        """Raises UserError where this process does not see what the first one has begun."""
        end = time.monotonic() + SECONDS_TO_BE_SEEN
        while "config.yaml" not in self._names():
            if time.monotonic() > end:
                raise UserError(
                    f"{socket.gethostname()} does not see the output folder that process 0 writes into",
                    where=str(self.path),
                    fix="give an --output-dir on a file system that all machines share",
                )
            time.sleep(0.2)

    def _names(self) -> list[str]:
        """Listed anew: a network file system may remember for a while that something was not there."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _take(self) -> None:
        if self._claim.holds:
            return
        self._make()
        if (self.path / "config.yaml").exists():  # this run's other processes may have made stacks/ meanwhile
            raise used_already(self.path)

    def keep(self) -> None:
        """Where somebody has cleared the folder away, make it again: what is saved in it must be a run's."""
        if self._claim.holds and (self.path / "config.yaml").exists():
            return
        self._make()
        self._write_settings()
        self.write_audit()
        self._reporter.message("warning: the output folder was removed; it is made again, what was in it is lost")

    def _make(self) -> None:
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._claim.take()

    def _write_settings(self) -> None:
        with disk_errors(self.path):
            save_config(self._config, self.path / "config.yaml")

    def write_audit(self) -> None:
        """What became of the rows. A streamed data set knows it only at the end, so it is written there again."""
        audit = json.dumps(self._prepared.audit, indent=2, ensure_ascii=False) + "\n"
        self._write("audit.json", [audit])
        if self._prepared.rejected:
            rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in self._prepared.rejected)
            self._write("rejected_rows.jsonl", rows)

    def _write(self, name: str, parts: Iterable[str]) -> None:
        """One part after the other: rejected rows may be more than fit into memory."""

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(parts)

        write_whole(self.path / name, write)
