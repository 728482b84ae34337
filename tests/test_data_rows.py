"""Every row format becomes the same few forms, and every kind of bad row gets its reason."""

import json
from contextlib import nullcontext

import pytest

from swiftlite.config.resolve import resolve_config
from swiftlite.data.prepare import prepare_data
from swiftlite.data.rows.formats import (
    check_columns,
    check_shown,
    detect_format,
    read_row,
    rename_columns,
    unknown_format,
)
from swiftlite.data.rows.forms import BadRow, Chat, Completion, Text
from swiftlite.errors import UserError
from swiftlite.models.tokenizer import tokenizer_loader

CALL = {"name": "add", "arguments": {"a": 1}}
WRAPPED = {"type": "function", "function": CALL}


def form(row, method="sft"):
    return read_row(row, detect_format(row, method))


def turns(chat):
    return [(m["role"], m["content"], t) for m, t in zip(chat.messages, chat.trained, strict=True)]


PLAIN = [("user", "Hi", False), ("assistant", "Hello", True)]
WITH_SYSTEM = [("system", "Be kind", False), *PLAIN]
WITH_HISTORY = [("user", "a", False), ("assistant", "b", True), *PLAIN]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, PLAIN),
        ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'}, PLAIN),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                       {"role": "assistant", "content": "Hello"}]}, PLAIN),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, PLAIN),
        ({"conversations": [{"from": "system", "value": "Be kind"}, {"from": "human", "value": "Hi"},
                            {"from": "gpt", "value": "Hello"}]}, WITH_SYSTEM),
        ({"system": "Be kind", "conversations": [{"from": "human", "value": "Hi"},
                                                 {"from": "gpt", "value": "Hello"}]}, WITH_SYSTEM),
        ({"instruction": "Hi", "output": "Hello"}, PLAIN),
        ({"instruction": "Hi", "input": "", "output": "Hello", "system": ""}, PLAIN),
        ({"instruction": "Hi", "input": "you", "output": "Hello"}, [("user", "Hi\nyou", False), PLAIN[1]]),
        ({"instruction": "Hi", "output": "Hello", "system": "Be kind"}, WITH_SYSTEM),
        ({"instruction": "Hi", "output": "Hello", "history": [["a", "b"]]}, WITH_HISTORY),
        ({"query": "Hi", "response": "Hello"}, PLAIN),
        ({"query": "Hi", "response": "Hello", "history": '[["a", "b"]]'}, WITH_HISTORY),
        ({"question": "Hi", "answer": "Hello", "system": "Be kind"}, WITH_SYSTEM),
        ({"prompt": [{"role": "user", "content": "Hi"}], "completion": "Hello"}, PLAIN),
        ({"prompt": "Hi", "completion": [{"role": "assistant", "content": "Hello"}]}, PLAIN),
        ({"prompt": "Hi", "completion": "Hello", "system": "Be kind"}, WITH_SYSTEM),
        ({"prompt": "Hi", "completion": "Hello", "history": [["a", "b"]]},
         [*WITH_HISTORY[:1], ("assistant", "b", False), *PLAIN]),
        ({"prompt": [{"role": "user", "content": "Hi"}], "completion": "Hello", "system": "Be kind"}, WITH_SYSTEM),
        ({"prompt": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}],
          "completion": "Hello", "system": "Be rude"}, WITH_SYSTEM),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "completion": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
         [("user", "a", False), ("assistant", "b", False), *PLAIN]),
    ],
)  # fmt: skip
def test_chat_formats(row, expected):
    assert turns(form(row)) == expected


def test_plain_formats():
    assert form({"prompt": "2 + 2 =", "completion": " 4"}) == Completion("2 + 2 =", " 4")
    assert form({"prompt": "a", "completion": "b", "system": "", "history": []}) == Completion("a", "b")
    assert form({"text": "Once"}, "pretrain") == Text("Once")
    assert form({"text": "Once"}) == Text("Once")


def test_message_lists_in_cells():
    """Cells of csv hold them as JSON text; a completion in JSON to a prompt in words is a text to write."""
    asked, answered = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    for completion in (json.dumps(answered), answered, "b"):
        assert turns(form({"prompt": json.dumps(asked), "completion": completion})) == [
            ("user", "a", False),
            ("assistant", "b", True),
        ]
    for prompt, completion in (("Give a chat.", json.dumps(answered)), ('[{"role": ["user"]}]', "b"), ("[1]", "b")):
        assert form({"prompt": prompt, "completion": completion}) == Completion(prompt, completion)
    whole = {"chosen": json.dumps(asked + answered), "rejected": json.dumps([*asked, answered[0] | {"content": "c"}])}
    for row in (whole, whole | {"prompt": "a"}, whole | {"prompt": json.dumps(asked)}):
        pair = form(row, "dpo")
        assert [turn[1] for turn in turns(pair.rejected)] == ["a", "c"]


def test_tools_and_tool_calls():
    chat = form(
        {
            "tools": json.dumps([{"name": "add", "parameters": {}}]),
            "messages": [
                {"role": "user", "content": "1 + 1"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
                {"role": "tool", "content": "2", "tool_call_id": "1"},
                {"role": "assistant", "content": "2"},
            ],
        }
    )  # fmt: skip
    assert chat.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert chat.messages[1]["tool_calls"] == [{"id": "1", **WRAPPED}]
    assert chat.messages[2]["tool_call_id"] == "1"
    assert chat.trained == [False, True, False, True]


def calls_of(*calls):
    return form({"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "tool_calls": [*calls]}]})


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_arguments_of_a_call_have_several_names(key):
    given = {"name": "add", key: {"a": 1}}
    for call in (given, {"function": given}, {"function": {"name": "add"}, key: '{"a": 1}'}):
        assert calls_of(call).messages[1]["tool_calls"] == [WRAPPED]
    assert calls_of(given | {"arguments": {"a": 1}, "args": None}).messages[1]["tool_calls"] == [WRAPPED]


def test_what_a_call_has_besides_stays():
    flat, wrapped = {"id": "abcdefgh1", "type": "tool_use", **CALL}, {"function": {**CALL, "thought": "x"}, "index": 2}
    assert calls_of(flat, wrapped).messages[1]["tool_calls"] == [
        {"id": "abcdefgh1", **WRAPPED},
        {"type": "function", "index": 2, "function": {**CALL, "thought": "x"}},
    ]


@pytest.mark.parametrize("calls", [None, [], "", "[]", "null", {}, False])
def test_an_answer_without_calls_is_no_call(calls):
    nothing = {"name": None, "function_call": {}, "reasoning_content": ""}  # as files have it that fill every column
    answer = {"role": "assistant", "content": "2", "tool_calls": calls, **nothing}
    assert form({"messages": [{"role": "user", "content": "1 + 1"}, answer]}).messages[1] == {
        "role": "assistant",
        "content": "2",
    }


@pytest.mark.parametrize("nothing", [None, [], "", "[]", "null"])
def test_lists_that_hold_nothing_are_none(nothing):
    chat = form({"instruction": "1 + 1", "output": "2", "history": nothing, "tools": nothing})
    assert [message["content"] for message in chat.messages] == ["1 + 1", "2"] and chat.tools is None


def test_sharegpt_function_calls():
    chat = form(
        {
            "conversations": [
                {"from": "human", "value": "1 + 1"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "It is 2."},
            ]
        }
    )
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [WRAPPED]}
    assert turns(chat)[2:] == [("tool", "2", False), ("assistant", "It is 2.", True)]


def test_openais_older_spelling_of_a_call():
    call = {"role": "assistant", "content": "Let me see.", "function_call": {**CALL, "arguments": '{"a": 1}'}}
    row = {"messages": [{"role": "user", "content": "1 + 1"}, call, {"role": "function", "name": "add", "content": "2"},
                        {"role": "assistant", "content": "2", "function_call": None}],
           "functions": [{"name": "add", "parameters": {}}]}  # fmt: skip
    chat = form(row)
    assert chat.messages[1] == {"role": "assistant", "content": "Let me see.", "tool_calls": [WRAPPED]}
    assert chat.messages[3] == {"role": "assistant", "content": "2"}
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"instruction": "a", "context": "b", "response": "c", "n": 1}, "--columns output=response input=context "),
        ({"system_prompt": "s", "question": "a", "response": "c"},
         "--columns instruction=question output=response system=system_prompt "),
        ({"input": "a", "output": "c"}, "--columns instruction=input "),
        ({"Instruction": "a", "Input": "b", "Output": "c"},
         "--columns instruction=Instruction output=Output input=Input "),
        ({"Text": "a"}, "--columns text=Text "),
        ({"dialogue": [{"role": "user", "content": "a"}]}, "--columns messages=dialogue "),
        ({"data": [{"instruction": "a", "output": "b"}]}, "the list under data alone"),
        ({"a;b;c": "1;2;3"}, "divided by commas"),
        ({"question": "a", "answers": ["b"]}, ""),
        ({"foo": 1}, ""),
    ],
)  # fmt: skip
def test_what_would_make_rows_of_unknown_keys_known(row, hint):
    found = unknown_format(row, {}).detail
    assert hint in found and (";" in found.replace("a;b;c", "")) == bool(hint)
    if "--columns" in found:
        words = found.split("--columns ")[1].split(" would")[0].split()
        named = rename_columns(row, dict(word.split("=") for word in words))
        assert detect_format(named, "sft").name in ("Alpaca", "messages", "text")


def test_a_suggested_column_can_be_pasted_whatever_its_name():
    turns = [{"role": "user", "content": "a"}]
    assert "--columns 'messages=my chat' would" in unknown_format({"my chat": turns}, {}).detail
    assert "' output' has blanks around it" in unknown_format({"prompt": "a", " output": "b"}, {}).detail


def test_mapped_columns_of_which_no_format_comes_are_named_with_their_keys():
    row = {"q": "a", "rules": "b", "reply": "c"}
    columns = {"prompt": "q", "system": "rules", "response": "reply"}
    found = unknown_format(row, columns).detail
    assert "these keys: prompt (column q), system (column rules), response (column reply)" in found
    words = dict(word.split("=") for word in found.split("--columns ")[1].split(" would")[0].split())
    assert words == {"instruction": "q", "output": "reply", "system": "rules"}
    assert detect_format(rename_columns(row, words), "sft").name == "Alpaca"


def test_calls_at_once_in_turns_of_their_own_are_one_message():
    call = {"role": "tool_call", "content": json.dumps(CALL)}
    result = {"role": "tool_response", "content": "2"}
    answer = {"role": "assistant", "content": "Both are 2."}
    chat = form({"messages": [{"role": "user", "content": "Twice"}, call, call, result, result, call, answer]})
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "tool", *["assistant"] * 2]
    assert chat.messages[1]["tool_calls"] == [WRAPPED, WRAPPED]
    assert chat.messages[4]["tool_calls"] == [WRAPPED]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"loss": False}, {"loss": True}, "some messages are to be trained and some are not"),
        ({}, {"weight": 0}, "some messages are to be trained and some are not"),
        ({}, {"reasoning_content": "hm"}, "has reasoning_content of its own"),
        ({"thinking": "ah"}, {"thinking": "hm"}, "has thinking of its own"),
    ],
)
def test_calls_at_once_that_are_no_one_answer(first, second, said):
    call = {"role": "tool_call", "content": json.dumps(CALL)}
    with pytest.raises(BadRow, match=said) as failure:
        form({"messages": [{"role": "user", "content": "Twice"}, call | first, call | second]})
    assert failure.value.reason == "bad_tool_call"
    assert failure.value.detail.startswith("messages[2] ")


def test_calls_at_once_keep_what_they_say_besides():
    call = {"role": "tool_call", "content": json.dumps(CALL)}
    given = [call | {"reasoning_content": "hm", "n": 1}, call | {"reasoning_content": "hm", "step": "b"}]
    chat = form({"messages": [{"role": "user", "content": "Twice"}, *given]})
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm", "n": 1, "step": "b"}
    assert chat.messages[1] == answer | {"tool_calls": [WRAPPED, WRAPPED]}


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}, {"train": 0}, {"loss": False}])
def test_a_message_can_be_left_out(mark):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bad", **mark},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "good", "train": True},
    ]
    chat = form({"messages": messages})
    assert chat.trained == [False, False, False, True]
    assert all(set(m) == {"role", "content"} for m in chat.messages)


def message_row(*messages):
    return {
        "messages": [dict(zip(("role", "content"), m, strict=True)) if isinstance(m, tuple) else m for m in messages]
    }


ASK, ANSWER = ("user", "a"), ("assistant", "b")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (message_row(ASK), "no_assistant_turn"),
        ({"messages": []}, "empty"),
        ({"messages": None}, "wrong_type"),
        ({"messages": "no json"}, "wrong_type"),
        ({"messages": ["a"]}, "wrong_type"),
        (message_row(ASK, ("assistant", " ")), "empty"),
        (message_row(ASK, ("assistant", None)), "empty"),
        (message_row(ASK, ("assistant", 5)), "wrong_type"),
        (message_row(ASK, ("critic", "b")), "unknown_role"),
        (message_row(ASK, {"content": "b"}), "missing_key"),
        (message_row({"role": "user", "text": "a"}, ANSWER), "missing_key"),
        (message_row(("system", None), ASK, ANSWER), "missing_key"),
        (message_row({"role": "user", "content": [{"type": "image"}]}, ANSWER), "wrong_type"),
        (message_row(ASK, {"role": "assistant", "content": "b", "train": False}), "nothing_to_train"),
        (message_row(ASK, {"role": "assistant", "content": "b", "train": "no"}), "wrong_type"),
        (message_row(ASK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}), "bad_tool_call"),
        (message_row(ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}), "bad_tool_call"),
        (message_row(ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}), "bad_tool_call"),
        (
            message_row(ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}, "input": {"a": 1}}]}),
            "bad_tool_call",
        ),
        (message_row(ASK, ("assistant", "\ud800")), "not_utf8"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no_assistant_turn"),
        ({"instruction": "a", "output": ""}, "empty"),
        ({"instruction": "a", "output": None}, "wrong_type"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "wrong_type"),
        ({"prompt": "a", "completion": ""}, "empty"),
        ({"prompt": "a", "completion": 4}, "wrong_type"),
        ({"prompt": "a", "completion": [{"role": "user", "content": "b"}]}, "no_assistant_turn"),
        ({"text": " \n"}, "empty"),
        ({"text": {"a": 1}}, "wrong_type"),
    ],
)
def test_bad_rows_have_a_reason_and_a_sentence(row, reason):
    with pytest.raises(BadRow) as failure:
        form(row)
    assert failure.value.reason == reason
    assert len(failure.value.detail) > 10


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (message_row(ASK, ("assistant", 5)), "messages[1].content must be a string or a list of text parts"),
        ({"prompt": 1, "completion": 2}, "prompt must be a string or an array of messages, it is a number"),
        ({"conversations": [{"from": "human", "value": 5}]}, "conversations[0].value must be a string"),
        ({"conversations": [{"from": "human", "value": [{"type": "image"}]}]}, "conversations[0].value has a part"),
    ],
)
def test_a_bad_content_is_named_as_the_row_writes_it(row, said):
    with pytest.raises(BadRow) as failure:
        form(row)
    assert failure.value.detail.startswith(said)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (message_row({"role": "user", "content": "<image>What is it?"}, ANSWER) | {"images": ["a.png"]}, "images"),
        ({"conversations": [{"from": "human", "value": "a\n<image>"}], "image": "a.png"}, "image"),
        ({"query": "<audio>?", "response": "b", "audios": [{"path": "a.wav"}]}, "audios"),
        ({"query": "<image>?", "response": "b", "images": []}, None),
        ({"query": "How is <image> read?", "response": "b"}, None),
        ({"query": "a", "response": "b", "images": ["of another task"]}, None),
    ],
)
def test_what_a_text_shows_beside_it_is_no_text(row, shown):
    with nullcontext() if shown is None else pytest.raises(BadRow, match=f"stands under {shown} by <") as failure:
        check_shown(row)
    assert shown is None or failure.value.reason == "not_text"


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_rows_that_show_something_are_bad_rows_of_a_run(tmp_path, tiny_model, write_rows, chat_rows, method):
    shown = {"messages": [{"role": "user", "content": "<image>a"}, *chat_rows[0]["messages"][-1:]], "images": ["a.png"]}
    rows = write_rows("rows.jsonl", [*chat_rows[:3], shown])
    more = {"reward": ["repetition"], "max_new_tokens": 8} if method == "grpo" else {}
    config = resolve_config(
        method, model=str(tiny_model("llama")), dataset=[str(rows)], cache_dir=str(tmp_path), on_bad_row="skip", **more
    )
    audit = prepare_data(config, tokenizer_loader(config)).audit
    assert audit["rows"]["dropped"] == {"not_text": 1} and audit["rows"]["used"] == 3


def test_a_row_without_the_keys_of_its_file():
    known = detect_format({"instruction": "a", "output": "b"}, "sft")
    with pytest.raises(BadRow, match="output") as failure:
        read_row({"instruction": "a", "response": "b"}, known)
    assert failure.value.reason == "missing_key"
    assert detect_format({"foo": 1}, "sft") is None


def test_rows_of_other_methods_are_refused_by_name():
    with pytest.raises(UserError, match="these are preference rows"):
        detect_format({"prompt": "a", "chosen": "b", "rejected": "c"}, "sft")
    with pytest.raises(UserError, match="these are preference rows"):
        detect_format({"messages": [], "rejected_response": "c"}, "sft")
    with pytest.raises(UserError, match="unpaired preference"):
        detect_format({"prompt": "a", "completion": "b", "label": False}, "sft")
    with pytest.raises(UserError, match="pretrain reads `text` rows"):
        detect_format({"messages": []}, "pretrain")


def test_pretraining_takes_the_text_that_stands_beside_its_parts():
    row = {"instruction": "a", "output": "b", "text": "a b"}
    assert form(row, "pretrain") == Text("a b")
    assert isinstance(form(row, "sft"), Chat)


def test_columns():
    columns = {"instruction": "question", "output": "reply"}
    row = rename_columns({"question": "Hi", "reply": "Hello", "output": "old"}, columns)
    assert row == {"instruction": "Hi", "output": "Hello"}
    assert isinstance(form(row), Chat)
    with pytest.raises(UserError, match="'instructon'"):
        check_columns({"instructon": "question"})
    with pytest.raises(UserError, match="'ask'") as turned:  # as ms-swift maps them
        check_columns({"ask": "query"})
    assert "query=ask" in turned.value.fix
