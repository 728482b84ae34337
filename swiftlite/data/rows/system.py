"""`--system`: the system message of conversations that have none of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from swiftlite.data.rows.forms import Chat, Completion, Judged, Pair, Row
from swiftlite.data.rows.messages import chat, exchange

ROLES = ("system", "developer")


def has_system(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a conversation has a system message of its own, under either name of the role."""
    return any(message["role"] in ROLES for message in messages)


def with_system(row: Row, text: str) -> Row:
    """The row behind a system message; the same object where it has one of its own, or is a text, which takes none.

    A prompt and completion as strings become a conversation, as they do with a `system` of their own. Raises BadRow.
    """
    if isinstance(row, Pair):
        chosen, rejected = with_system(row.chosen, text), with_system(row.rejected, text)
        return row if chosen is row.chosen else replace(row, chosen=chosen, rejected=rejected)
    if isinstance(row, Judged):
        answer = with_system(row.answer, text)
        return row if answer is row.answer else replace(row, answer=answer)
    opening = {"role": "system", "content": text}
    if isinstance(row, Completion):
        return chat([(opening, False), *exchange(row.prompt, row.completion)], None)
    if isinstance(row, Chat) and not has_system(row.messages):
        return replace(row, messages=[opening, *row.messages], trained=[False, *row.trained])
    return row
