"""Best-fit-decreasing packing: rows into packs of at most `capacity` tokens, few and full.

The rooms left in the open packs are the bits of one Python integer, so "the smallest room that still takes this row"
is a shift and a lowest-set-bit: 100,000 rows take a fraction of a second. Packs are numbers in two arrays and no lists
of lists, which would take ten times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np


def number_type(count: int) -> type[np.integer]:
    """The smaller type that holds the numbers of so many sequences: there are many arrays of them."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


class Packs:
    """Packs of rows, in an order. members: integers `[rows]`, the rows pack by pack; sizes: integers `[packs]`."""

    def __init__(self, members: np.ndarray, sizes: np.ndarray) -> None:
        self.members, self.sizes = members, sizes
        self._starts = (np.cumsum(sizes) - sizes).astype(members.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, place: int) -> list[int]:
        start = self._starts[place]
        return self.members[start : start + self.sizes[place]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return (self[place] for place in range(len(self)))

    def numbers(self) -> np.ndarray:
        """The place of each member's pack."""
        return np.repeat(np.arange(len(self), dtype=self.members.dtype), self.sizes)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Of `values[row]` over the rows of each pack, int64."""
        return np.add.reduceat(values[self.members], self._starts, dtype=np.int64)

    def reordered(self, places: np.ndarray) -> Packs:
        """The packs of these places."""
        sizes = self.sizes[places]
        return Packs(self.members[ranges(self._starts[places], sizes)], sizes)

    def sorted(self) -> Packs:
        """By the smallest row of each pack, with the rows of a pack ascending."""
        order = np.lexsort((self.members, self.numbers()))
        ascending = Packs(self.members[order], self.sizes)
        return ascending.reordered(np.argsort(ascending.members[self._starts], kind="stable"))

    def of(self, rows: np.ndarray) -> Packs:
        """With each row replaced by `rows[row]`."""
        return Packs(rows[self.members], self.sizes)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`start, start + 1, ...`, count numbers of it, for each of them, one after the other."""
    shifts = (starts - (np.cumsum(counts) - counts)).astype(starts.dtype)
    found = np.repeat(shifts, counts)
    found += np.arange(len(found), dtype=found.dtype)
    return found


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> Packs:
    """Packs of indices into `lengths`; every index is in exactly one.

    lengths: int `[rows]`, each from 1 to capacity. Rows of equal length keep their order, so that a shuffle before
    it is a shuffle of the packs' content. (Johnson, 1974: at most 11/9 of the best possible number of packs.)
    """
    number = number_type(len(lengths))
    order = np.argsort(-lengths, kind="stable").astype(number)
    if len(order) and lengths.sum(dtype=np.int64) <= capacity:  # `rooms` would be as wide as a pack that is never full
        return Packs(order, np.asarray([len(order)], dtype=number))
    chosen = array("i" if number == np.int32 else "q")  # the pack of each row of `order`
    opened = 0
    by_room: dict[int, list[int]] = {}  # room -> packs with exactly that room
    rooms = 0  # bit r is set where by_room[r] is not empty
    for length in memoryview(lengths[order]):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            waiting = by_room[room]
            pack = waiting.pop()
            if not waiting:
                rooms ^= 1 << room
        else:
            room, pack = capacity, opened
            opened += 1
        chosen.append(pack)
        left = room - length
        if left:
            by_room.setdefault(left, []).append(pack)
            rooms |= 1 << left
    numbers = np.frombuffer(chosen, dtype=number) if chosen else np.empty(0, dtype=number)
    sizes = np.bincount(numbers, minlength=opened).astype(number)
    return Packs(order[np.argsort(numbers, kind="stable")], sizes)
