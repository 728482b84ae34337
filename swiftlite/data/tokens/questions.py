"""Questions without their answers: what a model is asked with, out of rows of every format, as messages and as tokens.

`swiftlite infer` answers them, and so does a model that is trained on its own answers (`swiftlite grpo`). Answers that
stand behind the last question (training data often has them) are left out; the row itself is kept, so that what the
model says can be compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from swiftlite.data.rows.arguments import with_fitting_arguments
from swiftlite.data.rows.forms import BadRow, Chat, Completion
from swiftlite.data.rows.messages import (
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
from swiftlite.data.rows.preferences import read_preference
from swiftlite.data.rows.roles import with_known_roles
from swiftlite.data.rows.system import has_system
from swiftlite.data.tokens.thoughts import thought_key, with_placed_thoughts
from swiftlite.untrusted import names_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
ANSWERS = ("completion", "response", "answer", "output", "chosen", "solution")  # keys of a row that answer it
CONVERSATIONS = ("messages", "conversations")
FORMATS = "messages, conversations, prompt, query, question, or instruction with input"


@dataclass(frozen=True)
class Question:
    """row: as it was read; messages: what the model answers; where: `file.jsonl:17`; plain: one text to go on with, as
    training takes a prompt and a completion that are strings; system_added: it had no system message of its own;
    answer: what the row itself answers, as text, if it does."""

    row: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    plain: bool = False
    system_added: bool = False
    answer: str | None = None


def read_question(row: dict[str, Any], where: str, system: str | None) -> Question:
    """The question of a row. system: put before one that has no system message of its own. Raises BadRow."""
    compared = _compared(row)
    messages = _messages(row) if compared is None else _before(compared)
    own = optional_text(row, "system")
    tools = tools_of(row)
    answer = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else _answer_beside(row)
    if isinstance(compared, Completion):
        answer = compared.completion
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("no_question", "the row has no question: it needs a user message")
    if own is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": own})
    if added := system is not None and not has_system(messages):
        messages.insert(0, {"role": "system", "content": system})
    plain = len(messages) == 1 and (isinstance(compared, Completion) or _is_plain(row))
    return Question(row, messages, tools, where, plain, system_added=added, answer=answer or None)


def _answer_beside(row: dict[str, Any]) -> str | None:
    """What answers a row's prompt in a column of its own: a text, a number, or messages, of which the last counts."""
    said = messages_in(next((row[key] for key in ANSWERS if row.get(key) not in (None, "", [])), None))
    if isinstance(said, list) and isinstance(said[-1], dict):
        said = said[-1].get("content", said[-1].get("value"))
    return str(said) if isinstance(said, str | int | float) and not isinstance(said, bool) else None


def _compared(row: dict[str, Any]) -> Chat | Completion | None:
    """The better of two answers with its prompt as training takes them, where they are texts, or hold the prompt
    themselves; else None. Raises BadRow."""
    if any(row.get(key) is not None for key in CONVERSATIONS) or None in (row.get("chosen"), row.get("rejected")):
        return None
    alone = all(row.get(key) is None for key in ("prompt", *QUESTIONS))
    try:
        better = read_preference(row).chosen
    except BadRow:  # which training would leave out, and whose question may be asked all the same
        if alone:
            raise
        return None
    return better if alone or isinstance(better, Completion) else None


def _before(answer: Chat | Completion) -> list[Message]:
    """What an answer is to."""
    if isinstance(answer, Completion):
        return [{"role": "user", "content": answer.prompt}]
    return answer.messages[: answer.trained.index(True)]


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
        raise BadRow("unknown_format", f"no row format fits these keys: {names_of(row)}; known: {FORMATS}")
    if key in CONVERSATIONS:
        turns = messages_of(array(row[key], key), key)
    elif isinstance(said := messages_in(row[key]) if key == "prompt" else row[key], list):
        turns = behind(opening(row), turns_of(said, key, "user"))
    else:
        turns = opening(row) + turns_of(question_of(row, key), key, "user")
    return [message for message, _ in turns]


def opened(messages: list[Message], render: Callable[..., str]) -> str:
    """A conversation as text, with the opening of an answer. render: the chat template; takes messages and
    `add_generation_prompt`, and what it raises is raised."""
    messages = with_placed_thoughts(with_known_roles(messages, render), partial(thought_key, render))
    return render(with_fitting_arguments(messages, render), add_generation_prompt=True)


def plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A text to go on with as training has it, without the end that some tokenizers write."""
    ids, bos, eos = tokenizer(text)["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    if eos is not None and ids[-1:] == [eos] != bare[-1:]:
        ids = ids[:-1]
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
