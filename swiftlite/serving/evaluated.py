"""What `swiftlite eval` evaluates: the weights that `--model` and `--adapter` name, under the settings of their run.

A run's own config.yaml says what its result was trained for, on which rows, and from which model. Of it only what
changes a loss counts: how the run was divided and how it saved memory does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.flags import all_flags
from swiftlite.config.recipe import load_recipe
from swiftlite.config.save import is_run
from swiftlite.config.setting import DATA, MODEL, PREFERENCE, TUNER
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.serving.source import ModelSource, find_source

if TYPE_CHECKING:
    from swiftlite.config.recipe import Recipe

PANELS = (MODEL, DATA, TUNER, PREFERENCE)
BESIDE = {"method", "global_batch_size", "precision", "quantization", "seed"}
IN_THE_RESULT = {"tokenizer", "chat_template"}  # they lie beside its weights


def settle(given: Mapping[str, Given], recipe: Recipe | None) -> tuple[dict[str, Given], Recipe | None]:
    """Flags and recipe as those of a run: `model` and `adapter` are what the weights began as, `resume` is where they
    are now, if they have changed.

    Without either flag the recipe's model is evaluated, as it is before a run of that recipe. Raises UserError where a
    name leads nowhere.
    """
    if "resume" in given:
        where, fix = given["resume"].where, "name the run or the checkpoint as --model"
        raise UserError("an evaluation resumes nothing", where=where, fix=fix)
    if recipe is not None:
        recipe = _only(recipe, all_flags().keys() - {"output_dir"})  # of which nothing is read, and nothing is written
    model, adapter = given.get("model"), given.get("adapter")
    settled = {**given, "resume": Given("never", "swiftlite eval", "flag")}
    named = adapter or model
    if named is None:
        return settled, recipe
    source = find_source(model and str(model.value), adapter and str(adapter.value))
    weights = source.adapter or Path(source.base)
    run = _run_of(weights) if recipe is None else None
    settled.setdefault("tokenizer", Given(source.tokenizer, named.where, "flag"))
    if run is not None or source.adapter is not None:
        settled["resume"] = Given(str(weights), named.where, "flag")
    if run is not None:
        recipe = _settings(run)
        del settled["adapter" if adapter else "model"]  # what the weights began as is in the recipe
    else:
        settled |= {"model": Given(source.base, named.where, "flag"), **_on_base(source, adapter)}
    if source.is_classifier() and (recipe is None or "method" not in recipe.entries):
        settled.setdefault("method", Given("rm", named.where, "flag"))
    return settled, recipe


def _on_base(source: ModelSource, adapter: Given | None) -> dict[str, Given]:
    """Settings of an adapter that is no run's: what it began as has none."""
    if source.adapter is None:
        return {}
    where = "--model" if adapter is None else adapter.where
    return {"tuner": Given("lora", where, "flag"), "adapter": Given(None, where, "flag")}


def _run_of(weights: Path) -> Path | None:
    """The output folder whose `model/` or checkpoint these weights are, None where they are no run's."""
    folder = weights.resolve()  # `checkpoints/latest` is a link
    if folder.name == "model":
        above = folder.parent
    elif folder.parent.name == "checkpoints":
        above = folder.parent.parent
    else:
        return None
    return above if is_run(above) else None


def _settings(run: Path) -> Recipe:
    """What of a run's settings changes a loss."""
    panels = {name for name, flag in all_flags().items() if flag.panel in PANELS}
    return _only(load_recipe(str(run / "config.yaml")), panels - IN_THE_RESULT | BESIDE)


def _only(recipe: Recipe, names: Collection[str]) -> Recipe:
    return replace(recipe, entries={name: entry for name, entry in recipe.entries.items() if name in names})
