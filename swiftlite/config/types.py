"""Value types of the schema: choices that take other tools' spellings, lists from one string, and "none" for null.

Flags and recipes reach these types as plain strings, so both accept exactly the same spellings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from swiftlite.untrusted import existing, parse_json

MOST_COMMAS = 8  # that are looked for in one path
NEXT_KEY = re.compile(r"[\s,]+(?=\w+=)")  # what stands between two settings in one text
NULL_WORDS = ("none", "null", "~", "")
PART_OF_AN_EPOCH = re.compile(r"epoch(?:/([1-9]\d*))?")
NEVER = "never"
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


ON, OFF = ("true", "yes", "on"), ("false", "no", "off")


def switch(on: str, off: str) -> dict[str, str]:
    """The words of a switch, where a choice is between `on` and `off`."""
    return dict.fromkeys(ON, on) | dict.fromkeys(OFF, off)


def _switch_or_null(on: str) -> dict[str, str]:
    return switch(on, "none") | {"null": "none"}


# What other tools call a choice of ours.
NEVER_WORDS = (NEVER, *OFF)
SWITCH, OFFLOAD, KERNELS, FP8 = map(_switch_or_null, ("full", "cpu", "liger", "rowwise"))
SEQUENCE_PARALLEL = switch("always", NEVER)
BITS = _switch_or_null("nf4") | {"4": "nf4", "4bit": "nf4", "8": "int8", "8bit": "int8"}  # of quantized weights
RESUME = {"auto": "auto"} | switch("auto", NEVER) | dict.fromkeys((NEVER, "none", "null"), NEVER)
DTYPE = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "no": "fp32"}
FSDP_STRATEGIES = {"full_shard": "full", "shard_grad_op": "grad_op", "no_shard": "none", "hybrid_shard": "hybrid"}
SHARDING = FSDP_STRATEGIES | {
    "zero3": "full",  # DeepSpeed's, as ms-swift names its presets
    "default-zero3": "full",
    "zero2": "grad_op",
    "default-zero2": "grad_op",
    "zero0": "none",
}
PARALLEL = dict.fromkeys(("fsdp2", "true"), "fsdp") | dict.fromkeys(("false", "null", ""), "auto")  # of `fsdp`
OVERLONG = {"right": "truncate", "delete": "drop", "raise": "error"}
SCHEDULER = {"warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine"}
MIN_LR, MIN_LR_RATE = ({rf"\{{\W*{name}\W+([\d.e+-]+)\W*\}}": r"\1"} for name in ("min_lr", "min_lr_rate"))  # JSON
STRATEGY = {"epoch": "epoch"}  # of transformers, and how often a thing is done by it
STRATEGY_OR_NEVER = STRATEGY | {"no": NEVER}
NAME, AUTHOR = {r"([^/]+)": r"name=\1"}, {r"(.+)": r"author=\1"}  # of ms-swift; what has a slash names a model
ON_ALONE, OFF_WORDS = rf"(?:{'|'.join(ON)}|1)?", "|".join((*OFF, "0"))  # of a switch, which may stand without a value
MEANS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}  # verl's, of losses
LOSSES_AS_METHODS = "(orpo|simpo|cpo|ipo)"  # of dpo, which have commands of their own elsewhere
_STRATEGY = f"({'|'.join(FSDP_STRATEGIES)})"
FSDP_WORDS = (
    rf"(?=.*\b{_STRATEGY}\b)(?:(?:auto_wrap|offload|{_STRATEGY})(?: +|$))+"  # of transformers' `fsdp`, as one text
)
FSDP_OFFLOAD = rf"(?=.*\boffload\b){FSDP_WORDS}"
PART = {r"(0?\.\d+)": r"\1"}  # transformers' number of steps that is below one
AN_EPOCH = {r"([1-9]\d*)": r"epoch/\1", "0": NEVER}  # axolotl's number of times
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
}


@dataclass(frozen=True)
class Spelling:
    """Makes a `Literal` take any case, `-` for `_`, and the `others` that other tools use: {their word: ours}.

    A null is the word `null` where the others have it, and stays one elsewhere.
    """

    others: Mapping[str, str] = field(default_factory=dict)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        table = {plain_word(choice): choice for choice in literal_choices(source)}
        table |= {plain_word(theirs): ours for theirs, ours in self.others.items()}

        def respell(value: Any) -> Any:
            if value is None:
                return table.get("null")
            if isinstance(value, int):
                value = str(value)
            return table.get(plain_word(value), value) if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(respell, handler(source))


def literal_choices(annotation: Any) -> list[str]:
    """The words of the `Literal` inside an annotation such as `Literal[...] | None`, in order."""
    words: list[str] = []
    for part in get_args(annotation):
        words += [part] if isinstance(part, str) else literal_choices(part)
    return words


def spelled_words(annotation: Any, marks: Sequence[Any]) -> list[str]:
    """The words of a `Literal` and what other tools call them. marks: what `Annotated` hangs on the whole."""
    others = [word for mark in marks if isinstance(mark, Spelling) for word in mark.others]
    words = [annotation] if isinstance(annotation, str) else []
    for part in get_args(annotation):
        words += spelled_words(part, getattr(part, "__metadata__", ()))
    return [*words, *others]


def plain_word(word: str) -> str:
    """A word of a choice as all spellings of it are: in small letters, with `-` for `_`."""
    return word.strip().lower().replace("_", "-")


def split_list(text: str) -> list[str]:
    """`a,b` -> [a, b]. A comma inside brackets or braces, or in the path of an existing file, does not split.

    >>> split_list("q_proj, v_proj")
    ['q_proj', 'v_proj']
    """
    if "," not in text or existing(text) is not None:
        return [text]
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    names = []
    while parts:
        several = range(min(len(parts), MOST_COMMAS), 1, -1)
        count = next((count for count in several if _begins_with_a_path(parts[:count])), 1)
        names.append(",".join(parts[:count]).strip())
        del parts[:count]
    return [name for name in names if name]


def _begins_with_a_path(parts: list[str]) -> bool:
    """Whether `a,b#5` is the path `a,b` with something behind it."""
    text, last = ",".join(parts), len(parts[-1])
    ends = [len(text), *(place for place in range(len(text) - last, len(text)) if text[place] in ":@#*")]
    return any(existing(text[:end].strip()) for end in ends)


def _to_list(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [] if value.strip().lower() in NULL_WORDS else split_list(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return [] if value[0].strip().lower() in NULL_WORDS else value  # `[none]`, as transformers saves it
    return value


def _to_targets(value: Any) -> Any:
    """LLaMA-Factory says `all` for every linear layer, ms-swift 2 `ALL`."""
    names = _to_list(value)
    if not isinstance(names, list):
        return names
    return ["all-linear" if str(name).lower() == "all" else name for name in names]


def _to_columns(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise PydanticCustomError("columns", "not JSON: {reason}", {"reason": str(error)}) from error
    if value is None or isinstance(value, Mapping):
        return value or {}
    pairs = _to_list(value)
    if not isinstance(pairs, list):
        return value
    columns: dict[str, str] = {}
    for pair in pairs:
        key, equals, column = str(pair).partition("=")
        if not (equals and key.strip() and column.strip()):
            raise PydanticCustomError("columns", "{pair} is no key and value with = between them", {"pair": repr(pair)})
        if columns.setdefault(key.strip(), column.strip()) != column.strip():
            raise PydanticCustomError("columns", "{key} is given twice", {"key": key.strip()})
    return columns


def _to_overrides(value: Any) -> Any:
    """Each value as the text that a command line has."""
    items = [value] if isinstance(value, str) and not value.lstrip().startswith("{") else value
    if isinstance(items, list):
        value = [pair for item in items for pair in NEXT_KEY.split(str(item))]
    found = _to_columns(value)
    if not isinstance(found, Mapping):
        return found
    return {str(key): item if isinstance(item, str) else json.dumps(item) for key, item in found.items()}


def said_value(text: str) -> Any:
    """The number, list, word or switch that a text says, as JSON has it; `True` is one too."""
    try:
        return parse_json({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _null_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in NULL_WORDS else value


def _null_is(meant: Any) -> BeforeValidator:
    """For a setting that is never null: what a null of other tools' files says."""
    return BeforeValidator(lambda value: meant if _null_word(value) is None else value)


def _minus_one(value: Any) -> Any:
    """transformers' own "no limit"."""
    return None if str(value).strip() == "-1" else value


def _no_bool(value: Any) -> Any:
    """pydantic reads `true` as 1; a number that is written as a truth value is a slip."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "a truth value, not a number")
    return value


def _how_often(value: Any) -> Any:
    """Steps as a whole number, a part of the run as a number below 1, parts of an epoch in words."""
    text = plain_word(str(value))
    if PART_OF_AN_EPOCH.fullmatch(text):
        return text
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number < 1:
        return number
    if not number.is_integer() or not 1 <= number < 1e15 or isinstance(value, bool):
        raise PydanticCustomError("interval", "neither steps nor a part of the run or of an epoch")
    return int(number)


def _how_often_if_ever(value: Any) -> Any:
    return NEVER if plain_word(str(value)) in NEVER_WORDS else _how_often(value)


def times_an_epoch(every: str) -> int:
    """How often in an epoch a checked `Every` is due that counts epochs.

    >>> times_an_epoch("epoch/4")
    4
    """
    return int(PART_OF_AN_EPOCH.fullmatch(every)[1] or 1)


def _interval_form(*words: str) -> WithJsonSchema:
    """What editors are told of `Every`."""
    pattern = "|".join([r"\d*\.?\d+", r"[Ee]poch(/[1-9]\d*)?", *words])
    return WithJsonSchema({"type": ["integer", "number", "string"], "exclusiveMinimum": 0, "pattern": f"^({pattern})$"})


def check_size(value: Any) -> Any:
    """A size such as `5GB` in one spelling. Raises a ValueError of pydantic's for what is none."""
    text = str(value).strip().replace(" ", "")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)[KMGT]i?B", text, re.IGNORECASE)
    if not found or float(found[1]) < 1e-3:
        raise PydanticCustomError("size", "not a size such as 5GB or 500MB")
    return text.upper().replace("IB", "iB")


def _duration(value: Any) -> Any:
    text = str(value).strip().lower().replace(" ", "")
    if text.isdigit():
        text += "s"
    if isinstance(value, bool) or not DURATION.fullmatch(text) or seconds_of(text) == 0:
        raise PydanticCustomError("duration", "not a time such as 3h55m, 90m or 1d")
    return text


def seconds_of(text: str) -> int:
    """Seconds of a checked `Duration`.

    >>> seconds_of("3h55m")
    14100
    """
    parts = DURATION.fullmatch(text).groups()
    return sum(int(part or 0) * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True))


Number = BeforeValidator(_no_bool)
NullWord = BeforeValidator(_null_word)
OffForNull = Annotated[bool, _null_is(False)]
Names = Annotated[list[str], BeforeValidator(_to_list)]
Targets = Annotated[list[str], BeforeValidator(_to_targets)]
Columns = Annotated[dict[str, str], BeforeValidator(_to_columns)]
Overrides = Annotated[dict[str, str], BeforeValidator(_to_overrides)]
Size = Annotated[str, BeforeValidator(check_size)]
Duration = Annotated[str, BeforeValidator(_duration)]
ToList = BeforeValidator(_to_list)

Every = Annotated[int | float | str, BeforeValidator(_how_often), _interval_form()]
EveryOrNever = Annotated[int | float | str, BeforeValidator(_how_often_if_ever), _interval_form(*NEVER_WORDS)]
OptionalEvery = Annotated[EveryOrNever | None, NullWord]
Count = Annotated[int, Field(ge=1), Number]
OptionalCount = Annotated[Count | None, NullWord]
Whole = Annotated[int, Field(ge=0), Number]
Limit = Annotated[OptionalCount, BeforeValidator(_minus_one)]
OptionalPort = Annotated[Annotated[int, Field(ge=1, le=65535), Number] | None, NullWord]
OptionalWhole = Annotated[Whole | None, NullWord]
Integer = Annotated[int, Number]
Positive = Annotated[float, Field(gt=0), Number]
Passes = Annotated[float, Field(gt=0, le=1e6), Number]
Ratio = Annotated[Positive, _null_is(1.0)]
OptionalPositive = Annotated[Positive | None, NullWord]
NotNegative = Annotated[float, Field(ge=0), Number]
OptionalNotNegative = Annotated[NotNegative | None, NullWord]
ZeroForNull = Annotated[NotNegative, _null_is(0.0)]
Fraction = Annotated[float, Field(ge=0, le=1), Number]
BelowOne = Annotated[float, Field(ge=0, lt=1), Number]
OptionalText = Annotated[str | None, NullWord]
