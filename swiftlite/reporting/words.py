"""Numbers, times and small charts as text that a person reads at a glance."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
BLANK_BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of a dot by column and row in its 2 x 4 cell


def duration(seconds: float) -> str:
    """`8s`, `4m 05s`, `3h 07m`, `2d 04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def short(value: float | None, digits: int = 4) -> str:
    """A number with `digits` decimals, or with an exponent where that shows too little."""
    if value is None:
        return "not finite"
    return f"{value:.1e}" if value != 0 and not 1e-3 <= abs(value) < 1e7 else f"{value:,.{digits}f}"


def told(key: str, value: float | None, nothing: str = "none rewarded") -> str:
    """A loss or a reward. nothing: what a mean of no answers is called, which a reward of None is."""
    return nothing if value is None and key.startswith(("reward", "eval_reward")) else short(value)


def plain(key: str) -> str:
    """A key of metrics.jsonl in words; what stands behind a slash is a name that somebody gave."""
    kind, slash, name = key.partition("/")
    return f"{kind.replace('_', ' ')}{slash}{name}"


def spent(seconds: float) -> str:
    """The time of one step: `<1 ms`, `850 ms`, `12.30 s`."""
    if seconds < 1e-3:
        return "<1 ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def in_one_line(text: str) -> str:
    """The text without line breaks, without what a terminal would obey and what no encoding can write."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def resampled(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means of equally long stretches."""
    if count < 1:
        return []
    if len(values) <= count:
        return list(values)
    edges = [index * len(values) // count for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def sparkline(values: Sequence[float], width: int) -> str:
    """One line of bars over all values, scaled to their own range."""
    shown = resampled(values, width)
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def braille(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[list[int]]:
    """A line through the values in `width` x `height` cells of 2 x 4 dots: the bits of each cell, top row first."""
    cells = [[0] * width for _ in range(height)]
    points = resampled(values, 2 * width)
    stretch = (2 * width - 1) / (len(points) - 1) if len(points) > 1 else 0.0
    scale = (4 * height - 1) / (high - low) if high > low else 0.0
    before: tuple[int, int] | None = None
    for index, value in enumerate(points):
        here = round(index * stretch), round((high - min(max(value, low), high)) * scale)
        for x, y in _between(before or here, here):
            cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        before = here
    return cells


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of the straight line from start to end."""
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)]
