"""The pairs of the arithmetic demo: right answers are right, wrong ones wrong, and no question comes twice."""

import json
import runpy
from pathlib import Path

import pytest

from swiftlite.config.recipe import recipes_folder

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "make_arithmetic_pairs.py"
pairs = runpy.run_path(str(SCRIPT))["pairs"]


def test_answers_can_be_checked():
    asked = set()
    for row in pairs(500, 20, 3):
        question, answer = (message["content"] for message in row["messages"])
        a, sign, b = question.removeprefix("What is ").removesuffix("?").split()
        right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert int(answer) == right >= 0
        assert int(row["rejected_response"]) != right
        asked.add((frozenset((a, b)), sign))
    assert len(asked) == 500


def test_the_file_of_the_recipe_is_what_the_script_writes():
    lines = (recipes_folder() / "smollm2" / "arithmetic.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(pairs(1300, 30, 7))


def test_more_pairs_than_questions_are_refused():
    with pytest.raises(ValueError, match="there are 9 questions"):
        list(pairs(10, 2, 0))
