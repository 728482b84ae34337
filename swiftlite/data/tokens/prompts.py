"""Rows -> prompts that a model answers while it is trained: the tokens of each question, and the row beside them.

Nothing of a row's own answer is learnt. What else a row holds, such as the right answer, is for the functions that
reward what the model says.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.config.methods import GIVEN, PROMPT
from swiftlite.data.rows.formats import check_shown, rename_columns
from swiftlite.data.rows.forms import BadRow, Chat
from swiftlite.data.rows.messages import string
from swiftlite.data.rows.placeholders import Placeholders, holds_published
from swiftlite.data.rows.readers import parse_payload
from swiftlite.data.rows.sources import DataFile
from swiftlite.data.tokens.chat_template import ChatTemplate
from swiftlite.data.tokens.left_out import leaves_out_messages, leaves_out_tools
from swiftlite.data.tokens.own_tools import beside
from swiftlite.data.tokens.questions import Message, Question, opened, plain_ids, read_question
from swiftlite.data.tokens.tokenize import RawRow, TokenBatch, TokenOptions, reject
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTHING = np.empty(0, dtype=np.int32)


class PromptTokenizer:
    """What `RowTokenizer` is for rows with answers to learn; one a process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenOptions, files: list[DataFile]) -> None:
        """options.max_length: of a prompt alone; files: what `RawRow.file` points into."""
        self._tokenizer, self._options, self._files = tokenizer, options, files
        has_template = tokenizer.chat_template is not None
        self._template = ChatTemplate(tokenizer, options.template_date) if has_template else None
        self._placeholders = Placeholders(options.placeholders) if options.placeholders else None

    def __call__(self, rows: list[RawRow]) -> TokenBatch:
        """Tokenise the questions of some rows. Bad rows are collected in `rejected`, long ones dropped and counted.

        Raises UserError under `overlong: error`.
        """
        batch = TokenBatch()
        batch.counts["read"] = len(rows)
        for raw in rows:
            told: Counter[str] = Counter()
            try:
                question = self._read(raw, told)
                text, ids = self._text_and_ids(question)
                columns = {key: value for key, value in question.row.items() if key not in PROMPT}
                record = _record(question, columns)
            except BadRow as bad:
                reject(batch, raw, self._files, bad)
                continue
            if self._is_left_out(raw, len(ids), batch):
                continue
            self._count(question, text, told)
            batch.counts.update(told)
            batch.counts["used"] += 1
            batch.ids.append(np.asarray(ids, dtype=np.int32))
            batch.runs.append(NOTHING)
            batch.rows.append((raw.number, raw.file, raw.line))
            batch.columns.update(columns)
            batch.asked.append(record)
            batch.counts["answered"] += question.answer is not None
        return batch

    def _read(self, raw: RawRow, told: Counter[str]) -> Question:
        row = rename_columns(parse_payload(raw.payload), self._options.columns)
        if self._placeholders is not None:
            row, before = self._placeholders.fill(row), row
            told["placeholders_filled"] = row != before
        check_shown(row)
        if taken := next((name for name in GIVEN if name in row), None):
            raise BadRow("taken_name", f"functions that reward answers get those as {taken}: call the column otherwise")
        question = read_question(row, self._files[raw.file].where(raw.line), self._options.system)
        return replace(question, tools=beside(self._options.tools, question.tools))

    def _text_and_ids(self, question: Question) -> tuple[str, list[int]]:
        """What the model is asked. Raises BadRow."""
        if question.plain or self._template is None:
            return self._plain(question)
        template, tools = self._template, question.tools

        def render(messages: list[Message], *, add_generation_prompt: bool = False) -> str:
            return template.render(Chat(messages, [], tools), len(messages), generation=add_generation_prompt)

        text = string(opened(question.messages, render), "the conversation")
        return text, self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them all

    def _plain(self, question: Question) -> tuple[str, list[int]]:
        if len(question.messages) > 1:
            raise BadRow("no_template", "the tokenizer has no chat template, so it cannot write several messages")
        text = string(question.messages[0]["content"], "the prompt")
        ids = plain_ids(text, self._tokenizer)
        if not ids:
            raise BadRow("empty", "the prompt is empty")
        return text, ids

    def _count(self, question: Question, text: str, told: Counter[str]) -> None:
        """What is not asked as the row has it, and what stands in a question that nobody meant to."""
        chat = Chat(question.messages, [], question.tools)
        told["asked_plainly"] = self._template is None and not question.plain
        told["system_added"] = question.system_added
        told["tools_left_out"] = leaves_out_tools(chat, [text])
        told["messages_left_out"] = leaves_out_messages(chat, [text])
        told["placeholders_left"] = holds_published(text)

    def _is_left_out(self, row: RawRow, length: int, batch: TokenBatch) -> bool:
        """A question that lost a part of itself would be another one, so no policy cuts it."""
        limit = self._options.max_length
        if length <= limit:
            return False
        if self._options.overlong == "error":
            raise UserError(
                f"the prompt has {length:,} tokens, and beside --max-new-tokens {limit:,} are left for it",
                where=self._files[row.file].where(row.line),
                fix="raise --max-length, lower --max-new-tokens, or choose --overlong drop",
            )
        batch.dropped["over_long"] += 1
        return True


def _record(question: Question, columns: dict[str, Any]) -> str:
    """What a function that rewards answers is told of a question, as JSON. Raises BadRow."""
    prompt = question.messages[0]["content"] if question.plain else question.messages
    told = {"prompt": prompt, "columns": columns, "expected": question.answer}
    return string(json.dumps(told, ensure_ascii=False, default=str), "a column beside the question")
