"""A model, whole or base and adapter, loaded to answer: device, number type, checks of its files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftlite.checkpoint.safetensors_files import inspect_model_folder
from swiftlite.errors import UserError
from swiftlite.models.load import load_config, load_model
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.tuners import grow_vocabulary
from swiftlite.serving.source import ModelSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_TEMPLATE = "none"


def load_for_answers(
    source: ModelSource,
    *,
    precision: str = "auto",
    chat_template: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode on its device, and the tokenizer.

    chat_template: a built-in name, a Jinja file, or `none` for plain completion. Raises UserError.
    """
    config = load_config(source.base, revision=revision, trust_remote_code=trust_remote_code)
    if Path(source.base).expanduser().is_dir():
        inspect_model_folder(Path(source.base).expanduser())
    plain = chat_template == NO_TEMPLATE
    tokenizer = load_tokenizer(
        source.base,
        tokenizer=source.tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        chat_template=None if plain else chat_template,
    )
    if plain:
        tokenizer.chat_template = None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(
        source.base,
        config,
        dtype=answer_dtype(precision, device, config),
        attention=None,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if source.adapter is not None:
        grow_vocabulary(model, len(tokenizer))  # the adapter may have brought new tokens
        model = _add_adapter(model, source.adapter)
    return model.to(device).eval(), tokenizer


def answer_dtype(precision: str, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    """`auto`: on a GPU the type of the model's files, on a CPU bf16 where it is fast, else fp32. Raises UserError."""
    if precision != "auto":
        if precision not in DTYPES:
            raise UserError(
                f"unknown precision {precision!r}", where="--precision", fix=f"give auto, {', '.join(DTYPES)}"
            )
        return DTYPES[precision]
    if device.type == "cuda":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    info = Path("/proc/cpuinfo")
    return torch.bfloat16 if info.is_file() and "amx_bf16" in info.read_text() else torch.float32


def _add_adapter(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    import peft

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.PeftModel.from_pretrained(model, str(adapter))
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        raise UserError(
            f"the adapter cannot be put on the model: {str(error).splitlines()[0]}",
            where=str(adapter),
            fix="give the base model that the adapter was trained on with --model",
        ) from error
