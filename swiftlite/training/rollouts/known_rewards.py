"""Functions that reward answers and come with swiftlite, named by `--reward last_number` and the like.

They are called as a user's own are. expected: what each row itself answers, None where it does not, which then is not
rewarded. Thoughts, as models that reason write them, are no part of an answer, and nor is one that has no end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from swiftlite.config.methods import KNOWN_REWARDS

MINUS = "\N{MINUS SIGN}"
# A comma stands between thousands, else between numbers; behind a number a dash is no sign.
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-{MINUS}])?(?:(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)
SPARE = 0.2  # of an answer's tokens: as in the paper, 4,096 of 20,480
RUN = 4  # tokens
OPENING, CLOSING = "<think>", "</think>"

Expected = Sequence[Any]  # text or None; a user's own column of that name holds what it does
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

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each answer that takes it too long
    texts = [_wanted(value) for value in expected]
    wanted = [None if text is None else parse(text) or parse(f"${text}$") for text in texts]
    answers = [_without_thoughts(text_of(completion)) for completion in completions]
    return [float(verify(one, parse(said))) if one else None for one, said in zip(wanted, answers, strict=True)]


def think_format(completions: Sequence[Any], **_others: object) -> Rewards:
    """1 for an answer that is one thought in <think> tags, which the prompt may have opened, with text behind it."""
    return [float(_is_thought_and_answer(text_of(completion))) for completion in completions]


def soft_overlong(completion_ids: Sequence[Sequence[int]], max_new_tokens: int, **_others: object) -> Rewards:
    """0 for an answer that leaves a fifth of its tokens over, and less the nearer it comes to being cut, to -1 (DAPO,
    arXiv 2503.14476, equation 13)."""
    spare = max_new_tokens * SPARE
    return [min(0.0, (max_new_tokens - len(ids)) / spare - 1) for ids in completion_ids]


def repetition(completion_ids: Sequence[Sequence[int]], **_others: object) -> Rewards:
    """Minus the part of an answer's runs of four tokens that were there before.

    After arXiv 2502.03373, appendix C.2.
    """
    return [-_repeated(list(zip(*(ids[start:] for start in range(RUN)), strict=False))) for ids in completion_ids]


KNOWN = dict(
    zip(
        KNOWN_REWARDS,
        (exact_match, contains, last_number, math_equal, think_format, soft_overlong, repetition),
        strict=True,
    )
)
ELSEWHERE = {  # what TRL and ms-swift call the like of them
    "accuracy": "math_equal", "accuracy_reward": "math_equal", "format": "think_format",
    "think_format_reward": "think_format", "get_soft_overlong_punishment": "soft_overlong",
    "get_repetition_penalty_reward": "repetition",
}  # fmt: skip
PACKAGES = {"math_equal": ("math_verify", "math")}  # that a function needs, and the extra that brings it


def text_of(completion: Any) -> str:
    """Of an answer, which is messages where its prompt is, else text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _compared(completions: Sequence[Any], expected: Expected, is_right: Callable[[str, str], bool]) -> Rewards:
    answers = (_without_thoughts(text_of(completion)) for completion in completions)
    pairs = zip(answers, map(_wanted, expected), strict=True)
    return [None if wanted is None else float(is_right(said, wanted)) for said, wanted in pairs]


def _wanted(expected: Any) -> str | None:
    """What an answer is compared with, None where that is nothing: any text would have it as a part."""
    is_plain = isinstance(expected, str | int | float) and not isinstance(expected, bool)
    return (_without_thoughts(str(expected)).strip() or None) if is_plain else None


def _without_thoughts(text: str) -> str:
    return text.rpartition(CLOSING)[2].partition(OPENING)[0]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _number(text: str) -> Decimal | None:
    """The last one, exactly: long ones are alike as floats."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace(MINUS, "-")) if found else None
    except InvalidOperation:  # its exponent is larger than any
        return None


def _repeated(runs: Sequence[tuple[int, ...]]) -> float:
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _is_thought_and_answer(text: str) -> bool:
    thought, closed, answer = text.partition(CLOSING)
    opened = thought.count(OPENING)
    at_start = opened == 0 or (opened == 1 and thought.lstrip().startswith(OPENING))
    return bool(closed) and at_start and CLOSING not in answer and OPENING not in answer and bool(answer.strip())
