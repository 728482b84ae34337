"""Learning rate as a function of the optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def warmup_steps(total: int, steps: int | None, ratio: float) -> int:
    """Steps of linear warm-up: given, or a share of the run, rounded up as in Hugging Face's trainer."""
    return min(total, steps if steps is not None else math.ceil(total * ratio))


def schedule_note(config: RunConfig, total: int, warmup: int) -> str | None:
    """What is not as `--warmup-steps` says in a run of so many steps, if anything is not. warmup: as they are taken."""
    steps, kind = config.warmup_steps, config.lr_scheduler
    if steps is None or kind == "constant":
        return None
    if steps > total:
        return f"--warmup-steps {steps:,}, but the run has {total:,}: the learning rate rises to its peak in these"
    decay = math.ceil(total * config.decay_ratio)
    if kind == "wsd" and warmup + decay > total:
        return (
            f"warm-up ({warmup:,} steps) and decay ({decay:,}) overlap: from its peak the learning rate falls at once"
        )
    return None


def rate_at(
    step: int, *, peak: float, kind: str, total: int, warmup: int, minimum_ratio: float = 0.0, decay_ratio: float = 0.1
) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

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
    return peak * (minimum_ratio + (1.0 - minimum_ratio) * factor)
