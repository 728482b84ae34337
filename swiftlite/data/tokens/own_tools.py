"""Tools of users that a model may call while it answers: functions, and classes whose methods are such.

A chat template describes them to the model by their JSON schema, which transformers makes of type hints and docstring
(https://huggingface.co/docs/transformers/chat_extras).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

from swiftlite.errors import UserError, first_line
from swiftlite.own_code import find, load

FLAG = "--tools"
HOW = f"give {FLAG} FILE.py:NAME or PACKAGE.MODULE.NAME, of functions or of a class with methods"
RESET = "reset"  # of a class, called before each answer


@dataclass(frozen=True)
class Tool:
    """name: by which it is called; function: of a class one of its own; owner: the class, None of a plain function;
    schema: as chat templates take it."""

    name: str
    function: Callable[..., Any]
    owner: type | None
    schema: dict[str, Any]


def parse_tool(word: str) -> None:
    """Nothing is run. Raises UserError where a word names nothing."""
    if find(word, f"{FLAG} {word}", HOW) is None:
        raise UserError(f"{word!r} names no function", where=FLAG, fix=HOW)


def load_tools(words: Sequence[str]) -> tuple[Tool, ...]:
    """What the words of `--tools` name. Raises UserError where one cannot be had or described."""
    return _loaded(tuple(words))


@cache
def _loaded(words: tuple[str, ...]) -> tuple[Tool, ...]:
    found = [tool for word in words for tool in _load(word)]
    names = [tool.name for tool in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two of them are called {twice}", where=FLAG, fix="the model calls them so: rename one")
    if len({tool.owner for tool in found if tool.owner is not None}) > 1:
        raise UserError("two of them are classes", where=FLAG, fix="make one class with the methods of both")
    return tuple(found)


def _load(word: str) -> list[Tool]:
    parse_tool(word)
    where = f"{FLAG} {word}"
    found = load(find(word, where, HOW), where, HOW)
    if not inspect.isclass(found):
        return [Tool(_name(found, where), found, None, _schema(found, where))]
    methods = {
        name: function
        for name, function in inspect.getmembers(found, inspect.isfunction)
        if not name.startswith("_") and name != RESET
    }
    if not methods:
        raise UserError(f"the class {found.__name__} has no methods", where=where, fix=HOW)
    stand_in = object()  # a method's own argument is none of the model's
    return [
        Tool(name, function, found, _schema(MethodType(function, stand_in), where))
        for name, function in methods.items()
    ]


def _name(function: Callable[..., Any], where: str) -> str:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise UserError("a tool has to have a name", where=where, fix="define it as a function: def NAME(...)")
    return name


def _schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Raises UserError where there is nothing to make it of."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # of hints that it does not know, anything
        raise UserError(
            f"the tool {function.__name__} cannot be described: {first_line(error)}",
            where=where,
            fix="give it a docstring with a line for each argument (Args: city: The name of the city.), and type hints",
        ) from error
