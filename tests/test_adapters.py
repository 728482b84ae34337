"""Going on from adapters that swiftlite or peft itself has written: as peft would, or not at all."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from test_parity import metrics, settings, train_alone
from test_run import NEW_TOKENS
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.checkpoint.weights import fill
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.toys import toy_config, toy_pairs, write_toy
from swiftlite.serving.export import ExportOptions, run_export

TARGETS = ["q_proj", "o_proj", "down_proj"]


@pytest.fixture
def go_on(tmp_path, tiny_model, write_rows, chat_rows):
    """Train: (adapter folder, method, settings) -> the output folder."""
    write_rows("sft.jsonl", chat_rows)
    write_rows("rm.jsonl", toy_pairs(8))

    def train(adapter=None, method="sft", out="out", **more):
        values = settings(tmp_path, tiny_model("llama"), tmp_path / f"{method}.jsonl", max_length=128, max_steps=1)
        chosen = {"output_dir": str(tmp_path / out), "tuner": "lora", "adapter": adapter and str(adapter)} | more
        train_alone(resolve_config(method, **(values | chosen)))
        return tmp_path / out

    return train


def wrapped(source, kind=peft.LoraConfig, rows=None, **options):
    """A model with a random adapter of peft's making; rows: of its vocabulary then."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    if rows:
        model.resize_token_embeddings(rows)
    given = {"target_modules": TARGETS, "r": 4} if kind is peft.LoraConfig else {}
    model = peft.get_peft_model(model, kind(**({"task_type": "CAUSAL_LM"} | given | options)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (peft.PromptTuningConfig, {"num_virtual_tokens": 4}, "of the kind PROMPT_TUNING"),
        (peft.AdaLoraConfig, {"target_modules": TARGETS, "total_step": 10}, "of the kind ADALORA"),
        (peft.LoraConfig, {"init_lora_weights": "pissa"}, "changes the base model's weights"),
        (peft.LoraConfig, {"trainable_token_indices": [5, 6]}, "rows of the embedding"),
        (peft.LoraConfig, {"alora_invocation_tokens": [5, 6]}, "invocation tokens"),
    ],
)
def test_kinds_that_would_be_trained_wrongly_are_refused(go_on, tmp_path, tiny_model, kind, options, says):
    wrapped(tiny_model("llama"), kind, **options).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=says):
        go_on(tmp_path / "adapter")
    if "pissa" in options.values():
        with pytest.raises(UserError, match=says):
            run_export(ExportOptions(str(tiny_model("llama")), str(tmp_path / "adapter"), tmp_path / "merged"))


def loss_of(model, folder):
    """Of the first step's row, by peft."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)("one two <new 3>")["input_ids"] + [2])[None]
    logits = model(input_ids=ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()


def test_an_embedding_that_peft_wrote_beside_an_adapter_is_not_lost(go_on, tmp_path, tiny_model, write_rows):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    tokenizer.add_tokens([f"<new {number}>" for number in range(600 - len(tokenizer))])
    model = wrapped(tiny_model("llama"), rows=600)
    adapter = tmp_path / "adapter"
    for written in (model, tokenizer):
        written.save_pretrained(adapter)
    data = write_rows("text.jsonl", [{"text": "one two <new 3>"}])
    given = {"method": "pretrain", "dataset": [str(data)], "global_batch_size": 1, "precision": "fp32"}
    with pytest.raises(UserError, match="embed_tokens.weight") as error:
        go_on(adapter, **given)
    assert "modules_to_save" in error.value.fix
    described = json.loads((adapter / "adapter_config.json").read_text())
    described["modules_to_save"] = ["embed_tokens", "lm_head"]
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    assert metrics(go_on(adapter, **given))[0]["loss"] == pytest.approx(loss_of(model, adapter), rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_the_embedding_goes_on_and_is_merged(go_on, tmp_path, tied):
    """Beside which peft writes the embedding itself; merged, it is no longer that of the head."""
    config = toy_config("llama")
    config.tie_word_embeddings = tied
    source = write_toy(tmp_path / "source", config)
    wrapped(source, target_modules=["embed_tokens", *TARGETS]).save_pretrained(tmp_path / "adapter")
    run = go_on(tmp_path / "adapter", model=str(source))
    done = run_export(ExportOptions(str(run), None, tmp_path / "merged", dtype="fp32"))
    assert done.merge < 1e-5 and done.agreement == 1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    alone = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), run / "model")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(merged(ids).logits, alone.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_reward_model_begins_with_an_adapter_that_answers_but_not_the_other_way(go_on):
    answers = go_on(out="answers") / "model"
    scores = go_on(answers, "rm", "scores") / "model"
    assert json.loads((scores / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    assert any(name.endswith("score.weight") for name in load_file(scores / "adapter_model.safetensors"))
    more = metrics(go_on(scores, "rm", "more"))
    assert more[0]["loss"] < metrics(scores.parent)[0]["loss"]
    with pytest.raises(UserError, match="reward model"):
        go_on(scores, out="back")
    described = json.loads((answers / "adapter_config.json").read_text()) | {"task_type": "SEQ_CLS"}
    (answers / "adapter_config.json").write_text(json.dumps(described | {"modules_to_save": ["score", "classifier"]}))
    again = go_on(answers, out="again") / "model"  # what it says of itself does not matter
    assert json.loads((again / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("more", [{"modules_to_save": ["lm_head"]}, {"new_tokens": NEW_TOKENS}])
def test_a_reward_model_does_without_the_head_of_an_adapter_that_answers(go_on, tiny_model, family, more):
    """But not without the embedding, where that is the head."""
    answers = go_on(out="answers", model=str(tiny_model(family)), learning_rate=1e-2, **more) / "model"
    scores = go_on(answers, "rm", "scores", model=str(tiny_model(family)), learning_rate=1e-9) / "model"
    assert "lm_head" not in json.loads((scores / "adapter_config.json").read_text())["modules_to_save"]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (answers, scores))
    whole = {name for name in before if "lora_" not in name and "lm_head" not in name}
    assert {name for name in after if "lora_" not in name and "score" not in name} == whole
    assert bool(whole) == ("new_tokens" in more or family == "llama-tied")
    for name in whole:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)


def test_new_tokens_beside_an_adapter_are_refused_unless_it_has_them(go_on):
    adapter = go_on(out="first", new_tokens=["<fox>"]) / "model"
    go_on(adapter, out="second", new_tokens=["<fox>"])
    with pytest.raises(UserError, match="<dog>"):
        go_on(adapter, out="third", new_tokens=["<fox>", "<dog>"])


def test_memory_that_nothing_fills_is_an_error():
    with pytest.raises(UserError, match="no file gives values to layer.weight"):
        fill([("layer.weight", torch.empty(3, 4))], [], lambda name, shape, box: None)
