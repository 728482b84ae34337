"""Which rows are trained on, and which are held out of them to be evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swiftlite.data.order import Part, permutation
from swiftlite.data.rows.sources import HUB_SPLIT, DataFile
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.prepare import Entry


def part_of(entry: Entry, rows: np.ndarray | None = None) -> Part:
    """rows: those that take part, as places in `store.firsts`; None for all."""
    return Part(entry.source.spec.text, entry.store, rows, entry.source.spec.weight)


def split_parts(config: RunConfig, train: list[Entry], held_out: list[Entry]) -> tuple[list[Part], list[Part]]:
    """(training parts, evaluation parts). `eval_fraction` holds out whole rows, so none is ever in both."""
    if not config.eval_fraction:
        return [part_of(entry, entry.rows) for entry in train], [part_of(entry) for entry in held_out]
    _check_apart(train)
    parts, eval_parts = [], []
    for place, entry in enumerate(train):
        rows = np.arange(len(entry.store.firsts), dtype=entry.store.firsts.dtype) if entry.rows is None else entry.rows
        order = permutation(len(rows), config.seed, "eval", place)
        count = max(0, min(len(order) - 1, max(1, round(config.eval_fraction * len(order)))))
        if count:
            eval_parts.append(Part(entry.source.spec.text, entry.store, rows[np.sort(order[:count])]))
        parts.append(part_of(entry, rows[np.sort(order[count:])]))
    if not eval_parts:
        raise UserError(
            "too few rows to hold any out", where="--eval-fraction", fix="give --eval-dataset, or more rows"
        )
    return parts, eval_parts


def _check_apart(train: list[Entry]) -> None:
    """Raises UserError where data sets share a file: a row that is held out of one could be trained through another."""
    owners: dict[str, str] = {}
    for entry in train:
        name = entry.source.spec.text
        for file in entry.source.files:
            if any(owners.setdefault(place, name) != name for place in _places(file)):
                raise UserError(
                    "two data sets share a file, so rows held out of one could be trained through the other",
                    where=f"--eval-fraction, {file.label}",
                    fix="name the file once, or give --eval-dataset instead",
                )


def _places(file: DataFile) -> list[str]:
    """Where its rows lie: on the hub in splits, of which `train[:20%]` is a part."""
    if file.hub is None:
        return [str(file.path.resolve())]
    splits = (file.hub.split or HUB_SPLIT).split("+")
    return [f"{file.hub.name}:{file.hub.subset}@{split.partition('[')[0]}" for split in splits]
