"""`report.html`: a run on one page that needs no network and no script."""

from __future__ import annotations

from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from swiftlite.reporting.charts import Line, chart
from swiftlite.reporting.curves import EVALUATIONS, added_groups, curve_of, evaluated, series, smoothed
from swiftlite.reporting.files import read_json, read_run_state, write_whole
from swiftlite.reporting.metrics import read_metrics
from swiftlite.reporting.words import duration, short
from swiftlite.untrusted import without_secrets

Rows = list[dict[str, Any]]

STYLE = Path(__file__).with_name("page.css")
SINGLE_CHARTS = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "router_loss": "Router loss of the experts",
    "reward_std": "Spread of the rewards of a prompt's answers",
    "entropy": "Entropy of the tokens sampled",
    "clipped": "Part of the tokens whose ratio was clipped",
    "tokens_per_second": "Tokens per second",
    "peak_memory_gib": "Peak memory, GiB",
    "mfu": "Model FLOPs utilisation",
}
COLOURS = 8  # that the style sheet tells apart
OF_SETS = ("loss", "reward", "eval_loss", "eval_reward")  # what is drawn of each of several data sets
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report_page(output: Path, *, alive: bool = True) -> Path:
    """Write the page from run.json, config.yaml, audit.json and metrics.jsonl of a run folder.

    alive: whether a process may still write into it. Raises RunError where the file cannot be written.
    """
    name = output.resolve().name
    rows, state = read_metrics(output), read_run_state(output)
    body = [
        f"<header><h1>{escape(name)}</h1>{_state(state, state_in_words(rows, state, alive=alive))}</header>",
        _facts(state),
        _cards(rows, state),
        f'<div class="charts">{"".join(_charts(rows))}</div>',
        _messages(state),
        _audit(read_json(output / "audit.json")),
        _config(output / "config.yaml"),
        f"<footer>written by swiftlite {escape(str(state.get('swiftlite', '')))}</footer>",
    ]
    return write_page(output / "report.html", name, body)


def write_page(path: Path, title: str, body: list[str]) -> Path:
    """An HTML file of these parts that needs nothing else; what no encoding can write is a `?`. Raises RunError where
    it cannot be written."""
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · swiftlite</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body>{''.join(body)}</body></html>\n"
    )
    return write_whole(path, lambda partial: partial.write_text(page, encoding="utf-8", errors="replace"))


def state_in_words(rows: Rows, state: dict[str, Any], *, alive: bool) -> str:
    """`finished`, `failed at step 3: ...`; a run that says it is running, and is not alive, was killed."""
    if state.get("state") == "running" and not alive:
        return f"stopped without a word after step {rows[-1]['step'] if rows else 0:,}"
    return state.get("state", "unknown")


def figures(rows: Rows, state: dict[str, Any]) -> dict[str, str]:
    """What a run came to, in a few words each. rows: one at least."""
    key, _ = curve_of(rows)
    on_held_out, called = evaluated(key)
    values, evals = series(rows, key)[1], series(rows, on_held_out)[1]
    speeds, memory = series(rows, "tokens_per_second")[1], series(rows, "peak_memory_gib")[1]
    total = state.get("total_steps")
    found = {"steps": f"{rows[-1]['step']:,}" + (f"/{total:,}" if total else "")}
    if values:
        found |= {f"first {key}": short(values[0]), f"last {key}": short(values[-1])}
        found["smoothed"] = short(smoothed(values)[-1])
    if evals:
        found[f"best {called}"] = short(max(evals) if key == "reward" else min(evals))
    if key != "reward" and (rewards := series(rows, "eval_reward")[1]):
        found["best eval reward"] = short(max(rewards))
    if speeds:
        found["tokens/s"] = f"{median(speeds):,.0f}"
    if memory:
        found["peak memory"] = f"{max(memory):.2f} GiB"
    if "seconds" in state:
        found["time"] = duration(state["seconds"])
    return found


def as_html(value: Any) -> str:
    """As HTML shows it, without secrets."""
    return escape(without_secrets(str(value)))


def _state(state: dict[str, Any], now: str) -> str:
    started = state.get("started", "").replace("T", " ").replace("+00:00", " UTC")
    said = f'<span class="soft">started {as_html(started)}</span>' if started else ""
    return f"<p>{mark(now)} {said}</p>"


def mark(now: str) -> str:
    """The state of a run in its colour."""
    kind = next((kind for kind in ("finished", "running", "stopped", "failed") if now.startswith(kind)), "unknown")
    return f'<b class="mark {kind}">{as_html(now)}</b>'


def _facts(state: dict[str, Any]) -> str:
    facts = state.get("facts")
    if not facts:
        return ""
    rows = "".join(f"<tr><th>{as_html(key)}</th><td>{as_html(value)}</td></tr>" for key, value in facts.items())
    return f'<section class="card"><table class="facts">{rows}</table></section>'


def _cards(rows: Rows, state: dict[str, Any]) -> str:
    if not rows:
        return "<p>No step is logged yet.</p>"
    cards = figures(rows, state).items()
    shown = (f'<div class="card"><span>{label}</span><b>{value}</b></div>' for label, value in cards)
    return f'<div class="cards">{"".join(shown)}</div>'


def _charts(rows: Rows) -> list[str]:
    key, words = curve_of(rows)
    steps, values = series(rows, key)
    on_held_out, called = evaluated(key)
    lines = [
        Line(key, "raw", (steps, values)),
        Line("smoothed", "main", (steps, smoothed(values))),
        Line(called, "eval", series(rows, on_held_out)),
    ]
    charts = [chart(words.capitalize(), lines, large=True)]
    others = {key: title for key, title in EVALUATIONS.items() if key != on_held_out} | SINGLE_CHARTS
    charts += [chart(title, [Line(title, "main", series(rows, key))]) for key, title in others.items()]
    seconds = [
        Line("whole step", "main", series(rows, "step_seconds")),
        Line("waiting for data", "eval2", series(rows, "data_seconds")),
        Line("sampling answers", "eval", series(rows, "sampling_seconds")),
    ]
    charts.append(chart("Seconds per step", seconds))
    for title, keys in added_groups(rows).items():
        lines = [Line(key, f"c{number % COLOURS}", series(rows, key)) for number, key in enumerate(keys)]
        words = title.replace("_", " ").capitalize()
        charts.append(chart(f"{words} of each data set" if title in OF_SETS else words, lines))
    return charts


def _messages(state: dict[str, Any]) -> str:
    found = [(message["step"], message.get("text", "")) for message in state.get("messages", [])]
    if not found:
        return ""
    rows = "".join(f'<tr><td class="n">{as_html(step)}</td><td>{as_html(words)}</td></tr>' for step, words in found)
    return (
        f'<details class="card"><summary>What happened ({len(found):,})</summary>'
        f'<table><tr><th class="n">step</th><th></th></tr>{rows}</table></details>'
    )


def _audit(audit: dict[str, Any]) -> str:
    """Rows and tokens in all and per data set, one table."""
    sections = [("in all", audit)]
    if isinstance(audit.get("datasets"), dict):
        sections += audit["datasets"].items()
    sections.append(("evaluation", audit.get("eval")))
    flat = [(name, _flat(section)) for name, section in sections if isinstance(section, dict)]
    keys = list(dict.fromkeys(key for _, section in flat for key in section))
    if not keys:
        return ""
    head = "".join(f'<th class="n">{as_html(key)}</th>' for key in keys)
    rows = ""
    for name, section in flat:
        cells = "".join(f'<td class="n">{_cell(section.get(key))}</td>' for key in keys)
        rows += f"<tr><th>{as_html(name)}</th>{cells}</tr>"
    table = f"<table><tr><th></th>{head}</tr>{rows}</table>"
    return f'<section class="card"><h2>What became of the data</h2>{table}</section>'


def _flat(section: dict[str, Any]) -> dict[str, Any]:
    """rows.read -> `rows read`, rows.dropped.too_long -> `dropped: too_long`; then the numbers beside `rows`."""
    flat: dict[str, Any] = {}
    rows = section.get("rows")
    for key, value in rows.items() if isinstance(rows, dict) else ():
        if isinstance(value, dict):
            flat |= {f"{key.replace('_', ' ')}: {reason}": count for reason, count in value.items()}
        elif value or key in ("read", "used"):
            flat[f"rows {key}"] = value
    return flat | {key.replace("_", " "): v for key, v in section.items() if isinstance(v, int | float)}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if 0 <= value <= 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else ""


def _config(path: Path) -> str:
    if not path.is_file():
        return ""
    shown = as_html(path.read_text(encoding="utf-8", errors="replace"))
    return f'<details class="card"><summary>Configuration</summary><pre>{shown}</pre></details>'
