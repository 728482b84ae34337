"""Which tokens of a row each rank of a context-parallel group holds.

Whole documents as far as possible, since those need no other rank: the documents of a packed row differ so much in
length that it is decided for each whether it is divided (WLB-LLM, arXiv 2503.17924, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

# A longer document's attention, quadratic in its length, is shared by all ranks: done by one, it would keep the others
# waiting for longer than its messages take.
LONGEST_ALONE = 4096
# By this share more tokens than an even slice has may lie on a rank if so no document is divided: padding on the others
# costs less than messages in every layer do.
SLACK = 1 / 32
SLICE_MULTIPLE = 16  # of the tokens of such a slice: what products of fp8 take


@dataclass(eq=False)  # not frozen: the compiler would look into each one, and compile anew for it
class Division:
    """The share of a row that one rank of a group holds, and what it has to know of the others'.

    places: int64 `[slice]`, the row's places of its tokens: documents of its own, padding, then parts of shared ones.
    found: int64 `[size * slice]`, where in the slices of all ranks, end to end, each place of the row is.
    own: int32 `[documents + 1]`, borders of its own documents and padding; shared: those of the documents that lie on
    several ranks, end to end; counts: how many of their tokens each rank holds.
    """

    places: torch.Tensor
    found: torch.Tensor
    own: torch.Tensor
    shared: torch.Tensor
    counts: list[int]

    def to(self, device: torch.device) -> Division:
        """The same with its tensors on a device."""
        names = "places", "found", "own", "shared"
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def divide_row(lengths: Sequence[int], size: int, rank: int, slice_tokens: int, slack: int = 0) -> Division:
    """The share of one of `size` ranks.

    lengths: tokens of the documents; slice_tokens: of a rank, at least what all documents take; slack: further tokens
    that a slice may have where that keeps documents whole. Padding has the row's last places.
    """
    own, shared, load = _assign(lengths, size, slice_tokens + slack)
    if max(load) > slice_tokens:
        slice_tokens = -(-max(load) // SLICE_MULTIPLE) * SLICE_MULTIPLE
    starts = [0, *accumulate(lengths)]
    stream, left = _places(shared, starts), sum(lengths[document] for document in shared)
    padding, begun, places, fillings, counts = starts[-1], 0, [], [], []
    for holder in range(size):
        counts.append(min(left, slice_tokens - load[holder]))
        fillings.append(slice_tokens - load[holder] - counts[-1])
        left -= counts[-1]
        places += [_places(own[holder], starts), np.arange(padding, padding + fillings[-1])]
        places.append(stream[begun : begun + counts[-1]])
        padding, begun = padding + fillings[-1], begun + counts[-1]
    order = np.concatenate(places)
    found = np.empty_like(order)
    found[order] = np.arange(len(order))
    longest, filling = max(lengths, default=1), fillings[rank]
    pieces = [min(longest, filling - begun) for begun in range(0, filling, longest)]
    return Division(
        places=torch.from_numpy(order[rank * slice_tokens : (rank + 1) * slice_tokens]),
        found=torch.from_numpy(found),
        own=borders_of([*(lengths[document] for document in own[rank]), *pieces]),
        shared=borders_of([lengths[document] for document in shared]),
        counts=counts,
    )


def _assign(lengths: Sequence[int], size: int, room: int) -> tuple[list[list[int]], list[int], list[int]]:
    """(documents of each rank alone, those of several, tokens of the former on each rank): longest first, to whoever
    has the least (Graham's LPT rule)."""
    own: list[list[int]] = [[] for _ in range(size)]
    shared, load = [], [0] * size
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        rank = load.index(min(load))
        if lengths[document] > LONGEST_ALONE or load[rank] + lengths[document] > room:
            shared.append(document)
        else:
            own[rank].append(document)
            load[rank] += lengths[document]
    return [sorted(documents) for documents in own], sorted(shared), load


def _places(documents: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    parts = [np.arange(starts[document], starts[document + 1]) for document in documents]
    return np.concatenate([np.arange(0), *parts])


def borders_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
