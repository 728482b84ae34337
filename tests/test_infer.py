"""`swiftlite infer`: answers are the model's own greedy ones, batched or not, and bad input is named before loading."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from test_data_sources import COMPRESS

from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.errors import RunError, UserError
from swiftlite.models.tokenizer import read_chat_template
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.serving import infer as infer_module
from swiftlite.serving.generate import Answer, Answerer, Sampling
from swiftlite.serving.infer import InferOptions, run_infer
from swiftlite.serving.load import answer_dtype, load_for_answers
from swiftlite.serving.prompts import read_questions
from swiftlite.serving.source import check_base_folder, find_source
from swiftlite.serving.turns import Turns


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_for_answers(find_source(str(tiny_model("llama")), None), precision="fp32")


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


PROMPTS = [
    "Who are you?",
    "What is two plus two? Please answer, please answer, please answer.",
    "Hi",
    "Tell me about Paris.",
]


def test_what_the_models_generation_config_says_beside_its_ends_is_not_done(tiny_model):
    model, tokenizer = load_for_answers(find_source(str(tiny_model("llama")), None), precision="fp32")
    plain = Answerer(model, tokenizer, Sampling(max_new_tokens=8))
    prompt = plain.encode(ask(PROMPTS[0]), "test")
    wanted = plain.answer([prompt])[0]
    model.generation_config.update(repetition_penalty=5.0, num_beams=2, num_return_sequences=2, stop_strings=["a"])
    assert Answerer(model, tokenizer, Sampling(max_new_tokens=8)).answer([prompt]) == [wanted]


def test_plain_text_is_asked_as_it_is_trained(tmp_path, tiny_model):
    model, tokenizer = load_for_answers(find_source(str(tiny_model("llama")), None), precision="fp32")
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "The sky", "completion": " is blue"}\n{"prompt": "The sky"}\n')
    answerer = Answerer(model, tokenizer, Sampling())
    plain, chat = (answerer.encode(q.messages, q.where, plain=q.plain) for q in read_questions(path, None))
    bare = tokenizer("The sky", add_special_tokens=False)["input_ids"]
    assert plain[-len(bare) :] == bare and len(plain) <= len(bare) + 1 < len(chat)
    assert not read_questions(path, "a system message")[0].plain


def greedy(model, ids: list[int], stops: list[int], count: int) -> list[int]:
    """Independent of generate(): the likeliest token of a whole forward pass, again and again."""
    new: list[int] = []
    with torch.inference_mode():
        while len(new) < count:
            token = int(model(input_ids=torch.tensor([ids + new]), use_cache=False).logits[0, -1].argmax())
            if token in stops:
                break
            new.append(token)
    return new


def test_tokens_of_a_prompt_do_not_see_later_ones_where_attention_adds_to_its_mask(tmp_path):
    config = transformers.DogeConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        keep_window_size=4,
    )  # fmt: skip
    model, _ = load_for_answers(find_source(str(write_toy(tmp_path / "doge", config)), None), precision="fp32")
    torch.manual_seed(0)
    for parameter in model.parameters():  # what the mask adds is the same for all tokens at first
        parameter.data += 0.05 * torch.randn(parameter.shape)
    tokens = torch.arange(3, 19)[None]
    with torch.inference_mode():
        beginning, whole = model(tokens[:, :9]).logits, model(tokens).logits
    torch.testing.assert_close(whole[:, :9], beginning, rtol=0, atol=1e-5)


def test_a_batch_answers_as_each_prompt_alone(loaded):
    model, tokenizer = loaded
    tokenizer.pad_token = tokenizer.eos_token  # the mask must come from the lengths
    answerer = Answerer(model, tokenizer, Sampling(max_new_tokens=12))
    prompts = [answerer.encode(ask(text), "test") for text in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 1
    stops = stop_tokens(model.generation_config, tokenizer)
    for prompt, answer in zip(prompts, answerer.answer(prompts), strict=True):
        expected = greedy(model, prompt, stops, 12)
        assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.ids[: len(expected)] == expected and len(answer.ids) == len(expected) + answer.complete


def test_streamed_pieces_are_the_whole_answer(loaded):
    answerer = Answerer(*loaded, Sampling(max_new_tokens=12))
    prompt = answerer.encode(ask(PROMPTS[1]), "test")
    assert "".join(answerer.stream(prompt)) == answerer.answer([prompt])[0].text


def test_a_failure_in_the_streaming_thread_is_raised_where_it_is_read(loaded, monkeypatch):
    answerer = Answerer(*loaded, Sampling(max_new_tokens=4))

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(answerer, "_generate", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        list(answerer.stream([5, 6]))


def test_closing_the_stream_stops_the_model(loaded):
    answerer = Answerer(*loaded, Sampling(max_new_tokens=400))
    answerer._stops.clear()  # else an answer might be short by itself
    steps: list[int] = []
    hook = loaded[0].register_forward_hook(lambda *_: steps.append(1))
    try:
        pieces = answerer.stream(answerer.encode(ask("Tell me a story."), "test"))
        next(pieces)
        pieces.close()
    finally:
        hook.remove()
    assert 0 < len(steps) < 400


def test_the_end_of_a_turn_stops_an_answer(loaded, tokenizer):
    from transformers import GenerationConfig

    im_end, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    plain = load_copy(tokenizer, eos_token="<|endoftext|>")
    stops = stop_tokens(GenerationConfig(eos_token_id=[7, 8]), plain)
    assert stops == [7, 8, end_of_text, im_end]


def test_an_end_of_a_turn_that_is_no_special_token_is_not_shown(loaded):
    answerer = Answerer(*loaded, Sampling(max_new_tokens=12))
    prompt = answerer.encode(ask(PROMPTS[1]), "test")
    answerer._stops.clear()
    made, tokenizer = answerer._generate([prompt])[0].tolist(), loaded[1]
    seen = [token for token in made if tokenizer.decode(token, skip_special_tokens=True).strip()]
    answerer._stops.append(seen[-1])
    said = "".join(answerer.stream(prompt)).strip()
    assert (
        said == answerer.answer([prompt])[0].text.strip() != tokenizer.decode(made[: made.index(seen[-1]) + 1]).strip()
    )


def load_copy(tokenizer, **changes: str):
    import copy

    changed = copy.deepcopy(tokenizer)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def test_sampling_follows_the_seed(tiny_model, capsys):
    said = []
    for seed in (1, 1, 2):
        options = InferOptions(
            model=str(tiny_model("llama")), prompts=["Hi"], temperature=1.5, seed=seed, max_new_tokens=16,
            precision="fp32",
        )  # fmt: skip
        run_infer(options)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_prompts_beyond_the_model_are_refused_and_long_ones_get_the_room_that_is_left(loaded):
    answerer = Answerer(*loaded, Sampling(max_new_tokens=256))
    word = len(answerer.encode(ask("fox " * 10), "test")) - len(answerer.encode(ask("fox " * 9), "test"))
    long = answerer.encode(ask("fox " * (490 // word)), "test")
    assert answerer._room(long) == 512 - len(long) < 256
    assert list(answerer.batches([long, [1], [1, 2]], 8)) in ([[0], [2, 1]], [[2, 1], [0]])
    with pytest.raises(UserError, match="the model takes 512"):
        answerer.encode(ask("fox " * 1000), "test")


# ---- jsonl ----------------------------------------------------------------------------------------------------------


def answer_rows(tiny_model, tmp_path: Path, rows: list[dict], **options: object) -> list[dict]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_infer(
        InferOptions(
            model=str(tiny_model("llama")),
            input=source,
            output=target,
            max_new_tokens=6,
            precision="fp32",
            **options,
        )  # fmt: skip
    )
    assert not list(tmp_path.glob("*partial"))
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def test_every_row_format_is_answered_in_order(tiny_model, tmp_path):
    same = {"role": "user", "content": "Who are you?"}
    rows = [
        {"prompt": "Who are you?", "id": 1},
        {"messages": [same, {"role": "assistant", "content": "left out"}]},
        {"conversations": [{"from": "human", "value": "Who are you?"}]},
        {"instruction": "Who are", "input": "you?", "output": "x"},
        {"query": "Who are you?", "response": "mine"},
        {"prompt": [same]},
        {"question": "A much longer question, which belongs in another place of the batch?", "answer": "x"},
    ]
    written = answer_rows(tiny_model, tmp_path, rows, batch_size=3)
    assert [list(row)[0] for row in written] == [list(row)[0] for row in rows]
    assert written[0] == {**rows[0], "response": written[0]["response"]}
    assert written[4]["reference"] == "mine"
    assert len({written[i]["response"] for i in (0, 1, 2, 4, 5)}) == 1


@pytest.mark.parametrize(
    ("failure", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (MemoryError(), RunError)], ids=["^C", "memory"]
)
def test_answers_of_a_run_that_does_not_end_are_kept(tiny_model, tmp_path, monkeypatch, capsys, failure, raised):
    calls, answer = [], Answerer.answer

    def fail_at_the_third(self, prompts):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise failure
        return answer(self, prompts)

    monkeypatch.setattr(Answerer, "answer", fail_at_the_third)
    rows = [{"prompt": word * (7 - number), "id": number} for number, word in enumerate(["fox "] * 7)]
    with pytest.raises(raised):
        answer_rows(tiny_model, tmp_path, rows, batch_size=2)
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl.partial").read_text().splitlines()]
    assert [row["id"] for row in kept] == [0, 1, 2, 3] and all("response" in row for row in kept)
    assert "4 of 7 answers are in" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()
    with pytest.raises(UserError, match="a run that did not end"):
        answer_rows(tiny_model, tmp_path, rows)


@pytest.mark.parametrize("name", ["out.jsonl.partial", "out.jsonl"])
def test_answers_of_another_run_that_began_meanwhile_stay(tiny_model, tmp_path, monkeypatch, name):
    encode = Answerer.encode

    def another_begins(self, *words, **more):
        (tmp_path / name).write_text("its answers\n")
        return encode(self, *words, **more)

    monkeypatch.setattr(Answerer, "encode", another_begins)
    with pytest.raises(UserError, match="or has not yet, are there|the output file exists"):
        answer_rows(tiny_model, tmp_path, [{"prompt": "fox"}])
    assert [(path.name, path.read_text()) for path in tmp_path.glob("out*")] == [(name, "its answers\n")]


def test_a_folder_has_no_revisions(tiny_model):
    with pytest.raises(UserError, match="no revisions"):
        load_for_answers(find_source(str(tiny_model("llama")), None), revision="v2")


def test_a_text_that_is_none_is_named_by_its_row(loaded):
    answerer = Answerer(*loaded, Sampling())
    with pytest.raises(UserError, match="not UTF-8") as failure:
        answerer.encode(ask("Hi \ud83d"), "rows.jsonl:3")
    assert failure.value.where == "rows.jsonl:3"


def test_a_row_that_only_json_can_hold_is_written_as_such(tiny_model, tmp_path):
    rows = [{"prompt": "Hi", "note": "é"}, {"prompt": "Hi", "note": "\ud83d", "k\ud800": 1}]
    written = answer_rows(tiny_model, tmp_path, rows)
    assert [{key: row[key] for key in given} for row, given in zip(written, rows, strict=True)] == rows
    assert "é" in (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def test_a_system_message_is_added_only_where_there_is_none(tmp_path):
    from swiftlite.serving.prompts import read_questions

    path = tmp_path / "in.jsonl"
    own = {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]}
    path.write_text(json.dumps(own) + "\n\n" + json.dumps({"prompt": "x", "history": [["a", "b"]]}) + "\n")
    first, second = read_questions(path, "yours")
    assert [m["content"] for m in first.messages] == ["mine", "x"]
    assert [m["content"] for m in second.messages] == ["yours", "a", "b", "x"]
    assert second.where == f"{path}:3"


def test_rows_are_read_as_in_training(tmp_path):
    from swiftlite.serving.prompts import read_questions

    path, call = tmp_path / "in.jsonl", {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"from": "human", "value": "1 + 1?"}, {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"}, {"from": "chatgpt", "value": "left out"},
    ]  # fmt: skip
    path.write_text(json.dumps({"conversations": turns, "tools": "[]"}) + "\n")
    (question,) = read_questions(path, None)
    assert [message["role"] for message in question.messages] == ["user", "assistant", "tool"]
    assert question.messages[1]["tool_calls"][0]["function"] == call and question.tools is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[1]", "JSON object"),
        (b'{"text": "x"}', "no row format"),
        (b'{"prompt": 3}', "must be a string"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "role 'robot'"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "no question"),
        (b'{"messages": 3}', "must be an array"),
        (b'{"messages": "x"}', "is no JSON array"),
        (b'{"prompt": "x", "history": [1]}', "list of .question, answer. pairs"),
        (b'{"prompt": "<image>x", "images": ["a.png"]}', "stands under images by <image>"),
    ],
)
def test_a_bad_row_is_named_by_its_line_before_anything_is_loaded(tmp_path, tiny_model, monkeypatch, line, says):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    options = InferOptions(model=str(tiny_model("llama")), input=path, output=tmp_path / "out.jsonl")
    with pytest.raises(UserError, match=says) as caught:
        run_infer(options)
    assert caught.value.where == f"{path}:2"
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.csv.gz"])
def test_files_of_other_types_are_named(tmp_path, name):
    with pytest.raises(UserError, match=f"{Path(name).suffix} files are not written"):
        infer_module._check_output(tmp_path / name)
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(UserError, match=f"{Path(name).suffix} files are not answered"):
        read_questions(tmp_path / name, None)


def test_no_file_is_made_that_is_called_as_stdout_is():
    with pytest.raises(UserError, match="answers are written to a file") as failure:
        infer_module._check_output(Path("-"))
    assert failure.value.where == "--output -" and "answers.jsonl" in failure.value.fix


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
def test_rows_may_be_compressed(tmp_path, suffix):
    path, rows = tmp_path / f"in.jsonl{suffix}", b'\xef\xbb\xbf{"prompt": "a"}\r\n\n{"prompt": "b"}'
    path.write_bytes(COMPRESS[suffix](rows))
    found = read_questions(path, None)
    assert [(question.row, question.where) for question in found] == [
        ({"prompt": "a"}, f"{path}:1"),
        ({"prompt": "b"}, f"{path}:3"),
    ]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="cannot read the file"):
        read_questions(path, None)


def test_a_json_array_is_answered_as_it_is_trained(tmp_path):
    path = tmp_path / "in.json"
    path.write_text('[\n{"prompt": "a"},\n{"prompt": 3}\n]')
    with pytest.raises(UserError, match="must be a string") as caught:
        read_questions(path, None)
    assert caught.value.where == f"{path}:3"


def test_a_failure_half_way_leaves_no_output(tmp_path):
    class Broken:
        has_template = True

        def encode(self, *args: object, **more: object) -> list[int]:
            return [1]

        def batches(self, prompts: list, size: int) -> list[list[int]]:
            return [[0], [1]]

        def answer(self, prompts: list) -> list[Answer]:
            raise RuntimeError("lost the device")

    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    questions = infer_module.read_questions(path, None)
    with pytest.raises(RuntimeError, match="lost the device"):
        infer_module.answer_file(Broken(), questions, tmp_path / "out.jsonl", 1, Turns(Broken()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": Path("a.jsonl")}, "--output is missing"),
        ({"output": Path("new.jsonl")}, "--input is missing"),
        ({"prompts": ["x"], "input": Path("a"), "output": Path("new")}, "both given"),
        ({"input": Path("a"), "output": Path(__file__)}, "exists"),
        ({"input": Path("a"), "output": Path(__file__).parent}, "is a folder"),
        ({"input": Path("a"), "output": Path("/proc/x.jsonl")}, "cannot be written"),
        ({"input": Path("a"), "output": Path("no/such/folder/x")}, "folder of the output"),
        ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"batch_size": 0}, "--batch-size"),
        ({"prompts": ["fine", "\udcff"]}, "not UTF-8"),
        ({"prompts": ["x"], "system": "\udcff"}, "not UTF-8"),
        ({}, "no model"),
    ],
)
def test_flags_that_do_not_fit(change, says):
    with pytest.raises(UserError, match=says) as caught:
        run_infer(InferOptions(**change))
    assert caught.value.fix


# ---- what --model may be --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory) -> Path:
    """A LoRA adapter of the tiny model that really changes its answers."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tiny_model("llama")
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    folder = tmp_path_factory.mktemp("run") / "model"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def test_an_adapter_finds_its_base_and_is_applied(adapter, tiny_model, loaded):
    base = str(tiny_model("llama"))
    for model, given in ((str(adapter), None), (str(adapter.parent), None), (base, str(adapter)), (None, str(adapter))):
        source = find_source(model, given)
        assert (source.base, source.adapter, source.tokenizer) == (base, adapter, str(adapter))
    model, _ = load_for_answers(source, precision="fp32")
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        merged = model.merge_and_unload()(ids).logits
        difference = (merged - loaded[0](ids).logits).abs().max()
    assert difference > 1e-3


def test_a_base_that_is_recorded_below_home_is_found(adapter, tiny_model, tmp_path, monkeypatch):
    base = tiny_model("llama")
    monkeypatch.setenv("HOME", str(base.parent))
    moved = shutil.copytree(adapter, tmp_path / "adapter")
    settings = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": f"~/{base.name}"}))
    source = find_source(str(moved), None)
    assert source.base == str(base) and source.base_folder == base
    check_base_folder(source, None)
    with pytest.raises(UserError, match="no revisions"):
        check_base_folder(source, "v2")


def test_a_run_folder_stands_for_its_model_and_a_checkpoint_for_itself(tiny_model, tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="no model/ of a run") as caught:
        find_source(str(run), None)
    assert "step-00000010" in caught.value.fix
    for folder in (checkpoint, run / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
    assert find_source(str(run), None).base == str(run / "model")
    assert find_source(str(checkpoint), None).base == str(checkpoint)


def test_sources_that_lead_nowhere(tmp_path, tiny_model, adapter):
    gone = tmp_path / "adapter"
    gone.mkdir()
    (gone / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/model"}))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    base = str(tiny_model("llama"))
    for model, given, says in (
        (str(tmp_path / "none"), None, "neither a folder nor a hub id"),
        (str(tmp_path), None, "neither a model"),
        (str(gone), None, "not where it was"),
        (str(broken), None, "not valid JSON"),
        (base, base, "no adapter_config"),
        (str(adapter), str(adapter), "an adapter too"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            find_source(model, given)
        assert caught.value.fix


def test_a_file_of_a_model_is_no_model_but_its_folder_is(tiny_model):
    with pytest.raises(UserError, match="neither a folder") as error:
        find_source(str(tiny_model("llama") / "model.safetensors"), None)
    assert error.value.fix == f"name the folder of the file: {tiny_model('llama')}"


def test_a_truncated_weight_file_is_refused(tiny_model, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(tiny_model("llama"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError):
        load_for_answers(find_source(str(folder), None))


def test_an_adapter_of_another_model_is_refused(tiny_model, adapter):
    with pytest.raises(UserError, match="adapter"):
        load_for_answers(find_source(str(tiny_model("gpt2")), str(adapter)), precision="fp32")


@pytest.mark.parametrize(("layers", "says"), [(1, "layers that the model lacks: model.layers.1"), (3, "lacks tensors")])
def test_an_adapter_of_a_model_of_other_depth_is_refused(tmp_path, adapter, layers, says):
    base = write_toy(tmp_path / "other", toy_config("llama", layers))
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["target_modules"] = sorted({name.rsplit(".", 1)[-1] for name in settings["target_modules"]})
    (copy / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=says):
        load_for_answers(find_source(str(base), str(copy)), precision="fp32")


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"architectures": ["LlamaForSequenceClassification"]}),
        ("adapter_config.json", {"task_type": "SEQ_CLS", "base_model_name_or_path": "BASE"}),
    ],
)
def test_a_reward_model_is_asked_for_no_answers(tmp_path, tiny_model, file, settings):
    text = json.dumps(settings).replace("BASE", str(tiny_model("llama")))
    (tmp_path / file).write_text(text)
    save_file({"score.weight": torch.zeros(1, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="reward model"):
        run_infer(InferOptions(model=str(tmp_path), prompts=["Hello"]))


def test_precision(tiny_model):
    from transformers import LlamaConfig

    config = LlamaConfig(dtype=torch.bfloat16)
    assert answer_dtype("bf16", torch.device("cpu"), config) is torch.bfloat16
    assert answer_dtype("BF16", torch.device("cpu"), config) is answer_dtype("BFloat16", torch.device("cpu"), config)
    assert answer_dtype("Auto", torch.device("cuda"), config) is torch.bfloat16
    with pytest.raises(UserError, match="unknown precision"):
        answer_dtype("int8", torch.device("cpu"), config)


# ---- conversations --------------------------------------------------------------------------------------------------


class Echo:
    """Answers with the number of messages it was shown."""

    has_template = True

    def encode(self, messages: list[dict], where: str, tools: None) -> list[int]:
        return [len(messages)]

    def stream(self, prompt: list[int]):
        yield from ("saw ", str(prompt[0]))
        return Answer(f"saw {prompt[0]}", [1], complete=True)

    def limit(self, prompt: list[int]) -> str:
        return "--max-new-tokens"


def test_lines_from_a_pipe_are_one_conversation_until_clear(monkeypatch, capsys):
    from swiftlite.serving.chat import chat

    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n/clear\nc\n/exit\nd\n"))
    chat(Echo(), "system", streaming=True)
    assert capsys.readouterr().out.splitlines() == ["saw 2", "saw 4", "saw 2"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_pipe_that_is_not_utf8_is_refused(monkeypatch, errors):
    """Python opens stdin strict; under the C locale, what is no UTF-8 comes as halves of surrogate pairs."""
    from swiftlite.serving.chat import chat

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8", errors=errors))
    with pytest.raises(UserError, match="not UTF-8"):
        chat(Echo(), None, streaming=True)


def test_ctrl_c_keeps_what_was_said_and_the_session_goes_on(monkeypatch, capsys):
    from swiftlite.serving.chat import chat

    class Interrupted(Echo):
        def stream(self, prompt: list[int]):
            yield f"saw {prompt[0]} "
            if prompt[0] == 1:
                raise KeyboardInterrupt
            return Answer("", [1], complete=True)

    lines = iter(["a", "b", "/exit"])
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    chat(Interrupted(), None, streaming=True)
    captured = capsys.readouterr()
    assert captured.out.split() == ["saw", "1", "saw", "3"]  # the question, the cut answer, the next question
    assert "(stopped)" in captured.err
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    with pytest.raises(KeyboardInterrupt):
        chat(Interrupted(), None, streaming=True)


@pytest.mark.parametrize("streaming", [True, False])
def test_an_answer_that_is_cut_off_says_so(loaded, streaming, capsys):
    from swiftlite.serving.chat import Conversation

    conversation = Conversation(Answerer(*loaded, Sampling(max_new_tokens=3)), None)
    conversation.ask(PROMPTS[1], streaming=streaming)
    assert "(cut off by --max-new-tokens)" in capsys.readouterr().err
    answerer = Answerer(*loaded, Sampling(max_new_tokens=12))
    prompt = answerer.encode(ask(PROMPTS[1]), "test")
    answerer._stops.append(greedy(loaded[0], prompt, answerer._stops, 12)[-1])  # an end before that
    Conversation(answerer, None).ask(PROMPTS[1], streaming=streaming)
    assert "cut off" not in capsys.readouterr().err


def test_a_built_in_template_is_known_in_any_case():
    assert read_chat_template("ChatML") == read_chat_template("chatml")


def test_without_a_template_a_prompt_is_plain_text(tiny_model, capsys):
    options = InferOptions(
        model=str(tiny_model("llama")), prompts=["Once upon a time"], chat_template="None", max_new_tokens=5,
        precision="fp32",
    )  # fmt: skip
    run_infer(options)
    assert "no chat template" in capsys.readouterr().err
    with pytest.raises(UserError, match="several messages"):
        run_infer(InferOptions(**{**vars(options), "system": "Be brief."}))
