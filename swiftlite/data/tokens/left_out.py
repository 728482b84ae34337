"""What is not written of a conversation. Many templates know no tools, or skip roles they do not know; and a text ends
with the last answer that is learnt.

What an answer loses is an error (`template_drops_content`); what its context loses is counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from swiftlite.data.rows.forms import Chat
from swiftlite.data.tokens.special_tokens import squash


def leaves_out_tools(chat: Chat, texts: Sequence[str]) -> bool:
    """Whether a tool's name stands nowhere. texts: what became of the conversation."""
    tools = [tool["function"] for tool in chat.tools or ()]
    names = [str(tool["name"]) for tool in tools if isinstance(tool, dict) and "name" in tool]
    return not all(any(name in text for text in texts) for name in names)


def leaves_out_messages(chat: Chat, texts: Sequence[str]) -> bool:
    """Whether what another than the model says stands nowhere, white space aside, or anything follows the last answer
    that is learnt. Some templates write a tool's result as JSON."""
    if chat.goes_on:
        return True
    said = [message["content"] for message in chat.messages if message["role"] != "assistant"]
    found = [squash(text) for text in texts]
    return not all(
        any(squash(written) in text for written in _spellings(content) for text in found) for content in said
    )


def unwritten_call_keys(chat: Chat, texts: Sequence[str]) -> set[str]:
    """Keys that a call's function has besides name and arguments, and of which nothing stands in any text."""
    functions = [call["function"] for message in chat.messages for call in message.get("tool_calls") or ()]
    besides = [item for function in functions for item in function.items() if item[0] not in ("name", "arguments")]
    return {key for key, value in besides if not any(key in text or str(value) in text for text in texts)}


def _spellings(content: str) -> Iterator[str]:
    yield content
    for ascii_alone in (False, True):
        yield json.dumps(content, ensure_ascii=ascii_alone)[1:-1]
