"""Held-out rows -> prompts that a model answers while it is evaluated, of methods that learn from others' answers.

The same rows are read a second time, as `grpo` reads them: the question without what stands behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from swiftlite.config.methods import SAMPLING, as_prompts, examines
from swiftlite.data.audit import dropped_rows, questions_section
from swiftlite.data.build import check_vocabulary
from swiftlite.data.held_out import part_of
from swiftlite.data.order import Part
from swiftlite.data.prepare import (
    Entry,
    LoadTokenizer,
    PreparedData,
    Progress,
    asked_of,
    plan_evaluation,
    prepare_data,
    prepare_one,
)
from swiftlite.data.rows.sources import parse_spec, resolve
from swiftlite.data.tokens.tokenizer_key import tokenizer_key
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def prepare_run(
    config: RunConfig,
    load_tokenizer: LoadTokenizer,
    progress: Progress | None = None,
    vocabulary: int | None = None,
) -> PreparedData:
    """`prepare_data`, and where evaluations are of answers too, the rows that they are about as prompts.

    Raises UserError as it does, and where no held-out row can be asked.
    """
    prepared = prepare_data(config, load_tokenizer, progress, vocabulary)
    if config.method in SAMPLING or not examines(config):
        return prepared
    return with_questions(config, prepared, load_tokenizer, progress, vocabulary)


def with_questions(
    config: RunConfig,
    prepared: PreparedData,
    load_tokenizer: LoadTokenizer,
    progress: Progress | None,
    vocabulary: int | None,
) -> PreparedData:
    """What is prepared, with its evaluation rows as prompts. config: by which they are; the other arguments and errors
    are those of `prepare_run`."""
    asking = as_prompts(config)
    flag, names = ("--eval-dataset", config.eval_dataset) if config.eval_dataset else ("--dataset", config.dataset)
    identity = tokenizer_key(asking, load_tokenizer)
    sources = [resolve(parse_spec(text, flag, config.max_samples), asking.method) for text in names]
    entries = [prepare_one(asking, source, identity, load_tokenizer, progress) for source in sources]
    for entry in entries:
        check_vocabulary(entry.meta["largest_token"], vocabulary, entry.store.where_from)
    parts = [part_of(entry) for entry in entries] if config.eval_dataset else _held_out(entries, prepared)
    plan, named = plan_evaluation(asking, parts), f"{flag} {' '.join(names)}"
    if plan is None or not any(plan.row_counts.values()):
        reasons = ", ".join(dropped_rows(entries)) or "none of them is a question"
        raise UserError(
            f"none of the rows that are held out can be asked: {reasons}",
            where=named,
            fix="raise --max-length or lower --max-new-tokens, give --eval-dataset with questions, or no --reward",
        )
    held_out = None if config.eval_dataset else sum(prepared.eval.row_counts.values())
    return replace(
        prepared,
        audit=prepared.audit | questions_section(entries, plan, held_out),
        asked=(asked_of(named, entries),),
        questions=plan,
        questions_fingerprint=" ".join(entry.tokens for entry in entries),
    )


def _held_out(entries: list[Entry], prepared: PreparedData) -> list[Part]:
    """Of each data set the rows that are held out of it, by their numbers: other rows are left out of prompts than of
    what is learnt."""
    parts = {part.name: part for part in prepared.eval.parts}
    found = []
    for entry in entries:
        if (part := parts.get(entry.source.spec.text)) is not None:
            numbers = part.store.row_numbers()[part.rows]
            rows = np.flatnonzero(np.isin(entry.store.row_numbers(), numbers))
            found.append(Part(part.name, entry.store, rows))  # once, whatever weight others are trained with
    return found
