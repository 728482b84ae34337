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
