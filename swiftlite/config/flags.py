"""The schema as a table of flags: names, aliases, choices, defaults in words, and the nearest name to a wrong one.

The schema itself is imported on first use: `swiftlite --help` needs none of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from swiftlite.untrusted import existing

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


# Names of a setting that give way to its others. A model's architecture is what ms-swift and axolotl call its type.
GIVES_WAY = {"model_type": "the model's config.json says what it is"}


@dataclass(frozen=True)
class Flag:
    """One setting as the command line and recipes see it. kind: bool, int, float, str, list or map; switches: other
    tools' switches that stand for a value of it, {name: value}; phrases: their names whose values say it in another
    way, {name: {pattern of theirs: ours}}; nested: a map whose values may be lists and mappings too."""

    name: str
    kind: str
    panel: str
    help: str
    default: Any
    choices: Sequence[str] = ()
    aliases: Sequence[str] = ()
    shown: str | None = None
    metavar: str | None = None
    short: str | None = None
    bare: str | None = None
    env: str | None = None
    switches: Mapping[str, str] = field(default_factory=dict)
    phrases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    nested: bool = False

    @property
    def option(self) -> str:
        """`max_length` -> `--max-length`."""
        return as_option(self.name)

    @property
    def negation(self) -> str:
        """`packing` -> `--no-packing`, of a setting that is on or off."""
        return as_option(f"no_{self.name}")

    @property
    def default_in_words(self) -> str:
        """What help shows as the default."""
        if self.shown is not None:
            return self.shown
        return shown_value(self.default)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values that somebody gave mean the same, as `bf16` and `bfloat16` do."""
        return one == other or (found := self._meant(one)) is not None and found == self._meant(other)

    def _meant(self, value: Any) -> Any:
        """None for a value that it does not take."""
        from pydantic import ValidationError

        from swiftlite.config.schema import RunConfig

        try:
            return getattr(RunConfig(**{self.name: value}), self.name)
        except ValidationError:
            return None


@cache
def all_flags() -> dict[str, Flag]:
    """Name -> flag, panel by panel, in the order of the schema."""
    from swiftlite.config.schema import RunConfig
    from swiftlite.config.setting import PANELS

    read = [_read(name, field) for name, field in RunConfig.model_fields.items()]
    return {item.name: item for item in sorted(read, key=lambda item: PANELS.index(item.panel))}


@cache
def _by_spelling() -> dict[str, Flag]:
    table: dict[str, Flag] = {}
    for item in all_flags().values():
        for name in (item.name, *item.aliases):
            table[name] = item
    return table


def find_flag(spelled: str) -> Flag | None:
    """The flag of that name or alias, with `-` or `_`; None where there is none."""
    return _by_spelling().get(spelled.replace("-", "_"))


@cache
def _switches() -> dict[str, tuple[Flag, str]]:
    return {name: (item, value) for item in all_flags().values() for name, value in item.switches.items()}


def find_switch(spelled: str) -> tuple[Flag, str] | None:
    """The flag and its value that another tool's switch of that name stands for; None where there is no such switch."""
    return _switches().get(spelled.replace("-", "_"))


@cache
def _phrases() -> dict[str, list[tuple[Flag, Mapping[str, str]]]]:
    table: dict[str, list[tuple[Flag, Mapping[str, str]]]] = {}
    for item in all_flags().values():
        for name, words in item.phrases.items():
            table.setdefault(name, []).append((item, words))
    return table


def find_phrases(spelled: str, value: str | None) -> list[tuple[Flag, str]]:
    """The flags and their values for what another tool says by a name and value of its own; none where that says
    nothing here. Of a name that we have too, what exists as a path is one.

    >>> find_phrases("evals_per_epoch", "4")[0][1]
    'epoch/4'
    """
    plain, found = (value or "").strip(), []
    for item, words in _phrases().get(spelled.replace("-", "_"), []):
        matches = ((re.fullmatch(pattern, plain, re.IGNORECASE), ours) for pattern, ours in words.items())
        found += [(item, match.expand(ours)) for match, ours in matches if match]
    return [] if found and find_flag(spelled) and existing(value) is not None else found


def plain_name(option: str) -> str:
    """`--max-length` -> `max_length`."""
    return option.lstrip("-").replace("-", "_")


def shown_value(value: Any) -> str:
    """A value of a setting as a user reads it. `null` is none given, and `none` may be a choice.

    >>> shown_value({"output": "answer"})
    'output=answer'
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "on", False: "off"}[value]
    if isinstance(value, Mapping):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def as_option(name: str) -> str:
    """`max_length` -> `--max-length`."""
    return "--" + name.replace("_", "-")


def giving_way(names: Iterable[str]) -> dict[str, str]:
    """Which of the names that two values of a setting were given by gives way, and why; none or both where they have
    to agree."""
    plain = {name: plain_name(name) for name in names}
    weak = {name: GIVES_WAY[word] for name, word in plain.items() if word in GIVES_WAY}
    told = [name for name, word in plain.items() if any(item.kind != "map" for item, _ in _phrases().get(word, []))]
    return weak or {name: "which decides here" for name in plain if len(told) == 1 and name not in told}


def off_alone(switch: str, item: Flag, *, in_recipe: bool) -> tuple[str, str]:
    """(what is wrong, how to mend it) where a switch is off and nothing else says what its setting is."""
    on = item.switches[plain_name(switch)]
    others = [choice for choice in item.choices if choice not in (on, "auto")] or [item.metavar or "VALUE"]
    written = " or ".join(f"`{item.name}: {word}`" if in_recipe else f"`{item.option} {word}`" for word in others)
    return f"{switch} is off, which does not say what {item.name} is instead", f"write {written}"


def known_names() -> list[str]:
    """Every name and alias, in snake_case."""
    return [*_by_spelling(), *_switches(), *_phrases()]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like a wrong one, or None where none is alike.

    >>> nearest("clip_eps", ["log_steps", "eps_clip"])
    'eps_clip'
    """
    names = list(known)
    same = next((name for name in names if _parts(name) == _parts(word)), None)
    return same or next(iter(difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)), None)


def _parts(word: str) -> list[str]:
    """`clip_eps` and `eps-clip` have the same."""
    return sorted(re.split(r"[\W_]+", word.lower()))


def _read(name: str, field: FieldInfo) -> Flag:
    """The flag of a field of the schema, whose extras are the rest of its own fields."""
    from swiftlite.config.types import literal_choices

    return Flag(
        name=name,
        kind=_kind(field.annotation),
        help=field.description,
        default=field.get_default(call_default_factory=True),
        choices=literal_choices(field.annotation),
        **field.json_schema_extra,
    )


def _kind(annotation: Any) -> str:
    """The plain type inside `Annotated[int | None, ...]` and the like; of several that of the word, "str"."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin is list or annotation is list:
        return "list"
    if origin is dict:
        return "map"
    if annotation in (bool, int, float, str):
        return annotation.__name__
    kinds = {_kind(part) for part in get_args(annotation) if part is not type(None) and not isinstance(part, str)}
    return kinds.pop() if len(kinds) == 1 else "str"
