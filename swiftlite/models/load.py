"""Hugging Face configs and the structure of models, from a local folder or the hub."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.config.flags import nearest
from swiftlite.config.names import ADAPTER_CONFIG, CODES_SECTIONS, HUB_ID, check_name
from swiftlite.config.types import said_value
from swiftlite.errors import SwiftliteError, UserError, is_out_of_memory, kind_and_words
from swiftlite.hub import stay_offline_without_network
from swiftlite.models.architecture import auto_class
from swiftlite.postponed import register_meta_kernels
from swiftlite.untrusted import read_json_file

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from swiftlite.config.schema import RunConfig

FILES = ["*.safetensors", "*.json"]
CHECK_FILES = "check the files of the folder"
CHANGE_THESE = "change what config.json is to say"
CHECK_NAME = "check the name and the network, log in with `hf auth login` for a gated model, or give a local folder"
FIXES = {  # by words of transformers
    "contains custom code": "read that code, and add --trust-remote-code to run it",
    "does not recognize this architecture": "a newer transformers may know it: pip install --upgrade transformers",
}
FIXED = {"model_type", "architectures", "auto_map", "transformers_version", "dtype"}  # no part of a model's shape
SIZE = re.compile(r"(_size|_dim|_embd|_layers?|_heads?)$")  # what configs call numbers that cannot be 0
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
        return _overridden(config, model, revision, overrides) if overrides else config


def load_config_of(config: RunConfig) -> PretrainedConfig:
    """The config of the model that a run begins with. Raises UserError where it cannot be had."""
    return load_config(
        config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        overrides=config.config_overrides,
    )


def _overridden(
    config: PretrainedConfig, model: str, revision: str | None, overrides: Mapping[str, str]
) -> PretrainedConfig:
    """A config of the same class out of its file's own settings with others among them, so that what the class makes of
    them is made anew. Raises UserError."""
    settings, _ = config.get_config_dict(model, revision=revision)
    text, known = settings.get("text_config") or settings, config.get_text_config()
    where, wanted = _as_written(overrides), {}
    for key, said in overrides.items():
        name = known.attribute_map.get(key, key)
        if name in wanted:
            raise UserError(f"{known.model_type} calls two of these the same: {name}", where=where, fix="give one")
        wanted[name] = _checked_override(known, key, said_value(said), text)
    _fit_layers(text, known, wanted)
    _fit_heads(text, known, wanted)
    for other, name in (known.attribute_map | {"rope_scaling": "rope_parameters"}).items():
        if name in wanted:
            text.pop(other, None)  # another name for it, which would win
    text |= wanted
    try:
        made = type(config).from_dict(settings)
    except Exception as error:  # classes raise whatever they like
        what = f"no {known.model_type} can be like that: {' '.join(str(error).split())[:300]}"
        raise UserError(what, where=where, fix=CHANGE_THESE) from error
    has = made.get_text_config()
    if lost := [name for name, value in wanted.items() if value is not None and not _holds(getattr(has, name), value)]:
        what = f"the class of {known.model_type} makes {getattr(has, lost[0])!r:.200} of {lost[0]}"
        raise UserError(what, where=where, fix=f"leave {lost[0]} out, or see what else config.json says of it")
    made._name_or_path = config.name_or_path
    return made


def _as_written(overrides: Mapping[str, str]) -> str:
    return "--config-overrides " + " ".join(f"{key}={said}" for key, said in overrides.items())


@contextlib.contextmanager
def told_of_overrides(config: RunConfig) -> Iterator[None]:
    """What a class raises while it is built or run names `--config-overrides`, if there are any: no file is to blame,
    nor the architecture."""
    try:
        yield
    except UserError as error:
        if not config.config_overrides or error.__cause__ is None:
            raise
        raise UserError(error.what, where=_as_written(config.config_overrides), fix=CHANGE_THESE) from error


def _holds(found: Any, wanted: Any) -> bool:
    """Whether a setting is as wanted, to which classes may add."""
    if not isinstance(wanted, dict):
        return found == wanted
    found = {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    return all(key in found and found[key] == value for key, value in wanted.items())


def _checked_override(known: PretrainedConfig, key: str, value: Any, written: Mapping[str, Any]) -> Any:
    """The value in the type that the class has. written: what the file says."""
    where, says, name = f"--config-overrides {key}", known.to_dict(), known.attribute_map.get(key, key)
    if name not in says or name in FIXED:
        guess = nearest(key, says.keys() - FIXED)
        fix = f"did you mean {guess}?" if guess else f"config.json has {', '.join(sorted(written.keys() - FIXED))}"
        raise UserError(f"{known.model_type} has no setting {key} that can be another", where=where, fix=fix)
    kind = type(says[name])
    if kind is float and type(value) is int:
        return float(value)
    if None not in (says[name], value) and type(value) is not kind:
        what = f"{value!r} is no {kind.__name__}, which {key} is"
        raise UserError(what, where=where, fix="write it as config.json does")
    least = 1 if SIZE.search(key) else 0
    if kind is int and value is not None and value < least <= says[name]:
        raise UserError(f"{key} cannot be {value}", where=where, fix=f"give {least} or more")
    return value


def _fit_heads(text: dict[str, Any], known: PretrainedConfig, wanted: Mapping[str, Any]) -> None:
    """Keep the size of a head what the other sizes make of it, where it is. Some classes have a number of their own."""
    names = [known.attribute_map.get(key, key) for key in ("hidden_size", "num_attention_heads")]
    width, count = (getattr(known, name, None) for name in names)
    if not (width and count and wanted.keys() & set(names)) or text.get("head_dim") != width // count:
        return
    width, count = (wanted.get(name, old) for name, old in zip(names, (width, count), strict=True))
    if width and count and width % count == 0:
        text["head_dim"] = width // count


def _fit_layers(settings: dict[str, Any], known: PretrainedConfig, wanted: Mapping[str, Any]) -> None:
    """Cut what a file says layer by layer to fewer layers. Raises UserError where it does not say it of as many."""
    count = wanted.get(known.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    if count is None:
        return
    depth = known.num_hidden_layers
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == depth and key not in wanted:
            if count > depth:
                raise UserError(
                    f"config.json says {key} of {depth} layers",
                    where=f"--config-overrides num_hidden_layers={count}",
                    fix=f"override {key} too, with a list of {count} as JSON",
                )
            settings[key] = value[:count]


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
