"""`swiftlite report RUN`: draw a run's curves and page again."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.model_options import given_path
from swiftlite.errors import RunError, UserError

RUN = "Output folder of a run."
METRICS = "metrics.jsonl"
ELSEWHERE = "copy the run to a folder that can be written, and name that one"


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command("report", help="Loss curves and a one-file page of a run.")(report)


def report(run: Annotated[Path, typer.Argument(help=RUN, metavar="RUN", callback=given_path)]) -> None:
    """Write report.html and loss.png into the run's folder. Raises UserError where it holds no metrics or cannot be
    written, and where curves cannot be drawn."""
    from swiftlite.checkpoint.claim import is_held
    from swiftlite.reporting.metrics import damage_in_words
    from swiftlite.reporting.page import write_report_page
    from swiftlite.reporting.plots import write_loss_plot

    if not (run / METRICS).is_file():
        problem = f"the folder holds no {METRICS}" if run.is_dir() else "there is no such folder"
        near = [*run.absolute().parents[:3], *(sorted(run.iterdir()) if run.is_dir() else ())]  # inside it, or beside
        such = next((f", such as {folder}" for folder in near if (folder / METRICS).is_file()), "")
        fix = f"name the --output-dir of a run, which holds {METRICS}{such}"
        raise UserError("this is a file" if run.is_file() else problem, where=str(run), fix=fix)
    if not os.access(run, os.W_OK):
        raise UserError("the folder cannot be written", where=str(run), fix=ELSEWHERE)
    if damage := damage_in_words(run):
        typer.echo(damage, err=True)
    for write in (partial(write_report_page, alive=is_held(run)), write_loss_plot):
        try:
            path = write(run)
        except RunError as error:  # its way out is one for a training run
            raise UserError(error.what, where=error.where, fix=f"mend that, or {ELSEWHERE}") from error
        typer.echo(f"wrote {path}" if path is not None else "no step is logged yet, so there is no curve to draw")
