"""Write questions for products, with a call of the tool that answers them, or without an answer, as jsonl.

python scripts/make_product_rows.py [--count 200] [--asked] [--seed 0] > rows.jsonl

The tool is `multiply` of this file: `--tools scripts/make_product_rows.py:multiply`. --asked: questions of other random
numbers than those with calls, each with the right answer beside it.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from swiftlite.data.tokens.own_tools import load_tools

SMALLEST, LARGEST = 11, 99


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{a} x {b}?"}


def called(a: int, b: int, tools: list[dict[str, Any]]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    product = multiply(a, b)
    messages = [
        question(a, b),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(product)},
        {"role": "assistant", "content": f"It is {product}."},
    ]
    return {"messages": messages, "tools": tools}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--asked", action="store_true", help="questions alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    pairs = [(chance.randint(SMALLEST, LARGEST), chance.randint(SMALLEST, LARGEST)) for _ in range(2 * options.count)]
    tools = [tool.schema for tool in load_tools([f"{__file__}:multiply"])]
    for a, b in pairs[options.count :] if options.asked else pairs[: options.count]:
        row = {"messages": [question(a, b)], "answer": str(a * b)} if options.asked else called(a, b, tools)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
