"""How long a step takes in a layout: arithmetic, what pipelines idle, and messages that nothing hides.

An estimate to rank layouts by, from data sheets and the share of them that runs reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftlite.parallel.stages import StagePlan
from swiftlite.planning.communication import HOST, Traffic

if TYPE_CHECKING:
    from swiftlite.config.layout import Layout
    from swiftlite.planning.devices import Device

REACHED_FLOPS = 0.5  # of a GPU's peak: 46 to 57% on an H200 (docs/performance.md, "One GPU")
REACHED_LINK = 0.7  # of what a data sheet says of links
BACKWARD = 2 / 3  # of the arithmetic of a step
FORWARD = 1 - BACKWARD
AGAIN = {"none": 0.0, "selective": 0.03, "full": FORWARD}  # of the arithmetic, made again in the backward pass
WITH_ADAPTERS = 1.5  # times that where frozen weights take no gradient: forward passes are half of the arithmetic there


@dataclass(frozen=True)
class Message:
    """Messages of one kind in a step. seconds: if nothing hid them; exposed: those that nothing hides."""

    traffic: Traffic
    between_machines: bool
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Pace:
    """Seconds of a step. compute: arithmetic of the slowest device; idle: of it, what a pipeline waits."""

    compute: float
    idle: float
    messages: tuple[Message, ...]

    @property
    def exposed(self) -> float:
        return sum(message.exposed for message in self.messages)

    @property
    def seconds(self) -> float:
        return self.compute + self.idle + self.exposed


def step_pace(
    layout: Layout,
    flops: float,
    traffic: Sequence[Traffic],
    device: Device,
    *,
    per_machine: int,
    micro_batches: int,
    plan: StagePlan | None,
    unevenness: float = 1.0,
    sync_every_microbatch: bool = False,
) -> Pace:
    """flops: of the whole step on all devices, recomputation included; per_machine: devices; plan: of the pipeline;
    unevenness: work of the slowest stage over that of the mean one. What runs beside one kind of messages hides no
    other kind as well.
    """
    compute = flops / layout.world / (REACHED_FLOPS * device.flops) * unevenness
    idle = 0.0 if plan is None else compute * _bubble(plan, micro_batches)
    once = compute if sync_every_microbatch else compute / micro_batches  # what runs beside one exchange of weights
    left = {
        "all": compute,
        "forward": once * FORWARD,
        "backward": once * BACKWARD,
        "other micro-batches": compute - compute / micro_batches,
    }
    messages = []
    for entry in traffic:
        between = entry.dimension != HOST and _span(layout, entry.dimension) > per_machine
        link = device.host if entry.dimension == HOST else device.network if between else device.link
        seconds = entry.size / (REACHED_LINK * link)
        beside = _beside(entry, layout)
        hidden = min(seconds, left.get(beside, 0.0))
        if hidden:
            left[beside] -= hidden
        messages.append(Message(entry, between, seconds, seconds - hidden))
    return Pace(compute, idle, tuple(messages))


def _bubble(plan: StagePlan, micro_batches: int) -> float:
    """Idle time over arithmetic: (p - 1) / (v m), and about a third of that where gradients of weights fill it (arXiv
    2104.04473, section 2.2; arXiv 2401.10241)."""
    idle = (plan.ranks - 1) / (plan.schedule.per_rank * micro_batches)
    if plan.schedule.v_shaped:
        return 0.0
    return idle / 3 if plan.schedule.splits_backward else idle


def _span(layout: Layout, dimension: str) -> int:
    """Neighbouring ranks among which a group of a dimension lies."""
    inner = {
        "tp": layout.tp,
        "cp": layout.cp * layout.tp,
        "ep": layout.expert_parallel * layout.cp * layout.tp,
        "dp_replicate": layout.world // layout.pp,
        "pp": layout.world,
    }
    return inner.get(dimension, layout.dp_shard * layout.cp * layout.tp)


def _beside(entry: Traffic, layout: Layout) -> str | None:
    """The arithmetic that messages run beside: weights are gathered beside all of it, or beside a forward pass where
    they travel once; gradients beside a backward pass; what a pipeline hands on beside other micro-batches. What
    tensor, context and expert parallelism exchange is waited for, and so are moments that are paged and matrices on
    their way to be orthogonalised."""
    if entry.dimension in ("tp", "cp", "ep") or entry.what in ("moments", "matrices"):
        return None
    if entry.dimension == "pp":
        return "other micro-batches"
    if entry.what == "gradients":
        return "backward"
    return "all" if layout.sharding == "full" and layout.pp == 1 else "forward"
