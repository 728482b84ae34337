"""`swiftlite report RUN`: draw a run's curves and page again; of several runs, one page that compares them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftlite.cli.model_options import at_home, given_path
from swiftlite.errors import RunError, UserError
from swiftlite.reporting.metrics import METRICS

if TYPE_CHECKING:
    from rich.table import Table

    from swiftlite.reporting.comparison import Run

RUNS = "Output folder of a run; several are compared, on a page of their own."
BESIDE = 4  # blanks beside a column
OUTPUT = "Where the page of several runs is written; comparison.html by default."


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command("report", help="Loss curves and a one-file page of a run, or of several side by side.")(report)


def _given_runs(runs: list[Path]) -> list[Path]:
    return [at_home(run, "run") for run in runs]


def report(
    runs: Annotated[list[Path], typer.Argument(help=RUNS, metavar="RUN...", callback=_given_runs)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=OUTPUT, metavar="FILE", callback=given_path)
    ] = None,
) -> None:
    """Write report.html and loss.png into the run's folder, or one page of several runs. Raises UserError where a
    folder holds no metrics, what is written cannot be, and curves cannot be drawn."""
    from swiftlite.checkpoint.claim import is_held
    from swiftlite.reporting.metrics import damage_in_words

    for run in runs:
        _check_holds_metrics(run)
        if damage := damage_in_words(run):
            typer.echo(damage if len(runs) == 1 else f"{run}: {damage}", err=True)
    alive = [is_held(run) for run in runs]
    if len(runs) > 1:
        _compare(runs, alive, output or Path("comparison.html"))
    elif output is not None:
        raise UserError(
            "--output is for the page of several runs",
            where=str(output),
            fix="leave it out: the page of one run is report.html in its folder",
        )
    else:
        _redraw(runs[0], alive[0])


def _check_holds_metrics(run: Path) -> None:
    if (run / METRICS).is_file():
        return
    problem = f"the folder holds no {METRICS}" if run.is_dir() else "there is no such folder"
    near = [*run.absolute().parents[:3], *(sorted(run.iterdir()) if run.is_dir() else ())]  # inside it, or beside
    such = next((f", such as {folder}" for folder in near if (folder / METRICS).is_file()), "")
    fix = f"name the --output-dir of a run, which holds {METRICS}{such}"
    raise UserError("this is a file" if run.is_file() else problem, where=str(run), fix=fix)


def _redraw(run: Path, alive: bool) -> None:
    from swiftlite.reporting.page import write_report_page
    from swiftlite.reporting.plots import write_loss_plot

    elsewhere = "copy the run to a folder that can be written, and name that one"
    if not os.access(run, os.W_OK):
        raise UserError("the folder cannot be written", where=str(run), fix=elsewhere)
    for write in (partial(write_report_page, alive=alive), write_loss_plot):
        path = _written(partial(write, run), elsewhere)
        typer.echo(f"wrote {path}" if path is not None else "no step is logged yet, so there is no curve to draw")


def _compare(folders: Sequence[Path], alive: Sequence[bool], output: Path) -> None:
    from swiftlite.reporting.comparison import read_runs, write_comparison_page

    runs = read_runs(folders, alive)
    path = _written(partial(write_comparison_page, runs, output), "name another --output")
    _show(runs)
    typer.echo(f"wrote {path}")


def _written(write: Callable[[], Path | None], elsewhere: str) -> Path | None:
    try:
        return write()
    except RunError as error:  # its way out is one for a training run
        raise UserError(error.what, where=error.where, fix=f"mend that, or {elsewhere}") from error


def _show(runs: Sequence[Run]) -> None:
    """The page's two tables, with a column a run; one below the other for as many runs as the terminal has room for."""
    from swiftlite.cli.console import wide_console
    from swiftlite.reporting.comparison import common_figures, unequal_settings

    figures, settings = common_figures(runs), unequal_settings(runs)
    name = max(map(len, ["state", *figures, *settings]))
    number = max((len(words) for found in figures.values() for words in found), default=len("finished"))
    console = wide_console()
    together = max(1, (console.width - name - BESIDE) // (number + BESIDE))
    console.width = max(console.width, name + number + 2 * BESIDE)  # a narrower terminal breaks the lines itself
    for first in range(0, len(runs), together):
        console.print(_table(runs, figures, settings, number, slice(first, first + together)))


def _table(
    runs: Sequence[Run], figures: dict[str, list[str]], settings: dict[str, list[str]], number: int, part: slice
) -> Table:
    """number: the letters of a figure; part: the runs of this table."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", box=None, padding=(0, BESIDE // 2))
    table.columns[0].no_wrap = True
    for run in runs[part]:
        table.add_column(Text(run.name), overflow="fold", min_width=number)
    for name, words in ({"state": [run.state for run in runs]} | figures).items():
        table.add_row(name, *map(Text, words[part]))
    table.add_section()
    for name, words in settings.items():
        table.add_row(Text(name, "cyan"), *map(Text, words[part]))
    return table
