"""A model, whole or base and adapter, loaded to answer: device, number type, checks of its files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftlite.checkpoint.catalog import catalog_model, check_adapter, stored_tensors, take_prefixes
from swiftlite.checkpoint.described import FLOATS
from swiftlite.checkpoint.safetensors_files import ADAPTER, TensorEntry, inspect_file
from swiftlite.checkpoint.tensor_writer import NAMES
from swiftlite.checkpoint.weights import TensorFolder, fill, match_model, materialize
from swiftlite.config.names import PLAIN_MODEL, codes_section
from swiftlite.errors import UserError, first_line
from swiftlite.host_memory import check_host_memory, fits_host_memory
from swiftlite.imports import import_package
from swiftlite.models.anatomy import SCORE_HEAD, check_plain_weights, unread_codes
from swiftlite.models.architecture import auto_class
from swiftlite.models.dtypes import fast_at_bf16, named_dtype, source_dtype
from swiftlite.models.load import (
    ADDS_TO_MASK,
    build_model,
    hub_errors,
    load_config,
    model_folder,
    own_attention,
    quiet,
)
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.tuners import count_parameters, grow_vocabulary
from swiftlite.quick_imports import quick_imports
from swiftlite.serving.source import ModelSource, check_base_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NO_TEMPLATE = "none"


def load_for_answers(
    source: ModelSource,
    *,
    precision: str = "auto",
    chat_template: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    alone: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode on its device (a GPU where there is one), and the tokenizer.

    chat_template: a built-in name, a Jinja file, or `none` for plain completion; alone: False where other processes
    load theirs at the same time, so that nobody knows whose memory is free. Raises UserError.
    """
    tensors = check_base_folder(source, revision)
    config = load_config(source.base, revision=revision, trust_remote_code=trust_remote_code)
    tokenizer = tokenizer_of(
        source, chat_template=chat_template, revision=revision, trust_remote_code=trust_remote_code
    )
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = answer_dtype(precision, device, config)
    classifier = source.is_classifier()
    if classifier and source.adapter is not None:
        config.num_labels = 1  # a reward model's
    known = {"revision": revision, "trust_remote_code": trust_remote_code, "classifier": classifier}
    if alone:
        build = partial(build_model, source.base, config, dtype=dtype, attention="eager", **known)
        _check_memory(tensors, dtype, source, build)
    weights = _codes_of(source.base, config, revision)
    beside = SCORE_HEAD if source.adapter else None
    if weights is None:
        model = _load_whole(source.base, config, dtype, from_adapter=beside, **known)
    else:
        model = build_model(source.base, config, dtype=dtype, attention="eager", **known)
        _read_codes(model, weights, from_adapter=beside)
    if source.adapter is not None:
        grow_vocabulary(model, len(tokenizer))  # the adapter may have brought new tokens
        model = _add_adapter(model, source.adapter)
    return model.to(device).eval(), tokenizer


def tokenizer_of(
    source: ModelSource, *, chat_template: str | None, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer alone. chat_template: as of `load_for_answers`. Raises UserError."""
    plain = chat_template is not None and chat_template.lower() == NO_TEMPLATE
    tokenizer = load_tokenizer(
        source.base,
        tokenizer=source.tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        chat_template=None if plain else chat_template,
    )
    if plain:
        tokenizer.chat_template = None
    return tokenizer


def _check_memory(
    tensors: dict[str, TensorEntry], dtype: torch.dtype, source: ModelSource, build: Callable[[], PreTrainedModel]
) -> None:
    """Raises UserError where numbers in another type than that of the files are more than this machine has memory for:
    those of the same type may stay where they are, on the disk. build: makes the model on `meta`."""
    other = sum(prod(entry.shape) for entry in tensors.values() if entry.dtype in FLOATS - {NAMES[dtype]})
    if not fits_host_memory(other * dtype.itemsize):  # the model may leave some of them out, as those that see images
        other = min(other, count_parameters(build())[1])
    check_host_memory(
        other * dtype.itemsize,
        f"the model's weights in {str(dtype).removeprefix('torch.')}",
        where=f"--model {source.base}",
        fix="use a smaller model, or a machine with more memory",
    )


def _codes_of(source: str, config: PretrainedConfig, revision: str | None) -> TensorFolder | None:
    """The files where they hold codes that are read here, whatever config.json says: transformers would take 8-bit
    floats for numbers where it says nothing. None where they hold numbers, or codes that transformers reads. Raises
    UserError for codes of a method that it passes over."""
    if unread_codes(config) is not None:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        said = config.to_dict().get("quantization_config")
        method = said.get("quant_method") if isinstance(said, dict) else None
        if not isinstance(method, str) or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            check_plain_weights(config, source, PLAIN_MODEL)
        return None
    weights = TensorFolder(model_folder(source, revision=revision))
    return weights if weights.coded or codes_section(config.to_dict()) else None


def _load_whole(
    source: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    revision: str | None,
    trust_remote_code: bool,
    classifier: bool,
    from_adapter: str | None,
) -> PreTrainedModel:
    """The model with every weight read from safetensors by transformers. from_adapter: a module the adapter will bring.

    What that would leave random or mismatched is an error here: raises UserError where a tensor is missing, foreign or
    of another shape.
    """
    with hub_errors(source, "model"), quiet():
        model, report = auto_class(config, classifier=classifier).from_pretrained(
            source,
            config=config,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # collected below into one message instead of the first of many
        )
    _check_report(source, report, from_adapter)
    if config.model_type in ADDS_TO_MASK:
        model.set_attn_implementation("eager")
    return model


def _read_codes(model: PreTrainedModel, weights: TensorFolder, *, from_adapter: str | None) -> None:
    """Give a model on `meta` memory, and the numbers that codes stand for, as in training: transformers has kernels for
    some of them, on some GPUs."""

    def brought(name: str) -> bool:
        return name.split(".")[0] == from_adapter

    model.set_attn_implementation(own_attention(model))
    take_prefixes(model, weights.entries)
    catalog = match_model(weights, [e for e in catalog_model(model) if not brought(e.name)], model)
    materialize(model, torch.device("cpu"))
    fill(
        stored_tensors(model),
        [(weights, catalog)],
        lambda name, _, box: torch.zeros(box.shape) if brought(name) else None,
    )


def _check_report(source: str, report: dict, from_adapter: str | None) -> None:
    missing = sorted(key for key in report["missing_keys"] if key.split(".")[0] != from_adapter)
    foreign = sorted(report["unexpected_keys"])
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in report["mismatched_keys"]]
    for names, problem in ((mismatched, "have another shape than config.json says"), (missing, "are missing")):
        if names:
            shown = ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            strange = f"; the files hold names it does not know, such as {foreign[0]}" if foreign else ""
            raise UserError(
                f"{len(names)} tensors of the model {problem}: {shown}{strange}",
                where=source,
                fix="check that config.json and the safetensors files belong to the same model",
            )


def answer_dtype(precision: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    """`auto`: on a GPU the type of the model's files, on a CPU bf16 where it is fast, else fp32. Raises UserError."""
    if (named := named_dtype(precision, "--precision", kind="precision")) is not None:
        return named
    if device.type == "cuda":
        return source_dtype(config)
    return torch.bfloat16 if fast_at_bf16(device) else torch.float32


def _add_adapter(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    with quick_imports():
        peft = import_package("peft", "the adapter")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = peft.PeftModel.from_pretrained(model, str(adapter))
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        raise UserError(
            f"the adapter cannot be put on the model: {first_line(error)}",
            where=str(adapter),
            fix="give the base model that the adapter was trained on with --model",
        ) from error
    check_adapter(wrapped, inspect_file(adapter / ADAPTER), adapter)
    return wrapped
