"""Draw docs/run.svg, the terminal during a run, from the metrics of a real run through the display's own code.

python scripts/render_run_picture.py RUN_DIR [--step N] [--fact output=runs/mine] [--output docs/run.svg]
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from swiftlite.reporting.board import Board
from swiftlite.reporting.files import read_run_state
from swiftlite.reporting.metrics import read_metrics

COLUMNS, LINES = 104, 30
FONTS = r"@font-face \{[^}]*\}\s*"  # Rich names fonts of the network, which a picture in a README never gets


class Clock:
    """The seconds at which the recorded steps ended."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replay(run: Path, until: int, facts: dict[str, str]) -> Board:
    """The panel as it stood after a step of the recorded run. facts: shown instead of the recorded ones."""
    state, clock = read_run_state(run), Clock()
    board = Board(state["total_steps"], state["facts"] | facts, clock=clock)
    for row in read_metrics(run):
        if row["step"] <= until:
            clock.now += row["step_seconds"]
            board.add(row)
    for message in state["messages"]:
        if message["step"] <= until:
            board.say(message["text"])
    return board


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output folder of a run")
    parser.add_argument("--step", type=int, help="the step to show (three quarters of the run)")
    parser.add_argument("--command", default="swiftlite sft --recipe recipes/smollm2/135m-quickstart.yaml")
    parser.add_argument("--fact", action="append", default=[], help="KEY=VALUE to show, such as a shorter path")
    parser.add_argument("--output", type=Path, default=Path("docs/run.svg"))
    options = parser.parse_args()
    steps = [row["step"] for row in read_metrics(options.run)]
    until = options.step or steps[len(steps) * 3 // 4]
    console = Console(record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ ", style="green").append(options.command, style="bold default"))
    console.print(replay(options.run, until, dict(fact.split("=", 1) for fact in options.fact)))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    svg = re.sub(FONTS, "", console.export_svg(title="swiftlite"))
    options.output.write_text(svg, encoding="utf-8")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
