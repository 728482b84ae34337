"""The door into training: starts what can run beside the imports, then imports and trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftlite.data.background import prepared_in_background
from swiftlite.imports import collector_paused
from swiftlite.models.tokenizer import tokenizer_loader

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def launch(config: RunConfig) -> None:
    """Train as the config says. Raises what `run_training` raises."""
    with prepared_in_background(config, tokenizer_loader(config)):
        with collector_paused():
            from swiftlite.training.run import run_training

        run_training(config)
