"""`swiftlite sft`, `pretrain`, `dpo`, `kto`, `rm`, `grpo` and `train`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from swiftlite.cli.errors import show_error
from swiftlite.cli.options import RunCommand
from swiftlite.config.layout import follows
from swiftlite.streams import outlive_readers

if TYPE_CHECKING:
    from swiftlite.config.resolve import Resolved


def train(resolved: Resolved) -> None:
    """Train. Raises what the run itself raises."""
    config, leads = resolved.config, not follows(os.environ)
    outlive_readers()
    for note in resolved.notes if leads else ():
        print(f"note: {note}", flush=True)
    from swiftlite.checkpoint.claim import new_folder
    from swiftlite.training.launch import launch

    named = "output_dir" in resolved.given or config.resume != "never"
    chooses = leads and not config.node_rank and not named  # else the user has, or the first process does
    with new_folder(config.output_dir) if chooses else nullcontext(config.output_dir) as folder:
        settled = config.model_copy(update={"output_dir": folder})
        launch(settled, resolved.layout, partial(show_error, debug=config.debug))


TRAIN_COMMANDS = (
    RunCommand("sft", train, "Fine-tune on answers: conversations, instructions, completions.", method="sft"),
    RunCommand("pretrain", train, "Train on whole texts (also: pt).", method="pretrain"),
    RunCommand("dpo", train, "Learn from pairs of answers: DPO and its kin (--loss).", method="dpo"),
    RunCommand("kto", train, "Learn from single answers, each wanted or not.", method="kto"),
    RunCommand("rm", train, "Train a reward model on pairs of answers.", method="rm"),
    RunCommand("grpo", train, "Learn from the model's own answers, which functions reward.", method="grpo"),
    RunCommand("train", train, "Train as a recipe says, which names the method."),
)
