"""`report.html`: a run on one page that needs no network and no script."""

from __future__ import annotations

from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from swiftlite.reporting.charts import Line, chart
from swiftlite.reporting.curves import loss_words, preference_groups, series, smoothed
from swiftlite.reporting.files import read_json, read_run_state, write_whole
from swiftlite.reporting.metrics import read_metrics
from swiftlite.reporting.words import duration, short
from swiftlite.untrusted import without_secrets

Rows = list[dict[str, Any]]

STYLE = Path(__file__).with_name("page.css")
SINGLE_CHARTS = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "tokens_per_second": "Tokens per second",
    "peak_memory_gib": "Peak memory, GiB",
    "mfu": "Model FLOPs utilisation",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report_page(output: Path, *, alive: bool = True) -> Path:
    """Write the page from run.json, config.yaml, audit.json and metrics.jsonl of a run folder.

    alive: whether a process may still write into it. Raises RunError where the file cannot be written.
    """
    name, style = escape(output.resolve().name), STYLE.read_text(encoding="utf-8")
    rows, state = read_metrics(output), read_run_state(output)
    if state.get("state") == "running" and not alive:  # it was killed before it could say so
        state["state"] = f"stopped without a word after step {rows[-1]['step'] if rows else 0:,}"
    body = [
        f"<header><h1>{name}</h1>{_state(state)}</header>",
        _facts(state),
        _cards(rows, state),
        f'<div class="charts">{"".join(_charts(rows))}</div>',
        _messages(state),
        _audit(read_json(output / "audit.json")),
        _config(output / "config.yaml"),
        f"<footer>written by swiftlite {escape(str(state.get('swiftlite', '')))}</footer>",
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name} · swiftlite</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )
    return write_whole(output / "report.html", lambda path: path.write_text(page, encoding="utf-8"))


def _text(value: Any) -> str:
    return escape(without_secrets(str(value)))


def _state(state: dict[str, Any]) -> str:
    now = state.get("state", "unknown")
    mark = next((kind for kind in ("finished", "running", "stopped", "failed") if now.startswith(kind)), "unknown")
    started = f'<span class="soft">started {_text(state["started"])}</span>' if state.get("started") else ""
    return f'<p><b class="mark {mark}">{_text(now)}</b> {started}</p>'


def _facts(state: dict[str, Any]) -> str:
    facts = state.get("facts")
    if not facts:
        return ""
    rows = "".join(f"<tr><th>{_text(key)}</th><td>{_text(value)}</td></tr>" for key, value in facts.items())
    return f'<section class="card"><table class="facts">{rows}</table></section>'


def _cards(rows: Rows, state: dict[str, Any]) -> str:
    if not rows:
        return "<p>No step is logged yet.</p>"
    losses, evals = series(rows, "loss")[1], series(rows, "eval_loss")[1]
    speeds, memory = series(rows, "tokens_per_second")[1], series(rows, "peak_memory_gib")[1]
    total = state.get("total_steps")
    cards = [("steps", f"{rows[-1]['step']:,}" + (f"/{total:,}" if total else ""))]
    if losses:
        cards += [("first loss", short(losses[0])), ("last loss", short(losses[-1]))]
        cards += [("smoothed", short(smoothed(losses)[-1]))]
    cards += [("best eval loss", short(min(evals)))] if evals else []
    cards += [("tokens/s", f"{median(speeds):,.0f}")] if speeds else []
    cards += [("peak memory", f"{max(memory):.2f} GiB")] if memory else []
    if "seconds" in state:
        cards += [("time", duration(state["seconds"]))]
    shown = (f'<div class="card"><span>{label}</span><b>{value}</b></div>' for label, value in cards)
    return f'<div class="cards">{"".join(shown)}</div>'


def _charts(rows: Rows) -> list[str]:
    steps, losses = series(rows, "loss")
    lines = [
        Line("loss", "raw", (steps, losses)),
        Line("smoothed", "main", (steps, smoothed(losses))),
        Line("eval loss", "eval", series(rows, "eval_loss")),
    ]
    charts = [chart(loss_words(rows).capitalize(), lines, large=True)]
    charts += [chart(title, [Line(title, "main", series(rows, key))]) for key, title in SINGLE_CHARTS.items()]
    seconds = [
        Line("whole step", "main", series(rows, "step_seconds")),
        Line("waiting for data", "eval2", series(rows, "data_seconds")),
    ]
    charts.append(chart("Seconds per step", seconds))
    for title, keys in preference_groups(rows).items():
        lines = [Line(key, f"c{number % 4}", series(rows, key)) for number, key in enumerate(keys)]
        charts.append(chart(title.capitalize(), lines))
    return charts


def _messages(state: dict[str, Any]) -> str:
    found = [(message["step"], message.get("text", "")) for message in state.get("messages", [])]
    if not found:
        return ""
    rows = "".join(f'<tr><td class="n">{_text(step)}</td><td>{_text(text)}</td></tr>' for step, text in found)
    return (
        f'<details class="card"><summary>What happened ({len(found):,})</summary>'
        f'<table><tr><th class="n">step</th><th></th></tr>{rows}</table></details>'
    )


def _audit(audit: dict[str, Any]) -> str:
    """Rows and tokens in all and per data set, one table."""
    sections = {"in all": audit}
    if isinstance(audit.get("datasets"), dict):
        sections |= {str(name): section for name, section in audit["datasets"].items()}
    if isinstance(audit.get("eval"), dict):
        sections["evaluation"] = audit["eval"]
    flat = {name: _flat(section) for name, section in sections.items() if isinstance(section, dict)}
    keys = list(dict.fromkeys(key for section in flat.values() for key in section))
    if not keys:
        return ""
    head = "".join(f'<th class="n">{_text(key)}</th>' for key in keys)
    rows = ""
    for name, section in flat.items():
        cells = "".join(f'<td class="n">{_cell(section.get(key))}</td>' for key in keys)
        rows += f"<tr><th>{_text(name)}</th>{cells}</tr>"
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
    text = _text(path.read_text(encoding="utf-8", errors="replace"))
    return f'<details class="card"><summary>Configuration</summary><pre>{text}</pre></details>'
