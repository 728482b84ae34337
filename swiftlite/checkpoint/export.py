"""A trained model as every other tool reads it: safetensors, config and tokenizer, or a peft adapter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swiftlite.checkpoint.catalog import Entry, catalog_adapter, catalog_model, stored_tensors
from swiftlite.checkpoint.tensor_writer import FilePlan, parse_size
from swiftlite.config.names import GENERATION_CONFIG
from swiftlite.hub import kept_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_STEM, MODEL_STEM = "adapter_model", "model"
# How images become numbers, of models that take some: engines do not load such a model without them.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class ModelFiles:
    """What the result consists of. plan: its tensors; dtype: of config.json; adapter: it is one; rounded: they hold a
    rounded copy of the weights that are trained, which are kept beside them then; gives_router_logits: what config.json
    says of it, None for what the config in training does; quantization: what it says of weights that are codes;
    processors: texts of `PROCESSORS`, by their names.
    """

    plan: FilePlan
    dtype: torch.dtype
    adapter: bool
    rounded: bool
    gives_router_logits: bool | None = None
    quantization: dict[str, Any] | None = None
    processors: Mapping[str, str] = field(default_factory=dict)


def plan_files(
    model: nn.Module,
    base: PreTrainedModel,
    *,
    dtype: torch.dtype,
    max_shard_size: str,
    stand_ins: Mapping[str, list[tuple[Entry, torch.dtype]]] | None = None,
) -> ModelFiles:
    """Lay the files out while the model is whole and on `meta`.

    model: a peft model (its adapter alone is saved, as it is trained) or `base` itself, saved as `dtype`; stand_ins:
    what files have in the place of some of its tensors, by their names on disk.
    """
    types = {name: tensor.dtype for name, tensor in stored_tensors(model)}
    if model is not base:
        pairs = [(entry, types[entry.owner]) for entry in catalog_adapter(model)]
        return ModelFiles(FilePlan(pairs, ADAPTER_STEM, None), dtype, adapter=True, rounded=False)
    weights = {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    weights -= kept_in_fp32(base)
    pairs = [(e, dtype if e.owner in weights else types[e.owner]) for e in catalog_model(base)]  # buffers stay exact
    pairs = [pair for whole in pairs for pair in (stand_ins or {}).get(whole[0].name, [whole])]
    rounded = any(p.requires_grad and dtype not in (p.dtype, torch.float32) for p in model.parameters())
    plan, processors = FilePlan(pairs, MODEL_STEM, parse_size(max_shard_size)), _processors_of(base.config)
    return ModelFiles(plan, dtype, adapter=False, rounded=rounded, processors=processors)


def kept_in_fp32(base: PreTrainedModel) -> set[str]:
    """The names of parameters that transformers has in fp32, in files too, whatever the type of a model: experts are
    chosen by them, and by rounded ones others would be."""
    parts = base._keep_in_fp32_modules_strict or ()
    return {name for name, _ in base.named_parameters() if any(part in name for part in parts)}


def _processors_of(config: PretrainedConfig) -> dict[str, str]:
    """From where the model is from, a folder or hub id; none of a model that takes text alone."""
    if config.get_text_config() is config or not config.name_or_path:
        return {}
    revision = getattr(config, "_commit_hash", None)
    found = {name: kept_file(config.name_or_path, name, revision) for name in PROCESSORS}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items() if path is not None}


def create_model_files(
    folder: Path,
    files: ModelFiles,
    model: nn.Module,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    stops: Sequence[int] = (),
) -> None:
    """Everything but the bytes of the tensors, by one process: configs, tokenizer, safetensors with their headers.

    stops: ids that end an answer, for generation_config.json; as in the source where none are given. An adapter has
    that file only where it ends answers otherwise than its base.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if files.adapter:
            _save_adapter_config(folder, model)
        else:
            _save_config(folder, base, files)
            for name, text in files.processors.items():
                (folder / name).write_text(text, encoding="utf-8")
        if base.can_generate():
            _save_generation(folder, base, stops, needed=not files.adapter)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    files.plan.create(folder)


def _save_adapter_config(folder: Path, model: nn.Module) -> None:
    written = copy.copy(model.peft_config["default"])
    for name, value in vars(written).items():
        if isinstance(value, set):  # which peft would write in another order each time
            setattr(written, name, sorted(value))
    written.inference_mode = True  # whoever loads it does not mean to train it, unless they say so
    written.save_pretrained(folder)


def _save_config(folder: Path, base: PreTrainedModel, files: ModelFiles) -> None:
    """A training's switch for the loss of routers is none of the result's: whoever loads that would compute the loss in
    each forward pass. transformers says of router logits that they should not be returned in inference."""
    written = copy.deepcopy(base.config)  # the model may be training meanwhile
    written._attn_implementation = None  # no file says it, and of one it refuses to write `output_attentions`
    written.dtype = files.dtype
    if files.gives_router_logits is not None:
        written.get_text_config().output_router_logits = files.gives_router_logits
    if files.quantization is not None:
        written.quantization_config = files.quantization
    written.architectures = [type(base).__name__]
    written.save_pretrained(folder)


def _save_generation(folder: Path, base: PreTrainedModel, stops: Sequence[int], *, needed: bool) -> None:
    """Engines know no other ends of answers. needed: also where they are those of the base.

    Not by save_pretrained, which refuses settings that it does not like, such as a temperature without sampling.
    """
    settings = copy.deepcopy(base.generation_config)
    changed = bool(stops) and list(stops) not in (settings.eos_token_id, [settings.eos_token_id])
    if changed:
        settings.eos_token_id, settings._from_model_config = list(stops), False
    if changed or needed:
        settings.to_json_file(folder / GENERATION_CONFIG)
