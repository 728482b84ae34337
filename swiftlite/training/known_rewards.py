"""Functions that reward answers and come with swiftlite, named by `--reward last_number` and the like.

They are called as a user's own are. expected: what each row itself answers, None where it does not, which then is not
rewarded. A thought before the answer, as models that reason write it, is none of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
OPENING, CLOSING = "<think>", "</think>"

Expected = Sequence[str | None]
Rewards = list[float | None]


def exact_match(completions: Sequence[Any], expected: Expected, **_others: object) -> Rewards:
    """1 for an answer that is the expected one but for white space and case."""
    return _compared(completions, expected, lambda said, wanted: _plain(said) == _plain(wanted))


def contains(completions: Sequence[Any], expected: Expected, **_others: object) -> Rewards:
    """1 for an answer that the expected one is a part of, but for white space and case."""
    return _compared(completions, expected, lambda said, wanted: _plain(wanted) in _plain(said))


def last_number(completions: Sequence[Any], expected: Expected, **_others: object) -> Rewards:
    """1 for an answer whose last number is the last one of the expected answer, which may tell the way to it."""
    return _compared(completions, expected, lambda said, wanted: _number(said) == _number(wanted) is not None)


def math_equal(completions: Sequence[Any], expected: Expected, **_others: object) -> Rewards:
    """1 for an answer whose formula or number equals the expected one as mathematics has it: 1/2 is 0.5. None where the
    expected one is nothing of the kind. Read by https://github.com/huggingface/Math-Verify."""
    from math_verify import parse, verify

    wanted = [None if text is None else parse(text) or parse(f"${text}$") for text in expected]
    answers = [text_of(completion).rpartition(CLOSING)[2] for completion in completions]
    return [float(verify(one, parse(said))) if one else None for one, said in zip(wanted, answers, strict=True)]


def think_format(completions: Sequence[Any], **_others: object) -> Rewards:
    """1 for an answer that is one thought in <think> tags, which the prompt may have opened, with text behind it."""
    return [float(_is_thought_and_answer(text_of(completion))) for completion in completions]


KNOWN = {function.__name__: function for function in (exact_match, contains, last_number, math_equal, think_format)}
PACKAGES = {"math_equal": ("math_verify", "math")}  # that a function needs, and the extra that brings it


def text_of(completion: Any) -> str:
    """Of an answer, which is messages where its prompt is, else text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _compared(completions: Sequence[Any], expected: Expected, is_right: Callable[[str, str], bool]) -> Rewards:
    answers = (text_of(completion).rpartition(CLOSING)[2] for completion in completions)
    return [
        None if wanted is None else float(is_right(said, wanted.rpartition(CLOSING)[2]))
        for said, wanted in zip(answers, expected, strict=True)
    ]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _is_thought_and_answer(text: str) -> bool:
    thought, closed, answer = text.partition(CLOSING)
    opened = thought.count(OPENING)
    at_start = opened == 0 or (opened == 1 and thought.lstrip().startswith(OPENING))
    return bool(closed) and at_start and CLOSING not in answer and OPENING not in answer and bool(answer.strip())
