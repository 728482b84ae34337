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
# By this share more tokens than an even slice has may lie on a rank where that keeps a document whole: padding on the
# others costs less than messages in every layer do.
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
    room = [slice_tokens - tokens for tokens in load]
    counts = _fill(sum(lengths[document] for document in shared), room)
    padding = [tokens - count for tokens, count in zip(room, counts, strict=True)]
    starts = [0, *accumulate(lengths)]
    parts = _cut(_places(shared, starts), counts)
    fillers = _cut(np.arange(starts[-1], size * slice_tokens), padding)
    slices = [
        np.concatenate([_places(whole, starts), filler, part])
        for whole, filler, part in zip(own, fillers, parts, strict=True)
    ]
    pieces = _pieces(padding[rank], max(lengths, default=1))
    return Division(
        places=torch.from_numpy(slices[rank]),
        found=torch.from_numpy(_inverse(np.concatenate(slices))),
        own=_borders([*(lengths[document] for document in own[rank]), *pieces]),
        shared=_borders([lengths[document] for document in shared]),
        counts=counts,
    )


def divide_evenly(borders: torch.Tensor, size: int, rank: int, slice_tokens: int) -> Division:
    """The same of a row whose documents read one another, so that none is anybody's own: it is cut every `slice_tokens`
    tokens. borders: int32 `[documents + 1]`, of all that is in the row, padding too."""
    order = torch.arange(size * slice_tokens)
    place = order[rank * slice_tokens : (rank + 1) * slice_tokens]
    return Division(place, found=order, own=_borders([]), shared=borders, counts=[slice_tokens] * size)


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


def _fill(tokens: int, room: Sequence[int]) -> list[int]:
    """How many of the tokens each rank takes, the first ones as many as they have room for."""
    taken = []
    for most in room:
        taken.append(min(most, tokens - sum(taken)))
    return taken


def _pieces(tokens: int, longest: int) -> list[int]:
    """Lengths of documents of padding: no more than the row's own have, since so many positions exist."""
    return [min(longest, tokens - begun) for begun in range(0, tokens, longest)]


def _places(documents: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    """Those of some documents' tokens in the row. starts: of all documents."""
    parts = [np.arange(starts[document], starts[document + 1]) for document in documents]
    return np.concatenate([np.arange(0), *parts])


def _cut(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


def _inverse(order: np.ndarray) -> np.ndarray:
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def _borders(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
