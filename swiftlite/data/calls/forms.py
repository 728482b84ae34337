"""What all forms of calls share: calls, examples of them, and texts between which they stand."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swiftlite.data.tokens.spans import OPEN_TAG
from swiftlite.untrusted import parse_json

NAME = r"[\w.-]+"
QUOTES = "'\""
BARE_KEY = re.compile(rf'("(?:[^"\\]|\\.)*")|(?<=[{{,])(\s*)({NAME})(?=\s*:)')
OPENING, CLOSING = "([{", ")]}"
_JSON = json.JSONDecoder()
Types = dict[str, dict[str, Any]]  # of each tool's parameters, as JSON schema has them


class Unreadable(Exception):
    """What stands where a call is opened is none."""


@dataclass(frozen=True)
class Call:
    """Of a tool. id: that an answer gives it, if it does."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)

    @property
    def told(self) -> dict[str, Any]:
        """As messages have it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def check(values: Any) -> None:
    """Raises Unreadable where JSON has no such values, or they lie deeper in one another than those of rows may."""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a character is none
        parse_json(text)
    except (TypeError, ValueError, RecursionError):
        raise Unreadable from None


class Form(Protocol):
    def read(self, text: str, types: Types) -> tuple[int, list[Call]]:
        """(where the first call begins, the calls in order), of an answer. Raises Unreadable."""


@dataclass(frozen=True)
class Example:
    """Calls as a template writes them, without what ends a turn. calls: two, of which the first has two texts, the
    second two numbers as arguments; texts: of each an answer that is nothing else; both: one of both, None where it
    writes no two; bare: one that calls the first tool without arguments."""

    calls: tuple[Call, Call]
    texts: tuple[str, str]
    both: str | None
    bare: str


@dataclass(frozen=True)
class Closed:
    """What stands behind a call. closer: always; enders: else the characters that may, unless it is the end."""

    closer: str
    enders: str

    def behind(self, rest: str) -> str:
        """What stands behind that at the end of a text. rest: what stands behind its last argument."""
        return rest.strip().removeprefix(self.closer).strip()

    def end(self, text: str, place: int) -> int:
        """Where a call ends whose last argument does at a place. Raises Unreadable where it does not."""
        if self.closer:
            if (match := re.compile(rf"\s*{flexible(self.closer)}").match(text, place)) is None:
                raise Unreadable
            return match.end()
        begun = behind_blanks(text, place)
        if begun is not None and text[begun] not in self.enders:
            raise Unreadable
        return place


def closed_by(rests: Sequence[str]) -> Closed:
    """By what stands behind calls, to the ends of their texts."""
    closer = OPEN_TAG.sub("", os.path.commonprefix(list(rests))).strip()
    return Closed(closer, "".join(rest.strip()[:1] for rest in rests))


# ---- texts ----------------------------------------------------------------------------------------------------------


def decoded(text: str, begun: int) -> tuple[Any, int]:
    """(the JSON value that begins there, where it ends)."""
    try:
        return _JSON.raw_decode(text, begun)
    except (ValueError, RecursionError):
        raise Unreadable from None


def behind_blanks(text: str, place: int) -> int | None:
    """Where the next character is that is none; None at the end."""
    rest = text[place:].lstrip()
    return len(text) - len(rest) if rest else None


def flexible(literal: str) -> str:
    """A pattern of a text in which any white space, or none, may stand where it has some."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", literal)))


def cut_tag(text: str) -> tuple[str, str]:
    """(a text without a tag that is open at its end, that)."""
    cut = OPEN_TAG.search(text)
    return (text[: cut.start()], cut.group()) if cut else (text, "")


def wild(one: str, other: str) -> str:
    """A pattern of two texts of which the middle may differ, such as the number of a call."""
    if one == other:
        return flexible(one)
    before = os.path.commonprefix([one, other])
    behind = common_end(one[len(before) :], other[len(before) :])
    return f"{flexible(before)}.*?{flexible(behind)}"


def common_end(one: str, other: str) -> str:
    return os.path.commonprefix([one[::-1], other[::-1]])[::-1]


def balanced(text: str, begun: int, enders: str) -> int:
    """Where a value ends that one of some characters follows, which brackets and quotes may hold too."""
    depth, quote, place = 0, "", begun
    while place < len(text):
        sign = text[place]
        if quote:
            place += sign == "\\"
            quote = "" if sign == quote else quote
        elif depth == 0 and sign in enders:
            return place
        elif sign in QUOTES:
            quote = sign
        else:
            depth += (sign in OPENING) - (sign in CLOSING)
        place += 1
    raise Unreadable


def in_json(text: str, opening: str, closing: str) -> str:
    """A value as JSON has it, of which texts stand between such quotes, and keys between none."""
    quoted = re.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", re.DOTALL)
    text = quoted.sub(lambda found: json.dumps(found[1]), text)
    return BARE_KEY.sub(lambda found: found[1] or f'{found[2]}"{found[3]}"', text)


def literal(text: str) -> Any:
    """A value as JSON or Python write it, else the text itself."""
    readers: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval)
    for read in readers:
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
