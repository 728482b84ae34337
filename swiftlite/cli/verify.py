"""`swiftlite verify`: proof that this machine trains the same curve in every layout."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftlite.cli.errors import show_error
from swiftlite.cli.json_output import TO_STDOUT, check_output, write_output
from swiftlite.errors import UserError
from swiftlite.quick_imports import quick_imports

if TYPE_CHECKING:
    from rich.table import Table

    from swiftlite.verification.cases import Case, Subject
    from swiftlite.verification.run import Verdict


def register(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command("verify", help="Train toy models in each layout and compare with one process.")(verify)


def verify(
    nproc_per_node: Annotated[
        int, typer.Option(help="Processes to start; their number says which layouts there are.", metavar="N")
    ] = 2,
    architecture: Annotated[
        list[str] | None,
        typer.Option("--architecture", "-a", help="Only this toy model; may be given again.", metavar="NAME"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model's own shape, with few layers and random weights.", metavar="PATH"),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", "-l", help="Only layouts with this in their name.", metavar="TEXT")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this method: sft, dpo, rm, kto or grpo; may be given again.", metavar="NAME"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Each layout goes on from a checkpoint of the one before it.", metavar="")
    ] = False,
    report: Annotated[
        str | None, typer.Option("--json", help="Write the verdicts into this file.", metavar="FILE")
    ] = None,
) -> None:
    """Print the table. Exit code 1 where a layout differs, or where all were refused, which proves nothing.
    Raises UserError for names that do not exist.
    """
    from swiftlite.config.types import plain_word
    from swiftlite.models.toys import shallow_config, toy_config, write_toy
    from swiftlite.verification.cases import subjects

    chosen = _architectures(architecture, model)
    methods = {subject.method: None for subject in subjects(chosen)}
    wanted_methods = [plain_word(name) for name in method or methods]
    unknown = [name for name in wanted_methods if name not in methods]
    if unknown:
        raise UserError(f"{unknown[0]} is not verified", where="--method", fix=f"there are: {', '.join(methods)}")
    picked = _pick(nproc_per_node, layout)
    if report == TO_STDOUT:
        raise UserError("stdout has each verdict as it comes", where="--json -", fix="name a file")
    check_output(report)

    with quick_imports():
        from swiftlite.verification.run import read_verdicts  # behind the checks: it imports all of training

    layers = 2 * nproc_per_node  # two stages a rank
    with tempfile.TemporaryDirectory(prefix="swiftlite-verify-") as folder:
        config = shallow_config(model, layers) if model else None
        models = {name: str(write_toy(Path(folder) / name, config or toy_config(name, layers))) for name in chosen}
        wanted = [subject for subject in subjects(chosen) if subject.method in wanted_methods]
        try:
            _run(Path(folder), nproc_per_node, models, wanted, picked, resume)
        finally:  # hours of verdicts are worth keeping where the last one fails
            verdicts = read_verdicts(Path(folder))
            write_output([asdict(verdict) for verdict in verdicts], report)
    _show(verdicts)
    if not all(verdict.passed for verdict in verdicts) or all(verdict.refused for verdict in verdicts):
        raise typer.Exit(1)


def _architectures(names: list[str] | None, model: str | None) -> tuple[str, ...]:
    """What to train, by name. Raises UserError for names that do not exist."""
    from swiftlite.config.types import plain_word
    from swiftlite.models.toys import toy_architectures
    from swiftlite.verification.cases import DEFAULT_ARCHITECTURES

    if model is not None and names:
        raise UserError("--model and --architecture both say what to train", fix="leave one of them out")
    if model is not None:
        return (Path(model).resolve().name,)
    chosen = tuple(dict.fromkeys(map(plain_word, names or DEFAULT_ARCHITECTURES)))  # given twice, one counts once
    unknown = [name for name in chosen if name not in toy_architectures()]
    if unknown:
        known = ", ".join(toy_architectures())
        raise UserError(f"no toy model is called {unknown[0]}", where="--architecture", fix=f"use {known}")
    return chosen


def _pick(processes: int, texts: list[str] | None) -> list[Case]:
    """The layouts of so many processes that have one of the texts in their name."""
    from swiftlite.config.types import plain_word
    from swiftlite.verification.cases import cases

    if processes < 2:
        raise UserError("layouts begin with two processes", where="--nproc-per-node", fix="use 2, 4 or 8")
    wanted = [plain_word(text) for text in texts or [""]]
    picked = [case for case in cases(processes) if any(text in plain_word(case.name) for text in wanted)]
    if not picked:
        names = "; ".join(case.name for case in cases(processes))
        raise UserError("no layout has that in its name", where="--layout", fix=f"there are: {names}")
    return picked


def _verify_here(*arguments: Any) -> int:
    """The body of a started process. It is found here, where nothing heavy has been imported yet."""
    from swiftlite.parallel.start import told_before_joining

    with told_before_joining(show_error):
        with quick_imports():
            from swiftlite.verification.run import verify_in_process

        return verify_in_process(*arguments)


def _run(
    folder: Path, count: int, models: dict[str, str], subjects: list[Subject], cases: list[Case], resumed: bool
) -> None:
    from swiftlite.parallel.start import Machines, start_processes
    from swiftlite.verification.run import write_rows

    write_rows(folder)
    try:
        start_processes(Machines(count), _verify_here, str(folder), models, subjects, cases, show_error, resumed)
    except SystemExit as stop:
        if stop.code:
            raise


def _show(verdicts: list[Verdict]) -> None:
    from swiftlite.cli.console import print_whole, wide_console

    console = wide_console()
    print_whole(console, table(verdicts))
    refused = sum(verdict.difference is None for verdict in verdicts)
    differing = sum(not verdict.passed for verdict in verdicts)
    equal = len(verdicts) - refused - differing
    console.print(f"{equal} equal, {differing} differ, {refused} refused")


def table(verdicts: list[Verdict]) -> Table:
    """A row for each cell of the matrix."""
    from rich.table import Table

    shown = Table(box=None, padding=(0, 1))
    for heading in ("model", "layout", "loss", "gradient norm", "weights", "seconds", ""):
        words = heading in ("model", "layout", "")
        justify = "left" if words else "right"
        shown.add_column(heading, header_style="dim", justify=justify, overflow="fold", no_wrap=not words)
    for verdict in verdicts:
        found, numbers = verdict.difference, [""] * 4
        if found is not None:
            numbers = [
                *(f"{number:.1e}" for number in (found.loss, found.norm, found.weights)),
                f"{verdict.seconds:.1f}",
            ]
        style = "dim" if found is None else "green" if verdict.passed else "bold red"
        shown.add_row(verdict.subject, verdict.case, *numbers, f"[{style}]{verdict.word}[/]")
    return shown
