"""`loss.png`: the curves of a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.imports import import_package
from swiftlite.reporting.curves import added_groups, curve_of, evaluated, series, smoothed
from swiftlite.reporting.files import write_whole
from swiftlite.reporting.metrics import read_metrics
from swiftlite.reporting.words import in_one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

BLUE, PALE, ORANGE, GREEN, GREY = "#1f5fbf", "#a9c6ee", "#d9730d", "#2e8b57", "#5f6b7a"

LONGEST_TITLE = 90  # letters
MOST_NAMED = 7  # lines of one chart: a legend of more would lie over the others

# Inches beside, above, below and between the curves. Matplotlib's own search for them takes half of the time of a
# picture, and so a good part of the time of a short run.
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 0.9, 0.15, 0.3, 0.5, 0.85


def write_loss_plot(output: Path) -> Path | None:
    """Draw loss or reward, evaluation, learning rate and gradient norm, and what the method adds.

    None where no step is logged. Raises RunError where the file cannot be written, UserError where matplotlib fails.
    """
    rows = read_metrics(output)
    if not rows:
        return None
    figures = import_package("matplotlib.figure", "loss.png")  # without pyplot: no window system, nothing global
    groups = added_groups(rows)
    figure = figures.Figure(figsize=(10, 5.6 + 2.6 * len(groups)))
    grid = _grid(figure, [3.2, 1.4, *[1.8] * len(groups)])
    name = output.resolve().name
    _main(figure.add_subplot(grid[0, :]), rows, _shortened(name))
    _small(figure.add_subplot(grid[1, 0]), rows, "learning_rate", "learning rate", GREEN)
    _small(figure.add_subplot(grid[1, 1]), rows, "grad_norm", "gradient norm", GREY)
    for number, (title, keys) in enumerate(groups.items()):
        _group(figure.add_subplot(grid[2 + number, :]), rows, title, keys)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of names in any script
        return write_whole(output / "loss.png", lambda path: figure.savefig(path, dpi=130, format="png"))


def _grid(figure: Figure, heights: list[float]) -> GridSpec:
    """Rows of two places each, of these relative heights."""
    width, height = figure.get_size_inches()
    inside, gaps = height - TOP - BOTTOM, BETWEEN * (len(heights) - 1)
    return figure.add_gridspec(
        len(heights), 2, height_ratios=heights, left=LEFT / width, right=1 - RIGHT / width, bottom=BOTTOM / height,
        top=1 - TOP / height, hspace=BETWEEN * len(heights) / (inside - gaps), wspace=0.17,
    )  # fmt: skip


def _main(axes: Axes, rows: list[dict[str, Any]], title: str) -> None:
    key, words = curve_of(rows)
    steps, values = series(rows, key)
    _line(axes, steps, values, color=PALE, linewidth=1, label=key)
    axes.plot(steps, smoothed(values), color=BLUE, linewidth=2, label="smoothed")
    on_held_out, called = evaluated(key)
    eval_steps, eval_values = series(rows, on_held_out)
    if eval_values:
        axes.plot(eval_steps, eval_values, "o-", color=ORANGE, markersize=4, linewidth=1, label=called)
    axes.set_title(title, fontsize=11, loc="left", parse_math=False)
    axes.set_ylabel(words)
    axes.legend(frameon=False)
    _plain(axes)


def _group(axes: Axes, rows: list[dict[str, Any]], title: str, keys: list[str]) -> None:
    for key in keys[MOST_NAMED:]:
        _line(axes, *series(rows, key), linewidth=1, color=PALE)
    for key in keys[:MOST_NAMED]:
        _line(axes, *series(rows, key), linewidth=1.3, label=_shortened(key))
    if len(keys) > MOST_NAMED:
        axes.plot([], [], color=PALE, label=f"{len(keys) - MOST_NAMED} more")
    axes.set_title(_shortened(title), fontsize=10, loc="left", parse_math=False)
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)  # a data set may have dollars in its name
    _plain(axes)


def _shortened(name: str) -> str:
    """In letters that can be drawn, and no longer than the curves would make room for."""
    name = in_one_line(name)
    return name if len(name) <= LONGEST_TITLE else name[: LONGEST_TITLE - 1] + "…"


def _line(axes: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    """A line through one point alone, such as an only evaluation's, would not be seen."""
    axes.plot(steps, values, marker="." if len(steps) < 3 else None, **style)


def _small(axes: Axes, rows: list[dict[str, Any]], key: str, title: str, color: str) -> None:
    _line(axes, *series(rows, key), color=color, linewidth=1)
    axes.set_title(title, fontsize=10, loc="left")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
