"""Rows of every known format -> one of the forms: Chat, Completion, Text, and Pair or Judged for preferences.

The format is a property of a file: the first row whose keys are known decides it, later rows must follow it.
Whatever is wrong with a row raises BadRow with a short, stable reason that the audit counts.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftlite.config.methods import PAIRED, PREFERENCE
from swiftlite.data.rows.forms import BadRow, Chat, Row, Text
from swiftlite.data.rows.messages import (
    QUESTIONS,
    answer_to,
    chat,
    exchange,
    opening,
    question_of,
    read_messages,
    string,
    tools_of,
)
from swiftlite.data.rows.preferences import (
    judge,
    read_against,
    read_judged,
    read_openai_preference,
    read_preference,
    read_rejected_messages,
)
from swiftlite.errors import UserError
from swiftlite.untrusted import names_of, printable

ANSWERS, PREFERENCES, UNPAIRED = "answers", "preference", "unpaired preference"
MOST_COLUMNS = 100


@dataclass(frozen=True)
class Format:
    """One row format. keys: what a row must have; read: turns such a row into its form; kind: what its rows hold;
    methods: those that tell it from another format with fewer keys, none for all."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]
    optional: tuple[str, ...] = field(default=())
    kind: str = ANSWERS
    methods: tuple[str, ...] = ()


def detect_format(row: Mapping[str, Any], method: str) -> Format | None:
    """The format of a row by its keys, None where none fits. Raises UserError where it is no format of the method."""
    for known in (TEXT, *FORMATS) if method == "pretrain" else FORMATS:  # texts often stand beside their parts
        if known.methods and method not in known.methods:
            continue
        # Beside an answer alone, a key of a comparison that is null says that there is none.
        null_counts = known.kind == ANSWERS or method in PREFERENCE
        if all(key in row and (null_counts or row[key] is not None) for key in known.keys):
            _check_method(known, method)
            return known
    return None


ASKING = ("instruction", "prompt", "question", "query", "problem", "input")
ANSWERING = ("output", "response", "answer", "completion", "solution", "target")
BESIDE = {"input": "context", "system": "system_prompt"}  # what Alpaca rows may have, under names it often has


def unknown_format(row: Mapping[str, Any], columns: Mapping[str, str]) -> BadRow:
    """The error for a row whose keys no format has, and what to do where something suggests itself.

    columns: format key -> column of the file, as `--columns` says.
    """
    columns = _acting(row, columns)
    named = rename_columns(row, columns)
    keys = {f"{key} (column {columns[key]})" if key in columns else key: None for key in named}
    return BadRow("unknown_format", f"no row format has these keys: {names_of(keys)}{_hint_for(named, columns)}")


def _hint_for(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """What to do with such a row, as it is after `rename_columns`; empty where nothing suggests itself."""
    if padded := [key for key in row if key != key.strip()]:
        return f"; {padded[0]!r} has blanks around it: take them out"
    if len(row) == 1:
        ((key, value),) = row.items()
        if ";" in key:
            return "; columns are divided by commas in .csv, by tabs in .tsv"
        if isinstance(value, list) and value and isinstance(value[0], dict) and not {"role", "from"} & value[0].keys():
            return f"; the list under {key} alone, as a file, would be rows"
    suggested = _columns_for(row)
    if not suggested:
        return ""
    kept = {key: column for key, column in columns.items() if key in row and key not in suggested.values()}
    named = kept | {key: columns.get(column, column) for key, column in suggested.items()}
    words = shlex.join(f"{key}={column}" for key, column in named.items())
    return f"; --columns {words} would name them as a format does"


def _columns_for(row: Mapping[str, Any]) -> dict[str, str]:
    """Format key -> key of the row that would make this a row of conversation, empty where nothing would."""
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "from"} & value[0].keys():
            return {"messages": key}
    exact = {key: key for key, value in row.items() if isinstance(value, str)}
    texts = {key.lower(): key for key in exact} | exact
    asks = next((texts[key] for key in ASKING if key in texts), None)
    answers = next((texts[key] for key in ANSWERING if key in texts), None)
    if asks is None or answers is None:
        return {"text": texts["text"]} if "text" in texts else {}
    named = {"instruction": asks, "output": answers}
    for key, name in BESIDE.items():
        column = texts.get(name, texts.get(key))
        if column not in (None, asks):
            named[key] = column
    return {key: column for key, column in named.items() if key != column}


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
            fix=f"give rows with {pairs}{judged}, or name their columns, such as --columns "
            f"{'label' if method == 'kto' else 'rejected'}=COLUMN; `swiftlite sft` takes these",
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
    """Give columns the keys of a format. columns: format key -> column of the file; in a row without that column, as of
    another file of a mixture, the key is its own."""
    acting = _acting(row, columns)
    renamed = {key: value for key, value in row.items() if key not in acting.values() and key not in acting}
    return renamed | {key: row[column] for key, column in acting.items()}


def _acting(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, str]:
    return {key: column for key, column in columns.items() if column in row}


class TrackedRow(dict[str, Any]):
    """A row that knows which of its values were asked for."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def unused_of(self, given: Mapping[str, Any], columns: Mapping[str, str], method: str) -> list[str]:
        """The columns of the row as it was given, before `rename_columns`, that hold something nobody has asked for."""
        acting = _acting(given, columns)
        asked = {acting.get(key, key) for key in self.asked}
        if method != "rm":
            asked.discard(acting.get("margin", "margin"))  # every pair is read with its margin
        left = (key for key, value in given.items() if key not in asked and value not in (None, "", [], {}))
        return [printable(str(key))[:40] or "(unnamed)" for key in left]  # as the index that pandas writes to csv


def count_columns(total: Counter[str], more: Mapping[str, int]) -> None:
    """Add rows by unused column up; past `MOST_COLUMNS` under one name, since each row may have keys of its own."""
    for name, count in more.items():
        total[name if name in total or len(total) < MOST_COLUMNS else "others"] += count


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises UserError for a format key that does not exist."""
    known = sorted({key for known in FORMATS for key in (*known.keys, *known.optional)})
    for key, column in columns.items():
        if key not in known:
            turned = f"did you mean {column}={key}? " if column in known else ""
            raise UserError(
                f"no row format has the key {key!r}",
                where="--columns",
                fix=f"{turned}give KEY=COLUMN; keys: {', '.join(known)}",
            )


def read_row(row: Mapping[str, Any], known: Format) -> Row:
    """The row in its form. Raises BadRow."""
    missing = [key for key in known.keys if key not in row]
    if missing:
        raise BadRow("missing_key", f"{known.name} rows need {', '.join(missing)}; found {names_of(row)}")
    return known.read(row)


def check_shown(row: Mapping[str, Any]) -> None:
    """Raises BadRow for a row whose text has a mark for what stands beside it, as LLaVA, LLaMA-Factory and ms-swift
    write rows with images: its answers would be learnt as if the model had seen that."""
    for kind in ("image", "video", "audio"):
        column = next((name for name in (f"{kind}s", kind) if row.get(name)), None)
        if column is not None and _says(row, f"<{kind}>"):
            raise BadRow("not_text", f"its text shows what stands under {column} by <{kind}>; only text is read")


def _says(value: Any, mark: str) -> bool:
    if isinstance(value, list | dict):
        return any(_says(each, mark) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and mark in value


# ---- instruction, question and prompt formats -----------------------------------------------------------------------


def _read_exchange(question: str, answer: str) -> Callable[[Mapping[str, Any]], Chat]:
    """[system], the pairs of `history`, then question and answer. Answers of the history are trained like the last."""

    def read(row: Mapping[str, Any]) -> Chat:
        last = exchange(question_of(row, question), string(row[answer], answer))
        return chat([*opening(row), *last], tools_of(row))

    return read


def _read_text(row: Mapping[str, Any]) -> Text:
    text = string(row["text"], "text")
    if not text.strip():
        raise BadRow("empty", "text is empty")
    return Text(text)


def _with_answer(known: Format, key: str, read: Callable[..., Row], kind: str, *methods: str) -> Format:
    """A format of conversations with one more key, which tells how good the last answer is."""

    def read_both(row: Mapping[str, Any]) -> Row:
        return read(row, known.read(row))

    optional = (*known.optional, *(("margin",) if kind == PREFERENCES else ()))
    return Format(f"{known.name} with {key}", (*known.keys, key), read_both, optional, kind, methods)


BEFORE = ("system", "history", "tools")
PROMPT_KEYS = ("prompt", "conversations", "messages", *QUESTIONS, "input", *BEFORE, "margin")
MESSAGE_KEYS = ("system", "tools", "functions")
CHATS = (
    Format("messages", ("messages",), read_messages, MESSAGE_KEYS),
    Format("ShareGPT", ("conversations",), lambda row: read_messages(row, "conversations"), MESSAGE_KEYS),
    Format("Alpaca", ("instruction", "output"), _read_exchange("instruction", "output"), ("input", *BEFORE)),
    Format("query and response", ("query", "response"), _read_exchange("query", "response"), BEFORE),
    Format("question and answer", ("question", "answer"), _read_exchange("question", "answer"), BEFORE),
)
MESSAGES, *OTHER_CHATS = CHATS
TEXT = Format("text", ("text",), _read_text)
FORMATS = (
    Format("preference", ("chosen", "rejected"), read_preference, PROMPT_KEYS, PREFERENCES),
    Format(
        "OpenAI preference", ("input", "preferred_output", "non_preferred_output"), read_openai_preference,
        kind=PREFERENCES,
    ),
    _with_answer(MESSAGES, "rejected_response", read_against, PREFERENCES),
    Format(
        "rejected_messages", ("messages", "rejected_messages"), read_rejected_messages, (*MESSAGE_KEYS, "margin"),
        PREFERENCES,
    ),
    *(_with_answer(known, "rejected_response", read_against, PREFERENCES, *PREFERENCE) for known in OTHER_CHATS),
    Format(UNPAIRED, ("prompt", "completion", "label"), read_judged, BEFORE, UNPAIRED),
    Format(f"{UNPAIRED} with kto_tag", ("prompt", "completion", "kto_tag"), read_judged, BEFORE, UNPAIRED),
    *(_with_answer(known, "kto_tag", judge, UNPAIRED) for known in CHATS),
    *(_with_answer(known, "label", judge, UNPAIRED, "kto") for known in CHATS),
    *CHATS[:3],
    Format("prompt and completion", ("prompt", "completion"), answer_to, BEFORE),
    *CHATS[3:],
    TEXT,
)  # fmt: skip
