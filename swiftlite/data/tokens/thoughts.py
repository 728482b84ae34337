"""Thinking of answers as a chat template takes it: in the text up to `</think>`, or under a key of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from swiftlite.data.rows.messages import REASONING_KEYS
from swiftlite.data.tokens.special_tokens import squash

Message = dict[str, Any]
OPENS, THOUGHT = "<think>", "</think>"  # of DeepSeek R1 and of most that came after it
_IN_TEXT = re.compile(rf"\s*{OPENS}(.*?){THOUGHT}(.*)", re.DOTALL)
_THINKS, _SAYS = "abcdefgh4", "abcdefgh5"


def with_thinking(message: Message) -> str:
    """The answer with its thinking, as models give it whose thinking ends with `</think>`."""
    content = message["content"]
    thinking = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    if not thinking or THOUGHT in content:
        return content
    thinking, answer = thinking.strip("\n"), content.lstrip("\n")
    return f"{OPENS}\n{thinking}\n{THOUGHT}\n\n{answer}"


def with_opened_thought(answer: str) -> str:
    """An answer with what opens its thinking, where the prompt had written that: a template reads it in the text."""
    thinking, closed, _ = answer.partition(THOUGHT)
    return f"{OPENS}\n{answer}" if closed and OPENS not in thinking else answer


def with_placed_thoughts(messages: Sequence[Message], find_key: Callable[[], str | None]) -> list[Message]:
    """The messages, of which the thinking in the text stands under a key where the template has a place for it.

    It would come behind an empty thought there (Qwen3.8), or in the answer that is shown (gpt-oss).
    find_key: gives the template's `thought_key`.
    """
    if not any(_thinks_in_text(message) for message in messages) or (key := find_key()) is None:
        return list(messages)
    return [_placed(message, key) for message in messages]


def _thinks_in_text(message: Message) -> bool:
    if message["role"] != "assistant" or not _IN_TEXT.match(message["content"]):
        return False
    return not any(message.get(key) for key in REASONING_KEYS)


def _placed(message: Message, key: str) -> Message:
    if not _thinks_in_text(message):
        return message
    thinking, answer = _IN_TEXT.match(message["content"]).groups()
    thought = {key: thinking.strip("\n")} if thinking.strip() else {}  # gpt-oss would write an empty message
    return message | thought | {"content": answer.lstrip("\n")}


def thought_key(render: Callable[[list[Message]], str]) -> str | None:
    """The key under which a template writes thinking that it does not find in the text. render: it; it may raise."""

    def written(answer: Message) -> str:
        try:
            return squash(render([{"role": "user", "content": "x"}, {"role": "assistant"} | answer]))
        except Exception:  # foreign code may raise anything
            return ""

    texts = {key: written({"content": _SAYS, key: _THINKS}) for key in REASONING_KEYS}
    key = next((key for key, text in texts.items() if _THINKS in text), None)
    if key is None or texts[key] == written({"content": with_thinking({"content": _SAYS, key: _THINKS})}):
        return None
    return key
