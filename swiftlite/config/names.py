"""What users call models, data sets, files and folders: what a name stands for, and which names there can be none of.

An existing path always wins over a short name of the tables that ship with the recipes, and over what a hub has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.config.recipe import recipes_folder
from swiftlite.config.types import plain_word
from swiftlite.errors import UserError
from swiftlite.untrusted import existing, without_secrets

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

# The settings that name files and folders: what a run reads, its data sets, several names each, and where it writes.
SOURCES = ("model", "teacher", "tokenizer", "chat_template", "adapter")
DATASETS = ("dataset", "eval_dataset")
FUNCTIONS = ("reward", "tools")  # these name code and models, several each
NAMES = (*SOURCES, *DATASETS, "cache_dir", "engine_folder", "output_dir", "resume")
ADAPTER_CONFIG = "adapter_config.json"  # what makes a folder an adapter
GENERATION_CONFIG = "generation_config.json"
COMPRESSED_TENSORS = "compressed-tensors"  # `quant_method` of a config.json whose weights are codes, and our extra
CODES_SECTIONS = ("quantization_config", "compression_config")
PLAIN_MODEL = "name the model that it was made from, in bf16 or fp32"  # what to do where codes are not read
COMPRESSED_PACKAGE = "compressed_tensors"  # by which transformers reads them
SIZE = re.compile(r"(_size|_dim|_embd|_layers?|_heads?)$")  # what configs call numbers that cannot be 0
LONGEST_SYSTEM = 24 * 1024  # bytes of a system message, which is saved with the settings
LONGEST_NAME = 255  # bytes between two slashes, of every file system in use
LONGEST_PATH = 4095  # bytes that Linux takes of a whole path
# NAME[:SUBSET][@SPLIT][#COUNT][*WEIGHT]
SPEC = re.compile(r"(?P<name>.+?)(?P<subset>:[^:@#*/\\]+)?(?P<split>@[^@#*]+)?(?P<count>#\d+)?(?P<weight>\*[\d.]+)?")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?![\w./-])", re.ASCII)  # OWNER/NAME, behind which more may stand


def most_positions(settings: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model takes, by its config.json (of the text model); None where that does not say."""
    found = settings.get("max_position_embeddings") or settings.get("n_positions")  # GPT-2's name
    return found if isinstance(found, int) and found > 1 else None


def codes_section(settings: object) -> dict[str, Any]:
    """What a config.json says of weights that are codes: at the top, or among what it says of the text model; an older
    compressed-tensors had another name for it. Empty where they are numbers; of no method where it is no mapping."""
    settings = settings if isinstance(settings, dict) else {}
    for part in (settings, settings.get("text_config")):
        for key in CODES_SECTIONS if isinstance(part, dict) else ():
            if section := part.get(key):
                return section if isinstance(section, dict) else {"quant_method": None}
    return {}


def schemes_of(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What such a section of compressed-tensors says of each group of layers."""
    groups = section.get("config_groups")
    return [scheme for scheme in groups.values() if isinstance(scheme, dict)] if isinstance(groups, dict) else []


def gives_scores(architectures: object) -> bool:
    """Whether what a config.json has as `architectures` is a classifier, such as a reward model."""
    return isinstance(architectures, list) and any(
        str(one).endswith("ForSequenceClassification") for one in architectures
    )


@cache
def short_names(table: str) -> dict[str, str]:
    """Short name -> hub id. table: `models` or `datasets`."""
    import yaml

    path = recipes_folder() / f"{table}.yaml"
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def model_name(name: str) -> str:
    """The folder or hub id a model's name stands for.

    >>> model_name("Qwen-7B")
    'Qwen/Qwen2.5-7B-Instruct'
    """
    return placed(name, None) or short_names("models").get(plain_word(name), name)


def dataset_name(spec: str, base: Path | None = None) -> str:
    """The same for a data set, whose `:SUBSET@SPLIT#COUNT*WEIGHT` is kept; the table may know a subset and split.
    base: the recipe's folder, tried after the working folder."""
    if whole := placed(spec, base):
        return whole
    given = SPEC.fullmatch(spec)
    if given is None:
        return spec
    path = placed(given["name"], base)
    listed = short_names("datasets").get(plain_word(given["name"])) if path is None else None
    if listed is None:
        return (path or given["name"]) + spec[len(given["name"]) :]
    known = SPEC.fullmatch(listed)
    subset, split = (given[part] or known[part] or "" for part in ("subset", "split"))
    return known["name"] + subset + split + (given["count"] or "") + (given["weight"] or "")


def dataset_names(text: str, base: Path | None = None) -> list[str]:
    """The same for a value with several names in it, parted by blanks. A path may have blanks of its own."""
    words = text.split()
    if _is_known(text, base) or not all(_is_known(word, base) or HUB_ID.match(word) for word in words):
        words = [text]
    return [dataset_name(word, base) for word in words]


def _is_known(spec: str, base: Path | None) -> bool:
    given = SPEC.fullmatch(spec)
    name = given["name"] if given else spec
    return (
        placed(spec, base) is not None or placed(name, base) is not None or plain_word(name) in short_names("datasets")
    )


def system_text(given: str, base: Path | None = None) -> str:
    """The system message that a value stands for: itself, or what a .txt file holds. Raises UserError.

    What ends in .txt is always a file, so that a slip in its name is not learnt, and a message may not end so.
    """
    text = given
    if given.endswith(".txt"):
        path = placed(given, base)
        if path is None or not Path(path).is_file():
            fix = "check the path; of a message that ends so, end it with a full stop"
            raise UserError(f"there is no such file: {given[:80]}", where="--system", fix=fix)
        try:
            with Path(path).open("rb") as file:
                text = file.read(LONGEST_SYSTEM + 1).decode("utf-8-sig").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            fix = "give a text file in UTF-8"
            raise UserError(f"the system message cannot be read: {error}", where=path, fix=fix) from error
        check_text(text, path)
        if text.endswith(".txt"):
            raise UserError("the system message ends as the name of a file", where=path, fix="end it with a full stop")
    if len(text.encode()) > LONGEST_SYSTEM:
        what = f"the system message is longer than {LONGEST_SYSTEM // 1024} KiB"
        raise UserError(what, where="--system", fix="put what is so long into the rows")
    return text


def has_count(spec: str) -> bool:
    """Whether a data set says how many of its rows are taken."""
    given = SPEC.fullmatch(spec)
    return existing(spec) is None and given is not None and given["count"] is not None


def may_hold_texts(spec: str) -> bool:
    """Whether a data set can have .txt files, which a hub's cannot; a folder is not looked into."""
    given = SPEC.fullmatch(spec)
    places = [existing(spec), existing(given["name"]) if given else None]
    return ".txt" in spec.lower() or any(place is not None and place.is_dir() for place in places)


def check_text(text: str, where: str) -> None:
    """Raises UserError for a value that holds a secret, or that cannot be saved. where: who gave it."""
    if without_secrets(text) != text:
        raise UserError(
            "the value holds a password or a token, which would be saved with the run",
            where=where,
            fix="leave it out; log in with `hf auth login`, or set HF_TOKEN",
        )
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError("the value is not UTF-8", where=where, fix="rename it, or write the letter itself")


def check_name(name: str, where: str) -> None:
    """The same for a name, which also has to be one that a file or folder can have, with room for files in it."""
    check_text(name, where)
    fix = "check the value"
    try:
        whole = os.fsencode(Path(name).expanduser().absolute())
        short = max(map(len, name.encode("utf-8").split(b"/"))) <= LONGEST_NAME
        possible = short and len(whole) + LONGEST_NAME < LONGEST_PATH and "\0" not in name
    except RuntimeError:
        possible, fix = False, "nobody has that home folder; of a file called so, give the whole path: /.../~NAME"
    if not possible:
        raise UserError(f"no file or folder can have this name: {name[:80]!r}", where=where, fix=fix)


def check_names(config: RunConfig, where: Mapping[str, str]) -> None:
    """Check every text of a config. where: of the values that somebody gave. Raises UserError."""
    for setting, value in config.model_dump().items():
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, str):
                (check_name if setting in NAMES else check_text)(item, where.get(setting, setting))


def with_absolute_names(config: RunConfig) -> RunConfig:
    """The config whose files and folders are found from any folder. What is not there, such as a hub id, stays."""
    found: dict[str, object] = {name: _absolute(getattr(config, name)) for name in NAMES if name not in DATASETS}
    found |= {name: [_absolute_spec(spec) for spec in getattr(config, name)] for name in DATASETS}
    found |= {name: [_of_file(word, _absolute) for word in getattr(config, name)] for name in FUNCTIONS}
    return config.model_copy(update=found)


def _absolute(name: str | None) -> str | None:
    path = existing(name) if name else None
    return name if path is None else str(path.absolute())


def placed_function(word: str, base: Path | None) -> str:
    """A word of `--reward` or `--tools` with the path of its file or model, if it names one that exists, found as
    `placed` does."""
    return _of_file(word, lambda file: placed(file, base))


def _of_file(word: str, place: Callable[[str], str | None]) -> str:
    file, colon, function = word.rpartition(":")
    if colon:
        return f"{place(file) or file}:{function}"
    model, star, weight = word.rpartition("*") if "*" in word else (word, "", "")
    return f"{place(model) or model}{star}{weight}"


def _absolute_spec(spec: str) -> str:
    given = SPEC.fullmatch(spec)
    if existing(spec) is not None or given is None:
        return _absolute(spec) or spec
    return (_absolute(given["name"]) or "") + spec[len(given["name"]) :]


def placed(name: str, base: Path | None) -> str | None:
    """The path of an existing file or folder, with `~` resolved: against the working folder first, then against base.
    Else None."""
    places = (name, *((str(base / name),) if base is not None else ()))
    return next((str(path) for place in places if (path := existing(place)) is not None), None)
