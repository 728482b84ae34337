"""The console of commands that print tables and notes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

WIDTH = 500  # where no terminal sets one: a path that is cut in two lines cannot be found or copied


def wide_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, where text is broken between words; wide enough for anything where there is none, and
    nothing is broken. What is there to be copied is printed with `soft_wrap=True`."""
    console = Console(highlight=False, emoji=False, stderr=stderr)
    if not console.is_terminal:
        console.width, console.soft_wrap = WIDTH, True
    return console


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """A line each."""
    for note in notes:
        console.print(f"note: {note}", markup=False)
