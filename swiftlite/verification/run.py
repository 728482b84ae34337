"""Every subject in every layout, through the same `run_training` as a user's run, compared with one process."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swiftlite.checkpoint.folder import step_folder
from swiftlite.config.layout import Layout
from swiftlite.config.resolve import Resolved, resolve
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.imports import quiet_bitsandbytes
from swiftlite.models.toys import toy_judged, toy_pairs, toy_rows
from swiftlite.parallel.world import AnotherFailed, World, joined
from swiftlite.reporting.run import QuietReporter
from swiftlite.training.run import run_training
from swiftlite.verification.cases import Case, Subject
from swiftlite.verification.compare import Difference, compare

STEPS = 5
VERDICTS = "verdicts.jsonl"
ROWS = {
    "sft": ("chats", toy_rows),
    "dpo": ("pairs", toy_pairs),
    "rm": ("pairs", toy_pairs),
    "kto": ("judged", toy_judged),
    "grpo": ("chats", toy_rows),
}
SETS = {"": slice(0, 25), "more-": slice(25, 40)}  # two of each kind: what is told of either is compared too


class Recorder(QuietReporter):
    """Keeps the rows of a run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


@dataclass(frozen=True)
class Verdict:
    """One cell of the matrix. refused: why the layout does not take this model; then there is no difference."""

    subject: str
    case: str
    seconds: float
    difference: Difference | None = None
    refused: str | None = None

    @property
    def word(self) -> str:
        if self.difference is None:
            return f"refused: {self.refused}"
        return "equal" if self.difference.agrees else "DIFFERS"

    @property
    def passed(self) -> bool:
        return self.difference is None or self.difference.agrees


class Verification:
    """One world in which every subject is trained in every layout."""

    def __init__(self, folder: Path, models: dict[str, str], world: World, *, resumed: bool = False) -> None:
        """folder: of rows and runs, seen by all processes; models: architecture -> folder; resumed: each layout goes on
        from a checkpoint of the one before it, a step further each time; after the last but one step the next layout
        goes on from step 1 of one process again.
        """
        self._folder, self._models, self._world, self._resumed = folder, models, world, resumed

    def verdicts(self, subjects: list[Subject], cases: list[Case]) -> Iterator[Verdict]:
        """The verdict of each cell as it is reached, on rank 0; every process has to run through them."""
        for number, subject in enumerate(subjects):
            flags = _shared_flags(self._folder, self._models[subject.architecture], subject.method) | subject.flags
            flags["global_batch_size"] = _global_batch(self._world.size)
            reference = self._folder / f"reference-{number}"
            if self._resumed:
                flags |= {"save_steps": 1, "keep_checkpoints": STEPS}
            expected, refused = Recorder(), ""
            if self._world.rank == 0:
                refused = self._train_alone(subject.method, flags | {"output_dir": str(reference)}, expected)
            if refused := self._world.same(reference.name, refused):
                yield Verdict(subject.name, "one process", 0.0, None, refused)
                continue
            before, name = reference, "one process"
            for place, case in enumerate(case for case in cases if subject.takes(case)):
                wanted, output = flags | case.flags, self._folder / f"{number}-{place}"
                done = 1 + place % (STEPS - 1) if self._resumed else 0
                if done == 1:
                    before, name = self._exchange(before, reference, reference), "one process"
                if done:
                    wanted |= {"resume": str(step_folder(before, done))}
                found = self._difference((subject.method, wanted), output, expected.rows[done:], reference)
                yield Verdict(subject.name, f"{name} -> {case.name}" if done else case.name, *found)
                if output.exists():
                    before, name = self._exchange(before, output, reference), case.name
            self._remove(self._exchange(before, reference, reference))

    def _train_alone(self, method: str, flags: dict[str, Any], recorder: Recorder) -> str:
        """One process's run, which the others are compared with. Returns why it was refused, or nothing."""
        try:
            run_training(resolve_in_world(method, flags, 1).config, World(self._world.device), Layout(), recorder)
        except UserError as error:
            return error.what
        return ""

    def _exchange(self, old: Path, new: Path, reference: Path) -> Path:
        """`new`; the old run is removed where it is neither that nor the reference."""
        if old not in (new, reference):
            self._remove(old)
        return new

    def _remove(self, folder: Path) -> None:
        """Once nobody reads it any more."""
        self._world.meet(f"done with {folder.name}")
        if self._world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    def _difference(
        self, wanted: tuple[str, dict[str, Any]], output: Path, expected: list[dict[str, Any]], reference: Path
    ) -> tuple[float, Difference | None, str | None]:
        """(seconds, difference from one process, why the layout was refused). Raises UserError where only some of the
        processes refuse it: that is no refusal of a layout.
        """
        key, started, recorder = output.name, time.perf_counter(), Recorder()
        world = self._world.within(key)
        try:
            method, flags = wanted
            resolved = resolve_in_world(method, flags | {"output_dir": str(output)}, self._world.size)
            run_training(resolved.config, world, resolved.layout, recorder)
        except (UserError, AnotherFailed) as error:
            world.fails_first()  # who does not refuse it as well would wait for this process
            if isinstance(error, AnotherFailed):
                self._world.store.add(f"unsure/{key}", 1)
            self._world.meet(f"refuse {key}")
            if self._world.store.add(f"unsure/{key}", 0):
                raise
            return 0.0, None, error.what
        seconds = time.perf_counter() - started
        self._world.meet(f"end {key}")
        if self._world.rank != 0:
            return seconds, None, None
        return seconds, compare(recorder.rows, expected, output / "model", reference / "model"), None


def verify_in_process(
    folder: str,
    models: dict[str, str],
    subjects: list[Subject],
    cases: list[Case],
    report: Callable[[BaseException], int],
    resumed: bool = False,
) -> int:
    """The life of one process of `swiftlite verify`: rank 0 appends each verdict to `verdicts.jsonl` and prints it.

    report: tells the user of an error, in the process that fails first; resumed: as in `Verification`.
    """
    quiet_bitsandbytes()
    with joined() as world, world.told_once(report):
        for verdict in Verification(Path(folder), models, world, resumed=resumed).verdicts(subjects, cases):
            if world.rank == 0:
                with (Path(folder) / VERDICTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
                print(f"{verdict.subject}: {verdict.case}: {verdict.word}", flush=True)
    return 0


def read_verdicts(folder: Path) -> list[Verdict]:
    """What `verify_in_process` has written so far."""
    path = folder / VERDICTS
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return [
        Verdict(**row | {"difference": None if row["difference"] is None else Difference(**row["difference"])})
        for row in rows
    ]


def resolve_in_world(method: str, flags: dict[str, Any], world: int) -> Resolved:
    """The config and layout of a command with these flags in so many processes."""
    given = {name: Given(value, name, "flag") for name, value in flags.items()}
    env = {} if world == 1 else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    return resolve(method, given, env=env)


def _shared_flags(folder: Path, model: str, method: str) -> dict[str, Any]:
    """Steps of sequences of unequal lengths, some with hardly a trained token.

    AdamW divides a gradient by its own magnitude: where that is near epsilon, rounding decides about the update, and
    one process differs from itself with other micro-batches (by 4e-4 in a tensor at 1e-8, by 1e-5 at 1e-6).
    """
    return {
        "model": model, "dataset": [str(folder / f"{name}{ROWS[method][0]}.jsonl") for name in SETS],
        "max_length": 128, "max_steps": STEPS, "micro_batch_size": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-6,
        "precision": "fp32", "cache_dir": str(folder / "cache"), "save_steps": 1000, "workers": 1,
    }  # fmt: skip


def _global_batch(world: int) -> int:
    """Eight sequences, or as many more as give every data rank micro-batches of two."""
    return -(-8 // (2 * world)) * 2 * world


def write_rows(folder: Path) -> None:
    """What the methods are trained on, forty rows each."""
    for kind, make in ROWS.values():
        for name, part in SETS.items():
            lines = "".join(json.dumps(row) + "\n" for row in make(40)[part])
            (folder / f"{name}{kind}.jsonl").write_text(lines, encoding="utf-8")
