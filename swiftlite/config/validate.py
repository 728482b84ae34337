"""From raw values to a typed `RunConfig`, and pydantic's complaints in words that name the flag and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from swiftlite.config.flags import Flag, all_flags, find_flag, nearest
from swiftlite.config.others.words import instead_of_value
from swiftlite.config.schema import RunConfig
from swiftlite.errors import UserError, all_in_one

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


# Errors that `swiftlite.config.types` words itself, and what to do.
WORDED = {"size": "write it like 5GB", "duration": "write it like 3h55m", "columns": ""}


@dataclass(frozen=True)
class Given:
    """A value that somebody gave. where: `--lr`, `file.yaml:3: lr` or `NPROC_PER_NODE`; by: flag, env or recipe."""

    value: Any
    where: str
    by: str


def build_config(given: Mapping[str, Given]) -> RunConfig:
    """Type and check every value by itself. Raises one UserError for all that are wrong."""
    try:
        return RunConfig(**{name: item.value for name, item in given.items()})
    except ValidationError as error:
        raise all_in_one(_in_words(error, given), "values are wrong") from None


def wrong_values(given: Mapping[str, Given]) -> list[UserError]:
    """What `build_config` would complain of, value by value."""
    try:
        RunConfig(**{name: item.value for name, item in given.items()})
    except ValidationError as error:
        return _in_words(error, given)
    return []


def _in_words(error: ValidationError, given: Mapping[str, Given]) -> list[UserError]:
    found: dict[str, tuple[str, str]] = {}
    for detail in error.errors(include_url=False, include_context=True):
        name = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            near = nearest(name, all_flags())
            found[name] = (
                f"there is no setting {name}",
                f"did you mean {near}?" if near else "`swiftlite recipes schema` lists them",
            )
        else:
            found.setdefault(name, explain(all_flags()[name], detail, given[name]))
    return [UserError(what, where=given[name].where, fix=fix) for name, (what, fix) in found.items()]


def explain(flag: Flag, detail: ErrorDetails, given: Given) -> tuple[str, str]:
    """(what is wrong, how to mend it) for one value."""
    kind, context = detail["type"], detail.get("ctx", {})
    value = detail["input"] if flag.kind in ("list", "map") and len(detail["loc"]) > 1 else given.value
    if value is None:
        fix = f"leave it out for the default ({flag.default_in_words})"
        return f"{flag.name} cannot be null", f"give a {flag.name}" if flag.name in ("model", "method") else fix
    subject = f"{flag.name} is {_short(value)}"
    theirs = instead_of_value(flag.name, str(value), in_recipe=given.by == "recipe")
    if kind == "literal_error" or (theirs and flag.kind == "str"):
        fix = theirs or f"{_hint(str(value), flag)}it takes {', '.join(flag.choices)}"
        return f"{flag.name} cannot be {_short(value)}", fix
    pairs = f"{(flag.metavar or '').removesuffix(' ...')} pairs"
    if kind in WORDED:
        return f"{subject}: {detail['msg']}", theirs or WORDED[kind] or f"give {pairs}"
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("more than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return f"{subject}, out of range", theirs or f"give {words} {context[key]:g}"
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "map": pairs}
    clear = flag.kind in ("bool", "map")
    fix = f"give {wanted.get(flag.kind, 'text')}" + ("" if clear else f", such as {_example(flag)}")
    return f"{subject}, not {wanted.get(flag.kind, 'what it takes')}", theirs or fix


def _hint(word: str, flag: Flag) -> str:
    """What was meant by a word that a flag does not take: another flag, as in `--parallel tp`, or one of its words."""
    if other := find_flag(word) or find_flag(f"{word}_parallel_size"):
        return f"{other.option} is a flag of its own; "
    near = nearest(word, flag.choices)
    return f"did you mean `{near}`? " if near else ""


def _example(flag: Flag) -> str:
    examples = {"int": "8", "float": "1e-5"}
    if flag.default not in (None, "", [], {}):
        return str(flag.default)
    return examples.get(flag.kind, flag.metavar or "a word")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
