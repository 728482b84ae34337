"""Hugging Face configs and the structure of models, from a local folder or the hub."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.config.names import ADAPTER_CONFIG, CODES_SECTIONS, HUB_ID, check_name
from swiftlite.errors import SwiftliteError, UserError, is_out_of_memory, kind_and_words
from swiftlite.hub import stay_offline_without_network
from swiftlite.models.architecture import auto_class
from swiftlite.models.overrides import overridden
from swiftlite.postponed import register_meta_kernels
from swiftlite.untrusted import read_json_file

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.schema import RunConfig

FILES = ["*.safetensors", "*.json"]
CHECK_FILES = "check the files of the folder"
CHECK_NAME = "check the name and the network, log in with `hf auth login` for a gated model, or give a local folder"
FIXES = {  # by words of transformers
    "contains custom code": "read that code, and add --trust-remote-code to run it",
    "does not recognize this architecture": "a newer transformers may know it: pip install --upgrade transformers",
}
NOT_OURS = ["*/*", "consolidated*"]  # the same weights once more, in their maker's own format
ADDS_TO_MASK = {"doge"}  # transformers 5.17 hands it no mask with sdpa, and its tokens see later ones


def check_model_path(model: str) -> None:
    """A name that looks like a path must exist. Raises UserError."""
    check_name(model, "--model")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            fix = "name a folder that save_pretrained wrote" + result_inside(path, "config.json")
            if adapter := next((each for each in (path, path / "model") if (each / ADAPTER_CONFIG).is_file()), None):
                fix = f"this is an adapter: merge it by `swiftlite export`, or name its base and --adapter {adapter}"
            raise UserError("the model folder has no config.json", where=str(path), fix=fix)
        _check_config(path / "config.json")
        return
    if path.exists() or not HUB_ID.fullmatch(model):
        of_model = path.is_file() and any((path.parent / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
        raise UserError(
            "the model is neither a folder nor a hub id",
            where=f"--model {model}",
            fix=f"name the folder of the file: {path.parent}"
            if of_model
            else "check the path, or name a model of the hub as OWNER/NAME",
        )


def result_inside(folder: Path, file: str) -> str:
    """Words that point to the result of a run, where a folder is that of one."""
    return f": {folder / 'model'}" if (folder / "model" / file).is_file() else ""


def read_settings(path: Path) -> dict[str, Any]:
    """What a small JSON file says. Raises UserError where it is none, or cannot be read."""
    try:
        config = read_json_file(path)
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror}"
        raise UserError(what, where=str(path), fix="check the file and its rights") from error
    except ValueError as error:
        raise UserError(
            f"{path.name} is not valid JSON: {error}", where=str(path), fix="copy the file again"
        ) from error
    return config if isinstance(config, dict) else {}


def _check_config(path: Path) -> None:
    attention = next((str(value) for value in _attentions(read_settings(path)) if "/" in str(value)), None)
    if attention is not None:  # OWNER/KERNEL: transformers would fetch it and run it
        raise UserError(
            f"{path.name} asks for code of the hub: {attention[:80]!r} as attn_implementation",
            where=str(path),
            fix="take the line out of the file",
        )


def _attentions(config: Any) -> Iterator[Any]:
    """What a config says of attention, of its parts too."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if "attn_implementation" in key:
            yield value
        yield from _attentions(value)


def load_config(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: Mapping[str, str] | None = None,
) -> PretrainedConfig:
    """The model's config. overrides: what its file is to say instead. Raises UserError where it cannot be had."""
    from transformers import AutoConfig

    check_model_path(model)
    with hub_errors(model, "config"):
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
        return overridden(config, model, revision, overrides) if overrides else config


def load_config_of(config: RunConfig) -> PretrainedConfig:
    """The config of the model that a run begins with. Raises UserError where it cannot be had."""
    return load_config(
        config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        overrides=config.config_overrides,
    )


def build_model(
    source: str,
    model_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attention: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    classifier: bool = False,
) -> PreTrainedModel:
    """The causal language model with every parameter on `meta`: its structure, without memory for weights.

    Buffers that no file holds (the frequencies of rotary embeddings) are real. source: where the generation config is,
    a folder or hub id; attention: a name known to transformers' attention interface; classifier: as in
    `import_architecture`; a class that does not go through that interface has attention of its own. Raises UserError.
    """
    from transformers import GenerationConfig

    auto = auto_class(model_config, classifier=classifier)
    known = auto._model_mapping.get(type(model_config), None)
    if known is not None and not known._supports_attention_backend:
        attention = own_attention(known)
    with hub_errors(source, "model"), quiet(), _parameters_on_meta():
        try:
            model = auto.from_config(
                model_config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
        except KeyError as error:
            if error.args != (attention,):
                raise
            raise UserError(
                f"{model_config.model_type} has a table of its own attention functions in transformers, so packed "
                "documents cannot be kept apart",
                fix="use a model whose attention goes through transformers' attention interface",
            ) from error
    model.name_or_path = model.config.name_or_path = model_config.name_or_path  # the text's own config bears no name
    for part in (model.config, model.config.get_text_config()):
        for key in CODES_SECTIONS:  # codes in its files are read as numbers
            part.__dict__.pop(key, None)
    if not model.can_generate():
        return model
    with contextlib.suppress(OSError):  # many models have none
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return model


def own_attention(model: PreTrainedModel | type[PreTrainedModel]) -> str:
    """The name of the fastest attention that transformers itself has for a model, on any device."""
    return "sdpa" if model._supports_sdpa and model.config_class.model_type not in ADDS_TO_MASK else "eager"


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Each parameter loses its memory the moment a module registers it, before anything is written to it. Nothing is
    drawn for it either: on `meta` that is done in Python, by code that imports sympy (0.3 s). Other operations that
    are done in Python there are registered when there is one."""
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    drawing = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
    empty = torch.ops.aten.empty.memory_format
    register = nn.Module.register_parameter

    class Construction(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator in drawing and args[0].is_meta:
                return args[0]
            named = kwargs or {}
            try:
                return operator(*args, **named)
            except NotImplementedError:  # which is a RuntimeError
                if not register_meta_kernels():
                    raise
                return operator(*args, **named)
            except RuntimeError as error:
                if operator is not empty or not is_out_of_memory(error):
                    raise
                # experts of a layer may be larger than the machine
                return operator(*args, **named | {"device": "meta"})

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta
    try:
        with Construction():
            yield
    finally:
        nn.Module.register_parameter = register


def model_folder(source: str, *, revision: str | None = None) -> Path:
    """The local folder of a model's files; of a hub id, once they are downloaded. Raises UserError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    with hub_errors(source, "model"):
        folder = snapshot_download(source, revision=revision, allow_patterns=FILES, ignore_patterns=NOT_OURS)
    return Path(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
def hub_errors(source: str, what: str) -> Iterator[None]:
    """Turn what transformers and the hub raise for a bad source into one clear error."""
    if not Path(source).expanduser().is_dir():
        stay_offline_without_network()
    try:
        yield
    except SwiftliteError:
        raise
    except Exception as error:  # tokenizers raises no narrower type
        words = kind_and_words(error) if isinstance(error, KeyError) else str(error)  # which says the key alone
        said = [line.strip() for line in words.splitlines() if line.strip()] or [type(error).__name__]
        text = " ".join(said[: 2 if said[0].endswith(":") else 1])[:500]  # they repeat what the files say
        local = Path(source).expanduser().is_dir()
        general = CHECK_FILES if local else CHECK_NAME
        fix = next((fix for words, fix in FIXES.items() if words in text), general)
        raise UserError(f"the {what} cannot be loaded: {text}", where=source, fix=fix) from error
