"""`swiftlite eval`: the loss of a model, a checkpoint or the result of a run, on rows it was not trained on, or what
functions say of its answers to them."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.cli.errors import show_error
from swiftlite.cli.json_output import TO_STDOUT, check_output, write_line, write_output
from swiftlite.cli.options import RunCommand, json_flag, own_flag
from swiftlite.config.flags import Flag
from swiftlite.config.layout import follows
from swiftlite.config.methods import EXAMINED_BY, SAMPLING, TOKEN_ACCURACY
from swiftlite.config.setting import DATA, MODEL, PARALLELISM, PREFERENCE
from swiftlite.ending import ENDED, seen_signal
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
    "adapter", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "precision", "pure_bf16",
    "seed", "offload", "quantization", "qat", "kernels", "compile", "resume", "method", "debug", "dry_run", "reward",
    "tools", *EXAMINED_BY,
}  # fmt: skip
UNUSED = {"from_scratch", "config_overrides", "shuffle", "streaming", "sync_every_microbatch"}  # of those panels
ANSWERS = "--answers"
LARGEST_LOSS = 700.0  # whose exponential is a number


def evaluate(resolved: Resolved, json: str | None, answers: str | None) -> None:
    """Evaluate. Raises what the evaluation itself raises."""
    from swiftlite.config.resolve import require_reward

    check_output(json)
    if resolved.config.method in SAMPLING:
        require_reward(resolved.config)
    if answers is not None:
        _check_answers(resolved.config, answers, json)
    config = choose_rows(resolved)
    if not follows(os.environ):
        for note in _notes(resolved):
            print(f"note: {note}", file=sys.stderr if json == TO_STDOUT else sys.stdout, flush=True)
    from swiftlite.training.launch import launch

    try:
        shows = partial(show_error, debug=resolved.config.debug)
        launch(config, resolved.layout, shows, partial(_evaluation, json, answers))
    except SystemExit as stop:
        if stop.code in ENDED and seen_signal() is None:  # it was passed on to the processes, and nobody has told it
            print(ENDED[stop.code], file=sys.stderr)
        raise


def show(resolved: Resolved) -> None:
    """What `--dry-run` prints. Raises UserError as `choose_rows` does, but where no rows are named."""
    from swiftlite.cli.dry_run import show_plan

    named = resolved.config.dataset or resolved.config.eval_dataset
    config = choose_rows(resolved) if named else resolved.config
    show_plan(replace(resolved, config=config, notes=_notes(resolved)), uses, trains=False)


def _notes(resolved: Resolved) -> list[str]:
    return [*resolved.notes, *_of_the_loss(resolved), *_of_the_weights(resolved)]


def _check_answers(config: RunConfig, where: str, json: str | None) -> None:
    """Raises UserError where nothing would be written, or not to a file of its own."""
    if config.method not in SAMPLING:
        fix = "add --reward FILE.py:NAME, or have rows answered by `swiftlite infer --input`"
        raise UserError("no answers are given where no function rewards them", where=ANSWERS, fix=fix)
    check_output(where, ANSWERS)
    if where == TO_STDOUT or Path(where).expanduser().exists():
        problem = "answers are written to a file" if where == TO_STDOUT else "the file exists"
        raise UserError(problem, where=f"{ANSWERS} {where}", fix="name a new file, such as answers.jsonl")
    if json is not None and Path(json).expanduser().resolve() == Path(where).expanduser().resolve():
        raise UserError(
            "the numbers and the answers are for one file", where=f"{ANSWERS}, --json {json}", fix="name two"
        )


def _evaluation(json: str | None, answers: str | None) -> Work:
    from swiftlite.training.evaluate import run_evaluation

    told = {} if answers is None else {"tell_answers": partial(write_line, where=answers, flag=ANSWERS)}
    return partial(run_evaluation, tell=partial(_tell, json), quiet=json == TO_STDOUT, **told)


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
    own=(
        json_flag("the numbers"),
        own_flag(
            "answers",
            "str",
            None,
            "Write the answers that --reward judges into this file, a line a prompt.",
            metavar="FILE",
        ),
    ),
    fallback="sft",
    needs_rows=False,
    settle=_settle,
    uses=uses,
    why_idle="nothing is trained",
    meant={"samples": "eval_samples", "temperature": "eval_temperature"},
    exact_batch=False,
    show=show,
)


def choose_rows(resolved: Resolved) -> RunConfig:
    """`dataset` becomes what is evaluated: rows of the command line, else those that a recipe evaluates, else all of
    its rows. Raises UserError where there are none."""
    config, by = resolved.config, resolved.given
    if by.get("dataset") == by.get("eval_dataset") == "flag":
        raise UserError("both --dataset and --eval-dataset name rows to evaluate", fix="name all of them by --dataset")
    rows = config.eval_dataset or config.dataset
    if not rows:
        raise UserError("no rows are named", fix="add --dataset with a file, a folder, a hub id or a short name")
    if twice := next((name for name in rows if rows.count(name) > 1), None):
        raise UserError("the data set is named twice", where=twice, fix="name it once")
    held = {"beta": 0.0} if config.method in SAMPLING else {}  # to no reference, where rewards count alone
    return config.model_copy(update={"dataset": rows, "eval_dataset": [], **held})


def _of_the_loss(resolved: Resolved) -> list[str]:
    """Notes on flags that say how answers are judged, where something else does."""
    if resolved.config.method in SAMPLING:
        named = [f"--{name}" for name in ("loss", "beta", "reference") if resolved.given.get(name) == "flag"]
        return [f"{flag} has no effect: answers are evaluated by their rewards" for flag in named]
    if resolved.config.method == "sft" and resolved.given.get("loss") == "flag":
        return ["--loss has no effect: tokens are evaluated by their cross-entropy, whatever was trained"]
    return []


def _of_the_weights(resolved: Resolved) -> list[str]:
    """Notes where the weights decide what a flag would, or belong to another model."""
    from swiftlite.config.resolve import of_another_base

    config, notes = resolved.config, []
    if config.resume == "never":
        return notes
    if resolved.given.get("new_tokens") == "flag":
        notes.append("--new-tokens has no effect: the weights have those that they were trained with")
    return [*notes, *of_another_base(config.model_copy(update={"adapter": config.resume}))]


def _tell(json: str | None, found: list[Evaluated]) -> None:
    """Print what was found, and write it."""
    from swiftlite.cli.console import least_width, wide_console

    rows = [_row(one) for one in found]
    write_output(rows, json)  # first: whoever reads what is shown may have gone
    console, side_by_side = wide_console(stderr=json == TO_STDOUT), _table(rows)
    fits = least_width(side_by_side, console) <= console.width  # in one line each; names of data sets may be folded
    for table in [side_by_side] if fits else [_table([row]) for row in rows]:
        console.print(table)


def _row(one: Evaluated) -> dict[str, Any]:
    """The numbers of one data set by their names in metrics.jsonl, None for a mean of no rows; perplexity is of methods
    that learn tokens."""
    row = {"data": one.data, **one.counts} | ({} if one.loss is None else {"loss": one.loss})
    if TOKEN_ACCURACY in one.metrics:
        row["perplexity"] = math.exp(one.loss) if one.loss < LARGEST_LOSS else math.inf
    return row | one.metrics


def _table(rows: list[dict[str, Any]]) -> Table:
    """A line for each number, a column for each data set."""
    from rich.table import Table
    from rich.text import Text

    from swiftlite.reporting.words import plain

    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    shown = [{name: _in_words(value, _nothing(row)) for name, value in row.items()} for row in rows]
    for row in shown:
        widest = max(len(words) for name, words in row.items() if name != "data")
        table.add_column(justify="right", overflow="fold", min_width=widest)
    for name in rows[0]:
        table.add_row(Text(plain(name)), *(Text(row[name]) for row in shown))
    return table


def _nothing(row: dict[str, Any]) -> str:
    """What a mean of nothing is called: of answers, those that something rewards may be none."""
    return "none rewarded" if "answers/unrewarded" in row else "no rows"


def _in_words(value: str | float | None, nothing: str) -> str:
    from swiftlite.reporting.words import in_one_line, short

    if value is None:
        return nothing
    if isinstance(value, str):
        return in_one_line(value)
    return f"{value:,}" if isinstance(value, int) else short(value if math.isfinite(value) else None)
