"""A plan for programs to read; its keys are described in docs/parallelism.md, "Planning"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.errors import UserError
    from swiftlite.planning.devices import Device
    from swiftlite.training.needs import Outline
    from swiftlite.training.plan import Fleet, Plan, Proposal


def plan_values(
    config: RunConfig,
    outline: Outline,
    device: Device,
    plans: Sequence[tuple[Fleet, Plan]],
    refused: Iterable[UserError],
    command: list[str] | None,
) -> dict[str, Any]:
    """command: that starts the best layout, None where none fits."""
    return {
        "device": asdict(device),
        "model": {
            "name": config.model,
            "parameters": outline.trained + outline.frozen,
            "trained": outline.trained,
            "precision": outline.precision.name,
        },
        "proposals": [_proposal(fleet, proposal) for fleet, plan in plans for proposal in plan.proposals],
        "refused": [{"what": error.what, "where": error.where, "fix": error.fix} for error in refused],
        "command": command,
    }


def _proposal(fleet: Fleet, proposal: Proposal) -> dict[str, Any]:
    held, pace = proposal.footprint, proposal.pace
    layout = asdict(proposal.layout)
    del layout["world_source"]
    return {
        "machines": fleet.machines,
        "devices_per_machine": fleet.per_machine,
        "layout": layout,
        "flags": fleet.flags | proposal.flags,
        "micro_batch_size": proposal.config.micro_batch_size,
        "activation_checkpointing": proposal.config.activation_checkpointing,
        "memory": dict(held.parts()) | {"total": held.total, "limit": proposal.limit},
        "seconds": {"arithmetic": pace.compute, "idle": pace.idle, "messages": pace.exposed, "total": pace.seconds},
        "tokens": proposal.tokens,
        "tokens_per_second": proposal.tokens_per_second,
        "fits": proposal.fits,
    }
