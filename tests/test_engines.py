"""What serving engines need of the folders that a run writes, which they read by rules of their own."""

import json
import shutil

import pytest
from safetensors import safe_open
from test_parity import metrics, settings
from test_run import same_weights, train

from swiftlite.checkpoint.folder import MANIFEST, list_checkpoints


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    return settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=4, save_steps=2)


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_each_safetensors_file_of_a_checkpoint_holds_weights(base, tmp_path, tuner):
    train(base, tuner=tuner)
    folder = list_checkpoints(tmp_path / "out")[0]
    [file] = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as stored:
        assert {name.rpartition(".")[2] for name in stored.keys()} == {"weight"}  # noqa: SIM118 - it is no dict


def test_a_checkpoint_that_has_moments_beside_weights_is_gone_on_with(base, tmp_path):
    train(base)
    out, again = tmp_path / "out", tmp_path / "again"
    shutil.copytree(out, again, symlinks=True)
    newest, older = list_checkpoints(again)
    for gone in (newest, again / "model"):
        shutil.rmtree(gone)
    (older / "resume" / "tensors.safetensors").rename(older / "resume.safetensors")  # as it was written before
    text = (older / MANIFEST).read_text()
    (older / MANIFEST).write_text(text.replace("resume/tensors.safetensors", "resume.safetensors"))
    train(base, output_dir=str(again), resume="auto")
    assert [row["loss"] for row in metrics(again)] == [row["loss"] for row in metrics(out)]
    assert same_weights(out / "model" / "model.safetensors", again / "model" / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3-moe"])
def test_an_adapter_names_its_modules_by_the_last_part(tmp_path, tiny_model, write_rows, chat_rows, family):
    rows = write_rows("rows.jsonl", chat_rows)
    train(settings(tmp_path, tiny_model(family), rows, max_steps=1, tuner="lora"))
    adapter = tmp_path / "out" / "model"
    written = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as stored:
        adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in stored.keys()}  # noqa: SIM118
    assert written and {*written} <= adapted


def test_an_adapter_of_some_layers_names_them(tmp_path, tiny_model, write_rows, chat_rows):
    rows, some = write_rows("rows.jsonl", chat_rows), ["model.layers.1.self_attn.q_proj"]
    train(settings(tmp_path, tiny_model("llama"), rows, max_steps=1, tuner="lora", target_modules=[*some, "o_proj"]))
    written = json.loads((tmp_path / "out" / "model" / "adapter_config.json").read_text())["target_modules"]
    assert written == [*some, "o_proj"]
