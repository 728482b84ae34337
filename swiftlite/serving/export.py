"""`swiftlite export`: an adapter merged into its base, a model in another number type, in 8 or 4 bits or in other
shards, checked.

Merging happens in fp32 and is rounded once, at the end. Nothing is believed: the merged model must answer prompts as
base and adapter do, and what lies on the disk must be its weights, bit for bit, before the folder gets its name.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from swiftlite.checkpoint.boxes import Holding, holdings, whole
from swiftlite.checkpoint.catalog import stored_tensors
from swiftlite.checkpoint.export import ModelFiles, create_model_files, kept_in_fp32, plan_files
from swiftlite.checkpoint.folder import atomic_folder
from swiftlite.checkpoint.space import check_place, check_space
from swiftlite.checkpoint.weights import TensorFolder, read_overlap
from swiftlite.config.types import DTYPE, Size
from swiftlite.data.tokens.chat_template import written
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.errors import RunError, UserError, first_line
from swiftlite.models.adapters import check_start
from swiftlite.models.anatomy import check_plain_weights
from swiftlite.models.dtypes import named_dtype, source_dtype
from swiftlite.models.load import build_model, load_config
from swiftlite.serving.compress import Chosen, choose, named_format
from swiftlite.serving.load import load_for_answers
from swiftlite.serving.origin import rounding_of_training
from swiftlite.serving.prompts import check_utf8
from swiftlite.serving.source import ModelSource, find_source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain step by step.",
    "Übersetze ins Englische: Der frühe Vogel fängt den Wurm. 你好，世界！",
)
MERGE_TOLERANCE = 1e-4  # of logits by their 2-norm: one product in place of two, in fp32, through all layers
SPARE = 1.01  # disk beside the tensors: headers, tokenizer, configs


@dataclass(frozen=True)
class ExportOptions:
    """dtype: auto (that of the base), bf16, fp16 or fp32; quantization: none, fp8, int8 or int4; prompts: what the
    result is checked with."""

    model: str | None
    adapter: str | None
    output: Path
    dtype: str = "auto"
    quantization: str = "none"
    max_shard_size: str = "5GB"
    prompts: list[str] = field(default_factory=list)
    chat_template: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Exported:
    """What was done. size: bytes of tensors; merge: relative difference of logits that merging made in fp32, None
    without an adapter; total: the same of the result, rounded; agreement: share of positions whose likeliest token is
    that of base and adapter; chosen: what of it is codes, None without quantization;
    untrained: why these are not the codes that a run was trained with, None where they are, or it was with none.
    """

    folder: Path
    dtype: torch.dtype
    size: int
    merge: float | None
    total: float
    agreement: float
    chosen: Chosen | None
    untrained: str | None


def run_export(options: ExportOptions) -> Exported:
    """Write `options.output`. Raises UserError for what the user can mend, RunError where a check fails."""
    if options.output.exists():
        raise UserError(
            f"{options.output} is already there", where="--output-dir", fix="name a folder that does not exist yet"
        )
    check_place(options.output)
    largest = _shard_size(options.max_shard_size)
    source = find_source(options.model, options.adapter)
    config, dtype = _types(options, source)
    form = named_format(options.quantization)
    untrained = None if form is None else _untrained(source, source_dtype(config), form, dtype)
    chosen = None if form is None else _chosen(options, source, config, form)
    model, tokenizer = load_for_answers(
        source,
        precision="fp32",
        chat_template=options.chat_template,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        device=torch.device("cpu"),  # a model that fits no GPU in fp32 may well fit the memory
    )
    prompts = [_encode(text, tokenizer) for text in options.prompts or PROMPTS]
    logits = _logits(model, prompts)
    merge = None
    if source.adapter is not None:
        model = _merged(model, source.adapter)
        merge = _relative(_logits(model, prompts), logits)
        if merge > MERGE_TOLERANCE:
            raise RunError(
                f"the merged model's logits differ by {merge:.1e} from those of base and adapter",
                where=str(source.adapter),
                fix="nothing was written; serve base and adapter as they are, and please report model and adapter",
            )
    _check_range(model, dtype)
    files = _plan(model, dtype, largest, chosen)
    _write(options.output, files, model, tokenizer, chosen)
    _round(model, dtype)
    if chosen is not None:
        chosen.restore(model, options.output)
    with chosen.rounded_inputs(model) if chosen is not None else nullcontext():
        rounded = _logits(model, prompts)
    total, agreement = _relative(rounded, logits), _agreement(rounded, logits)
    return Exported(options.output, dtype, files.plan.size, merge, total, agreement, chosen, untrained)


def _untrained(source: ModelSource, before: torch.dtype, form: str, dtype: torch.dtype) -> str | None:
    """As `Exported` has it. before: the type of the files that are exported, to which `--qat` has rounded weights."""
    trained = rounding_of_training(source)
    if trained == "none":
        return None
    if trained != form:
        return f"the run was trained with --qat {trained}, so what it bears is {trained} and not {form}"
    if dtype != before:
        return f"the run was trained with scales in {type_name(before)}: in {type_name(dtype)} many codes are others"
    return None


def _chosen(options: ExportOptions, source: ModelSource, config: PretrainedConfig, form: str) -> Chosen:
    """What becomes codes, found before anything is loaded. Raises UserError."""
    built = build_model(
        source.base,
        config,
        dtype=torch.float32,
        attention="eager",  # which every architecture has: nothing is computed
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        classifier=source.is_classifier(),
    )
    return choose(built, form)


def _plan(model: PreTrainedModel, dtype: torch.dtype, largest: str, chosen: Chosen | None) -> ModelFiles:
    if chosen is None:
        return plan_files(model, model, dtype=dtype, max_shard_size=largest)
    stand_ins = chosen.stand_ins(dtype)
    files = plan_files(model, model, dtype=dtype, max_shard_size=largest, stand_ins=stand_ins)
    return replace(files, quantization=chosen.section)


def _merged(model: nn.Module, adapter: Path) -> PreTrainedModel:
    """The base with the adapter in its weights. Raises UserError for a kind that cannot be merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    check_start(model.active_peft_config, adapter)
    base = model.get_base_model()
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if isinstance(embedding, BaseTunerLayer) and head is not None and embedding.weight is head.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())  # which the adapter of the embedding does not change
        base.config.get_text_config().tie_word_embeddings = False
    try:
        return model.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, ValueError) as error:
        kind = getattr(model.active_peft_config.peft_type, "value", "unknown")
        raise UserError(
            f"an adapter of the kind {kind} cannot be merged: {first_line(error)[:200]}",
            where=str(adapter),
            fix="serve base and adapter as they are",
        ) from error


def _shard_size(text: str) -> str:
    try:
        return TypeAdapter(Size).validate_python(text)
    except ValidationError as error:
        what = f"--max-shard-size is {text!r}: {error.errors()[0]['msg']}"
        raise UserError(what, where="--max-shard-size", fix="write it like 5GB") from error


def _types(options: ExportOptions, source: ModelSource) -> tuple[PretrainedConfig, torch.dtype]:
    """(the base's config, the number type of the result). Raises UserError where the base's weights are codes."""
    config = load_config(source.base, revision=options.revision, trust_remote_code=options.trust_remote_code)
    fix = "name the model that it was made from with --model, beside --adapter where there is one"
    check_plain_weights(config, str(source.base), fix)
    return config, named_dtype(options.dtype, "--dtype") or source_dtype(config)


def type_name(dtype: torch.dtype) -> str:
    """As flags have it: `bf16`."""
    name = str(dtype).removeprefix("torch.")
    return DTYPE.get(name, name)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """`[1, tokens]`. Raises UserError for what no tokens come of."""
    check_utf8(text, "--prompt")
    ids = _tokens(text, tokenizer)
    if not ids.numel():
        raise UserError("the prompt is empty", where="--prompt", fix="give at least one word")
    return ids


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        text = written(tokenizer, messages, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return tokenizer(text, return_tensors="pt")["input_ids"]


@torch.no_grad()
def _logits(model: nn.Module, prompts: list[torch.Tensor]) -> torch.Tensor:
    """fp32 `[all positions, vocabulary]`."""
    return torch.cat([model(input_ids=ids, use_cache=False).logits[0].float() for ids in prompts])


def _relative(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((logits - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()


def _agreement(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()


@torch.no_grad()
def _check_range(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises UserError for a weight that would be infinite in `dtype`."""
    limit = torch.finfo(dtype).max
    for name, tensor in stored_tensors(model):
        if tensor.is_floating_point() and tensor.numel():
            largest = max(abs(value.item()) for value in torch.aminmax(tensor))
            if math.isnan(largest):
                raise UserError(f"{name} holds numbers that are none (NaN)", fix="export another checkpoint of the run")
            if limit < largest < math.inf:
                raise UserError(
                    f"{name} holds {largest:.3g}, which {type_name(dtype)} has no number for",
                    where="--dtype",
                    fix="export with --dtype bf16 or fp32",
                )


@torch.no_grad()
def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The values that a model of `dtype` has, in fp32: what rounding to bf16 does to a product is not ours to judge."""
    exact = kept_in_fp32(model)
    for name, parameter in model.named_parameters():
        if name not in exact:
            parameter.copy_(parameter.to(dtype))


def _write(
    folder: Path,
    files: ModelFiles,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chosen: Chosen | None,
) -> None:
    check_space({folder: files.plan.size * SPARE}, "the result", fix="free space or name a folder on another disk")
    tensors = dict(stored_tensors(model)) | ({} if chosen is None else chosen.packed(model, files.dtype))
    with atomic_folder(folder, manifest=False, again="export again") as partial:
        stops = stop_tokens(model.generation_config, tokenizer) if model.can_generate() else ()
        create_model_files(partial, files, model, model, tokenizer, stops)
        files.plan.write(partial, {name: holdings(tensor) for name, tensor in tensors.items()})
        _read_back(partial, files, tensors)


def _read_back(folder: Path, files: ModelFiles, tensors: dict[str, torch.Tensor]) -> None:
    """Raise RunError where a file does not hold the model's own bits."""
    stored = TensorFolder(folder, as_stored=True)
    for slot in files.plan.slots:
        entry, tensor = slot.entry, tensors[slot.entry.owner]
        wanted = tensor[entry.box.slices_of(whole(tensor.shape))].to(slot.dtype)
        found = torch.empty_like(wanted)
        read_overlap(stored, entry, Holding(entry.box, found))
        if not torch.equal(found, wanted):
            raise RunError(
                f"{entry.name} was read back from the disk with other values", where=str(folder), fix="check the disk"
            )
