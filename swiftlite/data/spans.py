"""Answers in the text of a conversation: the characters that are trained, and several answers as one sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """text: the whole conversation or a part of it; spans: trained characters, ascending; add_eos: the template ends
    answers with no token at all, so that the tokenizer's end-of-text has to be appended and trained."""

    text: str
    spans: list[Span]
    add_eos: bool


@dataclass(frozen=True)
class Turn:
    """One trained answer: the text up to its end, the spans within it, and whether an end-of-turn token closes it."""

    text: str
    spans: list[Span]
    closed: bool


def without_gaps(spans: list[Span]) -> list[Span]:
    """The spans that hold anything, with those that touch as one."""
    found: list[Span] = []
    for start, end in spans:
        if end > start and found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def joined(turns: list[Turn], stop_behind: Callable[[str, int], int]) -> Rendered:
    """The sequence of some answers; an end-of-text stands right behind the last of them.

    stop_behind: where the token ends that begins the next message, given a text and the end of an answer in it. Where
    nothing else ends an answer, the model stops by that (GLM's `<|user|>` and `<|observation|>` do both).
    """
    last, spans = turns[-1], []
    for turn in turns:
        start, end = turn.spans[-1]
        if not turn.closed and turn is not last:
            end = stop_behind(last.text, end)
        spans += [*turn.spans[:-1], (start, end)]
    return Rendered(last.text if last.closed else last.text[: spans[-1][1]], spans, add_eos=not last.closed)
