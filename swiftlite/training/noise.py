"""Whose noise a document gets in a step: a function of the run's seed, the step and the document's place in it.

Not of the micro-batch, the rank or the slice in which it is computed, so every layout adds the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from swiftlite.data.order import Pack
from swiftlite.seeds import derive_seed


def with_noise(packs: Sequence[Pack], seed: int, step: int) -> list[Pack]:
    """The packs of a step, whose documents have keys of their noise."""
    places = itertools.count()
    return [
        [replace(document, noise=derive_seed(seed, step, "noise", next(places))) for document in pack] for pack in packs
    ]
