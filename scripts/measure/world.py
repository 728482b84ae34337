"""A model in a layout, built and trained as by a run, for measurements inside each of several real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from swiftlite.config.resolve import Resolved
from swiftlite.config.schema import RunConfig
from swiftlite.data.batches import MicroBatch, collate
from swiftlite.data.order import Sequence
from swiftlite.models.tokenizer import tokenizer_loader
from swiftlite.parallel.world import World
from swiftlite.training.losses import TokenLoss
from swiftlite.training.optimizer import build_optimizer, clip_gradients
from swiftlite.training.setup import Trainee, build_trainee, check_model


def build(resolved: Resolved, world: World) -> Trainee:
    """The model, divided and loaded. Every process of the world calls it."""
    config = resolved.config
    model_config = check_model(config, resolved.layout, world.device, None)
    return build_trainee(config, model_config, None, tokenizer_loader(config), world, resolved.layout)


class Trainer:
    """Steps of a model that are all alike: `count` micro-batches of `tokens` tokens on each data rank."""

    def __init__(self, trainee: Trainee, config: RunConfig, tokens: int, count: int) -> None:
        self.trainee, self.config = trainee, config
        self.optimizer = build_optimizer(trainee.trained(), config, trainee.mesh, trainee.matrices)
        vocabulary = trainee.base.config.get_text_config().vocab_size
        random = torch.Generator().manual_seed(trainee.mesh.data_rank)
        self._batches = [_micro_batch(torch.randint(vocabulary, (tokens,), generator=random)) for _ in range(count)]
        self._steps = 0

    def add_gradients(self) -> None:
        """Forward and backward of all micro-batches, and what a run does before its update."""
        self._steps += 1
        trainee, ranks = self.trainee, self.trainee.mesh.layout.data_ranks
        trained = sum(batch.trained_tokens for batch in self._batches) * ranks
        trainee.divided.runner.train(self._steps, self._batches, TokenLoss(trained), 1.0, len(self._batches) * ranks)
        parameters = [parameter for _, parameter in trainee.trained()]
        clip_gradients(parameters, self.config.max_grad_norm, trainee.mesh, 1.0, trainee.uncounted())

    def update(self) -> None:
        """Change the weights and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _micro_batch(ids: torch.Tensor) -> MicroBatch:
    """One document, of which every token but the first is trained."""
    return collate([[Sequence(ids.numpy(), np.ones(len(ids), dtype=np.bool_), "random")]])


def shared_flags(model: Path, output: Path) -> dict[str, Any]:
    """Flags that every measured layout has; no data is read."""
    return {
        "model": str(model), "dataset": [str(model)], "output_dir": str(output), "tuner": "full", "max_length": 128,
        "precision": "fp32", "activation_checkpointing": "none", "learning_rate": 1e-4, "packing": False,
        "sequence_parallel": "always",  # as on GPUs
    }  # fmt: skip
