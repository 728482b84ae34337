"""The questions of a JSON file in its order (see `swiftlite.data.tokens.questions`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swiftlite.data.rows.formats import check_shown
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.rows.readers import Payload, parse_payload, read_rows
from swiftlite.data.rows.sources import DataFile, as_data_file
from swiftlite.data.tokens.questions import Question, read_question
from swiftlite.errors import UserError


def read_questions(path: Path, system: str | None) -> list[Question]:
    """All rows of a file in order: JSON lines, perhaps compressed, or a JSON array. system: put before rows that have
    no system message of their own.

    Raises UserError naming file and line of the first row that cannot be answered.
    """
    file = _data_file(path)
    questions = [_question(payload, file.where(number), system) for number, payload in read_rows(file)]
    if not questions:
        raise UserError("the input file has no rows", where=str(path), fix="write one JSON object a line")
    return questions


def check_utf8(text: str, where: str) -> None:
    """Raises UserError for text of a command line or a pipe with bytes that are not UTF-8; Python hands them over as
    halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise not_utf8(where) from error


def not_utf8(where: str) -> UserError:
    """The error for text that is no text."""
    return UserError("the text is not UTF-8", where=where, fix="convert it, for example with iconv -t UTF-8")


def _data_file(path: Path) -> DataFile:
    if path.is_dir() or not path.exists():  # a pipe is read too
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"the input file {problem}", where=f"--input {path}", fix="name a .jsonl file")
    file = as_data_file(path) or DataFile(str(path), "jsonl", path)
    if file.kind not in ("jsonl", "json", "txt"):
        problem = f"{path.suffix} files are not answered, only JSON lines"
        raise UserError(problem, where=f"--input {path}", fix="write its rows as .jsonl, one JSON object a line")
    return replace(file, kind="jsonl") if file.kind == "txt" else file


def _question(payload: Payload, where: str, system: str | None) -> Question:
    try:
        row = parse_payload(payload)
    except BadRow as bad:
        raise UserError(bad.detail, where=where, fix="write one JSON object a line, as UTF-8") from bad
    try:
        check_shown(row)
        return read_question(row, where, system)
    except BadRow as bad:
        raise UserError(bad.detail, where=where, fix="write rows as `swiftlite sft` takes them") from bad
