"""Preference rows of every spelling become pairs or judged answers, and bad ones get their reason."""

import pytest

from swiftlite.data.rows.formats import detect_format, read_row
from swiftlite.data.rows.forms import BadRow, Chat, Completion, Judged, Pair
from swiftlite.errors import UserError


def form(row, method="dpo"):
    return read_row(row, detect_format(row, method))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def turns(chat):
    return [(m["role"], m["content"], t) for m, t in zip(chat.messages, chat.trained, strict=True)]


ASK, GOOD, BAD = ("user", "Hi", False), ("assistant", "Hello", True), ("assistant", "Go", True)
WHOLE = {"chosen": [user("Hi"), assistant("Hello")], "rejected": [user("Hi"), assistant("Go")]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("Hi")], "chosen": [assistant("Hello")], "rejected": [assistant("Go")]},
        {"prompt": [user("Hi")], "chosen": "Hello", "rejected": "Go"},
        {"prompt": "Hi", "chosen": [assistant("Hello")], "rejected": "Go"},
        {"prompt": [user("Hi")], "chosen": assistant("Hello"), "rejected": assistant("Go")},
        WHOLE,
        WHOLE | {"prompt": "Hi"},  # a prompt beside whole conversations, as in UltraFeedback
        WHOLE | {"prompt": [user("Hi")]},
        {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"},
         "rejected": {"from": "gpt", "value": "Go"}},
        {"input": {"messages": [user("Hi")], "tools": [], "parallel_tool_calls": True},
         "preferred_output": [assistant("Hello")], "non_preferred_output": [assistant("Go")]},
        {"messages": [user("Hi")], "chosen": assistant("Hello"), "rejected": assistant("Go")},  # as axolotl's
        {"messages": [user("Hi")], "chosen": "Hello", "rejected": [assistant("Go")]},
        WHOLE | {"messages": WHOLE["chosen"]},
        {"messages": [user("Hi"), assistant("Hello")], "rejected_response": "Go"},
        {"messages": [user("Hi"), assistant("Hello")], "rejected_messages": [user("Hi"), assistant("Go")]},
        {"messages": [user("Hi"), assistant("Hello")], "rejected_messages": [assistant("Go")]},
        {"question": "Hi", "chosen": "Hello", "rejected": "Go"},
        {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "Go"},
        {"query": "Hi", "response": "Hello", "rejected_response": "Go"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
         "rejected_response": "Go"},
    ],
)  # fmt: skip
def test_every_spelling_of_a_pair(row):
    pair = form(row)
    assert turns(pair.chosen) == [ASK, GOOD]
    assert turns(pair.rejected) == [ASK, BAD]
    assert pair.margin == 0.0


def test_only_the_answer_of_a_long_conversation_is_trained():
    context = [user("a"), assistant("b"), user("c")]
    for row in (
        {"prompt": context, "chosen": "x", "rejected": "y"},
        {"chosen": [*context, assistant("x")], "rejected": [*context, assistant("y")]},
        {"messages": [*context, assistant("x")], "rejected_response": "y"},
    ):
        pair = form(row)
        assert pair.chosen.trained == pair.rejected.trained == [False, False, False, True]
        assert pair.chosen.messages[:3] == pair.rejected.messages[:3] == context


def test_a_question_and_a_system_message_stand_before_both_answers():
    both = {"chosen": "Sure, I do", "rejected": "Sure, you do", "system": "Be kind"}
    for prompt in ({"question": "Hi"}, {"prompt": "Hi"}, {"prompt": [user("Hi")]}):
        pair = form(prompt | both)
        assert turns(pair.chosen) == [("system", "Be kind", False), ASK, ("assistant", "Sure, I do", True)]
        assert turns(pair.rejected)[:2] == [("system", "Be kind", False), ASK]
    whole = {"messages": [user("Hi"), assistant("Sure, I do")], "system": "Be kind"}
    for rejected in ([assistant("Sure, you do")], [user("Hi"), assistant("Sure, you do")]):
        pair = form(whole | {"rejected_messages": rejected})
        assert turns(pair.rejected) == [("system", "Be kind", False), ASK, ("assistant", "Sure, you do", True)]
    earlier = form({"prompt": "Hi", "history": [["a", "b"]], "chosen": "Hello", "rejected": "Go"})
    assert turns(earlier.chosen) == [("user", "a", False), ("assistant", "b", False), ASK, GOOD]


def test_texts():
    assert form({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3", "margin": 2}) == Pair(
        Completion("1 + 1 =", " 2"), Completion("1 + 1 =", " 3"), 2.0
    )
    pair = form({"chosen": "Q: who?\n\nA: Ann", "rejected": "Q: who?\n\nA: Andy", "messages": []})  # no word is cut
    assert pair.chosen == Completion("Q: who?\n\nA:", " Ann")
    assert pair.rejected == Completion("Q: who?\n\nA:", " Andy")


def test_a_prompt_that_both_texts_say_again_is_there_once():
    chosen, rejected = "Q: who?\nA: Ann", "Q: who?\nA: Bob"
    for prompt in ("Q: who?\nA:", "Q: who?\nA:\n"):
        pair = form({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        assert (pair.chosen, pair.rejected) == (Completion("Q: who?\nA:", " Ann"), Completion("Q: who?\nA:", " Bob"))
    assert form({"prompt": "Q: who?", "chosen": "Q: who? Ann", "rejected": "Bob"}).chosen.completion == "Q: who? Ann"
    assert form({"prompt": "Hello", "chosen": "Hello!", "rejected": "Hello?"}).chosen == Completion("Hello", "Hello!")


def test_tools_and_margin():
    row = {"tools": [{"name": "add"}], "margin": "0.5", "messages": [user("Hi"), assistant("Hello")]}
    pair = form(row | {"rejected_response": "Go"})
    assert pair.margin == 0.5
    assert pair.chosen.tools == pair.rejected.tools == [{"type": "function", "function": {"name": "add"}}]


def test_a_margin_is_finite():
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    assert form(row | {"margin": -3e38}).margin == -3e38
    for margin in (float("inf"), "nan", "-inf", 3.5e38):
        with pytest.raises(BadRow, match="margin must be finite in fp32, it is") as failure:
            form(row | {"margin": margin})
        assert failure.value.reason == "wrong_type"
    with pytest.raises(BadRow, match="must be a number, it is true or false"):
        form(row | {"margin": True})


def test_judged_rows():
    judged = form({"prompt": [user("Hi")], "completion": "Go", "label": False}, "kto")
    assert isinstance(judged.answer, Chat)
    assert turns(judged.answer) == [ASK, BAD]
    assert not judged.desirable
    for label, desirable in (("True", True), (1, True), (0, False), ("0", False), (1.0, True)):
        row = {"prompt": "a", "completion": " b", "label": label}
        assert form(row, "kto") == Judged(Completion("a", " b"), desirable)
    with_system = form({"prompt": "Hi", "completion": "Hello", "label": True, "system": "Be kind"}, "kto")
    assert turns(with_system.answer) == [("system", "Be kind", False), ASK, GOOD]


def test_a_label_has_another_name():
    assert form({"prompt": "a", "completion": " b", "kto_tag": False}, "kto") == Judged(Completion("a", " b"), False)
    row = {"messages": [user("Hi"), assistant("Hello")], "kto_tag": True}
    assert turns(form(row, "kto").answer) == [ASK, GOOD]
    assert form({"instruction": "Hi", "output": "Hello", "kto_tag": "false"}, "kto").desirable is False
    with pytest.raises(UserError, match="would learn the refused answers too"):
        detect_format(row, "sft")


def test_tools_of_openais_preferences_are_in_their_input():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    given = {"input": {"messages": [user("1 + 1?")], "tools": [{"name": "add"}]}, "preferred_output": [call]}
    pair = form(given | {"non_preferred_output": [assistant("3")]})
    assert pair.chosen.tools == pair.rejected.tools == [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(UserError, match="would learn the refused answers too"):
        detect_format(given | {"non_preferred_output": []}, "sft")


def test_a_label_judges_the_last_answer_of_a_conversation():
    messages = [user("a"), assistant("b"), user("Hi"), assistant("Hello")]
    judged = form({"messages": messages, "label": False}, "kto")
    assert not judged.desirable
    assert turns(judged.answer) == [("user", "a", False), ("assistant", "b", False), ASK, GOOD]
    assert turns(form({"query": "Hi", "response": "Hello", "label": True}, "kto").answer) == [ASK, GOOD]
    assert isinstance(form({"messages": messages, "label": "greeting"}, "sft"), Chat)


PROMPT = {"prompt": [user("Hi")]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PROMPT | {"chosen": "a", "rejected": "a"}, "equal_completions"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "equal_completions"),
        ({"chosen": "same text", "rejected": "same text"}, "equal_completions"),
        ({"messages": [user("a"), assistant("b")], "chosen": "c", "rejected": "d"}, "different_prompts"),
        ({"messages": '[{"role": "assistant", "content": "b"}]', "chosen": "c", "rejected": "d"}, "different_prompts"),
        ({"input": {}, "preferred_output": "a", "non_preferred_output": "b"}, "missing_key"),
        ({"input": {"messages": []}, "preferred_output": "a", "non_preferred_output": "b"}, "different_prompts"),
        ({"chosen": WHOLE["chosen"], "rejected": WHOLE["chosen"]}, "equal_completions"),
        ({"messages": WHOLE["chosen"], "rejected_response": "Hello"}, "equal_completions"),
        (PROMPT | {"chosen": "a", "rejected": " "}, "empty"),
        ({"prompt": "Hi", "chosen": "", "rejected": ""}, "empty"),
        ({"prompt": "Hi", "chosen": " a", "rejected": "\n"}, "empty"),
        ({"chosen": "Q: ", "rejected": "Q: yes"}, "empty"),
        (PROMPT | {"chosen": [], "rejected": "b"}, "empty"),
        ({"chosen": WHOLE["chosen"], "rejected": [*WHOLE["chosen"], user("more")]}, "empty"),
        ({"chosen": WHOLE["chosen"], "rejected": [user("Ho"), assistant("Go")]}, "different_prompts"),
        (WHOLE | {"prompt": "Ho"}, "different_prompts"),
        (WHOLE | {"prompt": []} | {"chosen": [assistant("a")]}, "different_prompts"),
        ({"chosen": "one", "rejected": "two"}, "different_prompts"),
        ({"chosen": [user("s"), user("a"), assistant("b")], "rejected": [user("s"), user("c"), assistant("d")]},
         "different_prompts"),
        (PROMPT | {"chosen": [user("b")], "rejected": "a"}, "different_prompts"),
        (PROMPT | {"chosen": "a", "rejected": [user("b")]}, "no_assistant_turn"),
        (PROMPT | {"chosen": 5, "rejected": "b"}, "wrong_type"),
        ({"chosen": [{"role": ["assistant"], "content": "a"}], "rejected": [assistant("b")]}, "wrong_type"),
        (PROMPT | {"chosen": "a", "rejected": "b", "margin": "much"}, "wrong_type"),
        (PROMPT | {"chosen": "a", "rejected": "b", "margin": True}, "wrong_type"),
        ({"messages": [user("a"), assistant("b"), user("c")], "rejected_response": "d"}, "no_assistant_turn"),
        ({"messages": [user("a"), assistant("b"), user("c")], "label": True}, "no_assistant_turn"),
        ({"prompt": "a", "completion": "b", "label": 2}, "label_not_boolean"),
        ({"prompt": "a", "completion": "b", "label": 1.5}, "label_not_boolean"),
        ({"prompt": "a", "completion": "b", "label": None}, "label_not_boolean"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label_not_boolean"),
        ({"prompt": "a", "completion": "", "label": True}, "empty"),
    ],
)  # fmt: skip
def test_bad_rows_have_a_reason_and_a_sentence(row, reason):
    with pytest.raises(BadRow) as failure:
        form(row, "kto")
    assert failure.value.reason == reason
    assert len(failure.value.detail) > 10


PAIR_ROW, JUDGED_ROW = (
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": "a", "completion": "b", "label": True},
)


@pytest.mark.parametrize("method", ["dpo", "rm"])
def test_each_method_takes_its_rows_and_refuses_others_by_name(method):
    assert detect_format(PAIR_ROW, method).name == "preference"
    with pytest.raises(UserError, match=f"unpaired preference rows; {method}"):
        detect_format(JUDGED_ROW, method)
    with pytest.raises(UserError, match=f"{method} learns from answers that are compared, these are messages") as error:
        detect_format({"messages": []}, method)
    assert "`chosen`" in error.value.fix
    assert "`swiftlite sft`" in error.value.fix
    assert detect_format({"foo": 1}, method) is None


def test_a_comparison_that_is_null_is_none():
    messages = {"messages": [user("Hi"), assistant("Hello")]}
    for key in ("rejected_response", "rejected_messages", "label"):
        assert turns(form(messages | {key: None}, "sft")) == [ASK, GOOD]
    assert form({"prompt": "a", "completion": "b", "label": None}, "sft") == Completion("a", "b")
    assert detect_format(messages | {"rejected_response": None}, "dpo").name == "messages with rejected_response"
    with pytest.raises(UserError, match="would learn the refused answers too"):
        detect_format(messages | {"rejected_response": "Go"}, "sft")


def test_kto_takes_both():
    assert detect_format(PAIR_ROW, "kto").name == "preference"
    assert detect_format(JUDGED_ROW, "kto").name == "unpaired preference"
    with pytest.raises(UserError, match="these are text rows") as error:
        detect_format({"text": "a"}, "kto")
    assert "`label`" in error.value.fix
