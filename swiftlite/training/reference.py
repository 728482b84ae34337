"""Log-probabilities of answers under the reference: the model as it was before the first step.

Either the reference is there while training (the base under adapters that are switched off, or a second model), or its
values were computed beforehand in one pass over the steps, by the same runner and in the same layout, and kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from swiftlite.data.batches import MicroBatch
from swiftlite.errors import RunError

if TYPE_CHECKING:
    from swiftlite.data.order import BatchPlan, Pack, StepBatch
    from swiftlite.training.divide import Divided
    from swiftlite.training.share import Sharing

KINDS = ("train", "eval")
FORMAT_VERSION = 3  # of what is kept on disk
STEPS_A_FILE = 64  # what is lost at most where the pass is interrupted
Key = tuple[int, int, int, int]  # kind, step, data set, sequence
OWN = -1  # stands for the step where a row has its own answer, which does not depend on the step


@dataclass(frozen=True)
class Place:
    """Where micro-batches come from. kind: train or eval; step: of mismatched answers, OWN otherwise.

    A mismatched sequence's identity is its place in the step (`swiftlite.data.mismatched`)."""

    kind: str
    step: int = OWN

    def key(self, identity: Sequence[int]) -> Key:
        """Of a sequence that comes from here. identity: data set and sequence."""
        return (KINDS.index(self.kind), self.step, *identity)


class Reference(Protocol):
    def sums(self, batches: Sequence[MicroBatch], place: Place) -> list[torch.Tensor]:
        """log p of the answers of each micro-batch under the reference, fp64 `[answers]`."""


class LiveReference:
    """A model that is there while training."""

    def __init__(self, model: Divided, switched: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """switched: entered while it is the reference."""
        self._model, self._switched = model, switched

    def sums(self, batches: Sequence[MicroBatch], place: Place) -> list[torch.Tensor]:
        with evaluating(self._model.scorers), self._switched():
            return self._model.runner.score(batches)

    def tokens(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """log p of the trained tokens of each micro-batch under the reference, as `StepRunner.told`."""
        with evaluating(self._model.scorers), self._switched():
            return self._model.runner.told(batches)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Dropout off inside the block."""
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)


@dataclass
class ReferenceTable:
    """Values computed beforehand, by (kind, step or OWN, data set, sequence): of a pair (chosen, rejected)."""

    values: dict[Key, tuple[float, float]] = field(default_factory=dict)

    def sums(self, batches: Sequence[MicroBatch], place: Place) -> list[torch.Tensor]:
        """Raises RunError for an answer that was not computed."""
        return [self._of(batch, place) for batch in batches]

    def _of(self, batch: MicroBatch, place: Place) -> torch.Tensor:
        keys = [place.key(identity) for identity in batch.completions.identity.tolist()]
        for key, pair in zip(keys, batch.completions.pair.tolist(), strict=True):
            if key not in self.values:
                raise RunError(
                    "the reference's values, which were computed beforehand, lack a row",
                    where=batch.where[pair],
                    fix="remove the folder `reference` of the cache (--cache-dir), and start again",
                )
        found = [self.values[key][second] for key, second in zip(keys, _seconds(batch), strict=True)]
        return torch.tensor(found, dtype=torch.float64, device=batch.input_ids.device)

    def has(self, place: Place, identity: tuple[int, int]) -> bool:
        return place.key(identity) in self.values

    def add(self, batch: MicroBatch, sums: torch.Tensor, place: Place) -> None:
        for identity, second, value in zip(
            batch.completions.identity.tolist(), _seconds(batch), sums.tolist(), strict=True
        ):
            key = place.key(identity)
            first = self.values.get(key, (0.0, 0.0))[0]
            self.values[key] = (first, value) if second else (value, 0.0)


def _seconds(batch: MicroBatch) -> list[int]:
    """Whether each answer is the second one of its pair."""
    pair = batch.completions.pair.tolist()
    return [int(place > 0 and pair[place] == pair[place - 1]) for place in range(len(pair))]


class Precompute:
    """One pass over the steps of a run. A pass that was interrupted goes on where it stopped."""

    def __init__(
        self,
        folder: Path,
        share: Sharing,
        mismatched: Callable[[StepBatch], list[Pack]] | None,
    ) -> None:
        """folder: of this reference's values on disk; mismatched: packs of each step whose answers are other rows',
        None for methods without.
        """
        self._folder, self._mesh, self._share, self._mismatched = folder, share.mesh, share, mismatched

    def known(self) -> ReferenceTable:
        """What is on disk. Rank 0 reads it for all."""
        table = ReferenceTable()
        if self._mesh.rank == 0:
            for file in sorted(self._folder.glob("*.safetensors")):
                table.values |= _read(file)
        return ReferenceTable(self._mesh.from_first(table.values))

    def missing(self, table: ReferenceTable, plans: dict[str, BatchPlan]) -> bool:
        return next(self._work(table, plans), None) is not None

    def run(
        self,
        table: ReferenceTable,
        plans: dict[str, BatchPlan],
        model: Divided,
        progress: Callable[[int, int], None],
    ) -> None:
        """Fill the table. model: the reference; progress: told (steps done, steps in all)."""
        total = sum(plan.total_steps for plan in plans.values())
        fresh = ReferenceTable()
        with evaluating(model.scorers):
            for done, (place, packs) in enumerate(self._work(table, plans)):
                batches = self._share(packs).micro_batches
                for batch, sums in zip(batches, model.runner.score(batches), strict=True):
                    fresh.add(batch, sums, place)
                if (done + 1) % STEPS_A_FILE == 0:
                    fresh = self._keep(table, fresh)
                progress(min(done + 1, total), total)
        self._keep(table, fresh)

    def _work(self, table: ReferenceTable, plans: dict[str, BatchPlan]) -> Iterator[tuple[Place, list[Pack]]]:
        """Packs that are not in the table; the same on every rank."""
        seen: set[tuple[str, tuple[int, int]]] = set()
        for kind, plan in plans.items():
            for batch in plan.steps():
                own = [pack for pack in batch.packs if not self._is_known(table, seen, kind, pack)]
                seen |= {(kind, sequence.identity) for pack in own for sequence in pack}
                if own:
                    yield Place(kind), own
                others = self._mismatched(batch) if self._mismatched is not None else []
                place = Place(kind, batch.step)
                if others and not table.has(place, others[0][0].identity):
                    yield place, others

    @staticmethod
    def _is_known(table: ReferenceTable, seen: set[tuple[str, tuple[int, int]]], kind: str, pack: Pack) -> bool:
        return all((kind, one.identity) in seen or table.has(Place(kind), one.identity) for one in pack)

    def _keep(self, table: ReferenceTable, fresh: ReferenceTable) -> ReferenceTable:
        """Put what all ranks have found into the table and on disk. Returns an empty table."""
        found = {key: value for part in self._mesh.collect(fresh.values) for key, value in part.items()}
        table.values |= found
        if found and self._mesh.rank == 0:
            _write(self._folder, found)
        return ReferenceTable()


def _write(folder: Path, values: dict[Key, tuple[float, float]]) -> None:
    """Under a name of its own: runs that want the same reference may score it at the same time."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"values-{uuid.uuid4().hex}.safetensors"
    partial = final.with_suffix(".partial")
    keys = np.asarray(list(values), dtype=np.int64).reshape(-1, 4)
    save_file({"keys": keys, "values": np.asarray(list(values.values()), dtype=np.float64).reshape(-1, 2)}, partial)
    partial.replace(final)


def _read(file: Path) -> dict[Key, tuple[float, float]]:
    """Nothing of a file that a crash of the machine has cut off: its values are found again."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        held = load_file(file)
    except SafetensorError:
        return {}
    return dict(zip(map(tuple, held["keys"].tolist()), map(tuple, held["values"].tolist()), strict=True))


def reference_key(weights: Sequence[Path], facts: dict[str, object]) -> str:
    """A digest of everything that changes the values. weights: files of model and adapter; facts: the rest, as JSON."""
    digest = hashlib.sha256(json.dumps([FORMAT_VERSION, facts], sort_keys=True).encode())
    for file in weights:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]
