"""Who answers while a model is trained: the model itself where it lies whole in this process, else a copy of it.

The copy is the same model, built for one process and never trained. Before each step every process puts the parts that
it holds of the trained weights into it, whatever the layout, so all of them can answer, each other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from swiftlite.checkpoint.boxes import whole
from swiftlite.checkpoint.shared import to_write
from swiftlite.config.layout import Layout
from swiftlite.models.kernels.half_products import half_layers, half_weights
from swiftlite.models.sampling import answering, sample
from swiftlite.seeds import key_digest
from swiftlite.training.qat import gathered_in
from swiftlite.training.rollouts.generator import Generation, Request
from swiftlite.training.setup import Trainee, build_trainee

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.world import World


def build_model_generator(
    config: RunConfig,
    model_config: PretrainedConfig,
    trainee: Trainee,
    load: Callable[[], PreTrainedTokenizerBase],
    world: World,
    stops: Sequence[int],
) -> ModelGenerator:
    """The model itself where nothing of it is divided, or with a copy beside it. stops: ids that end an answer."""
    copy = None
    if trainee.mesh.stored is not None:
        exact = gathered_in(config, trainee.precision, trainee.files.dtype)
        alone, half = Layout(), exact == torch.bfloat16 and config.tuner != "lora"
        plain = {"pure_bf16": config.pure_bf16 or half, "compile": False}  # nothing is added to its weights
        choice = replace(trainee.choice, layout=alone, offload=False, checkpointing="none")
        beside = world.within("answers"), alone, choice
        copy = build_trainee(config.model_copy(update=plain), model_config, None, load, *beside, evaluates=True)
    return ModelGenerator(trainee, copy, stops, config)


class ModelGenerator:
    """A model with the weights that are being trained."""

    def __init__(self, trainee: Trainee, copy: Trainee | None, stops: Sequence[int], config: RunConfig) -> None:
        """copy: of one process, where the trainee does not answer itself; stops: ids that end an answer."""
        self._trainee, self._copy, self._stops, self._config = trainee, copy, stops, config
        self._taken: int | None = None  # updates of the weights that the copy has
        self._as_written = config.compile and copy is None
        self._generating = copy or trainee
        (self._part,) = self._generating.divided.parts

    @property
    def pads(self) -> bool:
        """As of `Generator`, and so whether prompts of several lengths can be answered together."""
        return self._generating.alone is None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """As of `Generator`."""
        if self._copy is not None and self._taken != self._trainee.updates:
            _take_over(self._trainee, self._copy)
            self._taken = self._trainee.updates
        layers = half_layers(self._part.scorer)
        computing = self._generating.precision.compute(self._generating.mesh.device)
        # Each length of a row would be compiled: an answer has as many as tokens.
        as_written = torch.compiler.set_stance("force_eager") if self._as_written else nullcontext()
        with answering(self._generating.base, switch=self.pads), computing, half_weights(layers), as_written:
            yield

    def generate(self, requests: Sequence[Request], temperature: float) -> Iterator[Generation]:
        """As of `Generator`, by numbers that are functions of the keys."""
        for some in self._at_once(requests):
            most = max(one.most for one in some)
            numbers = torch.from_numpy(np.stack([_uniform(most, *one.key) for one in some]))
            prompts, base = [one.ids for one in some], self._generating.base
            found = sample(base, prompts, numbers, self._stops, temperature, once=self.pads)
            yield from (Generation(ids[: one.most]) for one, ids in zip(some, found, strict=True))

    def _at_once(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Those that are answered together: of like length, or of one where nothing may be padded. The longest prompt
        with the longest answer is no longer than any prompt with its own may be."""
        some: list[Request] = []
        for one in requests:
            more = [*some, one]
            alike = not some or self.pads or len(some[0].ids) == len(one.ids)
            fits = max(len(each.ids) for each in more) + max(each.most for each in more) <= self._config.max_length
            if some and (len(some) == self._config.answers_at_once or not alike or not fits):
                yield some
                some = []
            some.append(one)
        if some:
            yield some


def _uniform(count: int, *key: object) -> np.ndarray:
    """Numbers in `[0, 1)` that are a function of the key only, fp64 `[count]`."""
    philox = np.random.Philox(key=np.frombuffer(key_digest("answers", *key, size=16), dtype=np.uint64))
    return (philox.random_raw(count) >> np.uint64(11)) * 2.0**-53


@torch.no_grad()
def _take_over(trainee: Trainee, copy: Trainee) -> None:
    """The trained weights as they are now, into the copy. Each number is in one process's part of exactly one box, so
    that the sum over all processes, of zeros elsewhere, is the whole."""
    (part,) = copy.divided.parts
    theirs = {name: tensor for name, tensor, _ in part.tensors()}
    mine = to_write(trainee.mesh, trainee.tensors())  # of a tied one that two stages hold, once
    for name in sorted(trainee.trained_shapes):
        target = theirs[name]
        gathered = torch.zeros_like(target)
        for holding in mine.get(name, ()):
            gathered[holding.box.slices_of(whole(target.shape))] = holding.tensor.to(target)
        dist.all_reduce(gathered)
        target.copy_(gathered)
