"""Calls that are objects of JSON with name and arguments, as those of Hermes, Qwen 2.5 and 3, Llama 3 and Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from swiftlite.data.calls.forms import (
    Call,
    Closed,
    Example,
    Types,
    Unreadable,
    behind_blanks,
    closed_by,
    decoded,
    flexible,
)


@dataclass(frozen=True)
class Objects:
    """opener: what stands before the first, nothing where the answer begins with it; name, arguments: the keys under
    which they are found; without a name it is the only key, with the arguments under it; id: likewise, if there is one;
    closed: what stands behind.
    """

    opener: str
    name: tuple[str, ...] | None
    arguments: tuple[str, ...]
    id: tuple[str, ...] | None
    closed: Closed

    def read(self, text: str, types: Types) -> tuple[int, list[Call]]:
        if not self.opener:  # an answer may be some other JSON
            try:
                return 0, self._behind(text, 0)
            except Unreadable:
                return len(text), []
        found, places = [], [match.span() for match in re.finditer(flexible(self.opener), text)]
        for _, end in places:
            found += self._behind(text, end)
        return min((begun for begun, _ in places), default=len(text)), found

    def _behind(self, text: str, place: int) -> list[Call]:
        found: list[Call] = []
        while (begun := behind_blanks(text, place)) is not None and text[begun] in "{[":
            value, place = decoded(text, begun)
            found += [self._call(one) for one in (value if isinstance(value, list) else [value])]
            place += len(re.match(r"\s*,?", text[place:]).group())
        if not found:
            raise Unreadable
        self.closed.end(text, place)
        return found

    def _call(self, value: Any) -> Call:
        if self.name is None:
            if not isinstance(value, dict) or len(value) != 1:
                raise Unreadable
            ((name, arguments),) = value.items()
        else:
            name, arguments = _under(value, self.name), _under(value, self.arguments)
        if isinstance(arguments, str):
            arguments, _ = decoded(arguments, 0)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise Unreadable
        id_ = _under(value, self.id) if self.id else ""
        return Call(name, arguments, id_ if isinstance(id_, str) else "")


def as_objects(example: Example) -> Objects | None:
    """The form of an example, None where it has another."""
    found = [_object(text, call) for text, call in zip(example.texts, example.calls, strict=True)]
    if None in found:
        return None
    (form, rest), (_, other) = found
    rests = [rest, other]
    if example.both is not None and (several := _object(example.both, example.calls[0])) is not None:
        rests.append(several[1])
    return replace(form, closed=closed_by(rests))


def _object(text: str, call: Call) -> tuple[Objects, str] | None:
    """(the form of a call in a text, what stands behind it)."""
    for begun in (match.start() for match in re.finditer(r"[{\[]", text[: text.find(call.name)])):
        try:
            value, end = decoded(text, begun)
        except Unreadable:
            continue
        value = value[0] if isinstance(value, list) and value else value
        name, arguments = _path(value, call.name), _path(value, call.arguments)
        if arguments is None:
            arguments = _path(value, json.dumps(call.arguments))
        keyed = value == {call.name: call.arguments}
        if arguments is not None and (keyed or name is not None):
            form = Objects(
                text[:begun].strip(), None if keyed else name, arguments, _path(value, call.id), Closed("", "")
            )
            return form, text[end:]
    return None


def _path(value: Any, wanted: Any) -> tuple[str, ...] | None:
    """The keys under which something is found in an object."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if item == wanted:
            return (key,)
        if (below := _path(item, wanted)) is not None:
            return (key, *below)
    return None


def _under(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, dict):
            raise Unreadable
        value = value.get(key)
    return value
