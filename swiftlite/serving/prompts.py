"""Conversations to be answered: the rows of a JSON file, up to their last question.

Answers that stand behind the last question (training data often has them) are left out; the row itself is kept, so
that they can be compared with what the model says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftlite.data.forms import BadRow, Completion
from swiftlite.data.messages import (
    QUESTIONS,
    answer_to,
    array,
    behind,
    messages_in,
    messages_of,
    opening,
    optional_text,
    question_of,
    tools_of,
    turns_of,
)
from swiftlite.data.readers import Payload, parse_payload, read_rows
from swiftlite.data.sources import DataFile, as_data_file
from swiftlite.data.system import has_system
from swiftlite.errors import UserError
from swiftlite.untrusted import names_of

Message = dict[str, Any]
CONVERSATIONS = ("messages", "conversations")
FORMATS = "messages, conversations, prompt, query, question, or instruction with input"


@dataclass(frozen=True)
class Question:
    """row: as it was read; messages: what the model answers; where: `file.jsonl:17`; plain: one text to go on with, as
    training takes a prompt and a completion that are strings."""

    row: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    plain: bool = False


def read_questions(path: Path, system: str | None) -> list[Question]:
    """All rows of a file in order: JSON lines, perhaps compressed, or a JSON array. system: put before rows that have
    no system message of their own.

    Raises UserError naming file and line of the first row that cannot be answered.
    """
    file = _data_file(path)
    questions = [_question(payload, file.where(number), system) for number, payload in read_rows(file)]
    if not questions:
        raise UserError("the input file has no rows", where=str(path), fix="write one JSON object a line")
    return questions


def check_utf8(text: str, where: str) -> None:
    """Raises UserError for text of a command line or a pipe with bytes that are not UTF-8; Python hands them over as
    halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise not_utf8(where) from error


def not_utf8(where: str) -> UserError:
    """The error for text that is no text."""
    return UserError("the text is not UTF-8", where=where, fix="convert it, for example with iconv -t UTF-8")


def _data_file(path: Path) -> DataFile:
    if path.is_dir() or not path.exists():  # a pipe is read too
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"the input file {problem}", where=f"--input {path}", fix="name a .jsonl file")
    file = as_data_file(path) or DataFile(str(path), "jsonl", path)
    if file.kind not in ("jsonl", "json", "txt"):
        problem = f"{path.suffix} files are not answered, only JSON lines"
        raise UserError(problem, where=f"--input {path}", fix="write its rows as .jsonl, one JSON object a line")
    return replace(file, kind="jsonl") if file.kind == "txt" else file


def _question(payload: Payload, where: str, system: str | None) -> Question:
    try:
        row = parse_payload(payload)
    except BadRow as bad:
        raise UserError(bad.detail, where=where, fix="write one JSON object a line, as UTF-8") from bad
    try:
        messages = _messages(row)
        own = optional_text(row, "system")
        tools = tools_of(row)
    except BadRow as bad:
        raise UserError(bad.detail, where=where, fix="write rows as `swiftlite sft` takes them") from bad
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise UserError("the row has no question", where=where, fix="give it a user message")
    if own is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": own})
    elif system is not None and not has_system(messages):
        messages.insert(0, {"role": "system", "content": system})
    return Question(row, messages, tools, where, plain=len(messages) == 1 and _is_plain(row))


def _is_plain(row: dict[str, Any]) -> bool:
    """Whether training takes a row for a text that goes on."""
    if any(row.get(key) is not None for key in CONVERSATIONS) or not row.get("prompt") or not row.get("completion"):
        return False
    try:
        return isinstance(answer_to(row), Completion)
    except BadRow:  # which training would leave out
        return False


def _messages(row: dict[str, Any]) -> list[Message]:
    """What training would see of a row's conversation, or of its question. Raises BadRow."""
    key = next((key for key in (*CONVERSATIONS, "prompt", *QUESTIONS) if row.get(key) is not None), None)
    if key is None:
        raise BadRow("unknown_keys", f"no row format fits these keys: {names_of(row)}; known: {FORMATS}")
    if key in CONVERSATIONS:
        turns = messages_of(array(row[key], key), key)
    elif isinstance(said := messages_in(row[key]) if key == "prompt" else row[key], list):
        turns = behind(opening(row), turns_of(said, key, "user"))
    else:
        turns = opening(row) + turns_of(question_of(row, key), key, "user")
    return [message for message, _ in turns]
