"""Work in equal parts: for micro-batches, for the threads of a process and for data ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def spread(
    items: Sequence[Item], count: int, cost: Callable[[Item], float], *, most: int | None = None
) -> list[list[Item]]:
    """The items in `count` lists that cost about the same: the next dearest to the list that costs least so far.

    most: items of a list at most; `count` lists of them have to hold all. Each list begins with its dearest.
    """
    costs = [cost(item) for item in items]
    lists: list[list[Item]] = [[] for _ in range(count)]
    open_lists = [(0.0, place) for place in range(count)]
    for number in sorted(range(len(items)), key=costs.__getitem__, reverse=True):
        spent, place = heapq.heappop(open_lists)
        lists[place].append(items[number])
        if most is None or len(lists[place]) < most:
            heapq.heappush(open_lists, (spent + costs[number], place))
    return lists


def fill(items: Sequence[Item], room: Callable[[int], int], size: Callable[[Item], int]) -> list[list[Item]]:
    """The items in lists that leave as little room as they can: the largest item that is left, and of the others those
    whose sizes together come nearest to what it leaves.

    room: of a list, for the size of its first item. Sums of sizes are bits of a whole number, one for each sum that can
    be had, so that thousands of choices are a few operations (https://en.wikipedia.org/wiki/Subset_sum_problem).
    """
    left = sorted(items, key=size, reverse=True)
    lists = []
    while left:
        first = left.pop(0)
        spare = room(size(first)) - size(first)
        sums = [1]  # with none of the items, with the first of them or not, and so on
        for item in left:
            sums.append((sums[-1] | sums[-1] << size(item)) & ((2 << spare) - 1))
        wanted, chosen = sums.pop().bit_length() - 1, [first]
        for place in range(len(left) - 1, -1, -1):
            if not sums[place] >> wanted & 1:  # it cannot be had without this item
                wanted -= size(left[place])
                chosen.append(left.pop(place))
        lists.append(chosen)
    return lists
