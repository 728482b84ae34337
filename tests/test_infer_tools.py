"""`swiftlite infer --tools`: what the model calls is called, in the terminal and for rows of a file."""

import io
import json

import pytest
import torch
from test_template_prompts import OWN_KEY
from test_tools import TOOLS, call

from swiftlite.data.calls.toolbox import Toolbox
from swiftlite.data.tokens.own_tools import load_tools
from swiftlite.errors import RunError, UserError
from swiftlite.serving.chat import Conversation, chat
from swiftlite.serving.generate import Answerer, Sampling
from swiftlite.serving.infer import InferOptions, answer_file, answer_prompts, run_infer
from swiftlite.serving.load import load_for_answers
from swiftlite.serving.prompts import read_questions
from swiftlite.serving.source import find_source
from swiftlite.serving.turns import Turns

STOPS_AT = "<|im_end|>"


class Scripted(Answerer):
    """Says what `script` has for the last words of a prompt, and keeps the prompts."""

    def __init__(self, model, tokenizer, script, sampling=None):
        super().__init__(model, tokenizer, sampling or Sampling())
        self.script, self.asked = script, []

    def _generate(self, prompts, streamer=None, **_others):
        texts = [self._tokenizer.decode(prompt) for prompt in prompts]
        self.asked += texts
        said = [next(value for key, value in self.script.items() if key in text.split(STOPS_AT)[-2]) for text in texts]
        rows = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        if streamer is not None:
            for tokens in (prompts[0], *([token] for token in rows[0])):
                streamer.put(torch.tensor(tokens))
            streamer.end()
        longest = max(map(len, rows))
        return torch.tensor([row + [self._stops[0]] * (longest - len(row)) for row in rows])


@pytest.fixture(scope="module")
def loaded(tiny_model):
    source = find_source(str(tiny_model("llama")), None)
    model, tokenizer = load_for_answers(source, precision="fp32", chat_template="chatml")
    model.config.max_position_embeddings = 4096
    return model, tokenizer


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture
def talking(loaded, tools):
    """(answerer, its turns) by a script, with tools of these names."""

    def make(script, *names, rounds=8, sampling=None):
        answerer = Scripted(*loaded, {key: said + STOPS_AT for key, said in script.items()}, sampling)
        words = [f"{tools}:{name}" for name in names]
        toolbox = Toolbox(load_tools(words), loaded[1], "2026-01-01", answerer._stops)
        return answerer, Turns(answerer, toolbox, rounds)

    return make


TWICE = {"Twice 4?": "Let me see.\n" + call("double", n=4), ">\n8\n<": "It is 8.", "Sure?": "Yes."}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_conversation_goes_on_from_what_tools_say(talking, capsys, streaming):
    answerer, turns = talking(TWICE, "double")
    conversation = Conversation(answerer, None, turns)
    conversation.ask("Twice 4?", streaming=streaming)
    shown = capsys.readouterr()
    assert shown.out == TWICE["Twice 4?"] + "\nIt is 8.\n" and shown.err == "(double says 8)\n"
    first, second = answerer.asked
    assert '"name": "double"' in first  # the prompt tells of it
    assert second.startswith(first + TWICE["Twice 4?"] + STOPS_AT) and "\n8\n" in second[len(first) :]
    conversation.ask("Sure?", streaming=streaming)
    third = answerer.asked[-1]
    assert call("double", n=4) in third and "<tool_response>\n8\n</tool_response>" in third
    assert third.index("It is 8.") < third.index("Sure?")
    assert capsys.readouterr() == ("Yes.\n", "")


def test_what_ends_an_answer_that_calls_is_told(talking, capsys, loaded, monkeypatch):
    again = {"Twice 4?": call("double", n=4), ">\n8\n<": call("double", n=4), "And?": "Well."}

    def asked(script, reason, **more):
        answerer, turns = talking(script, "double", **more)
        conversation = Conversation(answerer, None, turns)
        conversation.ask("Twice 4?", streaming=False)
        assert f"(cut off by {reason})" in capsys.readouterr().err
        return answerer, conversation

    answerer, conversation = asked(again, "--tool-rounds", rounds=2)
    assert len(answerer.asked) == 3
    conversation.ask("And?", streaming=False)  # what was not called is told as what was said
    assert answerer.asked[-1].count("<tool_response>") == 2 and answerer.asked[-1].count(call("double", n=4)) == 3
    asked({"Twice 4?": '<tool_call>\n{"name": "double", "arg\n</tool_call>'}, "a call that cannot be read")
    monkeypatch.setattr(loaded[0].config, "max_position_embeddings", 4096)
    answerer, turns = talking(TWICE, "double", sampling=Sampling(max_new_tokens=300))
    prompt = answerer.encode([{"role": "user", "content": "Twice 4?"}], "x", turns.schemas())
    answerer._positions = len(prompt) + 60
    Conversation(answerer, None, turns).ask("Twice 4?", streaming=False)
    assert f"(cut off by the {len(prompt) + 60} tokens that the model takes)" in capsys.readouterr().err


def test_a_conversation_has_one_object(talking, capsys, monkeypatch):
    script = {"Count": call("add", n=2), ">\n": "Done."}
    answerer, turns = talking(script, "Counter")
    monkeypatch.setattr("sys.stdin", io.StringIO("Count\nCount\n/clear\nCount\n"))
    chat(answerer, None, streaming=True, turns=turns)
    assert capsys.readouterr().err.splitlines() == ["(add says 2)", "(add says 4)", "(add says 2)"]
    _, turns = talking(script, "Broken")
    with pytest.raises(RunError, match="the class of tools Broken failed"):
        answer_prompts(answerer, InferOptions(prompts=["Count"]), turns)


@pytest.mark.parametrize("thought", ["Twice that.\n", ""])
def test_a_thought_that_the_prompt_opens_is_remembered_as_one(tiny_model, tmp_path, thought):
    (tmp_path / "thinking.jinja").write_text(OWN_KEY)
    source = find_source(str(tiny_model("llama")), None)
    known = load_for_answers(source, precision="fp32", chat_template=str(tmp_path / "thinking.jinja"))
    answerer = Scripted(*known, {"Twice 4?": f"{thought}</think>\n\nIt is 8.{STOPS_AT}", "Sure?": f"Yes.{STOPS_AT}"})
    conversation = Conversation(answerer, None)
    conversation.ask("Twice 4?", streaming=True)
    conversation.ask("Sure?", streaming=True)
    said = {"role": "assistant", "content": "It is 8.", "reasoning_content": thought.strip()}
    asked = [{"role": "user", "content": "Twice 4?"}, said, {"role": "user", "content": "Sure?"}]
    assert answerer.asked[1] == known[1].apply_chat_template(asked, tokenize=False, add_generation_prompt=True)


def test_what_tools_print_is_no_answer(talking, capsys, tmp_path, tiny_model):
    answerer, turns = talking({"Hi": call("prints"), ">\nnull\n<": "Done."}, "Prints")
    answer_prompts(answerer, InferOptions(prompts=["Hi"]), turns)
    assert capsys.readouterr() == (call("prints") + "\nDone.\n", "begun\ncalled\n(prints says null)\n")
    path = tmp_path / "loud.py"
    path.write_text("print('read')\n")
    with pytest.raises(UserError, match="there is no function nobody"):
        run_infer(InferOptions(model=str(tiny_model("llama")), prompts=["Hi"], tools=[f"{path}:nobody"]))
    assert capsys.readouterr() == ("", "read\n")


@pytest.mark.parametrize("where", ["said", "called"])
def test_ctrl_c_leaves_a_conversation_that_goes_on(talking, capsys, monkeypatch, where):
    answerer, turns = talking(TWICE | {"And?": "Well."}, "double")
    conversation = Conversation(answerer, None, turns)
    if where == "called":
        monkeypatch.setattr(turns._toolbox, "carry_out", lambda asked: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        streams = iter([answerer.stream, lambda prompt: (_ for _ in ()).throw(KeyboardInterrupt)])
        monkeypatch.setattr(answerer, "stream", lambda prompt: next(streams)(prompt))
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Twice 4?", streaming=True)
    monkeypatch.undo()
    conversation.ask("And?", streaming=True)
    behind = answerer.asked[-1].split("Twice 4?")[1]
    assert behind.index("Let me see.") < behind.index("And?")
    assert ("<tool_response>" in behind) == (where == "said") and capsys.readouterr().out.endswith("Well.\n")


def test_rows_of_a_file(talking, tmp_path, capsys):
    script = {"Twice 4?": call("double", n=4), ">\n8\n<": " It is 8.", "Hi": "Hello. ", "Count": call("add", n=2)}
    script |= {">\n5\n<": "Five.", ">\n9\n<": call("add", n=1), ">\n10\n<": "Ten.", "Go on": call("double", n=1)}
    answerer, turns = talking(script, "double", "Counter", rounds=2)
    schema = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": {}}}
    rows = [
        {"prompt": "Twice 4?", "response": "8"},
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [schema]},
        {"prompt": "Count", "start": 3},
        {"prompt": "Count", "start": 7},
    ]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer_file(answerer, read_questions(path, None), output, 3, turns)
    first, second, third, fourth = map(json.loads, output.read_text().splitlines())
    assert first["response"] == "It is 8." and first["reference"] == "8"
    function = {"name": "double", "arguments": {"n": 4}}
    assert first["turns"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "name": "double", "content": "8", "tool_call_id": "call00000"},
        {"role": "assistant", "content": " It is 8."},
    ]
    assert second["response"] == "Hello." and "turns" not in second
    told = next(text for text in answerer.asked if "Hi" in text)
    assert '"weather"' in told and '"double"' in told and '"add"' in told
    assert third["response"] == "Five." and fourth["response"] == "Ten." and len(fourth["turns"]) == 5
    assert capsys.readouterr().err.splitlines()[-1] == f"wrote {output}, answers: 4"


def test_a_batch_has_its_objects_while_it_is_answered(talking, tmp_path):
    answerer, turns = talking({"Hi": call("others"), ">\n0\n<": "Alone."}, "Single")
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(f"{json.dumps({'prompt': 'Hi'})}\n" * 3)
    answer_file(answerer, read_questions(path, None), output, 1, turns)
    assert [json.loads(line)["response"] for line in output.read_text().splitlines()] == ["Alone."] * 3


def test_a_text_to_go_on_with_calls_nothing(talking, tmp_path):
    answerer, turns = talking({"": call("double", n=4)}, "double")
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({"prompt": f"Once{STOPS_AT} upon{STOPS_AT}", "completion": " a time"}) + "\n")
    answer_file(answerer, read_questions(path, None), output, 3, turns)
    assert json.loads(output.read_text())["response"] == call("double", n=4)
    path.write_text(json.dumps({"prompt": "Hi", "turns": 3}) + "\n")
    with pytest.raises(UserError, match="the row has `turns`"):
        answer_file(answerer, read_questions(path, None), tmp_path / "other.jsonl", 3, turns)
