"""Tools of users that a model may call while it answers: functions, and classes whose methods are such.

A chat template describes them to the model by their JSON schema, which transformers makes of type hints and docstring
(https://huggingface.co/docs/transformers/chat_extras).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from swiftlite.errors import UserError, first_line
from swiftlite.own_code import VARIABLE, Code, find, load

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


def parse_tool(word: str) -> Code:
    """Nothing is run. Raises UserError where a word names nothing."""
    if (found := find(word, f"{FLAG} {word}", HOW)) is None:
        raise UserError(f"{word!r} names no function", where=FLAG, fix=HOW)
    return found


def load_tools(words: Sequence[str]) -> tuple[Tool, ...]:
    """What the words of `--tools` name. Raises UserError where one cannot be had or described."""
    found = [tool for word in words for tool in _load(word)]
    names = [tool.name for tool in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two of them are called {twice}", where=FLAG, fix="the model calls them so: rename one")
    if len({tool.owner for tool in found if tool.owner is not None}) > 1:
        raise UserError("two of them are classes", where=FLAG, fix="make one class with the methods of both")
    return tuple(found)


def give_objects(words: Sequence[str]) -> bool:
    """Whether one of them is a class, of which each answer has an object."""
    return any(tool.owner is not None for tool in load_tools(words))


def beside(tools: Sequence[dict[str, Any]], of_row: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The schemas of a row's tools, and of those that answers may call, which are what is called by their names. None
    of none."""
    own = [tool["function"]["name"] for tool in tools]
    others = [tool for tool in of_row or () if not own or _name_in(tool["function"]) not in own]
    return [*others, *tools] or None


def _name_in(function: Any) -> Any:
    return function.get("name") if isinstance(function, dict) else None


def _load(word: str) -> list[Tool]:
    where = f"{FLAG} {word}"
    found = load(parse_tool(word), where, HOW)
    if not inspect.isclass(found):
        return [Tool(_name(found, where), found, None, _schema(found, where))]
    methods = {
        # a method's own argument is none of the model's
        name: MethodType(function, object()) if isinstance(function, FunctionType) else getattr(found, name)
        for name, function in inspect.getmembers_static(found)
        if isinstance(function, FunctionType | staticmethod | classmethod) and name[0] != "_" and name != RESET
    }
    if not methods:
        raise UserError(f"the class {found.__name__} has no methods", where=where, fix=HOW)
    if asked := _asks_for(found):
        fix = f"give its `__init__` defaults; what a row has comes to `{RESET}`"
        raise UserError(f"the class {found.__name__} asks for `{asked}`", where=where, fix=fix)
    return [Tool(name, function, found, _schema(function, where)) for name, function in methods.items()]


def _asks_for(found: type) -> str | None:
    """An argument without which no object of a class can be had."""
    given = inspect.signature(found).parameters.values()
    return next((one.name for one in given if one.default is one.empty and one.kind not in VARIABLE), None)


def _misfit(function: Callable[..., Any]) -> str | None:
    """Why a function is none that is called with arguments by their names, and gives one result."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "gives one thing after the other (`yield`)"
    unnamed = (*VARIABLE, inspect.Parameter.POSITIONAL_ONLY)
    try:
        given = inspect.signature(function).parameters.values()
    except ValueError:  # of some that are written in C, which nothing describes either
        return None
    return next((f"takes `{one}`, which has no name to call it by" for one in given if one.kind in unnamed), None)


def _name(function: Callable[..., Any], where: str) -> str:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise UserError("a tool has to have a name", where=where, fix="define it as a function: def NAME(...)")
    return name


def _schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Raises UserError where there is nothing to make it of."""
    from transformers.utils import get_json_schema

    if why := _misfit(function):
        fix = "name each of its arguments, and return what the model is to know"
        raise UserError(f"the tool {function.__name__} {why}", where=where, fix=fix)
    try:
        return get_json_schema(function)
    except Exception as error:  # of hints that it does not know, anything
        raise UserError(
            f"the tool {function.__name__} cannot be described: {first_line(error)}",
            where=where,
            fix="give it a docstring with a line for each argument (Args: city: The name of the city.), and type hints",
        ) from error
