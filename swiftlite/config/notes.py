"""Notes on settings that are sound: which have no effect here, and which defaults mean more than they seem to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.flags import all_flags
from swiftlite.config.losses import LOSSES, REFERENCE_FREE, losses_of, policy_loss
from swiftlite.config.methods import EXAMINED, EXAMINED_BY, SAMPLING, answers, evaluates, learns_again, pack_capacity
from swiftlite.config.names import has_count, may_hold_texts
from swiftlite.config.types import NEVER

if TYPE_CHECKING:
    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig
    from swiftlite.config.validate import Given

REFERRING = ("dpo", "kto", *SAMPLING)  # the methods that may compare with a reference
METHOD_SETTINGS = {  # what acts in which methods
    "loss": tuple(LOSSES),
    "beta": REFERRING,
    "label_smoothing": ("dpo",),
    "rpo_alpha": ("dpo",),
    "simpo_gamma": ("dpo",),
    "reference": REFERRING,
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards": ("rm",),
    "share_prompt": ("dpo", "rm", *SAMPLING),
    "reward": EXAMINED,
    "tools": EXAMINED,
    "tool_rounds": EXAMINED,
    "samples": SAMPLING,
    "max_new_tokens": EXAMINED,
    "temperature": SAMPLING,
    "eval_samples": EXAMINED,
    "eval_temperature": EXAMINED,
    **dict.fromkeys(
        ("minibatches", "update_epochs", "epsilon", "epsilon_high", "scale_rewards", "cut_answers"), SAMPLING
    ),
    "max_resample_times": SAMPLING,
    "answers_at_once": EXAMINED,
    "engine_url": EXAMINED,
    "engine_folder": EXAMINED,
    "engine_ahead": SAMPLING,
    "engine_ratio_cap": SAMPLING,
}
LORA_SHAPE = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "dora", "rslora")
DEFAULT_SCALE = 2.0  # of LoRA's update
LOW_FOR_LORA = 0.2  # of the default learning rate: what all weights are trained with
OF_ROWS = "per_device_train_batch_size"  # which counts rows in other tools


def unused(config: RunConfig, layout: Layout, by: Mapping[str, str], *, trains: bool) -> list[str]:
    """A note for each setting without effect in this run: those of the command line, and those set to no default.

    by: who gave a value (flag, env, recipe); a saved config.yaml gives them all; trains: what evaluates in a run does
    so nowhere else.
    """
    values = config.model_dump()
    given = {name for name, who in by.items() if who == "flag" or values[name] != all_flags()[name].default}
    ineffective = [*_ineffective(config), *_ineffective_layout(config, layout)]
    ineffective += _without_evaluations(config) if trains else _judged_by_loss(config)
    notes = [f"{name} has no effect {why}" for name, why in ineffective if name in given]
    if config.method == "dpo" and config.label_smoothing == 0 and "robust" in _losses_named(config):
        notes.append("--loss robust is sigmoid without --label-smoothing, the share of labels that are wrong")
    return notes


def unsaid(config: RunConfig, given: Mapping[str, Given], lora_rate: float) -> Iterator[str]:
    """A note for each default beside which a setting that was given means something else than in other tools.

    lora_rate: the default learning rate of LoRA.
    """
    said = given.get("learning_rate")
    low = said is not None and said.value is not None and config.learning_rate <= LOW_FOR_LORA * lora_rate
    scale = config.lora_alpha / (config.lora_rank**0.5 if config.rslora else config.lora_rank)
    new = config.tuner == "lora" and config.adapter is None
    if new and low and "tuner" not in given:
        yield (
            f"--tuner is lora, as nothing says otherwise, and --learning-rate {config.learning_rate:g} is low for it; "
            "--tuner full trains all weights"
        )
    if new and scale != DEFAULT_SCALE and "lora_rank" in given and "lora_alpha" not in given:
        yield f"--lora-alpha is {config.lora_alpha}, so the update of LoRA is multiplied by {scale:.3g}"
    if config.method == "dpo" and "simpo" in _losses_named(config) and "beta" not in given:
        yield f"--beta is {config.beta:g}; the authors of simpo and ms-swift take 2 and more"
    if config.packing and "packing" not in given and _is_of_rows(given.get("micro_batch_size")):
        yield (
            f"a batch is of packs of up to {pack_capacity(config):,} tokens, not of rows as {OF_ROWS} is elsewhere; "
            "--no-packing makes it rows"
        )


def _is_of_rows(micro: Given | None) -> bool:
    return micro is not None and micro.where.replace("-", "_").endswith(OF_ROWS)


def unused_on_cpu(config: RunConfig) -> list[str]:
    """A note for each setting that moves from a GPU to the host what lies there in a run on CPUs."""
    moved = (
        (config.optimizer == "paged_adamw", "--optimizer paged_adamw has no effect", "moments are"),
        (config.offload == "cpu", "--offload cpu has no effect", "weights and optimizer state are"),
        (config.activation_checkpointing == "offload", "--activation-checkpointing offload is full", "inputs are"),
    )
    return [f"{what} on a CPU: {lies} in the host's memory" for on, what, lies in moved if on]


def _ineffective(config: RunConfig) -> Iterator[tuple[str, str]]:
    if Path(config.model).expanduser().is_dir():
        yield "revision", "with a local folder, which is what it is"
    if config.tuner != "lora":
        yield from ((name, f"with --tuner {config.tuner}") for name in (*LORA_SHAPE, "modules_to_save"))
    if config.tuner != "freeze":
        yield from ((name, f"with --tuner {config.tuner}") for name in ("trainable_layers", "trainable_modules"))
    if config.adapter is not None:
        yield from ((name, "beside --adapter, which brings its own") for name in (*LORA_SHAPE, "modules_to_save"))
    yield from _ineffective_by_method(config)
    if config.teacher is None:
        yield from ((name, "without --teacher") for name in ("teacher_weight", "teacher_tokens"))
    elif config.method in SAMPLING:
        yield "teacher_tokens", f"with {config.method}, of whose answers the teacher tells each token"
        if not config.reward:
            yield "teacher_weight", "without --reward: the teacher counts all"
            yield "max_resample_times", "without --reward"
    if not config.tools:
        yield "tool_rounds", "without --tools"
    if not config.engine_url:
        yield from ((name, "without --engine-url") for name in ("engine_folder", "engine_ahead", "engine_ratio_cap"))
    else:
        yield "answers_at_once", "with --engine-url: the engine takes as many as it has room for"
    if config.lr_scheduler != "wsd":
        yield "decay_ratio", f"with --lr-scheduler {config.lr_scheduler}"
    if config.lr_scheduler.startswith("constant"):
        why = f"with --lr-scheduler {config.lr_scheduler}, which does not decay"
        yield from ((name, why) for name in ("min_lr", "min_lr_ratio"))
    elif config.min_lr is not None:
        yield "min_lr_ratio", "beside --min-lr"
    if config.lr_scheduler == "constant":
        yield from ((name, "with --lr-scheduler constant") for name in ("warmup_ratio", "warmup_steps"))
    if config.max_steps is not None:
        yield "epochs", "beside --max-steps"
    if config.max_steps is not None and config.max_steps < 4:
        yield "profile", "in a run that has no step 4"
    if config.method == "pretrain":
        yield "system", "with pretrain, which learns texts and no conversations"
    if all(has_count(name) for name in (*config.dataset, *config.eval_dataset)):
        yield "max_samples", "where every data set names a #COUNT of its own"
    if not any(may_hold_texts(name) for name in (*config.dataset, *config.eval_dataset)):
        yield "sample_by", "without .txt files"
    if config.save_steps == NEVER:
        yield "keep_checkpoints", "with --save-steps never"
    if not config.push_to_hub:
        yield from ((name, "without --push-to-hub") for name in ("hub_model_id", "hub_private"))
    if not config.report_to:
        yield "run_name", "without --report-to"
    if config.warmup_steps is not None:
        yield "warmup_ratio", "beside --warmup-steps"


def _without_evaluations(config: RunConfig) -> Iterator[tuple[str, str]]:
    why = "without --eval-dataset or --eval-fraction"
    if not evaluates(config):
        yield from ((name, why) for name in ("eval_steps", "eval_on_start", "eval_samples", "eval_temperature"))
    if config.method in EXAMINED and not answers(config):
        judged = (
            ("reward", "max_new_tokens", "tool_rounds", "answers_at_once") if not evaluates(config) else EXAMINED_BY
        )
        judged = (*judged, "tools", "engine_url", "engine_folder")
        yield from ((name, "without --reward" if evaluates(config) else why) for name in judged)


def _judged_by_loss(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Of `swiftlite eval`, where it judges no answers."""
    if config.method not in SAMPLING:
        yield from ((name, f"with --method {config.method}") for name in ("reward", "tools", *EXAMINED_BY))


def _ineffective_layout(config: RunConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    if layout.tp == 1:
        yield "sequence_parallel", "without --tensor-parallel-size"
    if layout.pp == 1:
        yield from ((name, "without a pipeline") for name in ("pipeline_schedule", "num_microbatches"))
    reducing = layout.data_ranks * layout.cp  # they hold gradients of the same weights
    why = "in one process" if layout.world == 1 else "without several data ranks"
    if layout.dp_shard * layout.cp == 1 and config.sharding != "none":  # which is what happens
        yield "sharding", why if reducing == 1 else "where each data rank is a replica"
    if reducing == 1 and config.offload == "none":  # which takes weights layer by layer, and gradients with them
        yield from ((name, why) for name in ("fsdp_min_params", "sync_every_microbatch"))
    elif layout.pp > 1:
        yield "sync_every_microbatch", "in a pipeline, which reduces gradients once a step"
    elif config.gradient_accumulation_steps == 1:
        yield "sync_every_microbatch", "with one micro-batch a step"


def _ineffective_by_method(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield from (
        (name, f"with {config.method}") for name, where in METHOD_SETTINGS.items() if config.method not in where
    )
    if config.method in SAMPLING and not config.beta:
        yield "reference", "without --beta, the weight of the distance to it"
    if config.method in SAMPLING:
        yield from _ineffective_updates(config)
    if config.method == "dpo":
        named = _losses_named(config)
        if named == ["sft"]:
            yield "beta", "with --loss sft, which compares nothing"
        if all(name in REFERENCE_FREE for name in named):
            yield "reference", f"with --loss {' '.join(named)}, which has no reference"


def _ineffective_updates(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not learns_again(config):
        why = "where a step has one update: without --minibatches or --update-epochs"
        yield from ((name, why) for name in ("epsilon", "epsilon_high"))
    elif policy_loss(config) == "cispo":
        yield "epsilon", "with --loss cispo, which bounds nothing below"


def _losses_named(config: RunConfig) -> list[str]:
    return [name for name, _ in losses_of("dpo", config.loss)]
