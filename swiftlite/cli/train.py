"""`swiftlite sft`, `pretrain` and `train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftlite.cli.options import RunCommand
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.layout import Layout
    from swiftlite.config.resolve import Resolved


def train(resolved: Resolved) -> None:
    """Train. Raises UserError for what needs the parallel engine, and what the run itself raises."""
    refuse_what_needs_the_engine(resolved.layout, resolved.config.offload)
    for note in resolved.notes:
        print(f"note: {note}", flush=True)
    from swiftlite.training.launch import launch

    launch(resolved.config)


def refuse_what_needs_the_engine(layout: Layout, offload: str) -> None:
    """Raises UserError for what more than one process would do, as long as there is no engine for it."""
    if layout.world > 1:
        raise UserError(
            f"this layout has {layout.world} processes ({layout}); it needs the parallel engine, "
            "which this version does not have yet",
            where=layout.world_source,
            fix="train on one process, or look at the plan with --dry-run",
        )
    if offload != "none":
        raise UserError(
            "--offload cpu needs the parallel engine, which this version does not have yet",
            where="--offload",
            fix="leave it out, or look at the plan with --dry-run",
        )


TRAIN_COMMANDS = (
    RunCommand("sft", train, "Fine-tune on answers: conversations, instructions, completions.", method="sft"),
    RunCommand("pretrain", train, "Train on whole texts (also: pt).", method="pretrain"),
    RunCommand("train", train, "Train as a recipe says, which names the method."),
)
