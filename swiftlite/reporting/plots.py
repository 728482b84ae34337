"""`loss.png`: the curves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swiftlite.reporting.metrics import read_metrics

SMOOTHING = 0.9


def smoothed(values: list[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    result, average, weight = [], 0.0, 0.0
    for value in values:
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(average / weight)
    return result


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows that have a number under the key."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return [step for step, _ in points], [value for _, value in points]


def write_loss_plot(output: Path) -> Path | None:
    """Draw loss, evaluation, learning rate and gradient norm, and preference curves where there are any."""
    rows = read_metrics(output)
    if not rows:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    extra = sorted({key for row in rows for key in row if "/" in key})
    figure, axes = pyplot.subplots(
        2 + bool(extra), 1, figsize=(9, 6 + 3 * bool(extra)), height_ratios=[3, 1, 2][: 2 + bool(extra)], sharex=True
    )
    steps, losses = series(rows, "loss")
    axes[0].plot(steps, losses, color="#9ecae1", linewidth=1, label="loss")
    axes[0].plot(steps, smoothed(losses), color="#08519c", linewidth=2, label="smoothed")
    eval_steps, eval_losses = series(rows, "eval_loss")
    if eval_losses:
        axes[0].plot(eval_steps, eval_losses, "o-", color="#d94801", label="eval loss")
    axes[0].set_ylabel("loss per trained token")
    axes[0].legend(frameon=False)
    axes[1].plot(*series(rows, "grad_norm"), color="#636363", linewidth=1)
    axes[1].set_ylabel("gradient norm")
    rate = axes[1].twinx()
    rate.plot(*series(rows, "learning_rate"), color="#31a354", linewidth=1)
    rate.set_ylabel("learning rate", color="#31a354")
    for key in extra:
        axes[2].plot(*series(rows, key), linewidth=1, label=key)
    if extra:
        axes[2].legend(frameon=False)
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.2)
    figure.tight_layout()
    path = output / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
