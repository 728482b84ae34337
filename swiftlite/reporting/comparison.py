"""Several runs side by side: what they came to, the settings that tell them apart, and their curves in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swiftlite.config.flags import shown_value
from swiftlite.errors import UserError
from swiftlite.reporting.charts import Line, chart
from swiftlite.reporting.curves import EVALUATIONS, added_groups, curve_of, series, smoothed
from swiftlite.reporting.files import read_run_state
from swiftlite.reporting.metrics import read_metrics
from swiftlite.reporting.page import COLOURS, SINGLE_CHARTS, as_html, figures, mark, state_in_words, write_page
from swiftlite.reporting.words import plain
from swiftlite.untrusted import printable, without_secrets

TITLE = "Runs side by side"
UNTOLD = ("output_dir", "run_name")  # they name a run, and change nothing in it


@dataclass(frozen=True)
class Run:
    """What the files of one run say. figures: its numbers in words; settings: of its config.yaml."""

    name: str
    state: str
    rows: list[dict[str, Any]]
    figures: dict[str, str]
    settings: dict[str, Any]


def read_runs(folders: Sequence[Path], alive: Sequence[bool]) -> list[Run]:
    """alive: whether a process may still write into the folder. Raises UserError for more runs than colours."""
    if len(folders) > COLOURS:
        raise UserError(
            f"{len(folders)} runs are too many for one chart", where="swiftlite report", fix=f"name {COLOURS} at most"
        )
    return [_read(*given) for given in zip(folders, _names(folders), alive, strict=True)]


def _read(folder: Path, name: str, alive: bool) -> Run:
    rows, state = read_metrics(folder), read_run_state(folder)
    words = printable(without_secrets(state_in_words(rows, state, alive=alive)))
    return Run(printable(name), words, rows, figures(rows, state) if rows else {}, _settings(folder / "config.yaml"))


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where these are not enough."""
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder.resolve()) for folder in folders]


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def unequal_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """name -> its value in each run, of the settings that are not the same in all that have a configuration."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in UNTOLD)
    values = {key: [_value(run.settings, key) for run in runs] for key in keys}
    told = [index for index, run in enumerate(runs) if run.settings]
    return {key: words for key, words in values.items() if len({words[index] for index in told}) > 1}


def _value(settings: dict[str, Any], key: str) -> str:
    """In words; none where the run's version had no such setting."""
    return printable(without_secrets(shown_value(settings[key]))) if key in settings else ""


def common_figures(runs: Sequence[Run]) -> dict[str, list[str]]:
    """name -> its words in each run, of every figure that any of them has."""
    names = dict.fromkeys(name for run in runs for name in run.figures)
    return {name: [run.figures.get(name, "") for run in runs] for name in names}


def write_comparison_page(runs: Sequence[Run], path: Path) -> Path:
    """One HTML page without a script. Raises UserError where another file lies there, RunError where none can be
    written."""
    if path.exists() and not _is_such_page(path):
        there = "a folder" if path.is_dir() else "another file"
        raise UserError(f"{there} lies there", where=str(path), fix="name another --output")
    body = [
        f"<header><h1>{TITLE}</h1></header>",
        _table("", {"state": [mark(run.state) for run in runs]}, common_figures(runs), runs),
        f'<div class="charts">{"".join(_charts(runs))}</div>',
        _table("Settings that tell them apart", {}, unequal_settings(runs), runs),
        "<footer>written by swiftlite</footer>",
    ]
    return write_page(path, TITLE, body)


def _is_such_page(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return f"<title>{TITLE} " in file.read(500)
    except (OSError, ValueError):
        return False


def _table(title: str, marks: dict[str, list[str]], words: dict[str, list[str]], runs: Sequence[Run]) -> str:
    """A column a run, under its colour. marks: rows of HTML; words: rows of text."""
    cells = marks | {name: [as_html(value) for value in values] for name, values in words.items()}
    if not cells:
        return ""
    head = "".join(f'<th class="run"><i class="c{n}"></i>{as_html(run.name)}</th>' for n, run in enumerate(runs))
    rows = "".join(
        f"<tr><th>{as_html(name)}</th>{''.join(f'<td>{value}</td>' for value in values)}</tr>"
        for name, values in cells.items()
    )
    heading = f"<h2>{title}</h2>" if title else ""
    return f'<section class="card">{heading}<table><tr><th></th>{head}</tr>{rows}</table></section>'


def _charts(runs: Sequence[Run]) -> list[str]:
    told = [curve_of(run.rows) if run.rows else ("", "") for run in runs]
    charts = [_progress(runs, told, key) for key in dict(told) if key]
    added = {key: plain(key) for run in runs for keys in added_groups(run.rows).values() for key in keys}
    for key, title in (EVALUATIONS | SINGLE_CHARTS | dict(sorted(added.items()))).items():
        charts.append(chart(title, _lines(runs, [series(run.rows, key) for run in runs]), legend=False))
    return charts


def _progress(runs: Sequence[Run], told: Sequence[tuple[str, str]], key: str) -> str:
    """How the runs go whose curve is of one key: a loss and a reward are on no common scale. told: of `curve_of`."""
    words = " / ".join(dict.fromkeys(words for known, words in told if known == key)).capitalize()
    curves = [series(run.rows, key) if known == key else ([], []) for run, (known, _) in zip(runs, told, strict=True)]
    return chart(
        f"{words}, smoothed", _lines(runs, [(steps, smoothed(values)) for steps, values in curves]), large=True
    )


def _lines(runs: Sequence[Run], points: Sequence[tuple[list[int], list[float]]]) -> list[Line]:
    return [Line(run.name, f"c{number}", line) for number, (run, line) in enumerate(zip(runs, points, strict=True))]
