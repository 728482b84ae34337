"""Conversations to be answered: the rows of a jsonl file, up to their last question.

Answers that stand behind the last question (training data often has them) are left out; the row itself is kept, so
that they can be compared with what the model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.errors import UserError
from swiftlite.untrusted import names_of, parse_json

Message = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "developer": "system", "observation": "tool", "function": "tool"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
QUESTION_KEYS = ("prompt", "query", "question")
FORMATS = "messages, conversations, prompt, query, question, or instruction with input"


@dataclass(frozen=True)
class Question:
    """row: as it was read; messages: what the model answers; where: `file.jsonl:17`."""

    row: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str


def read_questions(path: Path, system: str | None) -> list[Question]:
    """All rows of a jsonl file in order. system: put before rows that have no system message of their own.

    Raises UserError naming file and line of the first row that cannot be answered.
    """
    questions = [_question(line, f"{path}:{number}", system) for number, line in _lines(path)]
    if not questions:
        raise UserError("the input file has no rows", where=str(path), fix="write one JSON object a line")
    return questions


def _lines(path: Path) -> list[tuple[int, bytes]]:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"the input file {problem}", where=f"--input {path}", fix="name a .jsonl file")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"the input cannot be read: {error.strerror}", where=str(path), fix="check the file") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _question(line: bytes, where: str, system: str | None) -> Question:
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError("the line is not UTF-8", where=where, fix="save the file as UTF-8") from error
    except ValueError as error:
        raise UserError(f"not valid JSON: {error}", where=where, fix="write one JSON object a line") from error
    if not isinstance(row, dict):
        raise UserError("a row must be a JSON object", where=where, fix="write one JSON object a line")
    messages = _messages(row, where)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise UserError("the row has no question", where=where, fix="give it a user message")
    first = row.get("system") or system
    if first is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(first, "system", where)})
    return Question(row, messages, row.get("tools") or None, where)


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    for key in ("messages", "conversations"):
        if key in row:
            return _turns(row[key], key, where)
    for key in QUESTION_KEYS:
        if isinstance(row.get(key), list):
            return _turns(row[key], key, where)
        if key in row:
            return [*_history(row, where), {"role": "user", "content": _text(row[key], key, where)}]
    if "instruction" in row:
        parts = [_text(row[key], key, where) for key in ("instruction", "input") if row.get(key)]
        return [*_history(row, where), {"role": "user", "content": "\n".join(parts)}]
    raise UserError(f"no row format fits these keys: {names_of(row)}", where=where, fix=f"use one of: {FORMATS}")


def _turns(given: object, name: str, where: str) -> list[Message]:
    if not isinstance(given, list):
        raise UserError(f"{name} must be an array", where=where, fix='write [{"role": "user", "content": "..."}]')
    return [_turn(message, f"{name}[{i}]", where) for i, message in enumerate(given)]


def _turn(given: object, name: str, where: str) -> Message:
    if not isinstance(given, dict):
        raise UserError(f"{name} must be an object", where=where, fix='write {"role": "user", "content": "..."}')
    role = given.get("role", given.get("from"))
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in KNOWN_ROLES:
        raise UserError(f"{name} has the role {role!r:.40}", where=where, fix=f"use one of: {', '.join(KNOWN_ROLES)}")
    rest = {key: value for key, value in given.items() if key not in ("role", "from", "content", "value", "train")}
    content = given.get("content", given.get("value"))
    if content is None and rest.get("tool_calls"):
        content = ""
    return {"role": role, "content": _text(content, f"{name}.content", where), **rest}


def _history(row: dict[str, Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(
                "history must be a list of pairs", where=where, fix='write "history": [["question", "answer"]]'
            )
        messages.append({"role": "user", "content": _text(pair[0], "history", where)})
        messages.append({"role": "assistant", "content": _text(pair[1], "history", where)})
    return messages


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} must be a string", where=where, fix=f"give {name} as text")
    return value
