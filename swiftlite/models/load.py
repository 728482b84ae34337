"""Hugging Face configs, tokenizers and models from a local folder or the hub.

`from_pretrained` builds the model on `meta` and fills it straight from the memory-mapped safetensors, converting names
where hub and memory differ (experts of mixture models). What it would leave random or mismatched is an error here.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN_TEMPLATES = {"chatml": CHATML}


def check_model_path(model: str) -> None:
    """A name that looks like a path must exist. Raises UserError."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                "the model folder has no config.json", where=str(path), fix="name a folder that save_pretrained wrote"
            )
        _check_json(path / "config.json")
        return
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UserError(
            "the model is neither a folder nor a hub id",
            where=f"--model {model}",
            fix="check the path, or name a model of the hub as OWNER/NAME",
        )


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path.name} is not valid JSON: {error}", where=str(path), fix="copy the file again"
        ) from error


def load_config(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config. Raises UserError where it cannot be had."""
    from transformers import AutoConfig

    check_model_path(model)
    with _hub_errors(model, "config"):
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)


def load_tokenizer(
    model: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    new_tokens: list[str] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template and the new tokens that were asked for.

    chat_template: a built-in name (`chatml`) or a Jinja file. Raises UserError where it cannot be had.
    """
    from transformers import AutoTokenizer

    source = tokenizer or model
    check_model_path(source) if tokenizer is None else None
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            "the model folder has no tokenizer",
            where=str(folder),
            fix="copy tokenizer.json and tokenizer_config.json into it, or give --tokenizer",
        )
    with _hub_errors(source, "tokenizer"):
        loaded = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    if new_tokens:
        loaded.add_tokens(new_tokens)
    if chat_template is not None:
        loaded.chat_template = read_chat_template(chat_template)
    return loaded


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def read_chat_template(name: str) -> str:
    """The text of a built-in template or of a Jinja file. Raises UserError."""
    if name in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(BUILT_IN_TEMPLATES)
        raise UserError(
            "no such chat template", where=f"--chat-template {name}", fix=f"name a .jinja file or one of: {known}"
        )
    return path.read_text(encoding="utf-8")


def load_model(
    source: str,
    model_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attention: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model with every weight read from safetensors.

    source: folder or hub id; dtype: of all parameters; attention: a name known to transformers' attention interface.
    Raises UserError where the architecture does not fit or a tensor is missing, foreign or of another shape.
    """
    from transformers import AutoModelForCausalLM

    with _hub_errors(source, "model"), _quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # collected below into one message instead of the first of many
        )
    _check_report(source, report)
    return model


def _check_report(source: str, report: dict) -> None:
    missing, foreign = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' loading table: the same facts come as one error, or not at all. Its bars stay off."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)


@contextlib.contextmanager
def _hub_errors(source: str, what: str) -> Iterator[None]:
    """Turn what transformers and the hub raise for a bad source into one clear error."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        local = Path(source).expanduser().is_dir()
        fix = (
            "check the files of the folder"
            if local
            else "check the name and the network, log in with `hf auth login` for a gated model, or give a local folder"
        )
        raise UserError(f"the {what} cannot be loaded: {text}", where=source, fix=fix) from error
