"""Rows of every known format -> one of the forms: Chat, Completion, Text, and Pair or Judged for preferences.

The format is a property of a file: the first row whose keys are known decides it, later rows must follow it.
Whatever is wrong with a row raises BadRow with a short, stable reason that the audit counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftlite.config.methods import PAIRED, PREFERENCE
from swiftlite.data.forms import BadRow, Chat, Row, Text
from swiftlite.data.messages import answer_to, array, chat, optional_text, read_messages, string, tools_of
from swiftlite.data.preferences import read_judged, read_preference, read_rejected_messages, read_rejected_response
from swiftlite.errors import UserError
from swiftlite.untrusted import names_of

ANSWERS, PREFERENCES, UNPAIRED = "answers", "preference", "unpaired preference"


@dataclass(frozen=True)
class Format:
    """One row format. keys: what a row must have; read: turns such a row into its form; kind: what its rows hold."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]
    optional: tuple[str, ...] = field(default=())
    kind: str = ANSWERS


def detect_format(row: Mapping[str, Any], method: str) -> Format | None:
    """The format of a row by its keys, None where none fits. Raises UserError where it is no format of the method."""
    found = next((known for known in FORMATS if all(key in row for key in known.keys)), None)
    if found is not None:
        _check_method(found, method)
    return found


def _check_method(found: Format, method: str) -> None:
    pairs = "`prompt`, `chosen` and `rejected`"
    if method in PAIRED and found.kind == UNPAIRED:
        raise UserError(
            f"these are unpaired preference rows; {method} compares two answers to one prompt",
            fix=f"give rows with {pairs}; kto takes these",
        )
    if method in PREFERENCE and found.kind == ANSWERS:
        judged = ", or `prompt`, `completion` and `label`" if method == "kto" else ""
        raise UserError(
            f"{method} learns from answers that are compared, these are {found.name} rows",
            fix=f"give rows with {pairs}{judged}; `swiftlite sft` takes these",
        )
    if method not in PREFERENCE and found.kind != ANSWERS:
        raise UserError(
            f"these are {found.kind} rows; {method} would learn the refused answers too",
            fix="keep only the wanted answers, as `messages` or as `prompt` and `completion`",
        )
    if method == "pretrain" and found.name != "text":
        raise UserError(
            f"pretrain reads `text` rows, these are {found.name} rows",
            fix="use `swiftlite sft`, or name the text: --columns text=COLUMN",
        )


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
        raise BadRow("missing_key", f"{known.name} rows need {', '.join(missing)}; found {names_of(row)}")
    return known.read(row)


# ---- instruction, question and prompt formats -----------------------------------------------------------------------


def _dialogue(row: Mapping[str, Any], question: str, answer: str) -> Chat:
    """[system], the pairs of `history`, then question and answer. Answers of the history are trained like the last."""
    pairs: list[tuple[dict[str, Any], bool]] = []
    if (system := optional_text(row, "system")) is not None:
        pairs.append(({"role": "system", "content": system}, False))
    history = row.get("history")
    turns = [] if history in (None, "") else array(history, "history")
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRow("wrong_type", "history must be a list of [question, answer] pairs")
    for asked, answered in [*turns, (question, answer)]:
        if not string(answered, "the answer").strip():
            raise BadRow("empty", "an answer is empty")
        pairs.append(({"role": "user", "content": string(asked, "the question")}, False))
        pairs.append(({"role": "assistant", "content": answered}, True))
    return chat(pairs, tools_of(row))


def _read_alpaca(row: Mapping[str, Any]) -> Chat:
    question = string(row["instruction"], "instruction")
    if (extra := optional_text(row, "input")) is not None:
        question = f"{question}\n{extra}" if question else extra
    return _dialogue(row, question, string(row["output"], "output"))


def _read_pair(question: str, answer: str) -> Callable[[Mapping[str, Any]], Chat]:
    def read(row: Mapping[str, Any]) -> Chat:
        return _dialogue(row, string(row[question], question), string(row[answer], answer))

    return read


def _read_completion(row: Mapping[str, Any]) -> Row:
    return answer_to(row["prompt"], row["completion"], "completion", tools_of(row))


def _read_text(row: Mapping[str, Any]) -> Text:
    text = string(row["text"], "text")
    if not text.strip():
        raise BadRow("empty", "text is empty")
    return Text(text)


PROMPT_KEYS = ("prompt", "conversations", "tools", "margin")
MESSAGE_KEYS = ("system", "tools", "margin")
FORMATS = (
    Format("preference", ("chosen", "rejected"), read_preference, PROMPT_KEYS, PREFERENCES),
    Format("rejected_response", ("messages", "rejected_response"), read_rejected_response, MESSAGE_KEYS, PREFERENCES),
    Format("rejected_messages", ("messages", "rejected_messages"), read_rejected_messages, MESSAGE_KEYS, PREFERENCES),
    Format(UNPAIRED, ("prompt", "completion", "label"), read_judged, ("tools",), UNPAIRED),
    Format("messages", ("messages",), read_messages, ("system", "tools")),
    Format("ShareGPT", ("conversations",), lambda row: read_messages(row, "conversations"), ("system", "tools")),
    Format("Alpaca", ("instruction", "output"), _read_alpaca, ("input", "system", "history")),
    Format("prompt and completion", ("prompt", "completion"), _read_completion, ("tools",)),
    Format("query and response", ("query", "response"), _read_pair("query", "response"), ("system", "history")),
    Format("question and answer", ("question", "answer"), _read_pair("question", "answer"), ("system", "history")),
    Format("text", ("text",), _read_text),
)
