"""Whole matrices for a function that cannot work on parts of them, each computed by one of the processes that hold it.

Processes tell each other once which box of which matrix they hold, so any layout will do: shards of FSDP and of tensor
parallelism, those of both at once, experts, replicas, stages of a pipeline. In a turn every process gets one matrix at
most, from all who hold a part of it, and sends the parts of the result back. So each part travels twice, whatever the
number of processes, and they share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from swiftlite.checkpoint.boxes import Box, holdings
from swiftlite.parallel.exchange import exchange
from swiftlite.parallel.mesh import Mesh
from swiftlite.training.balance import spread

Named = Sequence[tuple[str, nn.Parameter]]
Boxes = dict[int, Box]  # by rank


@dataclass(frozen=True)
class _Shared:
    """A matrix, `[rows, columns]`, or those of a batch, `[batch, rows, columns]`, that the same ranks have parts of.

    boxes: what each rank that has some of it holds, in the order of ranks; outer: all of it; first: the first rank with
    each box.
    """

    boxes: Boxes
    outer: Box
    first: frozenset[int]

    @staticmethod
    def of(boxes: Boxes) -> _Shared:
        corners = [(box.start, [a + n for a, n in zip(box.start, box.shape, strict=True)]) for box in boxes.values()]
        starts, ends = zip(*corners, strict=True)
        start, end = tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*ends, strict=True)))
        first: dict[Box, int] = {}
        for rank, box in boxes.items():
            first.setdefault(box, rank)
        outer = Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))
        return _Shared(boxes, outer, frozenset(first.values()))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.boxes)

    def sends(self, rank: int, owner: int) -> bool:
        """Whether it is this rank that gives its part to the one that computes the matrix, which may have it itself."""
        return rank == owner if self.boxes[rank] == self.boxes[owner] else rank in self.first

    def sent(self, rank: int, owner: int) -> int:
        """How many numbers a rank gives."""
        return _size(self.boxes[rank]) if self.sends(rank, owner) else 0

    def place(self, rank: int) -> tuple[slice, ...]:
        """Where in the whole a rank's part lies."""
        return self.boxes[rank].slices_of(self.outer)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of the parts, flat, that ranks gave, in the order of ranks."""
        whole = parts[0].new_empty(self.outer.shape)
        for (rank, box), numbers in zip(self.boxes.items(), parts, strict=True):
            if numbers.numel():
                whole[self.place(rank)] = numbers.view(box.shape)
        return whole


@dataclass(frozen=True)
class Turn:
    """parameters: of which this process holds a part, each computed by another process; owners: their ranks."""

    parameters: tuple[nn.Parameter, ...]
    owners: tuple[int, ...]


class WholeMatrices:
    """Who holds what of some parameters, and who computes which."""

    def __init__(self, matrices: Named, mesh: Mesh, cost: Callable[[tuple[int, ...]], float]) -> None:
        """matrices: of this process; every process of the run calls it together. cost: of a shape."""
        self._mesh, self._cost, self._shared = mesh, cost, _who_shares(matrices, mesh)
        own = {shared.ranks for shared in self._shared.values()}
        groups = sorted({ranks for of_process in mesh.collect(own) for ranks in of_process if len(ranks) > 1})
        self._groups = {ranks: _group(ranks) for ranks in groups}

    def turns(self, parameters: Sequence[nn.Parameter]) -> Iterator[Turn]:
        """All of them, those with the same holders in turns in which each holder computes one at most. Every process
        names the same ones in the same order."""
        together: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter in self._shared:
                together.setdefault(self._shared[parameter].ranks, []).append(parameter)
        for ranks in sorted(together):  # in one order everywhere: nobody waits for who waits for him
            lists = spread(together[ranks], len(ranks), lambda p: self._cost(self._shared[p].outer.shape))
            for place in range(max(map(len, lists))):
                found = [(one[place], rank) for one, rank in zip(lists, ranks, strict=True) if place < len(one)]
                yield Turn(*zip(*found, strict=True))

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], turn: Turn, parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """This process's parts of what `function` makes of the whole matrices.

        function: keeps the shape, `[rows, columns]` or `[batch, rows, columns]`; parts: of each parameter of the turn
        what this process holds of something of its shape, of one type and on the mesh's device.
        """
        shared = [self._shared[parameter] for parameter in turn.parameters]
        ranks = shared[0].ranks
        if len(ranks) == 1:
            return [function(part) for part in parts]
        me, group, nothing = self._mesh.rank, self._groups[ranks], parts[0].new_empty(0)
        given = dict(zip(turn.owners, zip(shared, parts, strict=True), strict=True))  # to each owner, of which matrix
        mine = given[me][0] if me in given else None
        leaving = [given[r][1] if r in given and given[r][0].sends(me, r) else nothing for r in ranks]
        arrived = _exchange(leaving, [mine.sent(r, me) if mine else 0 for r in ranks], group)
        results = [nothing] * len(ranks)
        if mine is not None:
            done = function(mine.joined(arrived))
            results = [done[mine.place(r)] for r in ranks]
        back = [_size(given[r][0].boxes[me]) if r in given else 0 for r in ranks]
        returned = dict(zip(ranks, _exchange(results, back, group), strict=True))
        return [returned[owner].view(part.shape) for owner, part in zip(turn.owners, parts, strict=True)]


@cache
def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Made once, as groups of a mesh are; every process of the run calls it, also those that are no member."""
    return dist.new_group(list(ranks))


def _who_shares(matrices: Named, mesh: Mesh) -> dict[nn.Parameter, _Shared]:
    """Of each parameter that this process holds some of: the ranks that hold parts of the same matrices of it."""
    own = {name: held[0].box for name, parameter in matrices if (held := holdings(parameter))}
    everywhere: dict[str, Boxes] = {}
    for rank, boxes in enumerate(mesh.collect(own)):
        for name, box in boxes.items():
            everywhere.setdefault(name, {})[rank] = box
    found = {}
    for name, parameter in matrices:
        if name in own:
            batch = _batch(own[name])
            found[parameter] = _Shared.of({r: box for r, box in everywhere[name].items() if _batch(box) == batch})
    return found


def _batch(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of which matrices of a batch a box holds a part."""
    return box.start[:-2], box.shape[:-2]


def _size(box: Box) -> int:
    return torch.Size(box.shape).numel()


def _exchange(leaving: Sequence[torch.Tensor], receive: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """leaving: what is for each rank of the group; receive: how many numbers come from each. Returns those, flat."""
    flat = torch.cat([part.reshape(-1) for part in leaving])
    return list(exchange(flat, [part.numel() for part in leaving], receive, group).split(list(receive)))
