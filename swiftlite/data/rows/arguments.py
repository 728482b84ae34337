"""Arguments of tool calls as a chat template takes them: as objects, or as the JSON text of them.

transformers asks templates for objects (https://huggingface.co/docs/transformers/chat_extras). Some join the text that
OpenAI's API gives (DeepSeek V3, Functionary): an object makes them fail, or is written as Python writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
CALL = [  # a conversation up to its call, as an example
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        # An id as Mistral's templates want it.
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "call", "arguments": {"key": "value"}}}
        ],
    },
]
_PYTHON, _JSON = "{'key': 'value'}", '{"key": "value"}'


def with_fitting_arguments(messages: Sequence[Message], render: Callable[[list[Message]], str]) -> list[Message]:
    """The messages, whose arguments are objects, as the template takes them. render: the template; it may raise."""
    called = any(message.get("tool_calls") for message in messages)
    return _as_text(messages) if called and _takes_text(render) else list(messages)


def _takes_text(render: Callable[[list[Message]], str]) -> bool:
    try:
        if _PYTHON not in render(CALL):
            return False
    except Exception:  # foreign code may raise anything
        pass
    try:
        return _JSON in render(_as_text(CALL))
    except Exception:  # the template takes no calls at all, and says so of the row
        return False


def _as_text(messages: Sequence[Message]) -> list[Message]:
    return [
        message | {"tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
