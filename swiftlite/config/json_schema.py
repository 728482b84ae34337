"""The JSON schema of a recipe, for completion and checks in editors. It takes what recipes take.

Recipes are read as text, so a number may be `1e-5` (which YAML 1.1 does not know as one), a name may be `2024`, and a
choice may be in any case and in other tools' words. Which words that are no choice of ours count, `null`, `true` or
`-1`, is asked of the settings themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from swiftlite.config.flags import Flag, all_flags
from swiftlite.config.others.axolotl import BLOCKS
from swiftlite.config.others.idle import OFF, ON
from swiftlite.config.schema import RunConfig
from swiftlite.config.types import NULL_WORDS, spelled_words

WHOLE = r"[+-]?\d+(\.0+)?"
NUMBER = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
TRUTH = ("true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0")
TEXT = ["string", "number", "boolean"]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) with every key; other tools' names are there too, marked as deprecated."""
    plain = RunConfig.model_json_schema()["properties"]
    properties: dict[str, Any] = {}
    dashed: dict[str, Any] = {}
    for name, flag in all_flags().items():
        properties[name] = {**_property(flag, plain[name]), "description": _sentence(flag)}
    for name, flag in all_flags().items():
        for alias in flag.aliases:
            properties[alias] = {**properties[name], "description": f"Another name of `{name}`.", "deprecated": True}
        for phrase, words in flag.phrases.items():
            form = {"type": TEXT, "pattern": f"^({'|'.join(words)})$"}
            if phrase in all_flags():
                properties[phrase]["anyOf"].append(form)
            else:
                said = f"Others' words for `{name}`."
                properties[phrase] = {
                    "type": [*TEXT, "array", "object", "null"],
                    "description": said,
                    "deprecated": True,
                }
        for switch in flag.switches:
            text = f"A switch of other tools: on is `{name}: {flag.switches[switch]}`."
            properties[switch] = {"anyOf": _switch_forms(flag), "description": text, "deprecated": True}
        keys = [key for key in (name, *flag.aliases) if "_" in key]
        dashed |= {f"^{key.replace('_', '[-_]')}$": {"$ref": f"#/properties/{key}"} for key in keys}
    for block, name in BLOCKS.items():
        said = f"axolotl's data sets, for `{name}`."
        items = {"type": "object", "required": ["path"]}
        properties[block] = {"type": ["array", "null"], "items": items, "description": said, "deprecated": True}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "swiftlite recipe",
        "type": "object",
        "properties": properties,
        "patternProperties": dashed,
        "additionalProperties": False,
    }


def _sentence(flag: Flag) -> str:
    return f"{flag.help} Default: {flag.default_in_words}."


def _property(flag: Flag, plain: dict[str, Any]) -> dict[str, Any]:
    forms = _forms(flag, plain)
    if _takes(flag, None):
        forms.append({"type": "null"})
    found: dict[str, Any] = {"anyOf": forms} if len(forms) > 1 else forms[0]
    return found if flag.default is None else {**found, "default": flag.default}


def _forms(flag: Flag, plain: dict[str, Any]) -> list[dict[str, Any]]:
    """What a value may look like; the first form is the one to write."""
    field = RunConfig.model_fields[flag.name]
    words = spelled_words(field.annotation, field.metadata)
    if flag.kind == "list":  # `dataset: rows.jsonl` is a list of one, and may hold several with commas
        items = {"anyOf": [{"enum": list(flag.choices)}, _pattern(words)]} if flag.choices else {"type": TEXT}
        return [{"type": "array", "items": items}, {"type": TEXT}]
    if flag.kind == "map":
        inside = [*TEXT, "array", "object", "null"] if flag.nested else TEXT
        return [{"type": "object", "additionalProperties": {"type": inside}}, {"type": "array"}, {"type": "string"}]
    if flag.kind == "bool":
        return [{"type": "boolean"}, _pattern(TRUTH), {"enum": [0, 1]}]
    nothing = [word for word in NULL_WORDS if _takes(flag, word)]
    if flag.kind in ("int", "float"):
        own = next(form for form in plain.get("anyOf", [plain]) if form["type"] != "null")
        bounds = {key: own[key] for key in BOUNDS if key in own}
        words = "|".join([WHOLE if flag.kind == "int" else NUMBER, *map(_any_case, nothing)])
        form = {"type": [own["type"], "string"], **bounds, "pattern": f"^({words})$"}
        return [form, {"const": -1}] if bounds and _takes(flag, -1) else [form]
    if flag.choices:
        odd = [value for value in (True, False, 4, 8) if _takes(flag, value)]
        return [{"enum": [*flag.choices, *odd]}, _pattern([*words, *nothing])]
    own = next(form for form in plain.get("anyOf", [plain]) if form.get("type") != "null")
    odd = [{"enum": [False]}] if _takes(flag, False) else []
    return [own, *odd] if "pattern" in own else [{"type": TEXT}]


def _switch_forms(flag: Flag) -> list[dict[str, Any]]:
    words = [{"enum": list(flag.choices)}] if flag.choices else []
    return [{"type": "boolean"}, _pattern((*ON, *OFF)), {"enum": [0, 1]}, {"type": "null"}, *words]


def _takes(flag: Flag, value: Any) -> bool:
    """Whether the setting takes a value as YAML has it: an editor may have read `on` as a truth value."""
    spelled = {True: ("true", "on"), False: ("false", "no", "off")}
    words = spelled[value] if isinstance(value, bool) else (None if value is None else str(value),)
    for word in words:
        try:
            RunConfig(**{flag.name: word})
        except ValidationError:
            continue
        return True
    return False


def _pattern(words: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^({'|'.join(dict.fromkeys(map(_any_case, words)))})$"}


def _any_case(word: str) -> str:
    """A pattern of the word in any case, `-` for `_` too."""
    return "".join(
        f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else "[-_]" if letter in "-_" else letter
        for letter in word
    )
