"""Rewards a sum that is right, for `smollm2/135m-grpo-arithmetic`. Such functions are called as TRL calls its own."""

import re

NUMBER = re.compile(r"-?\d+")


def right(completions, messages, **others):
    """1 for each answer whose last number is the one of the row's own answer, else 0.

    completions: the model's answers, each a conversation of one message; messages: of the rows, as the file has them.
    """
    said = [NUMBER.findall(answer["content"]) for (answer,) in completions]
    wanted = [row[-1]["content"] for row in messages]
    return [float(numbers[-1:] == [number]) for numbers, number in zip(said, wanted, strict=True)]
