"""Runs of rm: against a plain PyTorch loop over a sequence classifier, in what they leave behind, and resumed."""

import json
import math
import shutil

import pytest
import torch
from test_parity import metrics, planned_rows, render_chat, settings, train_alone
from test_run import same_weights
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from swiftlite.checkpoint.folder import list_checkpoints
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.toys import toy_pairs


@pytest.fixture
def start(tmp_path, tiny_model, write_rows):
    write_rows("pairs.jsonl", toy_pairs(24))

    def config(out="out", family="llama", **more):
        values = settings(tmp_path, tiny_model(family), tmp_path / "pairs.jsonl", max_length=128)
        return resolve_config("rm", **(values | {"output_dir": str(tmp_path / out)} | more))

    return config


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3.5"])
def test_rm_equals_plain_pytorch(start, tmp_path, tiny_model, family):
    config = start(family=family, center_rewards=0.01, max_steps=3)
    train_alone(config)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model(family), num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    tokenizer, pairs = AutoTokenizer.from_pretrained(tiny_model(family)), toy_pairs(24)

    def score(pair, side):
        ids, _ = render_chat(tokenizer, pair["prompt"] + pair[side])
        return model.score(model.base_model(torch.tensor(ids)[None]).last_hidden_state[0, -1])[0]

    for row, step in zip(metrics(tmp_path / "out"), planned_rows(config), strict=True):
        scores = [[score(pairs[number], side) for side in ("chosen", "rejected")] for number in step]
        losses = [-logsigmoid(chosen - rejected) + 0.01 * (chosen + rejected) ** 2 for chosen, rejected in scores]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert row["rewards/margin"] == pytest.approx(
            sum((chosen - rejected).item() for chosen, rejected in scores) / len(scores), rel=1e-3, abs=1e-6
        )
        for group in optimizer.param_groups:
            group["lr"] = row["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()


def test_the_result_is_a_sequence_classifier(start, tmp_path):
    train_alone(start(max_steps=2))
    assert metrics(tmp_path / "out")[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out" / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    of_words = settings(tmp_path, tmp_path / "out" / "model", tmp_path / "rows.jsonl", output_dir=str(tmp_path / "no"))
    taught = of_words | {"model": str(start().model), "teacher": of_words["model"]}
    for values in (of_words, taught):
        with pytest.raises(UserError, match="the model gives scores"):
            train_alone(resolve_config("sft", **values))
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    assert model.score.weight.abs().sum() > 0


@pytest.mark.parametrize("pad", [None, "eos"])
def test_transformers_reads_the_score_where_it_was_trained(start, tmp_path, pad):
    """Also of models whose padding is what ends an answer, or that have none."""
    config = start(max_steps=2)
    base = tmp_path / "base"
    shutil.copytree(config.model, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token if pad else None
    tokenizer.save_pretrained(base)
    values = json.loads((base / "config.json").read_text())
    values["pad_token_id"] = tokenizer.eos_token_id if pad else None
    (base / "config.json").write_text(json.dumps(values))
    train_alone(config.model_copy(update={"model": str(base)}))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    ends = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert ends.pad_token_id == model.config.pad_token_id not in (None, ends.eos_token_id)
    row = torch.tensor([[5, 6, 7, ends.eos_token_id, ends.eos_token_id]])
    scores = model.score(model.model(row).last_hidden_state)[0, :, 0]
    filled = torch.nn.functional.pad(row, (0, 2), value=ends.pad_token_id)
    for ids in (row, filled):
        torch.testing.assert_close(model(ids).logits[0, 0], scores[-1])


def test_the_score_head_is_trained_and_saved_beside_lora(start, tmp_path):
    from peft import AutoPeftModelForSequenceClassification

    train_alone(start(max_steps=2, tuner="lora"))
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model", num_labels=1)
    assert model.base_model.model.score.modules_to_save["default"].weight.abs().sum() > 0


@pytest.mark.parametrize("layers", [0, 1])
def test_the_score_head_is_trained_beside_frozen_layers(start, tmp_path, layers, capsys):
    train_alone(start(max_steps=4, tuner="freeze", trainable_layers=layers, save_steps=2))
    assert metrics(tmp_path / "out")[-1]["loss"] < metrics(tmp_path / "out")[0]["loss"]
    assert "is zero" not in capsys.readouterr().out


@pytest.mark.parametrize("tuner", ["full", "lora", "freeze"])
def test_rm_resumes_bit_for_bit(start, tmp_path, tuner):
    train_alone(start("whole", max_steps=4, tuner=tuner))
    train_alone(start("parts", max_steps=4, tuner=tuner, save_steps=2, keep_checkpoints=9))
    middle = list_checkpoints(tmp_path / "parts")[-1]
    train_alone(start("again", max_steps=4, tuner=tuner, resume=str(middle)))
    assert metrics(tmp_path / "again")[-1]["loss"] == metrics(tmp_path / "whole")[-1]["loss"]
    file = "adapter_model.safetensors" if tuner == "lora" else "model.safetensors"
    assert same_weights(tmp_path / "again" / "model" / file, tmp_path / "whole" / "model" / file)
    if tuner == "lora":
        again, whole = ((tmp_path / run / "model" / "adapter_config.json").read_text() for run in ("again", "whole"))
        assert again == whole and whole.count('"score"') == 1
        names = json.loads(whole)["target_modules"]
        assert names == sorted(names)  # a set has another order in each process
