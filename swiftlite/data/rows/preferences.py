"""Preference rows: two answers to one prompt, or one answer that is wanted or not.

The prompt stands by itself, or the answers are whole conversations (or texts) and it is what both begin with, as in
TRL's implicit form (https://huggingface.co/docs/trl/dataset_formats).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from swiftlite.data.rows.forms import BadRow, Chat, Completion, Judged, Pair
from swiftlite.data.rows.messages import (
    QUESTIONS,
    Turns,
    answer_to,
    array,
    behind,
    chat_of,
    json_object,
    json_type,
    messages_in,
    messages_of,
    opening,
    question_of,
    read_messages,
    role_of,
    string,
    tools_of,
    turns_of,
)
from swiftlite.untrusted import names_of

LARGEST_MARGIN = (2 - 2**-23) * 2.0**127  # of fp32
LABEL_KEYS = ("label", "kto_tag")  # LLaMA-Factory's name of it
# Cells of csv are text, and columns of numbers are common: of integers, or of floats where a row had none.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def read_preference(row: Mapping[str, Any]) -> Pair:
    """`chosen` and `rejected` as text, message or messages, with `prompt` or without. Raises BadRow."""
    prompt, before = _prompt(row), opening(row)
    chosen, rejected = messages_in(row["chosen"]), messages_in(row["rejected"])
    if prompt is None:
        prompt = _messages_before(row, [chosen, rejected])
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None) and not before:
        return _pair_of_texts(prompt, string(chosen, "chosen"), string(rejected, "rejected"), _margin(row))
    context = None if prompt is None else turns_of(prompt, "prompt", "user") or None
    answers = [turns_of(value, name, "assistant") for name, value in (("chosen", chosen), ("rejected", rejected))]
    return _pair(row, context, *answers, before=before)


def read_openai_preference(row: Mapping[str, Any]) -> Pair:
    """The files of OpenAI's preference tuning: `input` with messages and tools, and two lists of messages. Raises
    BadRow."""
    given = json_object(row["input"], "input")
    if given.get("messages") is None:
        raise BadRow("missing_key", f"input has no messages; found {names_of(given)}")
    context = turns_of(given["messages"], "input.messages", "user") or None
    chosen, rejected = (turns_of(row[key], key, "assistant") for key in ("preferred_output", "non_preferred_output"))
    return _pair(given, context, chosen, rejected)


def _messages_before(row: Mapping[str, Any], answers: list[object]) -> object:
    """`messages` where they are what both answers answer, as axolotl has them; None where an answer is a whole
    conversation, beside which they are one of the two again."""
    firsts = [answer[0] for answer in answers if isinstance(answer, list) and answer and isinstance(answer[0], dict)]
    if any(role_of(first) != "assistant" for first in firsts):
        return None
    messages = messages_in(row.get("messages"))
    if messages in (None, "", []):
        return None
    if turns_of(messages, "messages", "user")[-1][0]["role"] == "assistant":
        raise BadRow("different_prompts", "messages end with an answer, which chosen and rejected are to be")
    return messages


def _prompt(row: Mapping[str, Any]) -> object:
    """What both answers answer; a question or an instruction is asked in a chat, as it is without comparison."""
    for key in ("prompt", "conversations"):
        if (said := row.get(key)) is not None:
            return messages_in(said)
    key = next((key for key in QUESTIONS if row.get(key) is not None), None)
    return None if key is None else [{"role": "user", "content": question_of(row, key)}]


def read_against(row: Mapping[str, Any], whole: Chat) -> Pair:
    """whole: a conversation that ends with the chosen answer; the row has the refused one. Raises BadRow."""
    context, chosen = _last_answer(row, whole)
    return _pair(row, context, chosen, turns_of(row["rejected_response"], "rejected_response", "assistant"))


def read_rejected_messages(row: Mapping[str, Any]) -> Pair:
    """`messages`, and the conversation with the refused answer: the whole of it, or that answer. Raises BadRow."""
    chosen, rejected = _turns(read_messages(row)), turns_of(row["rejected_messages"], "rejected_messages", "assistant")
    if rejected and rejected[0][0]["role"] == "assistant" != chosen[0][0]["role"]:
        return _pair(row, chosen[:-1], chosen[-1:], rejected)
    return _pair(row, None, chosen, _turns(read_messages(row, "rejected_messages")))


def read_judged(row: Mapping[str, Any]) -> Judged:
    """`prompt`, `completion` and `label`. Raises BadRow."""
    return Judged(answer_to(row), _label(row))


def judge(row: Mapping[str, Any], whole: Chat) -> Judged:
    """whole: a conversation whose last answer the row's `label` judges. Raises BadRow."""
    context, answer = _last_answer(row, whole)
    return Judged(chat_of(context, answer, "last answer", whole.tools), _label(row))


def _last_answer(row: Mapping[str, Any], whole: Chat) -> tuple[Turns, Turns]:
    """(what comes before the answer that ends the row's conversation, that answer). Raises BadRow where none does."""
    turns = _turns(whole)
    key = next((key for key in ("messages", "conversations") if key in row), None)
    if key is not None and messages_of(array(row[key], key), key)[-1][0] != turns[-1][0]:
        raise BadRow("no_assistant_turn", f"{key} do not end with an answer")
    return turns[:-1], turns[-1:]


def _label(row: Mapping[str, Any]) -> bool:
    label = row[next(key for key in LABEL_KEYS if key in row)]
    desirable = LABELS.get(str(label).strip().lower()) if isinstance(label, bool | int | float | str) else None
    if desirable is None:
        raise BadRow("label_not_boolean", f"label must be true or false, it is {label!r:.40}")
    return desirable


def _pair(
    row: Mapping[str, Any], context: Turns | None, chosen: Turns, rejected: Turns, before: Turns | None = None
) -> Pair:
    """context: the messages before both answers; None where the answers are whole conversations. before: what the row
    says besides, before all of them."""
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns:
            raise BadRow("empty", f"the {name} answer is empty")
    if context is None or chosen[0][0]["role"] != "assistant":
        shared = _shared_messages(chosen, rejected)
        if context is not None and context[-1][0] not in [message for message, _ in chosen[:shared]]:
            raise BadRow("different_prompts", "chosen and rejected do not begin with the prompt")
        context, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    tools, context = tools_of(row), behind(before or [], context)
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
        where = "; is it in another column, name that with --columns prompt=COLUMN" if shared == 0 else ""
        raise BadRow("different_prompts", f"chosen and rejected do not answer the same prompt{where}")
    return shared


def _pair_of_texts(prompt: str | None, chosen: str, rejected: str, margin: float) -> Pair:
    if chosen.strip():
        _check_unequal(chosen, rejected)
    if prompt is None:
        prompt = _shared_text(chosen, rejected)
        if not prompt.strip():
            raise BadRow(
                "different_prompts",
                "there is no prompt, and chosen and rejected begin differently; is it in another column, name that "
                "with --columns prompt=COLUMN",
            )
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif said := _said_again(string(prompt, "prompt"), chosen, rejected):
        prompt, chosen, rejected = said, chosen[len(said) :], rejected[len(said) :]
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise BadRow("empty", f"the {name} answer is empty")
    return Pair(Completion(prompt, chosen), Completion(prompt, rejected), margin)


def _said_again(prompt: str, chosen: str, rejected: str) -> str:
    """The prompt as both texts begin with it, which then hold prompt and answer; nothing where they do not. A prompt of
    one word is none: answers to `Hello` begin so by themselves."""
    spellings = (prompt, prompt.strip()) if len(prompt.split()) > 1 else ()
    return next((said for said in spellings if chosen.startswith(said) and rejected.startswith(said)), "")


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
        margin = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        margin = None
    if margin is None:
        raise BadRow("wrong_type", f"margin must be a number, it is {json_type(value)}")
    if not abs(margin) <= LARGEST_MARGIN:
        raise BadRow("wrong_type", f"margin must be finite in fp32, it is {margin}")
    return margin


def _turns(chat: Chat) -> Turns:
    return list(zip(chat.messages, chat.trained, strict=True))
