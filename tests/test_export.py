"""`swiftlite export`: what it writes answers as base and adapter do, from any result, and nothing else gets a name."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_parity import settings, train_alone
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from swiftlite.checkpoint import space
from swiftlite.checkpoint.folder import list_checkpoints
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import RunError, UserError
from swiftlite.models.toys import toy_pairs
from swiftlite.serving.export import ExportOptions, run_export

LORA = {"tuner": "lora", "lora_rank": 4, "lora_alpha": 64, "learning_rate": 1e-2}  # so that the adapter is heard


@pytest.fixture
def trained(tmp_path, tiny_model, write_rows, chat_rows):
    """A factory: family, flags -> the output folder of a short run."""

    def train(family="llama", method="sft", **flags):
        rows = write_rows("rows.jsonl", chat_rows if method == "sft" else toy_pairs(24))
        values = (
            settings(tmp_path, tiny_model(family), rows, max_length=128) | {"max_steps": 2, "save_steps": 1} | flags
        )
        train_alone(resolve_config(method, **values))
        return tmp_path / "out"

    return train


def export(model, output, **options):
    return run_export(ExportOptions(model=str(model), adapter=None, output=output, **options))


def logits(folder, text="What is two plus two?", base=None):
    """By transformers and peft alone, fp32."""
    model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    if base is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", {}),
        ("qwen3", {"dora": True}),
        ("gpt2", {}),
        ("gpt2", {"dora": True}),
        ("qwen3-moe", {"target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_the_merged_model_answers_as_base_and_adapter(trained, tmp_path, tiny_model, family, flags):
    run = trained(family, **LORA, **flags)
    done = export(run, tmp_path / "merged", max_shard_size="50KB", dtype="FP32")
    wanted = logits(run / "model", base=tiny_model(family))
    assert (logits(tiny_model(family)) - wanted).norm() > 1e-2 * wanted.norm()
    torch.testing.assert_close(logits(tmp_path / "merged"), wanted, rtol=1e-4, atol=1e-5)
    assert done.merge < 1e-5 and done.total < 1e-5 and done.agreement == 1
    assert (tmp_path / "merged" / "model.safetensors.index.json").is_file()
    assert not list(tmp_path.glob(".merged*"))


def test_a_checkpoint_becomes_a_model_of_another_type(trained, tmp_path):
    run = trained(tuner="full")
    checkpoint = list_checkpoints(run)[0]
    done = export(checkpoint, tmp_path / "half", dtype="BF16")
    mine, whole = load_file(tmp_path / "half" / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert mine.keys() == whole.keys()
    assert all(torch.equal(mine[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert done.merge is None and 1e-4 < done.total < 2e-2


def test_a_reward_model_keeps_its_head(trained, tmp_path, tiny_model):
    import peft

    run = trained(method="rm", **LORA)
    export(run, tmp_path / "merged", dtype="fp32")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model("llama"), num_labels=1, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, run / "model").eval()
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 30, 41, 7]])
    with torch.no_grad():
        wanted = adapted(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-6)
    assert wanted.abs().item() > 1e-4


def test_a_weight_that_the_type_has_no_number_for_is_told(tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = -1e5
    model.save_pretrained(tmp_path / "big")
    AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "big")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1e\+05"):
        export(tmp_path / "big", tmp_path / "half", dtype="fp16")
    assert not (tmp_path / "half").exists()


def test_what_goes_wrong_leaves_nothing(trained, tmp_path, monkeypatch, tiny_model):
    run = trained(**LORA)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="already there"):
        export(run, tmp_path / "there")
    with pytest.raises(UserError, match="not a size"):
        export(run, tmp_path / "new", max_shard_size="five")
    with pytest.raises(UserError, match="unknown number type"):
        export(run, tmp_path / "new", dtype="fp12")
    with pytest.raises(UserError, match="neither a model"):
        export(tmp_path / "there", tmp_path / "new")
    monkeypatch.setattr(space.os, "access", lambda _path, mode: not mode & os.W_OK)  # the tests may run as root
    with pytest.raises(UserError, match="cannot be written"):
        export(run, tmp_path / "new")
    monkeypatch.undo()
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="MiB are free"):
        export(run, tmp_path / "new")
    monkeypatch.undo()
    real = FilePlan.write

    def flipped(self, folder, held):
        real(self, folder, held)
        file = folder / self.slots[-1].file
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(FilePlan, "write", flipped)
    with pytest.raises(RunError, match="read back"):
        export(run, tmp_path / "new", dtype="fp32")
    monkeypatch.undo()
    import peft

    merge = peft.LoraModel.merge_and_unload

    def wrong(self, **options):
        model = merge(self, **options)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
        return model

    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", wrong)
    with pytest.raises(RunError, match="nothing was written"):
        export(run, tmp_path / "new", dtype="fp32")
    assert sorted(path.name for path in tmp_path.iterdir() if "new" in path.name or path.name.startswith(".")) == []


def test_engines_are_told_the_ends_of_turns(tmp_path, tiny_model, write_rows, chat_rows):
    """They read them off generation_config.json alone, where a base model has the end of texts."""
    base, texts = tmp_path / "base", write_rows("texts.jsonl", [{"text": "Once upon a time. " * 9}] * 8)
    shutil.copytree(tiny_model("llama"), base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ends, turns = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    for file, changes in (("tokenizer", {"eos_token": "<|endoftext|>"}), ("generation", {"eos_token_id": ends})):
        path = base / f"{file}_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    chats = write_rows("chats.jsonl", chat_rows)
    runs = {"full": ("sft", "full", chats), "texts": ("pretrain", "full", texts), "lora": ("sft", "lora", chats)}
    for name, (method, tuner, rows) in runs.items():
        values = settings(tmp_path, base, rows, tuner=tuner, max_steps=1, output_dir=str(tmp_path / name))
        train_alone(resolve_config(method, **values))
    export(tmp_path / "lora", tmp_path / "merged")
    folders = {
        "full": tmp_path / "full" / "model",
        "texts": tmp_path / "texts" / "model",
        "merged": tmp_path / "merged",
    }
    found = {name: AutoModelForCausalLM.from_pretrained(folder).generation_config for name, folder in folders.items()}
    assert {name: settings.eos_token_id for name, settings in found.items()} == {
        "full": [ends, turns], "texts": ends, "merged": [ends, turns]
    }  # fmt: skip


def test_settings_that_transformers_does_not_like_are_kept(tmp_path, tiny_model, write_rows, chat_rows):
    """A temperature without sampling is in the file of many a model, and engines go by it."""
    base, chats = tmp_path / "base", write_rows("chats.jsonl", chat_rows)
    shutil.copytree(tiny_model("llama"), base)
    given = {"eos_token_id": 0, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 1, "max_length": 99}
    (base / "generation_config.json").write_text(json.dumps(given))
    for tuner in ("full", "lora"):
        values = settings(tmp_path, base, chats, tuner=tuner, max_steps=1, output_dir=str(tmp_path / tuner))
        train_alone(resolve_config("sft", **values))
    export(tmp_path / "lora", tmp_path / "merged")
    for folder in (tmp_path / "full" / "model", tmp_path / "lora" / "model", tmp_path / "merged"):
        found = json.loads((folder / "generation_config.json").read_text())
        assert found == found | given | {"eos_token_id": [0, 2]}
