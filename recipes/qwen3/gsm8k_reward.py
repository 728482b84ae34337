"""Rewards right answers to GSM8K's questions, whose own answers end with `#### 72`."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(completions, answer, **others):
    """1 where an answer's last number is the row's, else 0. answer: the column of that name."""
    said = [NUMBER.findall(reply["content"])[-1:] for (reply,) in completions]
    wanted = [NUMBER.findall(text)[-1:] for text in answer]
    return [float(bool(one) and _value(one) == _value(other)) for one, other in zip(said, wanted, strict=True)]


def _value(numbers):
    return float(numbers[0].replace(",", ""))
