"""Puts what `swiftlite verify --json FILE` found into docs/parallelism.md, a column for each model.

swiftlite verify --nproc-per-node 2 --json v2.json
python scripts/parity_matrix.py v2.json [v4.json ...] --markdown docs/parallelism.md
"""

from __future__ import annotations

import argparse
import json
import math
from importlib.metadata import version
from pathlib import Path

from bench.campaign import machine
from bench.tables import fill, has_place, markdown_table

PLACE = "verify"


def read(reports: list[Path]) -> list[dict]:
    """The verdicts of all reports, whose differences are null where they are infinite."""
    verdicts = [verdict for path in reports for verdict in json.loads(path.read_text())]
    for verdict in verdicts:
        if found := verdict["difference"]:
            verdict["difference"] = {key: math.inf if value is None else value for key, value in found.items()}
    return verdicts


def cell(verdict: dict | None) -> str:
    """`loss / gradient norm`, or why there is none."""
    if verdict is None:
        return ""
    found = verdict["difference"]
    if found is None:
        return "refused"
    text = f"{found['loss']:.0e} / {found['norm']:.0e}"
    return text if found["loss"] <= 1e-5 and found["norm"] <= 1e-4 and found["weights"] <= 1e-4 else f"**{text}**"


def table(verdicts: list[dict]) -> str:
    """Layouts down, models across, in the order in which they were tried."""
    subjects = list(dict.fromkeys(verdict["subject"] for verdict in verdicts))
    layouts = list(dict.fromkeys(verdict["case"] for verdict in verdicts))
    found = {(verdict["case"], verdict["subject"]): verdict for verdict in verdicts}
    rows = [[layout, *(cell(found.get((layout, subject))) for subject in subjects)] for layout in layouts]
    return markdown_table(("layout", *subjects), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="files that `swiftlite verify --json` wrote")
    parser.add_argument("--markdown", type=Path, required=True, help="file whose marked place takes the table")
    options = parser.parse_args()
    if not has_place(options.markdown, PLACE):
        parser.error(f"{options.markdown} has no place for the table")
    verdicts = read(options.reports)
    worst = [max(v["difference"][key] for v in verdicts if v["difference"]) for key in ("loss", "norm", "weights")]
    count = sum(verdict["difference"] is not None for verdict in verdicts)
    facts = machine()
    where = f"{facts['cores']} cores, {facts['cpu']}; torch {version('torch')}, transformers {version('transformers')}"
    about = (
        f"Worst relative differences of loss / gradient norm over 5 steps, {where}. Over all {count} runs: "
        f"loss {worst[0]:.0e}, gradient norm {worst[1]:.0e}, a tensor of final weights {worst[2]:.0e} (2-norm)."
    )
    fill(options.markdown, PLACE, f"{about}\n\n{table(verdicts)}")


if __name__ == "__main__":
    main()
