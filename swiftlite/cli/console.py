"""The console of commands that print tables and notes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH = 500  # where no terminal sets one: a path that is cut in two lines cannot be found or copied


def wide_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, where text is broken between words; wide enough for anything where there is none, and
    nothing is broken. What is there to be copied is printed with `soft_wrap=True`."""
    console = Console(highlight=False, emoji=False, stderr=stderr)
    if not console.is_terminal:
        console.width, console.soft_wrap = WIDTH, True
    return console


def least_width(table: Table, console: Console) -> int:
    """Characters of a line in which no word of the table is broken."""
    return _measured(table, console).minimum


def print_whole(console: Console, table: Table) -> None:
    """Print a table; where a terminal is too narrow for its words, in lines that are left to the terminal to break."""
    measured, terminal = _measured(table, console), console.width
    if measured.minimum > terminal:
        console.width = measured.maximum
    console.print(table)
    console.width = terminal


def _measured(table: Table, console: Console) -> Measurement:
    return console.measure(table, options=console.options.update(max_width=sys.maxsize))


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """A line each."""
    for note in notes:
        console.print(f"note: {note}", markup=False)
