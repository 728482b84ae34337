"""Rows of every known format -> one of three forms: Chat, Completion or Text.

The format is a property of a file: the first row whose keys are known decides it, later rows must follow it.
Whatever is wrong with a row raises BadRow with a short, stable reason that the audit counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftlite.errors import UserError


class BadRow(Exception):
    """A row that cannot be trained on. reason: stable word for the audit; detail: one sentence for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Chat:
    """messages: as the chat template takes them; trained: per message, whether it is an answer to learn."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """Plain text without a chat template, of which only the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, trained from its first to its last token."""

    text: str


Row = Chat | Completion | Text

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "function_call",
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Format:
    """One row format. keys: what a row must have; read: turns such a row into its form."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]
    optional: tuple[str, ...] = field(default=())


def detect_format(row: Mapping[str, Any], method: str) -> Format | None:
    """The format of a row by its keys, None where none fits. Raises UserError where it is no format of the method."""
    preference = {"chosen", "rejected"} <= row.keys() or (
        "messages" in row and not row.keys().isdisjoint({"rejected_response", "rejected_messages"})
    )
    if preference or {"prompt", "completion", "label"} <= row.keys():
        kind = "preference" if preference else "unpaired preference"
        raise UserError(
            f"these are {kind} rows; {method} would learn the refused answers too",
            fix="keep only the wanted answers, as `messages` or as `prompt` and `completion`",
        )
    found = next((known for known in FORMATS if all(key in row for key in known.keys)), None)
    if found is not None and method == "pretrain" and found.name != "text":
        raise UserError(
            f"pretrain reads `text` rows, these are {found.name} rows",
            fix="use `swiftlite sft`, or name the text: --columns text=COLUMN",
        )
    return found


def rename_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Give columns the keys of a format. columns: format key -> column of the file."""
    renamed = {key: value for key, value in row.items() if key not in columns.values() and key not in columns}
    return renamed | {key: row[column] for key, column in columns.items() if column in row}


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises UserError for a format key that does not exist."""
    known = sorted({key for known in FORMATS for key in (*known.keys, *known.optional)})
    for key in columns:
        if key not in known:
            raise UserError(
                f"no row format has the key {key!r}",
                where="--columns",
                fix=f"give KEY=COLUMN; keys: {', '.join(known)}",
            )


def read_row(row: Mapping[str, Any], known: Format) -> Row:
    """The row in its form. Raises BadRow."""
    missing = [key for key in known.keys if key not in row]
    if missing:
        raise BadRow("missing_key", f"{known.name} rows need {', '.join(missing)}; found {_names(row)}")
    return known.read(row)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(list(row)[:12]) or "nothing"


def json_type(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name} must be a string, it is {json_type(value)}")
    try:
        value.encode("utf-8")  # half of a surrogate pair passes JSON, but is no text
    except UnicodeEncodeError as error:
        raise BadRow("not_utf8", f"{name} holds half of a surrogate pair") from error
    return value


def _list(value: object, name: str) -> list[Any]:
    """A list, or the JSON text of one (csv cells and string columns hold such)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow("wrong_type", f"{name} is a string that is no JSON array: {error}") from error
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} must be an array, it is {json_type(value)}")
    return value


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow("wrong_type", f"{name} must be an object, it is {json_type(value)}")
    return value


# ---- messages -------------------------------------------------------------------------------------------------------


def _read_messages(row: Mapping[str, Any], key: str = "messages") -> Chat:
    """OpenAI messages and ShareGPT turns alike: role/content or from/value, in one reader."""
    given = _list(row[key], key)
    if not given:
        raise BadRow("empty", f"{key} is empty")
    system = _optional_text(row, "system")
    pairs = _messages(given, key)
    if system is not None and pairs[0][0]["role"] != "system":
        pairs.insert(0, ({"role": "system", "content": system}, False))
    return _chat(pairs, _tools(row))


def _chat(pairs: list[tuple[dict[str, Any], bool]], tools: list[dict[str, Any]] | None) -> Chat:
    """Check that there is an answer to learn, and cut what follows the last one: nothing there is ever trained."""
    if all(message["role"] != "assistant" for message, _ in pairs):
        raise BadRow("no_assistant_turn", "the conversation has no assistant turn")
    last = max((i for i, (_, trained) in enumerate(pairs) if trained), default=None)
    if last is None:
        raise BadRow("nothing_to_train", 'every assistant turn says "train": false')
    pairs = pairs[: last + 1]
    return Chat([message for message, _ in pairs], [trained for _, trained in pairs], tools)


def _messages(given: list[Any], name: str) -> list[tuple[dict[str, Any], bool]]:
    return [_message(_object(message, f"{name}[{i}]"), f"{name}[{i}]") for i, message in enumerate(given)]


def _message(given: dict[str, Any], name: str) -> tuple[dict[str, Any], bool]:
    """(message for the template, is it an answer to learn)."""
    role_key, content_key = ("role", "content") if "role" in given else ("from", "value")
    if role_key not in given:
        raise BadRow("missing_key", f"{name} has no role; found {_names(given)}")
    given_role = _string(given[role_key], f"{name}.{role_key}")
    role = ROLES.get(given_role)
    if role is None:
        raise BadRow("unknown_role", f"{name} has the role {given_role!r}; known: {', '.join(ROLES)}")
    message = {key: value for key, value in given.items() if key not in (role_key, content_key, "train", "weight")}
    message = {"role": role, "content": _content(given.get(content_key), name), **message}
    if role == "function_call":
        calls = _json_value(message["content"], name)
        message |= {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, name) for call in _list(message["tool_calls"], f"{name}.tool_calls")]
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            _string(message[key], f"{name}.{key}")
    if message["role"] != "assistant":
        return message, False
    if not message["content"].strip() and not message.get("tool_calls"):
        raise BadRow("empty", f"{name} is an empty answer")
    return message, _is_trained(given, name)


def _is_trained(given: dict[str, Any], name: str) -> bool:
    """`"train": false`, or `"weight": 0` as in OpenAI's fine-tuning files, leaves an answer out."""
    for key in ("train", "weight"):
        value = given.get(key)
        if value is not None and (value not in (0, 1) or isinstance(value, str)):
            raise BadRow("wrong_type", f"{name}.{key} must be {'true or false' if key == 'train' else '0 or 1'}")
    return given.get("train") not in (False, 0) and given.get("weight") != 0


def _content(value: object, name: str) -> str:
    """Text, or the joined text of a list of text parts; absent beside tool calls."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _string(value, f"{name}.content")
    parts = _list(value, f"{name}.content")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else json_type(part)
            raise BadRow("wrong_type", f"{name}.content has a part of type {kind}; only text is trained")
    return "".join(_string(part.get("text"), f"{name}.content") for part in parts)


def _json_value(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_tool_call", f"{name} is no JSON: {error}") from error


def _tool_call(call: object, name: str) -> dict[str, Any]:
    """`{"type": "function", "function": {"name", "arguments": {...}}}`, which is what templates expect."""
    call = _object(call, f"{name}.tool_calls")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_call", f"{name} has a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json_value(arguments or "{}", f"{name}.tool_calls arguments")
    if not isinstance(arguments, dict):
        raise BadRow("bad_tool_call", f"{name} has tool call arguments that are {json_type(arguments)}, not an object")
    rest = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    given = row.get("tools")
    if given in (None, "", []):
        return None
    tools = [_object(tool, "tools") for tool in _list(given, "tools")]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


# ---- instruction, question and prompt formats -----------------------------------------------------------------------


def _optional_text(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    return None if value in (None, "") else _string(value, key)


def _dialogue(row: Mapping[str, Any], question: str, answer: str) -> Chat:
    """[system], the pairs of `history`, then question and answer. Answers of the history are trained like the last."""
    pairs: list[tuple[dict[str, Any], bool]] = []
    if (system := _optional_text(row, "system")) is not None:
        pairs.append(({"role": "system", "content": system}, False))
    history = row.get("history")
    turns = [] if history in (None, "") else _list(history, "history")
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRow("wrong_type", "history must be a list of [question, answer] pairs")
    for asked, answered in [*turns, (question, answer)]:
        if not _string(answered, "the answer").strip():
            raise BadRow("empty", "an answer is empty")
        pairs.append(({"role": "user", "content": _string(asked, "the question")}, False))
        pairs.append(({"role": "assistant", "content": answered}, True))
    return _chat(pairs, _tools(row))


def _read_alpaca(row: Mapping[str, Any]) -> Chat:
    question = _string(row["instruction"], "instruction")
    if (extra := _optional_text(row, "input")) is not None:
        question = f"{question}\n{extra}" if question else extra
    return _dialogue(row, question, _string(row["output"], "output"))


def _read_pair(question: str, answer: str) -> Callable[[Mapping[str, Any]], Chat]:
    def read(row: Mapping[str, Any]) -> Chat:
        return _dialogue(row, _string(row[question], question), _string(row[answer], answer))

    return read


def _read_completion(row: Mapping[str, Any]) -> Row:
    """Two strings are plain text; as soon as one side is a message list it is a chat that trains the completion."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not _string(completion, "completion"):
            raise BadRow("empty", "completion is empty")
        return Completion(_string(prompt, "prompt"), completion)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _list(prompt, "prompt")
    given = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    context = _messages(asked, "prompt")
    answer = _messages(_list(given, "completion"), "completion")
    if all(message["role"] != "assistant" for message, _ in answer):
        raise BadRow("no_assistant_turn", "the completion has no assistant turn")
    return _chat([(message, False) for message, _ in context] + answer, _tools(row))


def _read_text(row: Mapping[str, Any]) -> Text:
    text = _string(row["text"], "text")
    if not text.strip():
        raise BadRow("empty", "text is empty")
    return Text(text)


FORMATS = (
    Format("messages", ("messages",), _read_messages, ("system", "tools")),
    Format("ShareGPT", ("conversations",), lambda row: _read_messages(row, "conversations"), ("system", "tools")),
    Format("Alpaca", ("instruction", "output"), _read_alpaca, ("input", "system", "history")),
    Format("prompt and completion", ("prompt", "completion"), _read_completion, ("tools",)),
    Format("query and response", ("query", "response"), _read_pair("query", "response"), ("system", "history")),
    Format("question and answer", ("question", "answer"), _read_pair("question", "answer"), ("system", "history")),
    Format("text", ("text",), _read_text),
)
