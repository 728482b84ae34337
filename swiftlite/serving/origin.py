"""The run that trained some weights, and what its settings say of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.recipe import load_recipe
from swiftlite.config.save import is_run
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.recipe import Recipe
    from swiftlite.serving.source import ModelSource


def run_of(weights: Path) -> Path | None:
    """The output folder whose `model/` or checkpoint these weights are, None where they are no run's."""
    folder = weights.resolve()  # `checkpoints/latest` is a link
    if folder.name == "model":
        above = folder.parent
    elif folder.parent.name == "checkpoints":
        above = folder.parent.parent
    else:
        return None
    return above if is_run(above) else None


def system_of_training(source: ModelSource) -> str | None:
    """The system message that a run gave to conversations without one; None where it gave none, or this is no run's."""
    recipe = _recipe_of_training(source.adapter or Path(source.base))
    return None if recipe is None or recipe.said("method") == "pretrain" else recipe.said("system")


def tools_of_training(source: ModelSource) -> list[str]:
    """The words of `--tools` of a run whose answers called tools; none where they called none, or this is no run's."""
    recipe = _recipe_of_training(source.adapter or Path(source.base))
    said = None if recipe is None else recipe.said("tools")
    return said if isinstance(said, list) else []


def rounding_of_training(source: ModelSource) -> str:
    """The form of `--qat` in which a run trained these weights; `none` where it was none, or this is no run's."""
    recipe = None if source.adapter is not None else _recipe_of_training(Path(source.base))
    return "none" if recipe is None else str(recipe.said("qat") or "none")


def _recipe_of_training(folder: Path) -> Recipe | None:
    """What the run says that trained these weights; None where this is no run's. A file that is spoilt does not keep a
    model from answering or from being exported."""
    run = run_of(folder)
    with suppress(UserError):
        return None if run is None else load_recipe(str(run / "config.yaml"))
    return None
