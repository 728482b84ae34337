"""Knowledge distillation: a second model that says, at each trained token, which tokens it finds likeliest, or of the
model's own answers how likely they are.

It lies beside the trained one on the same mesh, divided in the same way, and runs through each step's micro-batches
before they are trained. What it says is k tokens with their probabilities, so the `[tokens, vocabulary]` distributions
of neither model ever exist as a whole, and a message between stages stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftlite.checkpoint.safetensors_files import inspect_model_folder
from swiftlite.checkpoint.weights import TensorFolder
from swiftlite.config.names import ADAPTER_CONFIG, PLAIN_MODEL
from swiftlite.data.batches import MicroBatch, Taught
from swiftlite.errors import UserError
from swiftlite.models.architecture import import_architecture
from swiftlite.models.load import load_config, model_folder
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.tuners import count_parameters
from swiftlite.parallel.world import World
from swiftlite.training.flops import FlopCounter
from swiftlite.training.guards.fits import check_config, check_layout
from swiftlite.training.needs import Beside, weights_dtype
from swiftlite.training.reference import evaluating
from swiftlite.training.setup import (
    Trainee,
    build_base,
    build_trainee,
    precision_of,
    vocabulary_of,
)
from swiftlite.training.sources import match_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig

OTHERWISE = {  # of the settings of a run, what is not the teacher's
    "revision": None,
    "tokenizer": None,
    "from_scratch": False,
    "config_overrides": {},
    "tuner": "full",
    "adapter": None,
    "optimizer": "adamw",
    "optimizer_in_backward": False,
    "lora_plus_ratio": 1.0,
    "quantization": "none",
    "fp8": "none",
    "qat": "none",
    "neftune_noise_alpha": 0.0,
    "router_aux_loss_coef": 0.0,
    "teacher": None,
}


class Teacher:
    """A model that is asked."""

    def __init__(self, trainee: Trainee, config: RunConfig, taught: PreTrainedModel) -> None:
        """trainee: the teacher, divided and filled; config: of the run; taught: the trained model."""
        vocabulary = min(model.config.get_text_config().vocab_size for model in (trainee.base, taught))
        self._model, self._weight = trainee.divided, config.teacher_weight
        self._count = min(config.teacher_tokens, vocabulary)
        for scorer in self._model.scorers:
            scorer.tell_likeliest(self._count, vocabulary)

    def teach(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This rank's micro-batches of a step, with what is taught of them."""
        with evaluating(self._model.scorers):
            told = self._model.runner.told(batches, self._count)
        return [
            replace(batch, taught=Taught(ids.to(torch.int64), probabilities, self._weight))
            for batch, (probabilities, ids) in zip(batches, told, strict=True)
        ]


def check_teacher(
    config: RunConfig,
    layout: Layout,
    device: torch.device,
    load: Callable[[], PreTrainedTokenizerBase],
) -> Beside:
    """Everything that can be known of the teacher without its weights. load: the trained model's tokenizer. Raises
    UserError where it cannot teach.
    """
    settings, folder = settings_of(config), Path(config.teacher).expanduser()
    with _errors_of(config):
        if any((place / ADAPTER_CONFIG).is_file() for place in (folder, folder / "model")):
            raise UserError("it is an adapter", fix="merge it by `swiftlite export`, and name the result as --teacher")
        its_config = load_config(settings.model, trust_remote_code=config.trust_remote_code)
        check_config(settings, its_config, PLAIN_MODEL)
        import_architecture(its_config)
        if folder.is_dir():
            inspect_model_folder(folder)
        theirs = load_tokenizer(settings.model, trust_remote_code=config.trust_remote_code)
    _check_tokens(config, load(), theirs, vocabulary_of(settings, its_config))
    beside = beside_of(config, device, its_config)
    check_teaching_layout(config, layout, beside.base)
    if folder.is_dir():
        with _errors_of(config):
            match_files(TensorFolder(model_folder(settings.model)), beside.base)
    return beside


def _check_tokens(
    config: RunConfig, mine: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, rows: int | None
) -> None:
    """Each token of a text has to be the same one for both. rows: of the teacher's embedding."""
    known = theirs.get_vocab()
    others = sorted((place, token) for token, place in mine.get_vocab().items() if known.get(token) != place)
    others += [(len(mine) - 1, "")] if rows is not None and rows < len(mine) and not others else []
    if not others:
        return
    place, token = others[0]
    raise UserError(
        f"the teacher has other tokens: {len(others):,} of the model's {len(mine):,} are not the same there, such as "
        f"{token!r}, number {place}",
        where=f"--teacher {config.teacher}",
        fix="name a model with the same tokenizer, such as a larger one of the same family",
    )


def settings_of(config: RunConfig) -> RunConfig:
    """The teacher's own: those of the run, but for what is trained and how."""
    return config.model_copy(update={"model": config.teacher, **OTHERWISE})


def _in_half(config: RunConfig, its_config: PretrainedConfig, device: torch.device) -> RunConfig:
    """With weights in the type of products, where that is bf16: nothing is added to them."""
    dtype = precision_of(config, its_config, device).dtype
    return config.model_copy(update={"pure_bf16": dtype == torch.bfloat16})


def check_teaching_layout(config: RunConfig, layout: Layout, base: PreTrainedModel) -> None:
    """What a layout asks of the teacher. base: on `meta` will do. Raises UserError where it does not fit."""
    with _errors_of(config):
        check_layout(settings_of(config), layout, base)


def beside_of(config: RunConfig, device: torch.device, its_config: PretrainedConfig | None = None) -> Beside:
    """What the teacher takes of devices beside the trained model. its_config: as loaded."""
    with _errors_of(config):
        its_config = its_config or load_config(config.teacher, trust_remote_code=config.trust_remote_code)
        settings = _in_half(settings_of(config), its_config, device)
        precision = precision_of(settings, its_config, device)
        base = build_base(settings.model, settings, its_config, precision)
    return Beside(base, count_parameters(base)[1] * weights_dtype(settings, precision).itemsize, FlopCounter(base))


def build_teacher(
    config: RunConfig,
    trainee: Trainee,
    load: Callable[[], PreTrainedTokenizerBase],
    world: World,
    layout: Layout,
    tell: Callable[[str], None],
) -> Trainee:
    """The teacher, loaded beside the trained model. Raises UserError where it does not fit."""
    settings = settings_of(config)
    with _errors_of(config):
        its_config = load_config(settings.model, trust_remote_code=config.trust_remote_code)
        settings = _in_half(settings, its_config, world.device)
        teacher = build_trainee(
            settings, its_config, None, load, world.within("teacher"), layout, trainee.choice, evaluates=True
        )
        teacher.check(settings)
    for note in teacher.notes:
        tell(f"note: teacher: {note}")
    return teacher


@contextmanager
def _errors_of(config: RunConfig) -> Iterator[None]:
    """What is wrong with the teacher says so."""
    try:
        yield
    except UserError as error:
        own = f"--teacher {config.teacher}"
        where = own if error.where is None or config.teacher in error.where else f"{own}, {error.where}"
        raise UserError(f"of the teacher: {error.what}", where=where, fix=error.fix) from error
