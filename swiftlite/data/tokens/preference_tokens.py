"""Answers that are compared, as tokens: what they share, how they are cut, and how a pair is laid out.

A pair is one sequence `P | C | R`. P is the prompt without its last token; C and R are the chosen and the rejected
answer, each behind the prompt's last token. So whatever predicts an answer's first token stands in the answer's own
segment, and a label is the next token of the segment, as in any other document. What C and R attend to in P is
computed once for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swiftlite.data.tokens.encode import Tokens


@dataclass(frozen=True)
class Preference:
    """What a sequence of a preference method is made of, in tokens.

    A pair: `prompt` tokens of P (0 where the answers are two documents, each with the whole prompt), then `chosen`
    tokens of C; the rest is R. A single answer: `prompt` tokens come before it, and `chosen` is 0.
    desirable: whether a single answer is wanted; margin: of a pair.
    """

    prompt: int
    chosen: int = 0
    desirable: bool = True
    margin: float = 0.0

    @property
    def is_pair(self) -> bool:
        return self.chosen > 0

    def behind_prompt(self, tokens: int) -> tuple[int, ...]:
        """Tokens of each answer that goes on from the prompt, of a sequence of so many; none of a single answer, which
        is one document with its prompt."""
        return (self.chosen, tokens - self.prompt - self.chosen) if self.is_pair else ()

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Of each answer."""
        return (True, False) if self.is_pair else (self.desirable,)

    @property
    def margins(self) -> tuple[float, ...]:
        """Of each answer."""
        return (self.margin,) * len(self.wanted)


@dataclass(frozen=True)
class Group:
    """What a sequence of several answers to one prompt is made of, laid out as a pair is: `prompt` tokens of P, then
    `answers` tokens of each; advantages: by how much each is better than the others. Asked as a `Preference` is."""

    prompt: int
    answers: tuple[int, ...]
    advantages: tuple[float, ...]

    def behind_prompt(self, tokens: int) -> tuple[int, ...]:
        return self.answers

    @property
    def wanted(self) -> tuple[bool, ...]:
        return (True,) * len(self.answers)

    @property
    def margins(self) -> tuple[float, ...]:
        return self.advantages


def prompt_length(answers: list[Tokens]) -> int:
    """Tokens that all answers begin with, up to the first token that any of them trains.

    A merge at the seam of prompt and answer may differ between answers: it then belongs to each answer.
    """
    first_trained = min(int(trained.argmax()) if trained.any() else len(ids) for ids, trained in answers)
    rows = np.stack([ids[:first_trained] for ids, _ in answers])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else first_trained


def fit(answers: list[Tokens], prompt: int, limit: int, bos: int | None) -> tuple[list[Tokens], int]:
    """Answers with their prompt in at most `limit` tokens each, and the prompt tokens that they still share.

    The prompt is cut first, from the left (not a beginning-of-text token), down to its last token; then the end of
    an answer that alone is too long.
    """
    longest = max(len(ids) for ids, _ in answers) - prompt
    if prompt + longest <= limit:
        return answers, prompt
    kept = max(min(prompt, 1), limit - longest)
    opening = int(kept > 1 and bos is not None and answers[0][0][0] == bos)
    cut = []
    for ids, trained in answers:
        places = np.r_[:opening, prompt - kept + opening : len(ids)][:limit]
        cut.append((ids[places], trained[places]))
    return cut, kept


def lay_out_pair(
    chosen: Tokens, rejected: Tokens, prompt: int, margin: float, *, share: bool
) -> tuple[Tokens, Preference]:
    """The one sequence of a pair. prompt: tokens that both begin with; share: whether they come once."""
    shared = max(0, prompt - 1) if share else 0
    ids, trained = (np.concatenate([one, other[shared:]]) for one, other in zip(chosen, rejected, strict=True))
    return (ids, trained), Preference(shared, len(chosen[0]) - shared, margin=margin)
