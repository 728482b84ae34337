"""`--parallel auto`: the lightest way to share the work of several data ranks that fits their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swiftlite.config.layout import Layout
from swiftlite.sizes import in_words

# fp32 master weight and gradient, and AdamW's two moments. Source: ZeRO, arXiv 1910.02054, section 3.1
STATE_BYTES = {"weights": 4, "gradients": 4, "moments": 8}
TRAINED_BYTES = sum(STATE_BYTES.values())
PACKED_MOMENTS = 2 * (1 + 4 / 256)  # of adamw_8bit: a byte, and a scale for 256
USABLE = 0.85  # of the free memory; the rest is for buffers, fragments and what other libraries take


def moment_bytes(optimizer: str, device_type: str) -> float:
    """What both moments of a trained parameter take on the device. optimizer: as `--optimizer` has it."""
    if optimizer == "paged_adamw" and device_type != "cpu":
        return 0
    return PACKED_MOMENTS if optimizer == "adamw_8bit" else STATE_BYTES["moments"]


def trained_bytes(*, moments: float, pure_bf16: bool, no_gradients: bool) -> float:
    """What a trained parameter takes. moments: bytes of both; no_gradients: each is used and dropped at once."""
    share = 0.5 if pure_bf16 else 1.0
    gradients = 0 if no_gradients else STATE_BYTES["gradients"]
    return share * (STATE_BYTES["weights"] + gradients) + moments


@dataclass(frozen=True)
class Need:
    """What training takes before it is divided.

    trained, frozen: parameters; frozen_bytes: of a frozen one, on average; largest_unit: bytes of the largest group of
    weights that is whole for a moment; activations: bytes of a micro-batch, of which context parallel ranks have a
    slice each; trained_bytes: of a trained parameter; copies: bytes of whole weights in the type of products, which
    autocast makes of fp32 ones (FSDP gathers them as such, a unit at a time); gathered: of those that FSDP makes of all
    weights for a step where they are replicas.
    """

    trained: int
    frozen: int
    frozen_bytes: float
    largest_unit: int
    activations: int
    trained_bytes: float = TRAINED_BYTES
    copies: int = 0
    gathered: int = 0

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and optimizer states."""
        return int(self.trained * self.trained_bytes + self.frozen * self.frozen_bytes)


@dataclass(frozen=True)
class Choice:
    """layout: to train in; offload: keep states on the CPU; reason: the sum behind it, in words."""

    layout: Layout
    offload: bool
    reason: str


def choose_data_layout(layout: Layout, need: Need, free: int) -> Choice:
    """Replicas where each device can hold everything, else full sharding, else with the states on the CPU.

    layout: with its data ranks all in `dp_shard`; free: bytes that every device has.
    """
    split = layout.tp * layout.pp
    ranks = layout.data_ranks
    activations = need.activations // layout.cp
    replicated = (need.states + need.gathered) / split + activations
    sharded = need.states / split / ranks + 2 * need.largest_unit + activations
    limit = USABLE * free
    room = f"of {in_words(free)} free on a device"
    if replicated <= limit:
        chosen = replace(layout, dp_replicate=ranks, dp_shard=1, sharding="none")
        return Choice(chosen, False, f"ddp: weights, gradients and AdamW states take {in_words(replicated)} {room}")
    layout = replace(layout, dp_replicate=1, dp_shard=ranks, sharding="full")
    why = f"everything on each device would take {in_words(replicated)}"
    if sharded <= limit:
        return Choice(layout, False, f"fsdp full: {why}, a share of it {in_words(sharded)}, {room}")
    return Choice(layout, True, f"fsdp full with --offload cpu: {why}, a share of it {in_words(sharded)}, {room}")
