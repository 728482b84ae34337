"""`report.html`: a run on one page that needs no network and no script."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from swiftlite.reporting.metrics import read_metrics
from swiftlite.reporting.plots import series, smoothed

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 64, 28
STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--soft:#6b7785;--line:#d7dde3;--card:#fff;--back:#f4f6f8;--a:#2563eb;--b:#d97706}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaee;--soft:#94a1af;--line:#33404d;--card:#18212b;--back:#10161d;--a:#60a5fa;--b:#fbbf24}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1rem;margin:0 0 .6rem}p{color:var(--soft);margin:.2rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.8rem;margin:1rem 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem 1rem;overflow-x:auto;margin-bottom:1rem}
.card b{display:block;font-size:1.3rem}.card span{color:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}.raw{stroke:var(--a);opacity:.35}.main{stroke:var(--a);stroke-width:2}.eval{stroke:var(--b);stroke-width:2}
path{fill:none}circle{fill:var(--b)}circle.p{fill:var(--a);opacity:0}circle.p:hover{opacity:1}
"""


def write_report_page(output: Path) -> Path:
    """Write the page from config.yaml, audit.json and metrics.jsonl of a run folder."""
    rows = read_metrics(output)
    body = [f"<h1>{escape(output.name)}</h1>", _headline(rows), *_charts(rows), _audit(output), _config(output)]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(output.name)} · swiftlite</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style><body>{"".join(body)}</body></html>
"""
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _headline(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>No step is logged yet.</p>"
    _, losses = series(rows, "loss")
    _, evals = series(rows, "eval_loss")
    _, speeds = series(rows, "tokens_per_second")
    _, memory = series(rows, "peak_memory_gib")
    cards = [("steps", f"{rows[-1]['step']:,}")]
    if losses:
        cards += [("first loss", f"{losses[0]:.4f}"), ("last loss", f"{losses[-1]:.4f}")]
    if evals:
        cards += [("best eval loss", f"{min(evals):.4f}")]
    if speeds:
        cards += [("median tokens/s", f"{sorted(speeds)[len(speeds) // 2]:,.0f}")]
    if memory:
        cards += [("peak memory", f"{max(memory):.2f} GiB")]
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><span>{k}</span><b>{v}</b></div>' for k, v in cards)
        + "</div>"
    )


def _charts(rows: list[dict[str, Any]]) -> list[str]:
    steps, losses = series(rows, "loss")
    charts = []
    if losses:
        lines = [("raw", steps, losses), ("main", steps, smoothed(losses))]
        charts.append(_chart("Loss per trained token", lines, series(rows, "eval_loss")))
    titles = {
        "learning_rate": "Learning rate",
        "grad_norm": "Gradient norm before clipping",
        "tokens_per_second": "Tokens per second",
        "peak_memory_gib": "Peak memory, GiB",
    }
    titles |= {key: key for key in sorted({key for row in rows for key in row if "/" in key})}
    for key, title in titles.items():
        points = series(rows, key)
        if points[0]:
            charts.append(_chart(title, [("main", *points)], ([], [])))
    return charts


def _chart(title: str, lines: list[tuple[str, list[int], list[float]]], evals: tuple[list[int], list[float]]) -> str:
    """One SVG; hovering over a point shows its step and value."""
    xs = [x for _, steps, _ in lines for x in steps] + evals[0]
    ys = [y for _, _, values in lines for y in values] + evals[1]
    low_x, low_y = min(xs), min(ys)
    span_x, span_y = (max(xs) - low_x) or 1, (max(ys) - low_y) or abs(low_y) or 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / span_x * (WIDTH - LEFT - 12)
        return round(across, 1), round(10 + (1 - (y - low_y) / span_y) * (HEIGHT - BOTTOM - 10), 1)

    parts = []
    for i in range(5):
        value = low_y + span_y * i / 4
        _, y = place(low_x, value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH}"/><text x="0" y="{y + 4}">{value:.4g}</text>')
    for i in range(5):
        step = low_x + span_x * i / 4
        x, _ = place(step, low_y)
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="middle">{step:.0f}</text>')
    for kind, steps, values in lines:
        points = [place(x, y) for x, y in zip(steps, values, strict=True)]
        parts.append(f'<path class="{kind}" d="M' + "L".join(f"{x} {y}" for x, y in points) + '"/>')
        if kind == "main":
            every = max(1, len(points) // 300)
            triples = list(zip(points, steps, values, strict=True))[::every]
            parts += [_dot(point, f"step {s}: {v:.6g}", "p") for point, s, v in triples]
    for step, value in zip(*evals, strict=True):
        parts.append(_dot(place(step, value), f"eval, step {step}: {value:.6g}", "e"))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f'<div class="card"><h2>{escape(title)}</h2>{svg}</div>'


def _dot(point: tuple[float, float], text: str, kind: str) -> str:
    return f'<circle class="{kind}" cx="{point[0]}" cy="{point[1]}" r="4"><title>{escape(text)}</title></circle>'


def _audit(output: Path) -> str:
    path = output / "audit.json"
    if not path.is_file():
        return ""
    text = json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=2, ensure_ascii=False)
    return f'<div class="card"><h2>What became of the rows</h2><pre>{escape(text)}</pre></div>'


def _config(output: Path) -> str:
    path = output / "config.yaml"
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8")
    return f'<div class="card"><h2>Configuration</h2><pre>{escape(text)}</pre></div>'
