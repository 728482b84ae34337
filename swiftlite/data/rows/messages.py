"""Values of rows, checked, and conversations of every spelling -> messages as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from swiftlite.config.messages import PROPERTIES, ROLES
from swiftlite.data.rows.forms import BadRow, Chat, Completion
from swiftlite.untrusted import names_of, parse_json

MOST_MESSAGES = 4096  # a conversation is rendered once for each answer, so the work grows with their square
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
TRAIN_KEYS = ("train", "weight", "loss")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")  # of a call: OpenAI, Llama, LangChain, Anthropic
TOOLS = ("tools", "functions")  # keys of a row that may be called
QUESTIONS = ("query", "question", "instruction")  # keys of a row that ask in a chat
OWN_KEYS = (*PROPERTIES["role"], *PROPERTIES["content"], *TRAIN_KEYS)  # of a message, read by us
Turns = list[tuple[dict[str, Any], bool]]  # messages, each with whether it is an answer to learn


def json_type(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def string(value: object, name: str) -> str:
    """The value, which must be text. Raises BadRow."""
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name} must be a string, it is {json_type(value)}")
    try:
        value.encode("utf-8")  # half of a surrogate pair passes JSON, but is no text
    except UnicodeEncodeError as error:
        raise BadRow("not_utf8", f"{name} holds half of a surrogate pair") from error
    return value


def array(value: object, name: str) -> list[Any]:
    """A list, or the JSON text of one (csv cells and string columns hold such)."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise BadRow("wrong_type", f"{name} is a string that is no JSON array: {error}") from error
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} must be an array, it is {json_type(value)}")
    return value


def optional_array(value: object, name: str) -> list[Any]:
    """The same, empty where there is none: nothing, or the JSON text of a null."""
    return array(value, name) if value and value != "null" else []


def json_object(value: object, name: str) -> dict[str, Any]:
    """The value, which must be an object. Raises BadRow."""
    if not isinstance(value, dict):
        raise BadRow("wrong_type", f"{name} must be an object, it is {json_type(value)}")
    return value


def optional_text(row: Mapping[str, Any], key: str) -> str | None:
    """The text under a key, None where there is none or an empty one. Raises BadRow."""
    value = row.get(key)
    return None if value in (None, "") else string(value, key)


def read_messages(row: Mapping[str, Any], key: str = "messages") -> Chat:
    """OpenAI messages and ShareGPT turns alike: role/content or from/value, in one reader."""
    given = array(row[key], key)
    if not given:
        raise BadRow("empty", f"{key} is empty")
    pairs = messages_of(given, key)
    if pairs[0][0]["role"] != "system" and (system := optional_text(row, "system")) is not None:
        pairs.insert(0, ({"role": "system", "content": system}, False))
    return chat(pairs, tools_of(row))


def question_of(row: Mapping[str, Any], key: str) -> str:
    """The text of a question; of an instruction with its `input` below it. Raises BadRow."""
    question = string(row[key], key)
    extra = optional_text(row, "input") if key == "instruction" else None
    return "\n".join(filter(None, (question, extra)))


def exchange(question: object, answer: object) -> Turns:
    """A question and the answer to learn. Raises BadRow."""
    if not string(answer, "the answer").strip():
        raise BadRow("empty", "an answer is empty")
    asked = {"role": "user", "content": string(question, "the question")}
    return [(asked, False), ({"role": "assistant", "content": answer}, True)]


def opening(row: Mapping[str, Any]) -> Turns:
    """What a row's `system` and `history` put before its question. Raises BadRow."""
    turns: Turns = []
    if (system := optional_text(row, "system")) is not None:
        turns.append(({"role": "system", "content": system}, False))
    for turn in optional_array(row.get("history"), "history"):
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRow("wrong_type", "history must be a list of [question, answer] pairs")
        turns += exchange(*turn)
    return turns


def behind(before: Turns, context: Turns) -> Turns:
    """The context behind the row's `opening`. Its own system message is the one that counts, and stays in front."""
    if not context or context[0][0]["role"] != "system":
        return before + context
    return [context[0], *(turn for turn in before if turn[0]["role"] != "system"), *context[1:]]


def answer_to(row: Mapping[str, Any]) -> Chat | Completion:
    """`prompt` and `completion`: two strings are plain text. As soon as one of them is a message list, or the row has
    `system` or `history`, it is a chat that trains the completion. Raises BadRow.
    """
    prompt, completion, before = messages_in(row["prompt"]), row["completion"], opening(row)
    if isinstance(prompt, list):  # else a completion in JSON is what the model shall write
        completion = messages_in(completion)
    if isinstance(prompt, str) and isinstance(completion, str) and not before:
        if not string(completion, "completion"):
            raise BadRow("empty", "completion is empty")
        return Completion(string(prompt, "prompt"), completion)
    context = behind(before, turns_of(prompt, "prompt", "user"))
    return chat_of(context, turns_of(completion, "completion", "assistant"), "completion", tools_of(row))


def messages_in(value: object) -> object:
    """A string that is the JSON text of messages as their list, which a cell of csv can hold in no other way."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        with suppress(ValueError):
            found = parse_json(value)
            if found and all(isinstance(one, dict) and role_of(one) is not None for one in found):
                return found
    return value


def role_of(message: Mapping[str, Any]) -> str | None:
    """The role of a message as a file has it; None where it has none that is known."""
    return ROLES.get(str(message.get("role", message.get("from"))))


def turns_of(value: object, name: str, role: str) -> Turns:
    """Messages from a list of them, a single one, or the text of one by `role`. Raises BadRow."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, dict | list):
        raise BadRow("wrong_type", f"{name} must be a string or an array of messages, it is {json_type(value)}")
    return messages_of([value] if isinstance(value, dict) else value, name)


def chat_of(context: Turns, answer: Turns, name: str, tools: list[dict[str, Any]] | None) -> Chat:
    """The conversation of which only the answer is trained. Raises BadRow."""
    if all(message["role"] != "assistant" for message, _ in answer):
        raise BadRow("no_assistant_turn", f"the {name} has no assistant turn")
    return chat([(message, False) for message, _ in context] + answer, tools)


def chat(pairs: Turns, tools: list[dict[str, Any]] | None) -> Chat:
    """Check that there is an answer to learn, and cut what follows the last one: nothing there is ever trained."""
    if all(message["role"] != "assistant" for message, _ in pairs):
        raise BadRow("no_assistant_turn", "the conversation has no assistant turn")
    last = max((i for i, (_, trained) in enumerate(pairs) if trained), default=None)
    if last is None:
        raise BadRow("nothing_to_train", 'every assistant turn says "train": false')
    pairs, goes_on = pairs[: last + 1], last + 1 < len(pairs)
    return Chat([message for message, _ in pairs], [trained for _, trained in pairs], tools, goes_on)


def messages_of(given: list[Any], name: str) -> Turns:
    """The messages in the one spelling that templates take. name: of the list. Raises BadRow."""
    if len(given) > MOST_MESSAGES:
        raise BadRow("too_many_messages", f"{name} has {len(given):,} messages, at most {MOST_MESSAGES:,} are read")
    turns: Turns = []
    for i, message in enumerate(given):
        turn = _message(json_object(message, f"{name}[{i}]"), f"{name}[{i}]")
        if i and role_of(given[i - 1]) == role_of(message) == "function_call":  # calls at once are turns of their own
            turns[-1] = _with_call(turns[-1], turn, f"{name}[{i}]")
        else:
            turns.append(turn)
    return turns


def _with_call(
    before: tuple[dict[str, Any], bool], turn: tuple[dict[str, Any], bool], name: str
) -> tuple[dict[str, Any], bool]:
    """One answer of calls that stand in two messages. name: of the second. Raises BadRow for what one answer cannot
    hold: half of it trained, or a thought between its calls."""
    (first, trained), (second, second_trained) = before, turn
    if trained != second_trained:
        said = "calls at once are one answer, of which some messages are to be trained and some are not"
        raise BadRow("bad_tool_call", f"{name} follows a call: {said}")
    key = next((key for key in REASONING_KEYS if second.get(key) and second[key] != first.get(key)), None)
    if key is not None:
        raise BadRow("bad_tool_call", f"{name} has {key} of its own, but follows a call, with which it is one answer")
    return second | first | {"tool_calls": first["tool_calls"] + second["tool_calls"]}, trained


def _message(given: dict[str, Any], name: str) -> tuple[dict[str, Any], bool]:
    """(message for the template, is it an answer to learn)."""
    role_key, content_key = ("role", "content") if "role" in given else ("from", "value")
    if role_key not in given:
        raise BadRow("missing_key", f"{name} has no role; found {names_of(given)}")
    given_role = string(given[role_key], f"{name}.{role_key}")
    role = ROLES.get(given_role)
    if role is None:
        raise BadRow("unknown_role", f"{name} has the role {given_role!r:.40}; known: {', '.join(ROLES)}")
    if role in ("system", "user") and given.get(content_key) is None:
        raise BadRow("missing_key", f"{name} has no {content_key}; found {names_of(given)}")
    message = {"role": role, "content": _content(given.get(content_key), f"{name}.{content_key}")}
    # Templates ask whether a key is there: "tool_calls": [] would be a call without a function.
    message |= {key: value for key, value in given.items() if key not in OWN_KEYS and value not in (None, "", [], {})}
    if role == "function_call":
        calls = _json_value(message["content"], name)
        message |= {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    older = message.get("function_call") if role == "assistant" else None  # OpenAI's spelling of one call
    if isinstance(older, dict) and "tool_calls" not in message:
        message["tool_calls"] = [message.pop("function_call")]
    if calls := optional_array(message.pop("tool_calls", None), f"{name}.tool_calls"):
        message["tool_calls"] = [_tool_call(call, name) for call in calls]
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            string(message[key], f"{name}.{key}")
    if message["role"] != "assistant":  # a mark to train is kept, so that it is told that nothing comes of it
        return message | {key: given[key] for key in TRAIN_KEYS if given.get(key)}, False
    if not message["content"].strip() and not message.get("tool_calls"):
        raise BadRow("empty", f"{name} is an empty answer")
    return message, _is_trained(given, name)


def _is_trained(given: dict[str, Any], name: str) -> bool:
    """`"train": false` leaves an answer out, as do OpenAI's `"weight": 0` and ms-swift's `"loss": false`."""
    for key in TRAIN_KEYS:
        value = given.get(key)
        if value is not None and (value not in (0, 1) or isinstance(value, str)):
            raise BadRow("wrong_type", f"{name}.{key} must be {'0 or 1' if key == 'weight' else 'true or false'}")
    return all(given.get(key) in (None, 1) for key in TRAIN_KEYS)


def _content(value: object, name: str) -> str:
    """Text, or the joined text of a list of text parts; absent beside tool calls."""
    if value is None:
        return ""
    if isinstance(value, str):
        return string(value, name)
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} must be a string or a list of text parts, it is {json_type(value)}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else json_type(part)
            raise BadRow("wrong_type", f"{name} has a part of type {kind}; only text is trained")
    return "".join(string(part.get("text"), name) for part in value)


def _json_value(text: str, name: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadRow("bad_tool_call", f"{name} is no JSON: {error}") from error


def _tool_call(call: object, name: str) -> dict[str, Any]:
    """`{"type": "function", "function": {"name", "arguments": {...}}}`, which is what templates expect."""
    call = json_object(call, f"{name}.tool_calls")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_call", f"{name} has a tool call without a function name")
    arguments = _arguments(function if function is call else {**call, **function}, name)
    if isinstance(arguments, str):
        arguments = _json_value(arguments or "{}", f"{name}.tool_calls arguments")
    if not isinstance(arguments, dict):
        raise BadRow("bad_tool_call", f"{name} has tool call arguments that are {json_type(arguments)}, not an object")
    read = {"function", "type", *ARGUMENT_KEYS}
    beside = {key: value for key, value in call.items() if key not in read}  # such as the id, which Mistral's need
    within: dict[str, Any] = {}
    if function is call:
        beside.pop("name")
    else:
        beside |= {"type": call["type"]} if call.get("type") else {}
        within = {key: value for key, value in function.items() if key not in ARGUMENT_KEYS}
    return {"type": "function", **beside, "function": {**within, "name": function["name"], "arguments": arguments}}


def _arguments(call: dict[str, Any], name: str) -> Any:
    """What a call gives its function, under one of the names in use; {} where it gives nothing. Raises BadRow."""
    found = {key: call[key] for key in ARGUMENT_KEYS if call.get(key) is not None}
    if any(value != next(iter(found.values())) for value in found.values()):
        raise BadRow("bad_tool_call", f"{name} has a tool call with both {' and '.join(found)}, which are not the same")
    return next(iter(found.values()), {})


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The row's tools as templates take them, None where there are none. `functions` is OpenAI's older name of them.
    Raises BadRow."""
    given = next(filter(None, map(row.get, TOOLS)), None)
    tools = [json_object(tool, "tools") for tool in optional_array(given, "tools")]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None
