"""Preference rows: two answers to one prompt, or one answer that is wanted or not.

The prompt stands by itself, or the answers are whole conversations (or texts) and it is what both begin with, as in
TRL's implicit form (https://huggingface.co/docs/trl/dataset_formats).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from swiftlite.data.forms import BadRow, Chat, Completion, Judged, Pair
from swiftlite.data.messages import Turns, answer_to, chat_of, json_type, read_messages, string, tools_of, turns_of

LABELS = {"true": True, "false": False}


def read_preference(row: Mapping[str, Any]) -> Pair:
    """`chosen` and `rejected` as text, message or messages, with `prompt` or without. Raises BadRow."""
    prompt, chosen, rejected = row.get("prompt", row.get("conversations")), row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        return _pair_of_texts(prompt, string(chosen, "chosen"), string(rejected, "rejected"), _margin(row))
    context = None if prompt is None else turns_of(prompt, "prompt", "user") or None
    answers = [turns_of(value, name, "assistant") for name, value in (("chosen", chosen), ("rejected", rejected))]
    return _pair(row, context, *answers)


def read_rejected_response(row: Mapping[str, Any]) -> Pair:
    """`messages` that end with the chosen answer, and the text of the refused one. Raises BadRow."""
    whole = _turns(read_messages(row))
    return _pair(row, whole[:-1], whole[-1:], turns_of(row["rejected_response"], "rejected_response", "assistant"))


def read_rejected_messages(row: Mapping[str, Any]) -> Pair:
    """`messages`, and the whole of the conversation with the refused answer. Raises BadRow."""
    rejected = read_messages(row, "rejected_messages")
    return _pair(row, None, _turns(read_messages(row)), _turns(rejected))


def read_judged(row: Mapping[str, Any]) -> Judged:
    """`prompt`, `completion` and `label`. Raises BadRow."""
    label = row["label"]
    desirable = LABELS.get(label.strip().lower()) if isinstance(label, str) else label  # csv cells are text
    if not isinstance(desirable, bool):
        raise BadRow("label_not_boolean", f"label must be true or false, it is {label!r:.40}")
    return Judged(answer_to(row["prompt"], row["completion"], "completion", tools_of(row)), desirable)


def _pair(row: Mapping[str, Any], context: Turns | None, chosen: Turns, rejected: Turns) -> Pair:
    """context: the messages before both answers; None where the answers are whole conversations."""
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns:
            raise BadRow("empty", f"the {name} answer is empty")
    if context is None or chosen[0][0]["role"] != "assistant":
        shared = _shared_messages(chosen, rejected)
        if context is not None and context[-1][0] not in [message for message, _ in chosen[:shared]]:
            raise BadRow("different_prompts", "chosen and rejected do not begin with the prompt")
        context, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    tools = tools_of(row)
    pair = Pair(
        chat_of(context, chosen, "chosen answer", tools), chat_of(context, rejected, "rejected answer", tools),
        _margin(row),
    )  # fmt: skip
    _check_unequal(pair.chosen.messages, pair.rejected.messages)
    return pair


def _check_unequal(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise BadRow("equal_completions", "chosen and rejected are equal: there is nothing to prefer")


def _shared_messages(chosen: Turns, rejected: Turns) -> int:
    """How many messages both conversations begin with."""
    both = list(zip(chosen, rejected, strict=False))
    shared = next((place for place, (one, other) in enumerate(both) if one[0] != other[0]), len(both))
    _check_unequal([message for message, _ in chosen], [message for message, _ in rejected])
    if shared == len(both):
        raise BadRow("empty", "one of chosen and rejected is no more than what both begin with")
    if shared == 0 or any(message["role"] != "assistant" for message, _ in both[shared]):
        raise BadRow("different_prompts", "chosen and rejected do not answer the same prompt")
    return shared


def _pair_of_texts(prompt: str | None, chosen: str, rejected: str, margin: float) -> Pair:
    if chosen.strip():
        _check_unequal(chosen, rejected)
    if prompt is None:
        prompt = _shared_text(chosen, rejected)
        if not prompt.strip():
            raise BadRow("different_prompts", "there is no prompt, and chosen and rejected begin differently")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise BadRow("empty", f"the {name} answer is empty")
    return Pair(Completion(string(prompt, "prompt"), chosen), Completion(prompt, rejected), margin)


def _shared_text(chosen: str, rejected: str) -> str:
    """What both texts begin with, up to the last white space, so that no word is cut."""
    shared = os.path.commonprefix([chosen, rejected])
    end = next((place for place in range(len(shared), 0, -1) if shared[place - 1].isspace()), 0)
    return shared[:end].rstrip()


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get("margin")
    if value in (None, ""):
        return 0.0
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise BadRow("wrong_type", f"margin must be a number, it is {json_type(value)}")
    return margin


def _turns(chat: Chat) -> Turns:
    return list(zip(chat.messages, chat.trained, strict=True))
