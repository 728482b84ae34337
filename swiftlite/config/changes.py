"""What differs between the settings that a run was last started with and those it is to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftlite.config.flags import all_flags, shown_value
from swiftlite.config.names import NAMES, SOURCES, with_absolute_names
from swiftlite.config.notes import LORA_SHAPE
from swiftlite.config.recipe import load_recipe
from swiftlite.config.save import DERIVED, NOT_SAVED
from swiftlite.config.schema import RunConfig
from swiftlite.config.types import said_value
from swiftlite.config.validate import build_config
from swiftlite.errors import UserError

# A checkpoint has these from its run: what a resumed run is told of them has no effect, or does not fit.
FIXED = (
    "method", "tuner", "adapter", *LORA_SHAPE, "modules_to_save", "new_tokens", "trainable_layers", "trainable_modules",
    "config_overrides",
)  # fmt: skip
LONGEST_WORD = 200
# They say where and how long a run works, and change nothing of what it learns.
UNTOLD = (
    *NOT_SAVED, *DERIVED, "resume", "output_dir", "template_date", "workers", "cache_dir", "node_rank", "master_addr",
    "master_port", "stop_after", "max_restarts", "report_to", "run_name", "push_to_hub", "hub_model_id", "hub_private",
    "engine_folder",
)  # fmt: skip
# They decide which rows, in which tokens, make up each step.
OF_THE_ROWS = (
    "model", "tokenizer", "chat_template", "new_tokens", "method", "dataset", "eval_dataset", "eval_fraction",
    "columns", "max_samples", "deduplicate", "system", "placeholders", "streaming", "sample_by", "max_length",
    "overlong", "share_prompt", "train_on", "packing", "shuffle", "global_batch_size", "seed", "max_new_tokens",
    "tools",
)  # fmt: skip
# Losses under others of these are no measure for each other.
OF_THE_LOSS = (
    "loss", "beta", "label_smoothing", "rpo_alpha", "simpo_gamma", "desirable_weight", "undesirable_weight",
    "center_rewards", "teacher", "teacher_weight", "teacher_tokens", "minibatches", "update_epochs", "epsilon",
    "epsilon_high", "scale_rewards", "cut_answers", "max_resample_times",
    "tool_rounds", "engine_ahead", "engine_ratio_cap",
)  # fmt: skip
# The same of any loss, and of answers: of the model's own weights, or of what they are rounded to.
OF_THE_WEIGHTS = ("qat",)
# The same of answers to held-out prompts.
OF_THE_REWARD = ("reward", "tools", "tool_rounds", "max_new_tokens", "eval_samples", "eval_temperature")

# They decide how the files of a result hold its weights.
OF_THE_FILES = ("save_dtype", "max_shard_size")


def changed_settings(before: Path, now: RunConfig) -> dict[str, str]:
    """Name -> `--learning-rate 0.01 -> 0.001` of each setting that is not as in `before`, a `config.yaml`.

    Nothing where there is no such file, or one that is no configuration of this version.
    """
    if not before.is_file():
        return {}
    try:
        recipe = load_recipe(str(before))
        old = with_absolute_names(build_config(recipe.given()))
    except UserError:
        return {}
    now = with_absolute_names(now)
    found = {}
    for name, flag in all_flags().items():
        values = getattr(old, name), getattr(now, name)
        if name in recipe.entries and name not in UNTOLD and not _same(name, *values):
            found[name] = f"{flag.option} {_word(values[0])} -> {_word(values[1])}"
    return found


def other_settings(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """`--learning-rate 0.01 instead of 0.001` of each setting in which two processes of a run must agree, and do not.
    here, there: their settings, as JSON has them. Names of files are none: what lies there is compared."""
    return [
        f"{flag.option} {_word(here.get(name))} instead of {_word(there.get(name))}"
        for name, flag in all_flags().items()
        if name not in (*UNTOLD, *NAMES) and here.get(name) != there.get(name)
    ]


def _same(name: str, one: Any, other: Any) -> bool:
    if name in SOURCES and one and other:
        return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
    if name == "config_overrides":  # of which JSON may be written in several ways
        one, other = ({key: said_value(text) for key, text in said.items()} for said in (one, other))
    return one == other


def _word(value: Any) -> str:
    """A value in words; of a long text its beginning."""
    text = shown_value(value)
    return text if len(text) <= LONGEST_WORD and "\n" not in text else repr(text[:LONGEST_WORD]) + "..."
