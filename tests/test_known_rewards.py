"""Functions that reward answers and come with swiftlite, and what rows themselves answer."""

import logging
import math
import sys

import pytest
from test_eval import evaluate

from swiftlite.data.prepare import Asked
from swiftlite.data.tokens.questions import read_question
from swiftlite.errors import RunError, UserError
from swiftlite.training.rollouts.known_rewards import KNOWN
from swiftlite.training.rollouts.rewards import Rollout, check_columns, load_rewards, parse_reward, rewards_of

OF_THE_ANSWER_ALONE = ("think_format", "soft_overlong", "repetition")


def said(name, text, expected=None):
    """What a function says of an answer, as messages and as text alike."""
    (reward,) = load_rewards([name])
    prompts = ([{"role": "user", "content": "?"}], "?")
    answers = [Rollout(prompt, text, [1], {"level": 3}, "rows.jsonl:1", expected) for prompt in prompts]
    ((first, second),) = rewards_of([reward], answers, 20)
    assert first == second or first != first
    return first


@pytest.mark.parametrize(
    ("name", "text", "expected", "wanted"),
    [
        ("exact_match", " Paris\n", "paris", 1.0),
        ("exact_match", "<think>Lyon? No.</think>\n\nNew  York", "New York", 1.0),
        ("exact_match", "Paris.", "Paris", 0.0),
        ("contains", "It is PARIS, of course.", "Paris", 1.0),
        ("contains", "<think>Paris</think>Lyon", "Paris", 0.0),
        ("last_number", "3 + 4 is 7", "7", 1.0),
        ("last_number", "so $1,234.50 in all.", "It is 1200 + 34.5\n#### 1234.5", 1.0),
        ("last_number", "-5", "5", 0.0),
        ("last_number", "none", "none", 0.0),
        ("last_number", "9.0", "<think>8</think>9", 1.0),
        ("last_number", "1,2,3", "3", 1.0),  # a list, no 123
        ("last_number", "10-5=5, of 3-5", "5", 1.0),  # a dash between numbers is no sign
        ("last_number", "so \u22125", "-5", 1.0),  # nor is a sign always a hyphen
        ("last_number", "x = 1.5e3", "1500", 1.0),
        ("last_number", "1e5", "5", 0.0),
        ("last_number", "12345678901234567", "12345678901234568", 0.0),  # alike as floats
        ("last_number", "9" * 400, "8" * 400, 0.0),
        ("last_number", "1e" + "9" * 30, "1e" + "9" * 30, 0.0),
        ("contains", "<think>Is it Paris? Or", "Paris", 0.0),  # which was cut in its thought
        ("exact_match", "Paris <think>or", "Paris", 1.0),
        ("math_equal", "so it is $\\frac{1}{2}$", "0.5", 1.0),
        ("math_equal", "\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
        ("math_equal", "<think>72</think> 73", "#### 72", 0.0),
        ("math_equal", "who knows", "72", 0.0),
        ("think_format", "<think>hm</think> yes", None, 1.0),
        ("think_format", "hm</think> yes", None, 1.0),
        ("think_format", "<think>hm</think> ", None, 0.0),
        ("think_format", "well <think>hm</think> yes", None, 0.0),
        ("think_format", "<think>a<think>b</think>c</think> yes", None, 0.0),
        ("think_format", "yes", None, 0.0),
    ],
)
def test_what_they_reward(name, text, expected, wanted):
    assert said(name, text, expected) == wanted


@pytest.mark.parametrize("expected", [None, " ", "<think>so</think>", ["x"]])
def test_without_an_answer_of_the_row_there_is_nothing_to_say(expected):
    """Nor where a column of that name holds no text."""
    names = [name for name in KNOWN if name not in OF_THE_ANSWER_ALONE]
    assert all(math.isnan(said(name, "x", expected)) for name in names)


def test_a_column_of_numbers_is_compared_as_their_text():
    names = [name for name in KNOWN if name not in OF_THE_ANSWER_ALONE]
    assert [said(name, "7", 7) for name in names] == [1.0] * 4


@pytest.mark.parametrize(("tokens", "wanted"), [(1, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0)])
def test_long_answers_lose_by_degrees(tokens, wanted):
    assert of_ids("soft_overlong", list(range(tokens))) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0.0),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], -1 / 6),
        ([7] * 8, -4 / 5),
        ([7] * 3, 0.0),
    ],
)
def test_what_stood_there_before_counts_against_an_answer(ids, wanted):
    assert of_ids("repetition", ids) == pytest.approx(wanted)


def of_ids(name, ids):
    """What a function says of an answer of these tokens, of 20 that it could have."""
    ((found,),) = rewards_of(load_rewards([name]), [Rollout("?", "x", ids, {}, "rows.jsonl:1")], 20)
    return found


def test_a_limit_is_a_number_and_a_column_of_that_name_the_column(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def limit(completions, max_new_tokens, **others):\n    return [max_new_tokens * 1.0]\n")
    rewards = load_rewards([f"{file}:limit"])
    check_columns(rewards, Asked("rows.jsonl", (), answered=False))
    assert rewards_of(rewards, [Rollout("?", "x", [1], {}, "rows.jsonl:1")], 20) == [[20.0]]
    with pytest.raises(RunError, match="limit failed: TypeError"):
        rewards_of(rewards, [Rollout("?", "x", [1], {"max_new_tokens": None}, "rows.jsonl:1")], 20)


def test_what_takes_too_long_is_no_message_in_the_display(caplog):
    """Math-Verify says so for each answer, with the whole of it."""
    assert said("math_equal", "1", "1") == 1.0
    logging.getLogger("math_verify.grader").warning("Timeout during comparison")
    assert not caplog.records


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [["user", "?"], ["assistant", "a"], ["user", "?"], ["assistant", "b"]]}, "b"),
        ({"messages": [["user", "?"]], "answer": "c"}, "c"),
        ({"messages": [["user", "?"]]}, None),
        ({"prompt": "?", "completion": " d"}, " d"),
        ({"prompt": [["user", "?"]], "completion": [["assistant", "e"]]}, "e"),
        ({"prompt": [["user", "?"]], "chosen": [["user", "?"], ["assistant", "f"]], "rejected": "g"}, "f"),
        ({"question": "?", "answer": 7}, "7"),
        ({"instruction": "?", "input": "", "output": "h"}, "h"),
        ({"question": "?", "answer": None, "solution": "i"}, "i"),
        ({"query": "?", "response": True}, None),
    ],
)
def test_what_a_row_itself_answers(row, wanted):
    """Of every format; messages are short here."""
    whole = {
        key: [dict(zip(("role", "content"), one, strict=True)) for one in value] if isinstance(value, list) else value
        for key, value in row.items()
    }
    assert read_question(whole, "rows.jsonl:1", None).answer == wanted


def test_they_are_named_as_they_are_called(tmp_path):
    assert parse_reward("last_number*2").name == "last_number" and load_rewards(["contains*0.5"])[0].weight == 0.5
    with pytest.raises(UserError, match="'last_numbr' names no function") as failure:
        parse_reward("last_numbr")
    assert (
        "exact_match, contains, last_number, math_equal, think_format, soft_overlong, repetition" in failure.value.fix
    )
    assert "did you mean last_number?" in failure.value.fix
    for word, near in ("accuracy", "math_equal"), ("format", "think_format"):  # of TRL and ms-swift
        with pytest.raises(UserError, match="names no function") as failure:
            parse_reward(word)
        assert f"did you mean {near}?" in failure.value.fix


def test_a_package_that_is_missing_is_told_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match="math_verify") as failure:
        load_rewards(["math_equal"])
    assert "swiftlite[math]" in failure.value.fix


def test_rows_without_answers_are_told_before_training():
    rewards = load_rewards(["last_number"])
    with pytest.raises(UserError, match="compares answers with the rows' own") as failure:
        check_columns(rewards, Asked("--dataset rows.jsonl", ("level",), False))
    assert "completion, response, answer" in failure.value.fix and "--columns answer=COLUMN" in failure.value.fix
    check_columns(rewards, Asked("--dataset rows.jsonl", ("level",), True))
    check_columns(rewards, Asked("--dataset rows.jsonl", ("expected",), False))  # a column of that name is that


def test_an_evaluation_compares_with_what_rows_answer(tmp_path, tiny_model, write_rows):
    """One row of five has none."""
    rows = [{"question": f"What is {n}?", "answer": "" if n == 2 else str(n)} for n in range(5)]
    given = {"dataset": [str(write_rows("rows.jsonl", rows))], "max_new_tokens": 6, "max_length": 100}
    [found] = evaluate(model=str(tiny_model("llama")), reward=["exact_match"], cache_dir=str(tmp_path), **given)
    assert found.metrics["rewards/exact_match"] == 0.0 and found.metrics["answers/unrewarded"] == 0.2


def test_a_function_that_comes_along_means_the_limit_where_rows_have_one_too():
    answers = [Rollout("Q", "A", [1] * 9, {"max_new_tokens": "64"}, "rows.jsonl:1")]
    (found,) = rewards_of(load_rewards(["soft_overlong"]), answers, 10)
    assert found == [pytest.approx(-0.5)]
