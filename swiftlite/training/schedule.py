"""Learning rate as a function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swiftlite.training.interval import Interval

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def warmup_steps(total: int, steps: int | None, ratio: float) -> int:
    """Steps of linear warm-up: given, or a share of the run, rounded up as in Hugging Face's trainer."""
    return min(total, steps if steps is not None else math.ceil(total * ratio))


def schedule_notes(config: RunConfig, total: int, warmup: int, steps_per_epoch: int | None) -> Iterator[str]:
    """What settings that do not fit a run of so many steps do. warmup: its steps as they are taken; steps_per_epoch:
    None where it is not known."""
    steps, kind, patience = config.warmup_steps, config.lr_scheduler, config.early_stopping_patience
    decay = math.ceil(total * config.decay_ratio)
    if kind != "constant" and warmup == total > 1:
        given = f"--warmup-ratio {config.warmup_ratio:g}" if steps is None else f"--warmup-steps {steps:,}"
        yield (
            f"{given}, and the run has {total:,} steps: the learning rate is at its peak in the last one, and does not "
            "decay"
        )
    elif kind == "wsd" and steps is not None and warmup + decay > total:
        yield f"warm-up ({warmup:,} steps) and decay ({decay:,}) overlap: from its peak the learning rate falls at once"
    if patience is not None:
        earliest = Interval.of(config.eval_steps, total).step_of(patience + 1, steps_per_epoch)
        if earliest is not None and earliest >= total:
            yield (
                f"--early-stopping-patience {patience:,} with --eval-steps {config.eval_steps} acts at step "
                f"{earliest:,} at the earliest, and the run has {total:,}"
            )


def rate_at(
    step: int, *, peak: float, kind: str, total: int, warmup: int, minimum: float = 0.0, decay_ratio: float = 0.1
) -> float:
    """Learning rate of optimizer step `step`, counted from 1. minimum: where the decay ends.

    kind: `constant`, `constant_with_warmup`, `linear`, `cosine` (arXiv 1608.03983, one half period) or `wsd`
    (warm-up, stable, linear decay over the last `decay_ratio` of the run, arXiv 2404.06395). The first step already
    moves the weights: warm-up step s has the rate `peak * s / warmup`. `constant` has no warm-up.
    """
    done = step - 1
    if kind == "constant":
        return peak
    if done < warmup:
        return peak * step / warmup
    if kind == "constant_with_warmup":
        return peak
    if kind == "wsd":
        decay = max(1, math.ceil(total * decay_ratio))
        progress = max(0.0, (done - (total - decay)) / decay)
        factor = 1.0 - progress
    else:
        progress = min(1.0, (done - warmup) / max(1, total - warmup))
        factor = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (peak - minimum) * factor
