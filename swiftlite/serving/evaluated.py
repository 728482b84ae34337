"""What `swiftlite eval` evaluates: the weights that `--model` and `--adapter` name, under the settings of their run.

A run's own config.yaml says what its result was trained for, on which rows, and from which model. Of it only what
changes a loss counts: how the run was divided and how it saved memory does not, nor does what it says of the machine or
allows: it may come from anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.flags import all_flags
from swiftlite.config.methods import EXAMINED_BY, KNOWN_REWARDS, SAMPLING
from swiftlite.config.recipe import load_recipe
from swiftlite.config.setting import DATA, MODEL, PARALLELISM, PREFERENCE, TUNER
from swiftlite.config.types import plain_word
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.serving.origin import run_of
from swiftlite.serving.source import ModelSource, find_source, refuse_reward_model

if TYPE_CHECKING:
    from swiftlite.config.recipe import Recipe

PANELS = (MODEL, DATA, PREFERENCE)
BESIDE = {
    "method", "global_batch_size", "micro_batch_size", "precision", "quantization", "qat", "save_dtype", "pure_bf16",
    "seed", *EXAMINED_BY, "temperature",
}  # fmt: skip
OF_GIVEN_ANSWERS = {"loss", "beta", "reference", "overlong", "train_on"}
OF_TRAINING = {"streaming", "shuffle"}
ROWS = {"dataset", "eval_dataset", "eval_fraction", "max_samples"}
NOT_OF_A_RUN = {
    "tokenizer", "chat_template",  # they lie beside its weights
    "cache_dir", "workers",
    "trust_remote_code",
}  # fmt: skip
OF_A_RECIPE = {
    "adapter", "reward", "tools", "gradient_accumulation_steps", "offload", "kernels", "compile", "debug", "dry_run",
}  # fmt: skip


def settle(given: Mapping[str, Given], recipe: Recipe | None) -> tuple[dict[str, Given], Recipe | None]:
    """Flags and recipe as those of a run: `model` and `adapter` are what the weights began as, `resume` is where they
    are now, if they have changed.

    Without either flag the recipe's model is evaluated, as it is before a run of that recipe. Raises UserError where a
    name leads nowhere.
    """
    if "resume" in given:
        where, fix = given["resume"].where, "name the run or the checkpoint as --model"
        raise UserError("an evaluation resumes nothing", where=where, fix=fix)
    if "reward" in given and "method" not in given:
        given = {**given, "method": Given(SAMPLING[0], given["reward"].where, "flag")}
    if recipe is not None:
        recipe = _only(recipe, _of_panels(*PANELS, PARALLELISM) - OF_TRAINING | BESIDE | OF_A_RECIPE, given)
    model, adapter = given.get("model"), given.get("adapter")
    settled = {**given, "resume": Given("never", "swiftlite eval", "flag")}
    named = adapter or model
    if named is None:
        return settled | _any_tuner(given, recipe, None), recipe
    source = find_source(model and str(model.value), adapter and str(adapter.value))
    if "method" in given and given["method"].value in SAMPLING:
        refuse_reward_model(source)
    weights = source.adapter or Path(source.base)
    run = run_of(weights) if recipe is None else None
    settled.setdefault("tokenizer", Given(source.tokenizer, named.where, "flag"))
    if run is not None or source.adapter is not None:
        settled["resume"] = Given(str(weights), named.where, "flag")
    if run is not None:
        recipe = _settings(run, given)
        if _asks_otherwise(recipe, given):
            settled.setdefault("on_bad_row", Given("skip", named.where, "flag"))
        del settled["adapter" if adapter else "model"]  # what the weights began as is in the recipe
    else:
        settled |= {"model": Given(source.base, named.where, "flag"), **_on_base(source, adapter)}
        settled |= _any_tuner(given, recipe, source.adapter)
    if source.is_classifier() and (recipe is None or "method" not in recipe.entries):
        settled.setdefault("method", Given("rm", named.where, "flag"))
    return settled, recipe


def _any_tuner(given: Mapping[str, Given], recipe: Recipe | None, adapter: Path | None) -> dict[str, Given]:
    """Adapters and 4 bits ask for LoRA, rounding for whole weights, and nothing else for any."""
    trained = None if recipe is None else recipe.said("qat")
    asked = given["qat"].value if "qat" in given else trained
    rounds = adapter is None and asked is not None and plain_word(str(asked)) != "none"
    return {"tuner": Given("full" if rounds else "lora", "swiftlite eval", "flag")}


def _on_base(source: ModelSource, adapter: Given | None) -> dict[str, Given]:
    """Settings of an adapter that is no run's: what it began as has none."""
    if source.adapter is None:
        return {}
    where = "--model" if adapter is None else adapter.where
    return {"adapter": Given(None, where, "flag")}


def _settings(run: Path, given: Mapping[str, Given]) -> Recipe:
    """What of a run's settings changes a loss, or says what rewards answers. Raises UserError where that is code."""
    recipe = load_recipe(str(run / "config.yaml"))
    names = _of_panels(*PANELS, TUNER) - NOT_OF_A_RUN - OF_TRAINING | BESIDE
    method, rewards = recipe.said("method"), recipe.said("reward")
    if method not in SAMPLING and not rewards:  # it has asked nothing, and saved how it would have
        names -= set(EXAMINED_BY)
    if (given["method"].value if "method" in given else method) in SAMPLING:
        _check_tools(recipe, given)
    if method not in SAMPLING or "method" in given:
        return _only(recipe, names, given)
    words = rewards if isinstance(rewards, list) else []
    if not words or any(str(word).partition("*")[0] not in KNOWN_REWARDS for word in words):
        named = " ".join(map(str, words)) or "FILE.py:NAME"
        raise UserError(
            f"{method} learns by reward functions, and those that a run names are not run unasked",
            where=str(recipe.path),
            fix=f"name them (--reward {named}), or give --method sft for the loss of rows with answers",
        )
    return _only(recipe, names | {"reward"}, given)


def _check_tools(recipe: Recipe, given: Mapping[str, Given]) -> None:
    """Raises UserError where answers would lack the tools that those of the run had."""
    tools = recipe.said("tools")
    if not tools or "tools" in given:
        return
    named = " ".join(map(str, tools)) if isinstance(tools, list) else tools
    raise UserError(
        "the run's answers may call tools, and those that a run names are not run unasked",
        where=str(recipe.path),
        fix=f"name them: --tools {named}, or --tools none for answers without",
    )


def _asks_otherwise(recipe: Recipe, given: Mapping[str, Given]) -> bool:
    """Whether rows that a run has learnt from, or evaluated, are questions now, which not all of them need be."""
    return "method" in given and given["method"].value in SAMPLING and recipe.said("method") not in SAMPLING


def _of_answers(recipe: Recipe, names: set[str], given: Mapping[str, Given]) -> set[str]:
    """The names without those that only rows with answers have where the model's own are evaluated, or the reverse."""
    before = recipe.said("method")
    now = given["method"].value if "method" in given else before
    if now in SAMPLING:
        return names - OF_GIVEN_ANSWERS
    return names - set(EXAMINED_BY) - ({"loss", "beta"} if before in SAMPLING else set())


def _of_panels(*panels: str) -> set[str]:
    return {name for name, flag in all_flags().items() if flag.panel in panels}


def _only(recipe: Recipe, names: set[str], given: Mapping[str, Given]) -> Recipe:
    """The recipe with these settings. given: by flags, which may name rows in place of all that it names."""
    if {"dataset", "eval_dataset"} & set(given):
        names = names - ROWS
    elif "eval_fraction" in given:  # of the rows that it trains on
        names = names - {"eval_dataset"}
    if "precision" in given:
        names = names - {"pure_bf16"}  # which is one
    names = _of_answers(recipe, names, given)
    return replace(recipe, entries={name: entry for name, entry in recipe.entries.items() if name in names})
