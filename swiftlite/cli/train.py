"""`swiftlite sft`, `pretrain` and `train`."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from swiftlite.cli.errors import show_error
from swiftlite.cli.options import RunCommand
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.layout import Layout
    from swiftlite.config.resolve import Resolved


def train(resolved: Resolved) -> None:
    """Train. Raises UserError for layouts that are not built yet, and what the run itself raises."""
    refuse_unbuilt(resolved.layout)
    if os.environ.get("RANK", "0") == "0":
        for note in resolved.notes:
            print(f"note: {note}", flush=True)
    from swiftlite.training.launch import launch

    launch(resolved.config, resolved.layout, partial(show_error, debug="--debug" in sys.argv))


def refuse_unbuilt(layout: Layout) -> None:
    """Raises UserError for the dimensions that there is no engine for yet."""
    if layout.pp > 1:
        raise UserError(
            "pipeline parallelism is not built yet in this version",
            where=f"--pipeline-parallel-size {layout.pp}",
            fix="use --parallel fsdp or --tensor-parallel-size, or look at the plan with --dry-run",
        )


TRAIN_COMMANDS = (
    RunCommand("sft", train, "Fine-tune on answers: conversations, instructions, completions.", method="sft"),
    RunCommand("pretrain", train, "Train on whole texts (also: pt).", method="pretrain"),
    RunCommand("train", train, "Train as a recipe says, which names the method."),
)
