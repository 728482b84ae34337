"""The weights that are trained, handed over to engines beside the run, which answer by them."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.checkpoint.export import create_model_files
from swiftlite.checkpoint.shared import in_turn, nothing, to_write, write_together
from swiftlite.errors import UserError
from swiftlite.models.load import load_config_of
from swiftlite.serving.engines import asks_more
from swiftlite.training.rollouts.engine import in_background
from swiftlite.training.rollouts.generator import Generation, Request

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.mesh import Patient
    from swiftlite.training.rollouts.engine import Engine
    from swiftlite.training.setup import Trainee

FOLDER = "engine"  # of the output folder


class EngineGenerator:
    """A `Generator` whose answers engines give."""

    def __init__(
        self, engine: Engine, config: RunConfig, trainee: Trainee, together: Patient, ending: ExitStack
    ) -> None:
        """together: the processes, which write the weights together, whatever each holds of them; ending: is left
        when the run ends.

        Raises UserError for an adapter, or a vocabulary, that engines cannot take.
        """
        _check_adapter(trainee)
        _check_vocabulary(config, trainee)
        self._engine, self._trainee, self._together = engine, trainee, together
        self._parent = Path(config.engine_folder or Path(config.output_dir) / FOLDER).expanduser().resolve()
        run = hashlib.sha256(str(Path(config.output_dir).resolve()).encode()).hexdigest()[:8]
        (self._name, *_) = together.collect(f"{run}-{uuid.uuid4().hex[:8]}")  # engines remember those of before
        self._taken: int | None = None  # updates of the weights that engines have
        self._folder: Path | None = None  # of those weights
        self._foreseen: tuple[Sequence[Request], Future[list[Generation]]] | None = None
        if together.rank == 0:
            _remove(self._parent, run)  # what a run that was killed has left
            ending.callback(_remove, self._parent, run)

    @property
    def pads(self) -> bool:
        """As of `Generator`."""
        return self._trainee.alone is None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """As of `Generator`. What is being answered is so by the weights that it was asked of."""
        if self._foreseen is not None:
            wait([self._foreseen[1]])
        if self._taken != self._trainee.updates:
            self._hand_over()
            self._taken = self._trainee.updates
        yield

    def generate(self, requests: Sequence[Request], temperature: float) -> Iterator[Generation]:
        """As of `Generator`, by random numbers of the engine's own, which are functions of the keys as well."""
        if self._foreseen is None or self._foreseen[0] != requests:  # an evaluation asks others meanwhile
            return self._engine.generate(requests, temperature)
        found, self._foreseen = self._foreseen[1], None
        return iter(found.result())

    def foresee(self, requests: Sequence[Request], temperature: float) -> None:
        """Have answered, by the weights as they are now, what will be asked next. Within `ready`."""
        self._foreseen = requests, in_background(lambda: list(self._engine.generate(requests, temperature)))

    def _hand_over(self) -> None:
        trainee, leads = self._trainee, self._together.rank == 0
        files, before = trainee.files, self._folder
        mine = to_write(trainee.mesh, trainee.tensors())
        self._folder = folder = self._parent / f"{self._name}-{trainee.updates}"
        create = partial(create_model_files, files=files, model=trainee.model, base=trainee.base, tokenizer=None)
        write_together(self._together, folder, create, lambda part: files.plan.write(part, mine), manifest=False)
        take = partial(self._engine.take, folder, adapter=files.adapter)
        in_turn(self._together, take if leads else nothing)
        self._engine.named(folder.name if files.adapter else "")
        if leads and before is not None:  # until now an engine might have read it again
            shutil.rmtree(before, ignore_errors=True)


def _check_adapter(trainee: Trainee) -> None:
    if not trainee.files.adapter:
        return
    for _, words in asks_more(trainee.model.peft_config["default"].to_dict()):
        raise UserError(
            f"vLLM takes no adapter with {words}",
            where="--engine-url",
            fix="leave it out, so that the model answers itself, or use --tuner full",
        )


def _check_vocabulary(config: RunConfig, trainee: Trainee) -> None:
    """A server has as many rows for tokens as the model that it was started with."""
    if not config.new_tokens:
        return
    served, trained = (of.get_text_config().vocab_size for of in (load_config_of(config), trainee.base.config))
    if trained > served:
        raise UserError(
            f"vLLM takes no weights of {trained:,} tokens into a model of {served:,}",
            where=f"--engine-url, --new-tokens ({len(config.new_tokens)})",
            fix="leave one of them out, or train a model that has these tokens, and serve that",
        )


def _remove(parent: Path, run: str) -> None:
    """What is left of a run's weights, and the folder, if nothing else is in it."""
    for folder in [*parent.glob(f"{run}-*"), *parent.glob(f".{run}-*")]:
        shutil.rmtree(folder, ignore_errors=True)
    if parent.name == FOLDER and parent.is_dir() and not any(parent.iterdir()):
        parent.rmdir()
