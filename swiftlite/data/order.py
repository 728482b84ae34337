"""The order of training as a function of (seed, epoch, step): which rows, in which packs, in which step.

Nothing here depends on a rank, a process or what ran before, so any layout and any resumed run sees the same steps.
An epoch sees every row of a data set WEIGHT times: weight 2 repeats each row, weight 0.5 takes a fresh half each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swiftlite.data.packing import Packs, best_fit_decreasing, number_type, ranges
from swiftlite.data.rows.sources import names_of_sets
from swiftlite.data.store import SequenceStore
from swiftlite.data.tokens.preference_tokens import Group, Preference
from swiftlite.seeds import key_digest

ROUNDING = 1e-9  # of a number of steps


@dataclass(frozen=True)
class Sequence:
    """One document, or a pair of answers: input_ids int32 `[n]`, trained bool `[n]` (is this token learnt), where
    `file:line`.

    preference: of the methods that compare answers, or learn from several to one prompt; identity: the data set's
    number in the plan and the sequence's number in the data set, None of sequences that are made while training; noise:
    the key of what is added to its embeddings, None for nothing; asked: of a prompt that is answered while training,
    its row as JSON; data_set: the number of its data set, None where there is one, or it is made while training; drawn:
    fp32 `[n]`, log p of each token where another than the trained model has drawn it.
    """

    input_ids: np.ndarray
    trained: np.ndarray
    where: str
    preference: Preference | Group | None = None
    identity: tuple[int, int] | None = None
    noise: int | None = None
    asked: str | None = None
    data_set: int | None = None
    drawn: np.ndarray | None = None


Pack = list[Sequence]


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step. step: from 1; epoch: progress after this step; packs: at most `global_batch_size`; data_sets:
    what those that rows are of are called, by their numbers; empty where there is one."""

    step: int
    epoch: float
    packs: list[Pack]
    data_sets: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def documents(self) -> list[Sequence]:
        """Of all packs, in their order."""
        return [document for pack in self.packs for document in pack]


@dataclass(frozen=True)
class Part:
    """One data set's share of a plan. rows: those that take part, as ascending places in `store.firsts`, None for all;
    weight: visits an epoch."""

    name: str
    store: SequenceStore
    rows: np.ndarray | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class PlanOptions:
    """What besides the rows decides the steps. capacity: tokens of a pack at most; epochs may be a fraction; max_steps
    wins over it."""

    seed: int
    capacity: int
    packing: bool
    shuffle: bool
    global_batch_size: int
    epochs: float = 1.0
    max_steps: int | None = None


def permutation(count: int, *key: object) -> np.ndarray:
    """A permutation of range(count) that is a function of the key only: the order of as many Philox numbers.

    Raw numbers of a bit generator never change between numpy versions, those of `Generator.permutation` may.
    """
    philox_key = np.frombuffer(key_digest(*key, size=16), dtype=np.uint64)
    numbers = np.random.Philox(key=philox_key).random_raw(count)
    return np.argsort(numbers, kind="stable").astype(number_type(count))


class BatchPlan:
    """The steps of a run over prepared data sets."""

    def __init__(self, parts: list[Part], options: PlanOptions) -> None:
        self._parts, self._options = parts, options
        self._data_sets = names_of_sets([part.name for part in parts])
        self._offsets = np.cumsum([0, *(len(part.store) for part in parts)])
        self._lengths = _joined([part.store.lengths for part in parts])
        self._trained = _joined([part.store.trained for part in parts])
        self._opens_row = np.zeros(self._offsets[-1], dtype=np.bool_)
        for part, offset in zip(parts, self._offsets, strict=False):
            self._opens_row[part.store.firsts + offset] = True
        found = [part.store.preferences for part in parts]
        self._pairs = None if None in found else np.concatenate([columns["chosen"] > 0 for columns in found])
        self._desirable = None if None in found else np.concatenate([columns["desirable"] for columns in found])
        self._index = [_RowIndex(part) for part in parts]
        self._packs_of: tuple[int, Packs | None] = (-1, None)
        self._steps_of: dict[int, int] = {}
        self.total_steps = options.max_steps or self._steps_in(options.epochs)

    def steps(self, start_step: int = 0) -> Iterator[StepBatch]:
        """The steps after the first `start_step`, up to total_steps, repeating epochs as needed."""
        epoch, done = 0, 0
        while done + self._epoch_steps(epoch) <= start_step:
            done += self._epoch_steps(epoch)
            epoch += 1
        step = start_step
        while step < self.total_steps:
            packs, count = self._packs(epoch), self._epoch_steps(epoch)
            for place in range(step - done, min(count, self.total_steps - done)):
                step += 1
                size = self._options.global_batch_size
                chosen = range(place * size, min((place + 1) * size, len(packs)))
                read = [self._read_pack(packs[i]) for i in chosen]
                yield StepBatch(step, epoch + (place + 1) / count, read, data_sets=self._data_sets)
            done += count
            epoch += 1

    def others(self, batch: StepBatch) -> Iterator[Sequence]:
        """What is in the same epoch as a step, each once, in an order of the step's own; without packing."""
        packs = self._packs(math.ceil(batch.epoch) - 1)
        seen = {document.identity for document in batch.documents}
        for place in permutation(len(packs), self._options.seed, batch.step, "others"):
            (document,) = self._read_pack(packs[place])
            if document.identity not in seen:
                seen.add(document.identity)
                yield document

    def recount(self, step: int) -> None:
        """All rows are counted before the first step."""

    def longest(self, count: int) -> list[Pack]:
        """The packs of the first epoch with the most tokens, `count` of them, the longest last; a run that ends before
        the epoch does has only those of its steps."""
        taken = self._pack_tokens()[: self.total_steps * self._options.global_batch_size]
        places = np.argsort(taken, kind="stable")[-count:]
        return [self._read_pack(self._packs(0)[place]) for place in places]

    @property
    def parts(self) -> list[Part]:
        """The shares of the data sets."""
        return list(self._parts)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch."""
        return self._epoch_steps(0)

    @property
    def repeats(self) -> bool:
        """Whether some row is trained on a second time."""
        return self.total_steps > self._epoch_steps(0) or any(part.weight > 1 for part in self._parts)

    @property
    def row_counts(self) -> dict[str, int]:
        """Distinct rows that take part, per data set."""
        return {part.name: len(index) for part, index in zip(self._parts, self._index, strict=True)}

    def head(self, count: int) -> list[Sequence]:
        """The first sequences of each data set in the order of its files."""
        found = []
        for place, index in enumerate(self._index):
            members = index.members()[:count] + self._offsets[place]
            found += self._read_pack(members.tolist())
        return found

    def describe(self) -> dict[str, Any]:
        """Rows, tokens, trained tokens, packs and their fill in the first epoch.

        fill: tokens over packs times their capacity; without packing a row is a pack.
        """
        members, packs = self._first_epoch()
        return self._summary(members, packs, self._pack_tokens())

    def describe_parts(self) -> dict[str, dict[str, Any]]:
        """The same per data set; a pack counts for each data set that has a row in it."""
        members, packs = self._first_epoch()
        held, described = self._pack_tokens(), {}
        for part, start, end in zip(self._parts, self._offsets, self._offsets[1:], strict=False):
            mine = (members >= start) & (members < end)
            described[part.name] = self._summary(members[mine], packs[mine], held)
        return described

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence of the first epoch."""
        return self._lengths[self._first_epoch()[0]]

    def _first_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        """(sequence index, number of its pack) of everything in the first epoch."""
        packs = self._packs(0)
        return packs.members, packs.numbers()

    def _pack_tokens(self) -> np.ndarray:
        return self._packs(0).sums(self._lengths)

    def _summary(self, members: np.ndarray, packs: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        """Numbers of some sequences; packs: the pack of each; held: tokens in each pack."""
        used = np.zeros(len(held), dtype=np.bool_)
        used[packs] = True
        count = int(used.sum())
        return {
            "rows": int(self._opens_row[members].sum()),
            **self._answers(members),
            "tokens": int(self._lengths[members].sum()),
            "trained_tokens": int(self._trained[members].sum()),
            "packs": count,
            "fill": round(float(held[used].sum()) / (count * self._options.capacity), 4) if count else 0.0,
        }

    def _answers(self, members: np.ndarray) -> dict[str, int]:
        """How many pairs, or answers of either label, some sequences hold; nothing where answers are not compared."""
        if self._pairs is None:
            return {}
        if self._pairs[members].any():
            return {"pairs": len(members)}
        wanted = int(self._desirable[members].sum())
        return {"desirable": wanted, "undesirable": len(members) - wanted}

    def _read_pack(self, pack: list[int]) -> Pack:
        read = []
        for index in pack:
            which = int(np.searchsorted(self._offsets, index, side="right")) - 1
            store, place = self._parts[which].store, index - int(self._offsets[which])
            beside = {"preference": store.preference(place), "asked": store.asked(place), "identity": (which, place)}
            read.append(Sequence(*store.read(place), **beside, data_set=which if self._data_sets else None))
        return read

    def _epoch_steps(self, epoch: int) -> int:
        """Steps of an epoch. Whole weights give every epoch the same lengths, and so the same number of packs."""
        same = all(part.weight == int(part.weight) for part in self._parts)
        key = 0 if same else epoch
        if key not in self._steps_of:
            self._steps_of[key] = math.ceil(len(self._packs(key)) / self._options.global_batch_size)
        return self._steps_of[key]

    def _steps_in(self, epochs: float) -> int:
        whole, rest = int(epochs), epochs - int(epochs)
        partial = math.ceil(rest * self._epoch_steps(whole) - ROUNDING) if rest else 0
        return sum(self._epoch_steps(epoch) for epoch in range(whole)) + partial

    def _packs(self, epoch: int) -> Packs:
        """The packs of an epoch in their order, as sequence indices; the last epoch asked for is kept."""
        if self._packs_of[0] != epoch:
            self._packs_of = (epoch, self._arrange(epoch))
        return self._packs_of[1]

    def _arrange(self, epoch: int) -> Packs:
        options, wide = self._options, number_type(int(self._offsets[-1]))
        order = _joined(
            [
                index.sequences(options.seed, epoch, place) + wide(self._offsets[place])
                for place, index in enumerate(self._index)
            ]
        )
        if options.shuffle:
            order = order[permutation(len(order), options.seed, epoch, "rows")]
        if not options.packing:
            return Packs(order, np.ones_like(order))
        packs = best_fit_decreasing(self._lengths[order], options.capacity)
        if options.shuffle:
            packs = packs.reordered(permutation(len(packs), options.seed, epoch, "packs"))
        else:
            packs = packs.sorted()
        return packs.of(order)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """One after the other; a single one as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class _RowIndex:
    """From the rows of a part to their sequences: a row that was split has several, always together."""

    def __init__(self, part: Part) -> None:
        firsts = part.store.firsts
        self._first, self._counts = firsts, None  # a sequence each
        if len(firsts) < len(part.store):
            self._counts = np.diff(firsts, append=len(part.store)).astype(firsts.dtype)
        if part.rows is not None:
            self._first = firsts[part.rows]
            self._counts = None if self._counts is None else self._counts[part.rows]
        self._weight = part.weight

    def __len__(self) -> int:
        return len(self._first)

    def members(self) -> np.ndarray:
        """Indices of all sequences, each once."""
        return self._of_rows(np.arange(len(self)))

    def sequences(self, seed: int, epoch: int, place: int) -> np.ndarray:
        """Sequence indices of one epoch, before any shuffle."""
        total = len(self)
        whole, rest = int(self._weight), self._weight - int(self._weight)
        chosen = [np.arange(total, dtype=self._first.dtype)] * whole
        if rest:
            count = max(1, round(rest * total))
            chosen.append(np.sort(permutation(total, seed, epoch, "weight", place)[:count]))
        return self._of_rows(_joined(chosen))

    def _of_rows(self, rows: np.ndarray) -> np.ndarray:
        return self._first[rows] if self._counts is None else ranges(self._first[rows], self._counts[rows])
