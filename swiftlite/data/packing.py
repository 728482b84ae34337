"""Best-fit-decreasing packing: rows into packs of at most `capacity` tokens, few and full.

The rooms left in the open packs are the bits of one Python integer, so "the smallest room that still takes this row"
is a shift and a lowest-set-bit: 100,000 rows take a fraction of a second.
"""

from __future__ import annotations

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs of indices into `lengths`; every index is in exactly one.

    lengths: int `[rows]`, each from 1 to capacity. Rows of equal length keep their order, so that a shuffle before
    it is a shuffle of the packs' content. (Johnson, 1974: at most 11/9 of the best possible number of packs.)
    """
    order = np.argsort(-lengths, kind="stable")
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room -> packs with exactly that room
    rooms = 0  # bit r is set where by_room[r] is not empty
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            waiting = by_room[room]
            pack = waiting.pop()
            packs[pack].append(index)
            if not waiting:
                rooms ^= 1 << room
        else:
            room, pack = capacity, len(packs)
            packs.append([index])
        left = room - length
        if left:
            by_room.setdefault(left, []).append(pack)
            rooms |= 1 << left
    return packs
