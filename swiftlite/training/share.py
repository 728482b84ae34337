"""Who computes what of a global step.

Every process knows the whole step and divides it in the same way, so nobody has to ask: packs go to the data ranks by
cost, each rank's packs to micro-batches, and all ranks have equally many (some may be empty). What a pack costs are its
FLOPs: packs of equally many tokens differ where attention over one long document is dearer than over many short ones,
and where more of them is learnt, which the output head has to do with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swiftlite.data.batches import MicroBatch, collate, empty_micro_batch
from swiftlite.data.order import Pack, Sequence
from swiftlite.parallel.mesh import Mesh
from swiftlite.training.balance import Item, fill, spread
from swiftlite.training.flops import FlopCounter

# A process on a CPU gains little from a forward pass over more tokens than this, and pays for each in memory. The split
# of a step into forward passes does not change the sums, so a micro-batch is run in smaller pieces there.
CPU_FORWARD_TOKENS = 1024

FULL_ENOUGH = 0.75  # of the longest row of a forward pass, which the others are filled up to

Cost = Callable[[Pack], float]
Rounded = Callable[[int], int]


@dataclass(frozen=True)
class StepShare:
    """One data rank's part of a step. count (of micro-batches that are not empty), trained_tokens, tokens, lengths (of
    the documents: pairs, or single answers), desirable ones, and whether any has a margin: of the whole step.
    """

    micro_batches: list[MicroBatch]
    count: int
    trained_tokens: int
    tokens: int
    lengths: list[int]
    desirable: int = 0
    margins: bool = False

    @property
    def documents(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Sharing:
    """How a run divides its steps. lanes: micro-batches that this process trains at a time; cut_tokens: of one, about,
    where documents may leave their packs; in_pieces: whether a micro-batch of several packs may be run in several
    forward passes; alike: micro-batches are those of one process, because a loss is a mean of each; rounded: the
    length that fast products want in place of a row's, reached by padding; side_by_side: where documents cannot share
    a row, the tokens of a pass that has several of them in rows of their own, 0 for one (or one pair) in each pass."""

    mesh: Mesh
    micro_batch_size: int
    flops: FlopCounter
    lanes: int = 1
    cut_tokens: int | None = None
    in_pieces: bool = True
    alike: bool = False
    rounded: Rounded | None = None
    side_by_side: int | None = None

    def __call__(self, packs: list[Pack]) -> StepShare:
        """This process's part of some packs of a step."""
        share = self._share(packs)
        if self.rounded is None:
            return share
        rows = [batch.padded_to(self.rounded(batch.input_ids.shape[1])) for batch in share.micro_batches]
        return replace(share, micro_batches=rows)

    def _share(self, packs: list[Pack]) -> StepShare:
        layout, size = self.mesh.layout, self.micro_batch_size
        if self.side_by_side is not None:
            packs, size = [[document] for document in _joined(packs)], 1
        if self.cut_tokens is not None:
            cut = balance(packs, self.cut_tokens, self.lanes, self._cost, self.rounded)
            return share_step(cut, rank=0, ranks=1, size=1, token_limit=None, cost=self._cost)
        if layout.pp > 1 and not self.alike:  # a short last step still has work for all stages
            size = max(1, min(size, len(packs) // layout.data_ranks // layout.pp))
        rank, ranks, limit = self.mesh.data_rank, layout.data_ranks, None
        if self.mesh.device.type == "cpu" and self.in_pieces:
            limit = CPU_FORWARD_TOKENS * (1 if self.alike else layout.cp)
        return share_step(packs, rank, ranks, size, limit, self._cost, alike=self.alike, beside=self.side_by_side or 0)

    def _cost(self, pack: Pack) -> float:
        return sum(self.flops.work(_length(document), _trained(document), self.mesh.device) for document in pack)


def group_by_length(documents: Pack, tokens: int) -> list[Pack]:
    """Documents of about one length together, the longest first. tokens: that the rows of a group, filled up to its
    longest, have together at most, where it has several."""
    groups: list[Pack] = []
    for document in sorted(documents, key=_length, reverse=True):
        longest = _length(groups[-1][0]) if groups else 0
        alike = _length(document) >= FULL_ENOUGH * longest
        if groups and alike and (len(groups[-1]) + 1) * longest <= tokens:
            groups[-1].append(document)
        else:
            groups.append([document])
    return groups


def share_step(
    packs: list[Pack],
    rank: int,
    ranks: int,
    size: int,
    token_limit: int | None,
    cost: Cost,
    *,
    alike: bool = False,
    beside: int = 0,
) -> StepShare:
    """Divide a step's packs.

    size: packs in a micro-batch at most; token_limit: tokens in one of several packs, None for any number; alike:
    micro-batches hold the same packs however many ranks there are, at the price of ranks that are less even; beside:
    see `group_by_length`, 0 where packs are laid end to end.
    """
    if alike:
        divided = _by_rank(_micro_batches(packs, size, token_limit), ranks, lambda piece: sum(map(cost, piece)))
    elif beside:
        groups = [group_by_length(_joined(mine), beside) for mine in _by_rank(packs, ranks, cost)]
        divided = [[[group] for group in mine] for mine in groups]
    else:
        divided = [_micro_batches(mine, size, token_limit) for mine in _by_rank(packs, ranks, cost)]
    count = max(len(mine) for mine in divided)
    mine = [replace(collate(piece), cost=sum(map(cost, piece))) for piece in divided[rank]]
    mine += [empty_micro_batch()] * (count - len(mine))
    documents = _joined(packs)
    return StepShare(
        micro_batches=mine,
        count=sum(len(theirs) for theirs in divided),
        trained_tokens=sum(map(_trained, documents)),
        tokens=sum(len(document.input_ids) for document in documents),
        lengths=[len(document.input_ids) for document in documents],
        margins=any(document.preference is not None and any(document.preference.margins) for document in documents),
        desirable=sum(document.preference is not None and document.preference.wanted[0] for document in documents),
    )


def balance(packs: list[Pack], tokens: int, lanes: int, cost: Cost, rounded: Rounded | None = None) -> list[Pack]:
    """The documents in packs of about `tokens`, which as many lanes can share out evenly; the dearest pack first.

    All cost about the same, or where rows are filled up to `rounded` lengths, whatever keeps the busiest lane shortest:
    packs that leave little to fill up, or those.
    """
    documents = [[document] for document in _joined(packs)]
    count = lanes * max(1, round(sum(map(_tokens, documents)) / (tokens * lanes)))
    parts = spread(documents, min(count, len(documents)), cost)
    if rounded is not None:
        ways = [parts, *_filled(documents, tokens, rounded)]
        parts = min(ways, key=lambda way: _longest(way, lanes, cost, rounded))
    return sorted(map(_joined, parts), key=cost, reverse=True)


def _filled(documents: list[Pack], tokens: int, rounded: Rounded) -> list[list[list[Pack]]]:
    """Ways to put documents into rows of round lengths, from somewhat more than half of `tokens` to all."""
    lengths = sorted({rounded(tokens * eighths // 8) for eighths in (5, 6, 7, 8)})
    return [fill(documents, lambda first, most=most: max(most, rounded(first)), _tokens) for most in lengths]


def _longest(parts: list[list[Pack]], lanes: int, cost: Cost, rounded: Rounded) -> float:
    """What the busiest of some lanes has to do, filled-up tokens as dear as the others of their row."""
    packs = [_joined(part) for part in parts]
    costs = [cost(pack) * rounded(_tokens(pack)) / _tokens(pack) for pack in packs]
    return max(map(sum, spread(costs, lanes, float)))


def _joined(packs: list[Pack]) -> Pack:
    return [document for pack in packs for document in pack]


def _by_rank(packs: list[Item], ranks: int, cost: Callable[[Item], float]) -> list[list[Item]]:
    """Equally many packs (or micro-batches) each, but for the remainder, that cost about the same.

    Each rank begins with its dearest ones, so that micro-batches that meet in a collective cost about the same.
    """
    return [packs] if ranks == 1 else spread(packs, ranks, cost, most=-(-len(packs) // ranks))


def _micro_batches(packs: list[Pack], size: int, token_limit: int | None) -> list[list[Pack]]:
    pieces: list[list[Pack]] = [[]]
    tokens = 0
    for pack in packs:
        length = _tokens(pack)
        if pieces[-1] and (len(pieces[-1]) == size or (token_limit is not None and tokens + length > token_limit)):
            pieces.append([])
            tokens = 0
        pieces[-1].append(pack)
        tokens += length
    return [piece for piece in pieces if piece]


def _tokens(pack: Pack) -> int:
    return sum(map(_length, pack))


def _length(document: Sequence) -> int:
    return len(document.input_ids)


def _trained(document: Sequence) -> int:
    return int(document.trained[1:].sum())  # nothing predicts the first
