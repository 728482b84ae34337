"""Write preference pairs that can be checked: sums, differences and products with a right and a wrong answer, as jsonl.

python scripts/make_arithmetic_pairs.py [--count 1300] [--largest 30] [--seed 7] > pairs.jsonl

A question comes once, also with its numbers exchanged, so whatever part of the file is held out is new to a model that
trains on the rest. The wrong answers are mistakes that people make: a bit off, ten off, another operation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
NEAR = (-3, -2, -1, 1, 2, 3)
TENS = (-10, 10)


def pairs(count: int, largest: int, seed: int) -> Iterator[dict[str, object]]:
    """Rows of `messages` that end with the right answer, and `rejected_response`, the wrong one.

    Raises ValueError where there are not that many different questions.
    """
    chance = random.Random(seed)
    for a, sign, b in _questions(count, largest, chance):
        yield {
            "messages": [
                {"role": "user", "content": f"What is {a} {sign} {b}?"},
                {"role": "assistant", "content": str(OPERATIONS[sign](a, b))},
            ],
            "rejected_response": str(_wrong(a, sign, b, chance)),
        }


def _questions(count: int, largest: int, chance: random.Random) -> list[tuple[int, str, int]]:
    both = [(a, b) for a in range(1, largest + 1) for b in range(1, a + 1)]  # differences are not below 0
    every = [(a, sign, b) for sign in OPERATIONS for a, b in both]
    if count > len(every):
        raise ValueError(f"there are {len(every)} questions with numbers up to {largest}, not {count}")
    chosen = chance.sample(every, count)
    return [(b, sign, a) if sign != "-" and chance.random() < 0.5 else (a, sign, b) for a, sign, b in chosen]


def _wrong(a: int, sign: str, b: int, chance: random.Random) -> int:
    right = OPERATIONS[sign](a, b)
    others = [operation(a, b) for operation in OPERATIONS.values()]
    kinds = [[right + near for near in NEAR], [right + ten for ten in TENS], others]
    found = [number for number in chance.choice(kinds) if number != right and number >= 0]
    return chance.choice(found or [right + 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1300, help="how many pairs")
    parser.add_argument("--largest", type=int, default=30, help="the largest number in a question")
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    try:
        for row in pairs(asked.count, asked.largest, asked.seed):
            sys.stdout.write(json.dumps(row) + "\n")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
