"""Stretches of characters of a rendered conversation: `[start, end)`."""

from __future__ import annotations

import os
import re

Span = tuple[int, int]
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*$")  # at the end of a text
_TAG = re.compile(r"[<\[][^<>\[\]\s]+[>\]]")


def behind_like(text: str, prompt: str, history: int) -> int | None:
    """The place in the text behind what is the prompt, white space aside; None where it does not begin so.
    history: characters of the prompt before the answer's header, of which the white space counts."""
    place = at = len(os.path.commonprefix([text, prompt]))
    if at < history:
        return None
    while at < len(prompt):
        if text[place : place + 1] == prompt[at]:
            place, at = place + 1, at + 1
        elif prompt[at].isspace():
            at += 1
        elif text[place : place + 1].isspace():
            place += 1
        else:
            return None
    return place


def thinks_nothing(more: str, answer: str) -> bool:
    """Whether what a generation prompt says more than a header is a thought that is closed at once, as Gemma 4's
    `<|channel>thought\n<channel|>`, and the answer has none of its own: it goes behind that."""
    tags = _TAG.findall(more)
    return len(tags) > 1 and more.rstrip().endswith(tags[-1]) and not answer.lstrip().startswith(tags[0])


def blanks_behind(text: str) -> int:
    """How many characters of white space end a text."""
    return len(text) - len(text.rstrip())


def moved(spans: list[Span], by: int) -> list[Span]:
    return [(start + by, end + by) for start, end in spans]


def without_gaps(spans: list[Span]) -> list[Span]:
    """The spans that hold anything, with those that touch as one."""
    found: list[Span] = []
    for start, end in spans:
        if end > start and found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def ends_within(part: str, opening: str, found: str) -> bool:
    """Whether `part` stands in opening + found and at least its last character in found."""
    reach = min(len(opening), max(0, len(part) - 1))
    return part in opening[len(opening) - reach :] + found
