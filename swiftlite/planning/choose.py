"""What a run takes where the flags leave it open: the layout of its data ranks, and how much its layers recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from swiftlite.config.layout import Layout
from swiftlite.planning.footprint import Footprint
from swiftlite.sizes import in_words

USABLE = 0.85  # of the free memory; the rest is for buffers, fragments and what other libraries take
# Recomputation that takes less time than messages of sharded weights may; any other costs a third of the arithmetic,
# where so many tokens need it that those messages hide behind them.
LIGHT = ("none", "selective")


@dataclass(frozen=True)
class Choice:
    """layout: to train in; offload: keep states on the CPU; checkpointing: how layers are recomputed; held: what the
    fullest device will hold; reason: the sums behind the layout, in words, where it was open."""

    layout: Layout
    offload: bool
    checkpointing: str
    held: Footprint
    reason: str = ""

    def room(self, free: int) -> float:
        """Bytes that are left for activations. free: of a device, before weights load."""
        return USABLE * free - self.held.resident

    def is_ample(self, free: int) -> bool:
        """Whether an estimate is far from what is free."""
        return self.held.total - self.held.resident < self.room(free) / 2

    def bears_copy(self, free: int) -> bool:
        """Whether a second model takes little of what the states leave, and fits beside the peak."""
        copy = self.held.weights
        return not self.offload and copy < self.room(free) / 4 and self.held.total + copy <= USABLE * free


@dataclass(frozen=True)
class Try:
    """A layout to look at, with its states on the CPU or not, and how its layers are recomputed."""

    layout: Layout
    offload: bool
    checkpointing: str


Holds = Callable[[Try], Footprint]


def data_layouts(layout: Layout) -> tuple[Layout, Layout]:
    """(replicas, full sharding) of all data ranks, the one that sends least first."""
    ranks = layout.data_ranks
    replicas = replace(layout, dp_replicate=ranks, dp_shard=1, sharding="none")
    return replicas, replace(layout, dp_replicate=1, dp_shard=ranks, sharding="full")


def tries(layouts: Sequence[Layout], modes: Sequence[str]) -> Iterator[Try]:
    """In the order in which they are preferred: layouts as they come, but with full recomputation only where none fits
    with less, and with states on the CPU at last. modes: of recomputation, the least first."""
    for some in ([mode for mode in modes if mode in LIGHT], [mode for mode in modes if mode not in LIGHT]):
        yield from (Try(layout, False, mode) for layout in layouts for mode in some)
    yield from (Try(layouts[-1], True, mode) for mode in modes)


def first_that_fits(tried: Iterator[Try], holds: Holds, free: int) -> Choice:
    """The last one where none does. free: bytes that every device has."""
    for one in tried:
        held = holds(one)
        if held.total <= USABLE * free:
            break
    return Choice(one.layout, one.offload, one.checkpointing, held)


def explained(choice: Choice, holds: Holds, free: int) -> Choice:
    """Of a data layout, with the sums that decided: those of lighter ones did not fit with the same recomputation."""

    def words(layout: Layout, offload: bool = False) -> str:
        return in_words(holds(Try(layout, offload, choice.checkpointing)).total)

    replicas, shards = data_layouts(choice.layout)
    room = f"of {in_words(USABLE * free)} that may be taken of a device"
    if choice.layout == replicas:
        reason = f"ddp: about {in_words(choice.held.total)} at the peak, {room}"
    elif not choice.offload:
        reason = f"fsdp full: replicas would take about {words(replicas)} at the peak, shards {words(shards)}, {room}"
    else:
        reason = (
            f"fsdp full with --offload cpu: replicas would take about {words(replicas)} at the peak, shards "
            f"{words(shards)}, shards with states on the CPU {words(shards, True)}, {room}"
        )
    return replace(choice, reason=reason)
