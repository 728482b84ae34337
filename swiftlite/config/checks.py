"""What single values cannot show: settings that contradict one another, and settings that have no effect."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING

from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig

LORA_ONLY = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "dora", "rslora")
FREEZE_ONLY = ("trainable_layers", "trainable_modules")


def check_together(config: RunConfig, where: Mapping[str, str]) -> None:
    """Raise UserError for the first contradiction. where: of the values that somebody gave."""
    for what, names, fix in _contradictions(config):
        raise UserError(what, where=", ".join(where[name] for name in names if name in where) or None, fix=fix)


def _contradictions(config: RunConfig) -> list[tuple[str, tuple[str, ...], str]]:
    evaluates = bool(config.eval_dataset) or config.eval_fraction > 0
    rules = [
        (
            bool(config.eval_dataset) and config.eval_fraction > 0,
            "--eval-dataset and --eval-fraction both say what to evaluate on",
            ("eval_dataset", "eval_fraction"),
            "keep one of them",
        ),
        (
            config.early_stopping_patience is not None and not evaluates,
            "--early-stopping-patience needs an evaluation loss",
            ("early_stopping_patience",),
            "add --eval-fraction 0.05 or --eval-dataset",
        ),
        (
            config.adapter is not None and config.tuner != "lora",
            f"--adapter goes on with a LoRA adapter, but the tuner is {config.tuner}",
            ("adapter", "tuner"),
            "use --tuner lora, or leave --adapter out",
        ),
        (
            config.streaming and config.method != "pretrain",
            "--streaming reads plain texts, which only pretrain takes",
            ("streaming",),
            "leave --streaming out: rows are tokenised once and then read from the cache",
        ),
        (
            config.streaming and config.max_steps is None,
            "--streaming does not know how many rows there are",
            ("streaming",),
            "add --max-steps",
        ),
        (
            config.streaming and config.eval_fraction > 0,
            "--eval-fraction cannot hold out rows of a stream",
            ("streaming", "eval_fraction"),
            "give --eval-dataset instead",
        ),
        (
            config.tuner == "freeze" and config.trainable_layers == 0 and not config.trainable_modules,
            "--tuner freeze with --trainable-layers 0 trains nothing",
            ("trainable_layers",),
            "give --trainable-layers 2 or --trainable-modules",
        ),
        (
            config.lr_scheduler == "wsd"
            and config.warmup_steps is None
            and config.warmup_ratio + config.decay_ratio > 1,
            f"warm-up ({config.warmup_ratio:g}) and decay ({config.decay_ratio:g}) are longer than the run",
            ("warmup_ratio", "decay_ratio"),
            "lower --warmup-ratio or --decay-ratio",
        ),
        (
            not _is_date(config.template_date),
            f"{config.template_date!r} is not a date",
            ("template_date",),
            "write it as YYYY-MM-DD",
        ),
    ]
    return [(what, names, fix) for broken, what, names, fix in rules if broken]


def unused(config: RunConfig, given: set[str]) -> list[str]:
    """A note for each given setting that has no effect in this run."""
    notes = []
    if config.tuner != "lora":
        notes += [_note(name, f"with --tuner {config.tuner}") for name in LORA_ONLY if name in given]
    if config.tuner != "freeze":
        notes += [_note(name, f"with --tuner {config.tuner}") for name in FREEZE_ONLY if name in given]
    if config.adapter is not None:
        shape = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "dora", "rslora")
        notes += [_note(name, "beside --adapter, which brings its own") for name in shape if name in given]
    if config.lr_scheduler != "wsd" and "decay_ratio" in given:
        notes.append(_note("decay_ratio", f"with --lr-scheduler {config.lr_scheduler}"))
    if config.max_steps is not None and "epochs" in given:
        notes.append(_note("epochs", "beside --max-steps"))
    if config.warmup_steps is not None and "warmup_ratio" in given:
        notes.append(_note("warmup_ratio", "beside --warmup-steps"))
    if config.pipeline_parallel_size == 1:
        pipeline = ("pipeline_schedule", "num_microbatches")
        notes += [_note(name, "without a pipeline") for name in pipeline if name in given and _is_set(config, name)]
    if not (config.eval_dataset or config.eval_fraction) and "eval_steps" in given:
        notes.append(_note("eval_steps", "without --eval-dataset or --eval-fraction"))
    return notes


def refuse_unbuilt(layout: Layout) -> None:
    """Raise UserError for a layout that this version can check and show, but not run."""
    if layout.world > 1:
        raise UserError(
            f"a layout of {layout.world} processes needs the parallel engine, which this version does not have yet",
            where=f"pp x dp_replicate x dp_shard x cp x tp = {layout}",
            fix="train in one process (leave the parallel flags out), or add --dry-run to see the plan",
        )


def _note(name: str, why: str) -> str:
    return f"{name} has no effect {why}"


def _is_set(config: RunConfig, name: str) -> bool:
    return config.model_dump(include={name})[name] is not None


def _is_date(text: str | None) -> bool:
    try:
        return datetime.date.fromisoformat(text or "").isoformat() == text
    except ValueError:
        return False
