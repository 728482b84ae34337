"""The forms that rows of every format become, and the error for a row that becomes none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class BadRow(Exception):
    """A row that cannot be trained on. reason: stable word for the audit; detail: one sentence for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Chat:
    """messages: as the chat template takes them; trained: per message, whether it is an answer to learn; goes_on: the
    row has more of them, behind the last such answer."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None
    goes_on: bool = False


@dataclass(frozen=True)
class Completion:
    """Plain text without a chat template, of which only the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, trained from its first to its last token."""

    text: str


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. margin: by how much the chosen one is better, for reward models; 0 where not said.

    Each answer comes with the whole prompt; both are of the same form, and not equal.
    """

    chosen: Chat | Completion
    rejected: Chat | Completion
    margin: float = 0.0


@dataclass(frozen=True)
class Judged:
    """One answer, with its prompt. desirable: whether it is wanted."""

    answer: Chat | Completion
    desirable: bool


Row = Chat | Completion | Text | Pair | Judged
