"""`--train-on`: what of a conversation is learnt, if not each of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swiftlite.data.rows.forms import BadRow, Chat, Row
from swiftlite.data.rows.messages import TRAIN_KEYS, messages_in


def with_last_answer(row: Row) -> Row:
    """A conversation of which only the last answer to learn is left to learn; any other row as it is."""
    if not isinstance(row, Chat):
        return row
    last = len(row.trained) - 1 - row.trained[::-1].index(True)
    return replace(row, trained=[index == last for index in range(len(row.trained))])


def check_no_marks(given: Mapping[str, Any]) -> None:
    """Raises BadRow where a message says that it is not to be learnt, and all of the text shall be."""
    for key, value in given.items():
        messages = messages_in(value)
        for index, message in enumerate(messages if isinstance(messages, list) else []):
            if isinstance(message, dict) and any(message.get(mark) in (0, False) for mark in TRAIN_KEYS):
                raise BadRow("marked_message", f"{key}[{index}] is not to be learnt, but --train-on all learns all")
