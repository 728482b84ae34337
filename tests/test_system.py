"""`--system`: which rows get it, as what they are trained then, and that a model is asked as it has learnt."""

import json

import pytest
from test_data_tokens import only, run
from test_preference_tokens import pair_of

from swiftlite.config.names import LONGEST_SYSTEM
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.save import save_config
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.serving.engines import ENGINES
from swiftlite.serving.infer import InferOptions, system_to_ask_behind
from swiftlite.serving.origin import system_of_training
from swiftlite.serving.prompts import read_questions
from swiftlite.serving.serve import ServeOptions, _told
from swiftlite.serving.source import ModelSource

TEXT = "Be brief.\nAlways."
QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}
SHARE_GPT = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]}


def opening(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": [QUESTION, ANSWER]}),
        ("ShareGPT", SHARE_GPT),
        ("Alpaca", {"instruction": "Who?", "output": "Me.", "system": ""}),
        ("query and response", {"query": "Who?", "response": "Me.", "system": None}),
        ("prompt and completion", {"prompt": [QUESTION], "completion": [ANSWER]}),
        ("prompt and completion", {"prompt": "Who?", "completion": "Me."}),
    ],
)
def test_a_row_without_a_system_message_is_as_one_that_has_it(tokenizer, form, row):
    wanted, flags = only(run(tokenizer, {"messages": [opening(TEXT), QUESTION, ANSWER]}, "messages"))
    batch = run(tokenizer, row, form, system=TEXT)
    ids, trained = only(batch)
    assert ids.tolist() == wanted.tolist() and trained.tolist() == flags.tolist()
    assert batch.counts["system_added"] == 1 and not batch.unused


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": [opening("Own."), QUESTION, ANSWER]}),
        ("messages", {"messages": [{"role": "developer", "content": "Own."}, QUESTION, ANSWER]}),
        ("messages", {"messages": [opening(""), QUESTION, ANSWER]}),
        ("messages", {"messages": [QUESTION, ANSWER], "system": "Own."}),
        ("prompt and completion", {"prompt": "Who?", "completion": "Me.", "system": "Own."}),
        ("text", {"text": "Once."}),
    ],
)
def test_a_row_with_one_of_its_own_and_a_text_stay_as_they_are(tokenizer, form, row):
    wanted, _ = only(run(tokenizer, row, form))
    batch = run(tokenizer, row, form, system=TEXT)
    assert only(batch)[0].tolist() == wanted.tolist()
    assert batch.counts["system_added"] == 0
    assert batch.counts["system_left_out"] == (form == "text")


@pytest.mark.parametrize("method", ["dpo", "rm"])
@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("preference", {"prompt": "Who?", "chosen": "Me.", "rejected": "You."}),
        ("preference", {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {**ANSWER, "content": "You."}]}),
        (
            "OpenAI preference",
            {
                "input": {"messages": [QUESTION]},
                "preferred_output": [ANSWER],
                "non_preferred_output": [{**ANSWER, "content": "You."}],
            },
        ),
    ],
)
def test_of_a_pair_it_opens_the_prompt(tokenizer, method, form, row):
    whole = {"prompt": [opening(TEXT), QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "You."}]}
    wanted, flags = pair_of(run(tokenizer, whole, "preference", method=method))
    batch = run(tokenizer, row, form, method=method, system=TEXT)
    found, trained = pair_of(batch)
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]
    assert [part.tolist() for part in trained] == [part.tolist() for part in flags]
    assert batch.counts["system_added"] == 1


def test_a_judged_answer_has_it_and_an_empty_one_stays_bad(tokenizer):
    judged = {"prompt": "Who?", "completion": "Me.", "label": True}
    wanted, _ = only(run(tokenizer, judged | {"system": TEXT}, "unpaired preference", method="kto"))
    batch = run(tokenizer, judged, "unpaired preference", method="kto", system=TEXT)
    assert only(batch)[0].tolist() == wanted.tolist() and batch.counts["system_added"] == 1
    empty = run(tokenizer, {"prompt": "Who?", "completion": " "}, "prompt and completion", system=TEXT)
    assert empty.dropped == {"empty": 1} and empty.counts["system_added"] == 0


def made(**values):
    return resolve_config("sft", model="org/model", dataset="org/rows", **values)


@pytest.mark.parametrize("text", [TEXT, "", "none", 'it\'s "so": 1\n\n  # no\n'])
def test_the_text_of_a_file_is_saved_with_the_run(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "said.txt").write_text(text + "\n")
    config = made(system="said.txt")
    assert config.system == text.rstrip("\n")
    assert made(system=text).system == text
    save_config(made(system=text), tmp_path / "config.yaml")
    assert resolve(None, {}, load_recipe(str(tmp_path / "config.yaml")), env={}).config.system == text


def test_a_recipe_names_a_file_beside_it(tmp_path):
    (tmp_path / "said.txt").write_text("Be brief.")
    recipe = tmp_path / "a.yaml"
    recipe.write_text("method: sft\nmodel: org/model\ndataset: org/rows\ndefault_system: said.txt\n")
    assert resolve(None, {}, load_recipe(str(recipe)), env={}).config.system == "Be brief."


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), (b"\xff\xfe", "cannot be read"), (b"x" * (LONGEST_SYSTEM + 1), "longer than"),
     (b"Read notes.txt\n", "ends as the name")],
)  # fmt: skip
def test_what_is_no_system_message_is_told(tmp_path, content, said):
    path = tmp_path / "said.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        made(system=str(path))


def test_pretraining_takes_none_and_says_so():
    flags = {"model": "org/model", "dataset": "org/rows", "system": TEXT}
    notes = resolve("pretrain", {name: Given(value, name, "flag") for name, value in flags.items()}, env={}).notes
    assert any(note.startswith("system has no effect with pretrain") for note in notes)


@pytest.fixture
def run_folder(tmp_path):
    """A factory: settings of a run -> where its result would lie."""

    def write(method="sft", **values):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "chat_template.jinja").touch()
        config = resolve_config(method, model="org/model", dataset="org/rows", **values)
        save_config(config, tmp_path / "config.yaml")
        return ModelSource(str(tmp_path / "model"), None, str(tmp_path / "model"))

    return write


def test_a_model_is_asked_behind_what_its_run_gave(run_folder, tmp_path):
    source = run_folder(system=TEXT)
    assert system_of_training(source) == TEXT
    system, note = system_to_ask_behind(InferOptions(), source)
    assert system == TEXT and "Be brief." in note
    assert system_to_ask_behind(InferOptions(system=""), source) == ("", None)
    line = _told(ENGINES[0], source, ServeOptions(model=source.base))
    assert json.dumps([opening(TEXT), {"role": "user"}])[:-2] in line
    assert system_to_ask_behind(InferOptions(chat_template="none"), source) == (None, None)
    assert system_to_ask_behind(InferOptions(), run_folder()) == (None, None)
    assert system_of_training(run_folder("pretrain", system=TEXT)) is None
    run_folder(system=TEXT)
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("\nlr: [")
    assert system_of_training(source) is None


def test_rows_of_a_file_are_asked_as_they_are_learnt(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [QUESTION]},
        {"messages": [{"role": "developer", "content": "Own."}, QUESTION]},
        {"prompt": "Who?", "completion": "Me."},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, own, plain = read_questions(path, TEXT)
    assert first.messages == plain.messages == [opening(TEXT), QUESTION] and not plain.plain
    assert [message["role"] for message in own.messages] == ["developer", "user"]
