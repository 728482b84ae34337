"""`swiftlite eval`: the loss of a model, a checkpoint or the result of a run, on rows it was not trained on."""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from swiftlite.cli.errors import show_error
from swiftlite.cli.json_output import TO_STDOUT, check_output, write_output
from swiftlite.cli.options import RunCommand, own_flag
from swiftlite.config.flags import Flag, all_flags
from swiftlite.config.setting import DATA, MODEL, PARALLELISM, PREFERENCE
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from swiftlite.config.recipe import Recipe
    from swiftlite.config.resolve import Resolved
    from swiftlite.config.schema import RunConfig
    from swiftlite.config.validate import Given
    from swiftlite.training.evaluate import Evaluated
    from swiftlite.training.launch import Work

USED_PANELS = (MODEL, DATA, PREFERENCE, PARALLELISM)
USED = {  # of the other panels
    "adapter", "tuner", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "precision", "seed",
    "offload", "quantization", "kernels", "compile", "resume", "method", "debug", "dry_run",
}  # fmt: skip
UNUSED = {"new_tokens", "shuffle", "streaming"}  # of those panels
LARGEST_LOSS = 700.0  # whose exponential is a number


def evaluate(resolved: Resolved, json: str | None) -> None:
    """Evaluate. Raises what the evaluation itself raises."""
    check_output(json)
    config = choose_rows(resolved)
    if os.environ.get("RANK", "0") == "0":
        for note in [*resolved.notes, *_unused(resolved)]:
            print(f"note: {note}", file=sys.stderr if json == TO_STDOUT else sys.stdout, flush=True)
    from swiftlite.training.launch import launch

    launch(config, resolved.layout, partial(show_error, debug="--debug" in sys.argv), partial(_evaluation, json))


def _evaluation(json: str | None) -> Work:
    from swiftlite.training.evaluate import run_evaluation

    return partial(run_evaluation, tell=partial(_tell, json), quiet=json == TO_STDOUT)


def _settle(given: dict[str, Given], recipe: Recipe | None) -> tuple[dict[str, Given], Recipe | None]:
    from swiftlite.serving.evaluated import settle

    return settle(given, recipe)


def uses(flag: Flag) -> bool:
    """Whether a setting changes what an evaluation does."""
    return flag.name in USED or (flag.panel in USED_PANELS and flag.name not in UNUSED)


EVAL = RunCommand(
    "eval",
    evaluate,
    "Evaluate a model, a run or a checkpoint: loss, perplexity, rewards.",
    own=(own_flag("json", "str", None, "Write the numbers into this file; `-`: to stdout, and all else to stderr."),),
    fallback="sft",
    needs_rows=False,
    settle=_settle,
    uses=uses,
)


def choose_rows(resolved: Resolved) -> RunConfig:
    """`dataset` becomes what is evaluated: rows of the command line, else those that a recipe evaluates, else all of
    its rows. Raises UserError where there are none."""
    config, by = resolved.config, resolved.given
    said = [name for name in ("eval_dataset", "dataset") if by.get(name) == "flag"]
    if len(said) == 2:
        raise UserError("both --dataset and --eval-dataset name rows to evaluate", fix="name all of them by --dataset")
    held_out = config.eval_fraction if by.get("eval_fraction") == "flag" or not said else 0.0
    rows = getattr(config, said[0]) if said else config.eval_dataset or config.dataset
    if config.eval_dataset and not said:
        held_out = 0.0
    if not rows:
        raise UserError("no rows are named", fix="add --dataset with a file, a folder, a hub id or a short name")
    return config.model_copy(update={"dataset": rows, "eval_dataset": [], "eval_fraction": held_out})


def _unused(resolved: Resolved) -> list[str]:
    """A note for each flag of the command line that says how to train."""
    given = [flag for name, flag in all_flags().items() if resolved.given.get(name) == "flag" and not uses(flag)]
    return [f"{flag.option} has no effect: nothing is trained" for flag in given]


def _tell(json: str | None, found: list[Evaluated]) -> None:
    """Print what was found, and write it."""
    from swiftlite.cli.dry_run import wide_console

    rows = [_row(one) for one in found]
    wide_console(stderr=json == TO_STDOUT).print(_table(rows))
    write_output(rows, json)


def _row(one: Evaluated) -> dict[str, Any]:
    """The numbers of one data set by their names in metrics.jsonl; perplexity is of methods that learn tokens."""
    row = {"data": one.data, **one.counts, "loss": one.loss}
    if not one.metrics:
        row["perplexity"] = math.exp(one.loss) if one.loss < LARGEST_LOSS else math.inf
    row |= one.metrics
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    """A line for each number, a column for each data set."""
    from rich.table import Table

    from swiftlite.reporting.words import short

    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    for _ in rows:
        table.add_column(justify="right", overflow="fold")
    for name in rows[0]:
        values = [row[name] for row in rows]
        shown = [
            value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else short(value)
            for value in values
        ]
        table.add_row(name.replace("_", " "), *shown)
    return table
