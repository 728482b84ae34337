"""Line charts as inline SVG for the run page: no script, values shown by hovering."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from swiftlite.reporting.words import short

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26  # LEFT: at least
GAP, LETTER = 8, 7  # between a number and its line; the width of a letter of it
SMALL, LARGE = (540, 210), (1120, 320)  # both are shown at about their own size, so that their letters are alike
MOST_POINTS, MOST_BANDS = 1000, 160
LEAST_SPAN = 1e-9  # of values, as a part of them; a moving average of equal values differs from them by rounding
LEAST = 1e-100  # no training has smaller numbers but 0, and the fourth part of one may be none

Points = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Line:
    """kind: its CSS class (`raw`, `main`, `eval`, `c0`...); points: steps and values."""

    name: str
    kind: str
    points: Points


def chart(title: str, lines: list[Line], *, large: bool = False, legend: bool = True) -> str:
    """A card with a tooltip for each stretch of steps. legend: says which line is which, where there are several."""
    lines = [Line(line.name, line.kind, _thinned(line.points, MOST_POINTS)) for line in lines if line.points[0]]
    if not lines:
        return ""
    scale = _Scale.around(lines, *(LARGE if large else SMALL))
    parts = [*_axes(scale), *(_path(line, scale) for line in lines), *_bands(lines, scale)]
    named = lines if legend and len(lines) > 1 else []
    names = " ".join(f'<span><i class="{line.kind}"></i>{escape(line.name)}</span>' for line in named)
    head = f'<h2>{escape(title)}<span class="legend">{names}</span></h2>'
    label = escape(title, quote=True)
    svg = f'<svg viewBox="0 0 {scale.width} {scale.height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<section class="card{" large" * large}">{head}{svg}</section>'


@dataclass(frozen=True)
class _Scale:
    width: int
    height: int
    first: int
    last: int
    ticks: list[float]
    texts: list[str]
    left: int

    @staticmethod
    def around(lines: list[Line], width: int, height: int) -> _Scale:
        steps = [step for line in lines for step in line.points[0]]
        values = [value for line in lines for value in line.points[1]]
        ticks = nice_ticks(min(values), max(values))
        texts = tick_texts(ticks)
        left = max(LEFT, GAP + LETTER * max(map(len, texts)))
        return _Scale(width, height, min(steps), max(steps), ticks, texts, left)

    def x(self, step: int) -> float:
        span = max(1, self.last - self.first)
        return round(self.left + (step - self.first) / span * (self.width - self.left - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return round(TOP + (high - value) / (high - low) * (self.height - TOP - BOTTOM), 1)


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers that enclose low..high, about `wanted` steps apart."""
    largest = max(abs(low), abs(high))
    if high - low <= max(LEAST_SPAN * largest, LEAST):  # ticks are rounded: what differs by less has but one
        margin = largest * 0.1 if largest > LEAST else 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * (1 - 1e-9))
    start = math.floor(low / step + 1e-9)
    end = math.ceil(high / step - 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(start, end + 1)]


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for tick, text in zip(scale.ticks, scale.texts, strict=True):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{scale.left}" x2="{scale.width - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{scale.left - GAP}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (scale.first + scale.last) // 2
    for step, anchor in {scale.first: "start", middle: "middle", scale.last: "end"}.items():
        parts.append(f'<text x="{scale.x(step)}" y="{scale.height - 6}" text-anchor="{anchor}">{step:,}</text>')
    return parts


def tick_texts(ticks: list[float]) -> list[str]:
    """`0 0.5 1`, `10,000 12,000`, or with one exponent for all: `0 5e-5 10e-5`; as many digits as tell them apart."""
    power = 0
    if not 1e-2 <= max(map(abs, ticks)) < 1e7:
        power = math.floor(math.log10(max(abs(tick) for tick in ticks[:2])))
    shown = [tick / 10**power for tick in ticks]
    digits = max(0, 1 - math.floor(math.log10(shown[1] - shown[0])))  # one more than its first, for steps of 2.5
    texts = [f"{number:,.{digits}f}" for number in shown]
    texts = [text.rstrip("0").rstrip(".") if digits else text for text in texts]
    return [f"{text}e{power}" if power and text != "0" else text for text in texts]


def _path(line: Line, scale: _Scale) -> str:
    places = [(scale.x(step), scale.y(value)) for step, value in zip(*line.points, strict=True)]
    if len(places) == 1 or line.kind == "eval":
        dots = "".join(f'<circle class="{line.kind}" cx="{x}" cy="{y}" r="3"/>' for x, y in places)
    else:
        dots = ""
    return f'<path class="{line.kind}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>{dots}'


def _bands(lines: list[Line], scale: _Scale) -> list[str]:
    """Invisible upright bands; the one under the pointer shows its step, its dots and its values."""
    few = {step for line in lines if len(line.points[0]) <= MOST_BANDS for step in line.points[0]}  # evaluations
    many = [_thinned(line.points, MOST_BANDS)[0] for line in lines]
    steps = sorted(few.union(*many))
    tables = [dict(zip(*line.points, strict=True)) for line in lines]
    xs = [scale.x(step) for step in steps]
    edges = [scale.left - 6, *((a + b) / 2 for a, b in zip(xs, xs[1:], strict=False)), scale.width - RIGHT + 6]
    bands, bottom = [], scale.height - BOTTOM
    for step, x, begin, end in zip(steps, xs, edges, edges[1:], strict=False):
        found = [(line, table[step]) for line, table in zip(lines, tables, strict=True) if step in table]
        dots = "".join(f'<circle class="{line.kind}" cx="{x}" cy="{scale.y(value)}" r="3.5"/>' for line, value in found)
        values = ", ".join(f"{line.name if len(lines) > 1 else ''} {short(value)}".strip() for line, value in found)
        text = escape(f"step {step:,}: {values}")
        place, anchor = (x - 8, "end") if x > scale.width / 2 else (x + 8, "start")
        bands.append(
            f'<g class="band"><rect x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" height="{bottom - TOP}"/>'
            f'<g><line x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>{dots}'
            f'<text x="{place:.1f}" y="{TOP + 10}" text-anchor="{anchor}">{text}</text></g></g>'
        )
    return bands


def _thinned(points: Points, most: int) -> Points:
    """At most so many of them, first and last kept."""
    steps, values = points
    count = len(steps)
    if count <= most:
        return points
    kept = [index * (count - 1) // (most - 1) for index in range(most)]
    return [steps[i] for i in kept], [values[i] for i in kept]
