"""What a model's config.json is to say instead of what it says: `--config-overrides`."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swiftlite.config.flags import nearest
from swiftlite.config.names import SIZE
from swiftlite.config.types import said_value
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.schema import RunConfig

CHANGE_THESE = "change what config.json is to say"
ROTARY = "rope_parameters"
# What a rotary embedding is scaled from, whatever by.
UNSCALED = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
TRAINED_FOR = "original_max_position_embeddings"
FROM_LENGTH = ("yarn", "longrope", "llama3")  # kinds that want to know for how many positions it was trained
# What transformers says of a rotary embedding that is none, and goes on.
OF_NO_ROTARY = re.compile("Unrecognized keys|Missing validation|`rope_parameters`'s")
# No part of a model's shape.
FIXED = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "_name_or_path"}


def overridden(
    config: PretrainedConfig, model: str, revision: str | None, overrides: Mapping[str, str]
) -> PretrainedConfig:
    """A config of the same class out of its file's own settings with others among them, so that what the class makes of
    them is made anew. Raises UserError."""
    settings, _ = config.get_config_dict(model, revision=revision)
    of_file = copy.deepcopy(settings)
    text, known = settings.get("text_config") or settings, config.get_text_config()
    where, wanted, other_names = _as_written(overrides), {}, {"rope_scaling": ROTARY} | known.attribute_map
    for key, said in overrides.items():
        name = other_names.get(key, key)
        if name in wanted:
            raise UserError(f"{known.model_type} calls two of these the same: {name}", where=where, fix="give one")
        wanted[name] = _checked(known, key, name, said_value(said), text)
    _fit_layers(text, known, wanted)
    _fit_heads(text, known, wanted)
    if ROTARY in wanted:
        wanted[ROTARY] = _fitted_rotary(known, wanted[ROTARY])
        with _faults_of_rotary() as before:
            type(config).from_dict(of_file)
    for other, name in other_names.items():
        if name in wanted:
            text.pop(other, None)  # another name for it, which would win
    text |= wanted
    try:
        with _faults_of_rotary() as faults:
            made = type(config).from_dict(settings)
        if ROTARY in wanted and (new := [fault for fault in faults if fault not in before]):
            raise ValueError(new[0])
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


def _checked(known: PretrainedConfig, key: str, name: str, value: Any, written: Mapping[str, Any]) -> Any:
    """The value in the type that the class has. name: what the class calls the key; written: what the file says."""
    where, says = f"--config-overrides {key}", known.to_dict()
    if name not in says or name in FIXED:
        guess = nearest(key, says.keys() - FIXED)
        fix = f"did you mean {guess}?" if guess else f"config.json has {', '.join(sorted(written.keys() - FIXED))}"
        if name in UNSCALED and ROTARY in says:  # which older files have beside it
            fix = f'write {ROTARY}={{"{name}": {value}}}'
        raise UserError(f"{known.model_type} has no setting {key} that can be another", where=where, fix=fix)
    kind = type(says[name])
    if kind is float and type(value) is int:
        return float(value)
    ends = name.endswith("_token_id") and {type(value), kind} == {int, list}  # one, or several
    if None not in (says[name], value) and type(value) is not kind and not ends:
        what = f"{value!r} is no {kind.__name__}, which {key} is"
        raise UserError(what, where=where, fix="write it as config.json does")
    least = 1 if SIZE.search(key) else 0
    if kind is int is type(value) and value < least <= says[name]:
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


def _fitted_rotary(known: PretrainedConfig, value: dict[str, Any] | None) -> dict[str, Any]:
    """A rotary embedding that is scaled otherwise, of the model's own frequencies; by None not at all. Raises
    UserError."""
    has = getattr(known, ROTARY) or {}
    kinds = [name for name, part in has.items() if isinstance(part, dict)]
    if not kinds:
        return _scaled(known, has, value)
    value = dict.fromkeys(kinds) if value is None else value
    if strange := sorted(value.keys() - kinds):
        what = f"config.json says {ROTARY} for each kind of layer, and {strange[0]} is none"
        raise UserError(what, where=f"--config-overrides {ROTARY}", fix=f"give them for {' and '.join(kinds)}")
    for name, part in value.items():
        if not isinstance(part, dict | None):
            what = f"{part!r} is no dict, which {ROTARY} of {name} is"
            raise UserError(what, where=f"--config-overrides {ROTARY}", fix="write it as config.json does")
    return {name: _scaled(known, has[name], value[name]) if name in value else has[name] for name in kinds}


def _scaled(known: PretrainedConfig, has: dict[str, Any], value: dict[str, Any] | None) -> dict[str, Any]:
    """value: anew where it names a kind of scaling, else changes to what the model has."""
    unscaled = {name: has[name] for name in UNSCALED if name in has}
    if value is None:
        return unscaled
    value = dict(value)
    if "type" in value:  # its older name
        value.setdefault("rope_type", value.pop("type"))
    made = (unscaled if "rope_type" in value else has) | value
    if made.get("rope_type") in FROM_LENGTH:
        made.setdefault(TRAINED_FOR, has.get(TRAINED_FOR) or known.max_position_embeddings)
    return made


@contextlib.contextmanager
def _faults_of_rotary() -> Iterator[list[str]]:
    """What transformers says against the rotary embedding of a config that is made meanwhile."""
    found: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if OF_NO_ROTARY.match(record.getMessage()):
                found.append(record.getMessage())

    logger, listening = logging.getLogger("transformers.modeling_rope_utils"), Listening()
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(listening)
    try:
        yield found
    finally:
        logger.removeHandler(listening)
        logger.setLevel(level)
