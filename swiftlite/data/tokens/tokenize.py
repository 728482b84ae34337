"""Rows -> token sequences with a trained flag a token. Each text is tokenised as a whole.

Tokenising prompt and answer apart would change the merges at their seam, and a mask made from `token == pad` would
lose every end-of-turn token of the many models whose pad is their eos.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.config.methods import PAIRED
from swiftlite.data.rows.formats import (
    FORMATS,
    TrackedRow,
    check_shown,
    count_columns,
    read_row,
    rename_columns,
    unknown_format,
)
from swiftlite.data.rows.forms import BadRow, Chat, Completion, Judged, Pair, Row, Text
from swiftlite.data.rows.learnt import check_no_marks, with_last_answer
from swiftlite.data.rows.messages import string
from swiftlite.data.rows.placeholders import Placeholders, holds_published
from swiftlite.data.rows.readers import Payload, parse_payload
from swiftlite.data.rows.sources import DataFile
from swiftlite.data.rows.system import with_system
from swiftlite.data.tokens.encode import Spans, TextEncoder, Tokens
from swiftlite.data.tokens.left_out import leaves_out_messages, leaves_out_tools, unwritten_call_keys
from swiftlite.data.tokens.preference_tokens import Preference, fit, lay_out_pair, prompt_length
from swiftlite.data.tokens.template import ChatRenderer
from swiftlite.errors import UserError
from swiftlite.untrusted import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenOptions:
    """Everything besides tokenizer and rows that decides the tokens. overlong: truncate, drop, split or error;
    share_prompt: whether the prompt of a pair comes once; system: the message of conversations that have none;
    placeholders: what is written for {{KEY}} in a row; train_on: answers, last-answer or all of a conversation; tools:
    that a model may call in its own answers, beside those of a row, as chat templates take them."""

    method: str
    max_length: int
    overlong: str
    template_date: str
    columns: dict[str, str]
    share_prompt: bool = True
    system: str | None = None
    placeholders: dict[str, str] = field(default_factory=dict)
    train_on: str = "answers"
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class RawRow:
    """One row as read: file is an index into the source's files, line counts from 1, number is the row's, from 0."""

    file: int
    line: int
    number: int
    format: str | None
    payload: Payload


@dataclass
class TokenBatch:
    """Sequences of some rows, laid end to end. runs: trained `[start, end)` pairs of each sequence, flat; preferences:
    of each sequence, for the methods that compare answers; asked: of each prompt that is answered while training, its
    row as JSON; columns: that such rows have for whoever rewards answers; unused: rows by column that nothing was made
    of."""

    ids: list[np.ndarray] = field(default_factory=list)
    runs: list[np.ndarray] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # (row number, file, line) per sequence
    preferences: list[Preference] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    rejected: list[dict[str, Any]] = field(default_factory=list)

    def extend(self, other: TokenBatch) -> None:
        """Put the sequences and counts of further rows behind these."""
        for name in ("ids", "runs", "rows", "preferences", "asked", "rejected"):
            getattr(self, name).extend(getattr(other, name))
        self.columns |= other.columns
        self.counts.update(other.counts)
        self.dropped.update(other.dropped)
        count_columns(self.unused, other.unused)

    def largest(self) -> int:
        """The highest token of all, -1 where there is none."""
        return max((int(ids.max(initial=-1)) for ids in self.ids), default=-1)


@dataclass(frozen=True)
class _Text:
    """A text to tokenise. spans: trained characters, None for all of them; plain: with the tokenizer's own special
    tokens (a chat template has written them itself); add_eos: close it with the end-of-text token; asked: the model is
    asked with what stands before the spans."""

    text: str
    spans: Spans | None
    plain: bool
    add_eos: bool
    asked: bool = True


@dataclass
class _Sound:
    """A row that becomes some texts. told: what the audit says of it where it is used; unused: likewise, its columns of
    which nothing is made."""

    raw: RawRow
    row: Row
    texts: list[_Text]
    told: Counter[str]
    unused: Counter[str]


class RowTokenizer:
    """Turns raw rows into token sequences; one a process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenOptions, files: list[DataFile]) -> None:
        """files: what `RawRow.file` points into. Raises UserError for a tokenizer that gives no character offsets."""
        if not tokenizer.is_fast:
            raise UserError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: it gives no character offsets, and trained "
                "spans cannot be exact without them",
                fix="use a model with a tokenizer.json, or convert its tokenizer",
            )
        self._tokenizer, self._options, self._files = tokenizer, options, files
        self._encoder = TextEncoder(tokenizer)
        self._ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]  # by itself
        self._renderer: ChatRenderer | None = None
        self._placeholders = Placeholders(options.placeholders) if options.placeholders else None

    def __call__(self, rows: list[RawRow]) -> TokenBatch:
        """Tokenise some rows. Bad rows are collected in `rejected`.

        Raises UserError under `overlong: error`, and for a tokenizer or template that cannot do what the rows need.
        """
        batch = TokenBatch()
        batch.counts["read"] = len(rows)
        sound: list[_Sound] = []
        for raw in rows:
            try:
                sound.append(self._sound(raw))
            except BadRow as bad:
                reject(batch, raw, self._files, bad)
        encoded = iter(self._encode([text for found in sound for text in found.texts]))
        for found in sound:
            sequences, torn = zip(*(next(encoded) for _ in found.texts), strict=True)
            found.told["asked_otherwise"] = any(torn) or not all(text.asked for text in found.texts)
            if isinstance(found.row, Pair | Judged):
                is_used = self._finish_answers(found.raw, found.row, sequences, batch)
            else:
                is_used = self._finish(found.raw, sequences, batch)
            if is_used:
                batch.counts.update(found.told)
                batch.unused.update(found.unused)
        return batch

    def with_prompt(self, answer: Chat | Completion) -> np.ndarray:
        """The tokens of an answer behind its prompt, as they are where answers are compared. Raises BadRow."""
        (((ids, _), _),) = self._encode(self._answer(answer))
        return ids

    def _sound(self, raw: RawRow) -> _Sound:
        """The row in its form, with its texts. Raises BadRow."""
        given, columns, system = parse_payload(raw.payload), self._options.columns, self._options.system
        told: Counter[str] = Counter()
        if raw.format is None:
            raise unknown_format(given, columns)
        if self._placeholders is not None:
            given, before = self._placeholders.fill(given), given
            told["placeholders_filled"] = given != before
        check_shown(given)
        known = next(known for known in FORMATS if known.name == raw.format)
        tracked = TrackedRow(rename_columns(given, columns))
        said = read_row(tracked, known)
        unused = Counter(tracked.unused_of(given, columns, self._options.method))
        if self._options.train_on == "all":
            check_no_marks(given)
        if self._options.train_on != "answers":
            said = with_last_answer(said)
        row = said if system is None else with_system(said, system)
        told["system_added"] = row is not said
        told["system_left_out"] = system is not None and isinstance(row, Text)
        found = _Sound(raw, row, self._texts(row), told, unused)
        self._count_left_out(found)
        return found

    def _count_left_out(self, found: _Sound) -> None:
        """What becomes of no text of a row, and what stands in one that nobody meant to."""
        row, written = found.row, [text.text for text in found.texts]
        if self._options.method != "pretrain":  # whose texts may be pages with words in braces
            found.told["placeholders_left"] = any(map(holds_published, written))
        if isinstance(row, Pair):
            answers = [(row.chosen, written[:1]), (row.rejected, written[1:])]
        else:
            answers = [(row.answer if isinstance(row, Judged) else row, written)]
        chats = [(chat, texts) for chat, texts in answers if isinstance(chat, Chat)]
        found.told["tools_left_out"] = any(leaves_out_tools(*chat) for chat in chats)
        found.told["messages_left_out"] = any(leaves_out_messages(*chat) for chat in chats)
        unknown = {f"messages.{printable(key):.40}" for chat, _ in chats for key in self._renderer.unknown_keys(chat)}
        unknown |= {f"messages.tool_calls.{printable(key):.40}" for chat in chats for key in unwritten_call_keys(*chat)}
        found.unused.update(unknown)

    def _texts(self, row: Row) -> list[_Text]:
        """The texts of a row; of one that holds answers to compare, one an answer."""
        if isinstance(row, Pair):
            return [*self._answer(row.chosen), *self._answer(row.rejected)]
        if isinstance(row, Judged):
            return self._answer(row.answer)
        if isinstance(row, Chat):
            if self._renderer is None:
                self._renderer = ChatRenderer(self._tokenizer, self._options.template_date)
            parts = self._renderer.render(row)
            return [
                _Text(string(part.text, "the conversation"), self._learnt(part.spans), False, part.add_eos, part.asked)
                for part in parts
            ]
        if isinstance(row, Completion):
            text = row.prompt + row.completion
            return [_Text(text, self._learnt([(len(row.prompt), len(text))]), plain=True, add_eos=True)]
        return [_Text(row.text, None, plain=True, add_eos=True)]

    def _learnt(self, spans: Spans) -> Spans:
        """The spans of the answers, or from the text's beginning to the end of the last."""
        return [(0, spans[-1][1])] if self._options.train_on == "all" else spans

    def _answer(self, answer: Chat | Completion) -> list[_Text]:
        texts = self._texts(answer)
        if len(texts) > 1:
            raise BadRow(
                "template_splits_answer", "the chat template writes the turns of one answer as several sequences"
            )
        return texts

    def _encode(self, texts: list[_Text]) -> list[tuple[Tokens, bool]]:
        """Tokens of all texts in order, and whether a prompt has others by itself.

        It is one call of the tokenizer for those of one kind, which uses every core.
        """
        found: list[tuple[Tokens, bool] | None] = [None] * len(texts)
        for plain in (False, True):
            chosen = [i for i, text in enumerate(texts) if text.plain == plain]
            if not chosen:
                continue
            encoded = self._encoder(
                [texts[i].text for i in chosen], [texts[i].spans for i in chosen], special_tokens=plain
            )
            for i, (ids, trained, torn) in zip(chosen, encoded, strict=True):
                found[i] = self._close(texts[i], ids, trained), torn
        return found

    def _close(self, text: _Text, ids: np.ndarray, trained: np.ndarray) -> Tokens:
        """No double beginning-of-text, nor end; an end-of-text that is trained where nothing else ends the answer."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if text.plain and bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids, trained = ids[1:], trained[1:]
        if text.plain and self._ends_texts and len(ids) > 1 and ids[-1] == ids[-2] == eos:
            ids, trained = ids[:-1], trained[:-1]
        if text.add_eos:
            if eos is None:
                raise UserError(
                    "the tokenizer has no end-of-text token, so no answer would ever end",
                    fix="give the tokenizer an eos_token, or use a chat template that ends each turn",
                )
            if len(ids) == 0 or ids[-1] != eos:
                ids, trained = np.append(ids, np.int32(eos)), np.append(trained, True)
            trained[-1] = True
        trained[:1] = False  # the first token of a document is never predicted
        return ids, trained

    def _finish(self, row: RawRow, sequences: list[Tokens], batch: TokenBatch) -> bool:
        """Apply the policy for over-long rows, then keep what has a token to learn. Every loss is counted. Returns
        whether anything is kept."""
        limit, policy = self._options.max_length, self._options.overlong
        longest = max(len(ids) for ids, _ in sequences)
        if self._is_left_out(row, longest, batch):
            return False
        cut = (lambda ids, trained: [(ids[:limit], trained[:limit])]) if policy == "truncate" else self._windows
        parts = [part for tokens in sequences for part in (cut(*tokens) if len(tokens[0]) > limit else [tokens])]
        kept = [(ids, trained) for ids, trained in parts if trained.any()]
        if not kept:
            batch.dropped["no_trained_token"] += 1
            return False
        batch.counts["used"] += 1
        batch.counts["truncated"] += longest > limit and policy == "truncate"
        batch.counts["split"] += longest > limit and policy == "split"
        batch.counts["split_by_template"] += len(sequences) > 1
        for tokens in kept:
            _keep(batch, row, tokens)
        return True

    def _finish_answers(self, raw: RawRow, row: Pair | Judged, answers: list[Tokens], batch: TokenBatch) -> bool:
        """The same for answers that are compared: a pair is one sequence, or for kto two, each with its label."""
        longest = max(len(ids) for ids, _ in answers)
        if self._is_left_out(raw, longest, batch):
            return False
        # Of a pair both have the same prompt, also after a cut.
        fitted, prompt = fit(answers, prompt_length(answers), self._options.max_length, self._tokenizer.bos_token_id)
        if not all(trained.any() for _, trained in fitted):
            batch.dropped["no_trained_token"] += 1
            return False
        if isinstance(row, Pair) and np.array_equal(fitted[0][0], fitted[1][0]):  # their tokens, or what is left
            batch.dropped["equal_completions"] += 1
            return False
        batch.counts["used"] += 1
        batch.counts["truncated"] += longest > self._options.max_length
        if self._options.method in PAIRED:
            _keep(batch, raw, *lay_out_pair(*fitted, prompt, row.margin, share=self._options.share_prompt))
            return True
        labels = [True, False] if isinstance(row, Pair) else [row.desirable]
        for tokens, desirable in zip(fitted, labels, strict=True):
            _keep(batch, raw, tokens, Preference(prompt_length([tokens]), desirable=desirable))
        return True

    def _is_left_out(self, row: RawRow, longest: int, batch: TokenBatch) -> bool:
        """Whether a row is dropped for its length, and counted. Raises UserError under `overlong: error`."""
        limit, policy = self._options.max_length, self._options.overlong
        if longest > limit and policy == "error":
            raise UserError(
                f"the row has {longest:,} tokens, --max-length is {limit:,}",
                where=self._files[row.file].where(row.line),
                fix="raise --max-length, or choose --overlong truncate, drop or split",
            )
        if longest > limit and policy == "drop":
            batch.dropped["over_long"] += 1
            return True
        return False

    def _windows(self, ids: np.ndarray, trained: np.ndarray) -> Iterator[Tokens]:
        """Windows that share one token with the next: it is predicted in the first and only context in the second."""
        limit = self._options.max_length
        for start in range(0, len(ids) - 1, limit - 1):
            flags = trained[start : start + limit].copy()
            flags[0] = False
            yield ids[start : start + limit], flags


def runs_of(flags: np.ndarray) -> np.ndarray:
    """The `[start, end)` pairs of the runs of true values, flat, int32."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.view(np.int8), [0]])))
    return edges.astype(np.int32)


def flags_of(runs: np.ndarray, count: int) -> np.ndarray:
    """The inverse of `runs_of` for `count` flags."""
    flags = np.zeros(count, dtype=np.bool_)
    for start, end in zip(runs[::2], runs[1::2], strict=True):
        flags[start:end] = True
    return flags


def _keep(batch: TokenBatch, row: RawRow, tokens: Tokens, preference: Preference | None = None) -> None:
    ids, trained = tokens
    batch.ids.append(ids)
    batch.runs.append(runs_of(trained))
    batch.rows.append((row.number, row.file, row.line))
    if preference is not None:
        batch.preferences.append(preference)


def reject(batch: TokenBatch, row: RawRow, files: list[DataFile], bad: BadRow) -> None:
    """Count and keep a row that cannot be used. files: what `RawRow.file` points into."""
    batch.dropped[bad.reason] += 1
    shown = row.payload.decode("utf-8", "replace") if isinstance(row.payload, bytes) else row.payload
    rejected = {
        "file": files[row.file].label,
        "line": row.line,
        "reason": bad.reason,
        "detail": bad.detail,
        "row": None if isinstance(shown, BadRow) else shown,
    }
    # Half surrogate pairs can be in no file, dates and the like of columnar files not in JSON.
    batch.rejected.append(json.loads(_half_pairs_out(json.dumps(rejected, ensure_ascii=False, default=str))))


def _half_pairs_out(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
