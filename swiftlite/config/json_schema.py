"""The JSON schema of a recipe, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from swiftlite.config.flags import Flag, all_flags
from swiftlite.config.schema import RunConfig


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) with every key; aliases are there too, marked as deprecated."""
    plain = RunConfig.model_json_schema()["properties"]
    properties: dict[str, Any] = {}
    for name, flag in all_flags().items():
        properties[name] = _property(flag, plain[name])
    for name, flag in all_flags().items():
        for alias in flag.aliases:
            properties[alias] = {**properties[name], "description": f"Another name of `{name}`.", "deprecated": True}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "swiftlite recipe",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(flag: Flag, plain: dict[str, Any]) -> dict[str, Any]:
    kept = {
        key: plain[key]
        for key in ("type", "anyOf", "enum", "items", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        if key in plain
    }
    if flag.kind == "list":  # `dataset: rows.jsonl` is a list of one
        kept = {"anyOf": [{"type": "array", "items": kept["items"]}, {"type": "string"}, {"type": "null"}]}
    if flag.kind == "map":
        kept = {"type": "object", "additionalProperties": {"type": "string"}}
    if flag.default is not None:
        kept["default"] = flag.default
    return {"description": f"{flag.help} Default: {flag.default_in_words}.", **kept}
