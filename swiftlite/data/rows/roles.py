"""Roles of messages as a chat template takes them: OpenAI's `developer` is the `system` of templates that lack it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
_SAID = "abcdefgh3"


def with_known_roles(messages: Sequence[Message], render: Callable[[list[Message]], str]) -> list[Message]:
    """The messages, where the template makes nothing of a developer's with that of the system. render: the template;
    it may raise."""
    if all(message["role"] != "developer" for message in messages) or _writes_developer(render):
        return list(messages)
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _writes_developer(render: Callable[[list[Message]], str]) -> bool:
    try:
        return _SAID in render([{"role": "developer", "content": _SAID}, {"role": "user", "content": "x"}])
    except Exception:  # foreign code may raise anything
        return False
