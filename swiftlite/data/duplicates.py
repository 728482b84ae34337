"""Rows that are the same as others, by their tokens and what is learnt of them.

A row that comes twice is learnt twice as much, and one that is trained on and evaluated makes a loss that says nothing
of rows that were never seen. They are counted in any case, and left out of training where that is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swiftlite.data.order import Part
from swiftlite.data.packing import number_type
from swiftlite.data.store import SequenceStore


def first_rows(stores: Sequence[SequenceStore], evaluated: Sequence[SequenceStore]) -> list[np.ndarray]:
    """Of each store the places in `firsts` of the rows that no row before is the same as, in no other store either,
    nor one that is evaluated; ascending."""
    digests = [_digests(store) for store in stores]
    together = _joined(digests)
    is_kept = np.zeros(len(together), dtype=np.bool_)
    is_kept[np.unique(together, return_index=True)[1]] = True
    is_kept &= ~np.isin(together, _joined([_digests(store) for store in evaluated]))
    parts = np.split(is_kept, np.cumsum([len(part) for part in digests])[:-1])
    return [np.flatnonzero(part).astype(number_type(len(part))) for part in parts]


def count_trained_on(parts: Sequence[Part], evaluated: Sequence[Part]) -> int:
    """How many rows that are evaluated are trained on as well."""
    return int(np.isin(_rows(evaluated), _rows(parts)).sum()) if evaluated else 0  # which sorts all that are trained on


def _rows(parts: Sequence[Part]) -> np.ndarray:
    found = [_digests(part.store) for part in parts]
    rows = [part.rows for part in parts]
    return _joined([each if rows is None else each[rows] for each, rows in zip(found, rows, strict=True)])


def _digests(store: SequenceStore) -> np.ndarray:
    """64 bits of each row that has a sequence: of one that was split the sum of its sequences'."""
    return np.add.reduceat(store.digests, store.firsts) if len(store.firsts) else store.digests


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
