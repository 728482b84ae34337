"""Prompts with the answers of other rows: what KTO takes its reference point z0 from (arXiv 2402.01306, section 4.1).

The rows of a global step stand in one order, whoever computes them, and each prompt gets the answer of the next row
with another prompt, after the last row beginning with the first. So z0 depends on the step alone, and not on ranks or
micro-batches. Only where all rows of a step ask the same does a prompt get another answer to itself.
"""

from __future__ import annotations

import numpy as np

from swiftlite.data.order import Pack, Sequence
from swiftlite.data.packing import best_fit_decreasing
from swiftlite.data.tokens.preference_tokens import Preference, fit

MIXED = -1  # in place of a data set's number


def mismatched_packs(packs: list[Pack], max_length: int, bos: int | None) -> list[Pack]:
    """The packs of a global step, of single answers, with each prompt before the answer of the next row.

    Sequences longer than `max_length` tokens are cut as rows are: the prompt first, from the left, but not a `bos` that
    opens it. A sequence is known by its prompt's place in the step: a row may stand there twice, before two answers. A
    step of one row has no other: no packs.
    """
    rows = [sequence for pack in packs for sequence in pack]
    if len(rows) < 2:
        return []
    others = _next_with_another_prompt(rows)
    mixed = [_mix(row, rows[others[place]], (MIXED, place), max_length, bos) for place, row in enumerate(rows)]
    lengths = np.asarray([len(sequence.input_ids) for sequence in mixed])
    return [[mixed[place] for place in pack] for pack in best_fit_decreasing(lengths, max_length)]


def _next_with_another_prompt(rows: list[Sequence]) -> list[int]:
    """For each row the place of the one whose answer its prompt gets."""
    count = len(rows)
    prompts = [row.input_ids[: row.preference.prompt].tobytes() for row in rows]
    if len(set(prompts)) == 1:
        return [(place + 1) % count for place in range(count)]
    found = [0] * count
    for place in reversed(range(2 * count)):  # once round, so that the last rows know what the first ones ask
        here, after = place % count, (place + 1) % count
        found[here] = found[after] if prompts[here] == prompts[after] else after
    return found


def _mix(asked: Sequence, answered: Sequence, identity: tuple[int, int], max_length: int, bos: int | None) -> Sequence:
    prompt, skipped = asked.preference.prompt, answered.preference.prompt
    ids = np.concatenate([asked.input_ids[:prompt], answered.input_ids[skipped:]])
    trained = np.concatenate([np.zeros(prompt, dtype=np.bool_), answered.trained[skipped:]])
    ((ids, trained),), kept = fit([(ids, trained)], prompt, max_length, bos)
    return Sequence(ids, trained, asked.where, Preference(kept, desirable=answered.preference.desirable), identity)
