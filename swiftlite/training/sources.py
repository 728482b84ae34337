"""Where a model's values come from: its own files, an adapter's, a checkpoint's, and what no file holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftlite.checkpoint.catalog import (
    Catalog,
    catalog_adapter,
    catalog_model,
    check_adapter,
    stored_tensors,
    take_prefixes,
    tied_names,
    unread_of_adapter,
)
from swiftlite.checkpoint.safetensors_files import ADAPTER
from swiftlite.checkpoint.weights import TensorFolder, match_model, shown_names
from swiftlite.config.names import ADAPTER_CONFIG
from swiftlite.errors import UserError
from swiftlite.models.anatomy import ANSWER_HEADS, SCORE_HEAD, dissect
from swiftlite.models.load import result_inside

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.schema import RunConfig


PASSED_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)(masked_bias|position_ids)$")  # constants, saved by older versions


def find_weights(config: RunConfig, resume: Path | None) -> tuple[str, Path | None]:
    """(where the model's weights are, the adapter to go on from). A checkpoint has all of them where all are trained;
    frozen ones may have been rounded to its type."""
    adapter = resume if config.tuner == "lora" else None
    if adapter is None and config.adapter is not None:
        adapter = Path(config.adapter).expanduser()
        if not (adapter / ADAPTER_CONFIG).is_file():
            fix = "check --adapter" + result_inside(adapter, ADAPTER_CONFIG)
            raise UserError(f"no {ADAPTER_CONFIG} in the adapter folder", where=str(adapter), fix=fix)
    return (str(resume) if config.tuner == "full" and resume is not None else config.model), adapter


def starts_at_random(config: RunConfig, resume: Path | None) -> bool:
    """Whether no file holds the weights that a run starts with."""
    return config.from_scratch and resume is None


def drawn_values(base: PreTrainedModel, seed: int) -> Callable[[str], torch.Tensor]:
    """Those of a model that starts at random, by their names."""
    from swiftlite.models.initial import InitialValues

    return InitialValues(base, seed)


def match_files(weights: TensorFolder, base: PreTrainedModel) -> tuple[Catalog, str | None]:
    """(what the files hold of the model, the name of a score head that they lack). Raises UserError."""
    take_prefixes(base, weights.entries)
    catalog = catalog_model(base)
    score = f"{SCORE_HEAD}.weight"
    lacking = score if dissect(base).gives_scores and score not in weights.entries else None
    on_disk = match_model(weights, [entry for entry in catalog if entry.name != lacking], base)
    _check_tied(weights, on_disk, base)
    return on_disk, lacking


def _check_tied(weights: TensorFolder, on_disk: Catalog, base: PreTrainedModel) -> None:
    """Raise UserError where files have another tensor under each name of a tied one, as those of a model whose head was
    trained apart: transformers keeps both then, whatever config.json says."""
    read = {entry.owner: entry.name for entry in on_disk}
    for name, first in tied_names(base).items():
        one, other = read.get(first), weights.find(name, base.base_model_prefix)
        if None in (one, other) or one == other or weights.entries[one].shape != weights.entries[other].shape:
            continue
        if not weights.are_equal(one, other):
            raise UserError(
                f"config.json says that {other} and {one} are one, and in the files they differ",
                where=str(weights.path),
                fix='write "tie_word_embeddings": false into config.json, or give --config-overrides '
                "tie_word_embeddings=false under --tuner full; or take the tensor out that is not meant",
            )


def unread_in_words(weights: TensorFolder, on_disk: Catalog, base: PreTrainedModel) -> list[str]:
    """A note where the files hold tensors that the model has no place for. on_disk: in the names of the files. Of a
    tied tensor one name is read; what transformers passes over by its own rules is passed over."""
    prefix = f"{base.base_model_prefix}."
    known = {name for name, _ in [*base.named_parameters(remove_duplicate=False), *base.named_buffers()]}
    known |= {name.removeprefix(prefix) for name in known} | {entry.name for entry in on_disk}
    rules = [*(base._keys_to_ignore_on_load_unexpected or ()), *PASSED_OVER]
    if dissect(base).gives_scores:
        rules.append(rf"(^|\.)({'|'.join(ANSWER_HEADS)})\.")  # in place of which it has another
    unread = [name for name in weights.entries if name not in known and not any(re.search(r, name) for r in rules)]
    words = f"of the model's files nothing reads {shown_names(sorted(unread))}: config.json has no place for them"
    return [words] if unread else []


def text_alone_in_words(base: PreTrainedModel, given: PretrainedConfig) -> list[str]:
    """A note where the model takes images too, and transformers has a class for its language model alone, which is what
    is trained then. given: the config of its files."""
    text = given.get_text_config()
    if text is given or type(base.config) is not type(text):
        return []
    return [f"{type(base).__name__} is the language model alone: what the model has for images is left out"]


def read_on_top(
    model: nn.Module, base: PreTrainedModel, weights: TensorFolder, adapter: Path | None, checkpoint: Path | None
) -> list[tuple[TensorFolder, Catalog]]:
    """What is read over the weights of the base: an adapter, or what a checkpoint holds of trained parameters; nothing
    in a new run. Raises UserError where it does not fit."""
    if adapter is not None:
        saved = TensorFolder(adapter / ADAPTER)
        check_adapter(model, saved.entries, adapter)
        catalog, has_head = catalog_adapter(model), has_scores(saved)  # one that has learnt to answer has none
        _check_all_read(catalog, base, weights, saved, adapter)
        return [(saved, saved.match([e for e in catalog if has_head or not _is_score(e.name)], "base_model.model"))]
    if checkpoint is not None:
        saved = TensorFolder(checkpoint)
        return [(saved, saved.match(_trained_entries(base), base.base_model_prefix))]
    return []


def _check_all_read(
    catalog: Catalog, base: PreTrainedModel, weights: TensorFolder, saved: TensorFolder, adapter: Path
) -> None:
    """Raise UserError where tensors of an adapter's file would be lost: those beside the adapter that are not the
    base's own. A model that gives scores has no use for the head of one that answers."""
    gives_scores = dissect(base).gives_scores
    if has_scores(saved) and not gives_scores:
        raise UserError(
            "the adapter is a reward model's: its score head has no place in a model that answers",
            where=str(adapter),
            fix="go on with it by `swiftlite rm`, or give an adapter that sft, dpo, kto or pretrain trained",
        )
    lost = [
        plain
        for name, plain in unread_of_adapter(catalog, saved.entries).items()
        if not (gives_scores and plain.split(".")[0] in ANSWER_HEADS)
        if plain not in weights.entries or not torch.equal(saved.read(name).float(), weights.read(plain).float())
    ]
    if lost:
        raise UserError(
            f"the adapter's file has tensors that its settings do not name: {shown_names(sorted(lost))}",
            where=str(adapter),
            fix="add their modules (such as embed_tokens and lm_head) to modules_to_save in adapter_config.json, which "
            "trains them on, or merge the adapter by `swiftlite export` and give the result to --model",
        )


def has_scores(folder: TensorFolder) -> bool:
    """Whether these files hold the score head of a reward model."""
    return any(map(_is_score, folder.entries))


def _is_score(name: str) -> bool:
    return name.split(".")[-2:] == [SCORE_HEAD, "weight"]


def in_wrapped_names(catalog: Catalog, plain: dict[int, str], model: nn.Module) -> Catalog:
    """The catalog with each owner's name as adapters left it; modules trained whole start as copies of their base."""
    wrapped: dict[str, list[str]] = {}
    for name, tensor in stored_tensors(model):
        if id(tensor) in plain:
            wrapped.setdefault(plain[id(tensor)], []).append(name)
    names = {name for name, _ in stored_tensors(model)}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # of a tied one both ends may have a copy
        copy = _trained_copy(name)
        if id(parameter) in plain and copy in names and copy != name:
            wrapped[plain[id(parameter)]].append(copy)
    return [replace(entry, owner=owner) for entry in catalog for owner in wrapped[entry.owner]]


def _trained_copy(name: str) -> str:
    return name.replace(".original_module.", ".modules_to_save.default.")


def _trained_entries(base: PreTrainedModel) -> Catalog:
    """What files hold of the parameters that are trained."""
    trained = {name for name, parameter in base.named_parameters() if parameter.requires_grad}
    return [entry for entry in catalog_model(base) if entry.owner in trained]


def new_rows(catalog: Catalog, folder: TensorFolder, model: nn.Module) -> dict[str, torch.Tensor]:
    """For embedding and head with more rows than the files hold: the mean of the old rows, and so in a head's bias."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model)}
    first = {id(parameter): _plain_name(name) for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {_plain_name(name): first[id(parameter)] for name, parameter in every if ".modules_to_save." not in name}
    means: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        plain = _plain_name(name)
        entry = next((entry for entry in catalog if entry.owner == tied.get(plain, plain)), None)
        if entry is not None and len(shape) <= 2 and entry.shape[:1] < shape[:1] and entry.shape[1:] == shape[1:]:
            means[name] = folder.read(entry.name).float().mean(0)
    return means


def _plain_name(name: str) -> str:
    """A name without what peft puts into it."""
    plain = name.removeprefix("base_model.model.")
    for part in (".original_module.", ".modules_to_save.default.", ".base_layer."):
        plain = plain.replace(part, ".")
    return plain


def new_scores(model: nn.Module, name: str | None) -> dict[str, torch.Tensor]:
    """A new score head begins at zero, so that every answer has the same score."""
    if name is None:
        return {}
    heads = [(other, tensor) for other, tensor in stored_tensors(model) if SCORE_HEAD in other.split(".")]
    return {other: torch.zeros(tensor.shape[-1]) for other, tensor in heads}
