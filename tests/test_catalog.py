"""What files hold of a model, where names and shapes on disk are others than in memory."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    core_model_loading,
)

from swiftlite.checkpoint.boxes import Box, Holding
from swiftlite.checkpoint.catalog import catalog_model
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.checkpoint.weights import TensorFolder, fill, materialize
from swiftlite.models.load import build_model

ATTENTION = "model.layers.{}.self_attn."


def with_joined_attention(model, state):
    """As transformers joins queries, keys and values of sarvam_moe for its files."""
    for layer in range(model.config.num_hidden_layers):
        place = ATTENTION.format(layer)
        parts = [state.pop(f"{place}{name}_proj.weight") for name in "qkv"]
        state[f"{place}query_key_value.weight"] = torch.cat(parts, dim=0)
    return state


def halves(tensor: torch.Tensor) -> list[Holding]:
    """The rows of a tensor, as two processes hold them: the first has one row more than half."""
    first = min(len(tensor), len(tensor) // 2 + 1)
    rows = [(0, first), (first, len(tensor) - first)]
    rest = tuple(tensor.shape[1:])
    return [
        Holding(Box((start, *[0] * len(rest)), (count, *rest)), tensor[start : start + count]) for start, count in rows
    ]


@pytest.mark.parametrize("largest", [None, 60_000])
def test_tensors_that_files_hold_joined(tmp_path, tiny_model, monkeypatch, largest):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", with_joined_attention)
    catalog = catalog_model(model)
    plan = FilePlan([(entry, torch.float32) for entry in catalog], "model", largest)
    plan.create(tmp_path)
    tensors = dict(model.named_parameters())
    for rank in range(2):
        plan.write(tmp_path, {name: [halves(tensor.detach())[rank]] for name, tensor in tensors.items()})

    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (largest is not None)
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(stored) == len({entry.name for entry in catalog})
    joined = torch.cat([tensors[f"{ATTENTION.format(1)}{name}_proj.weight"] for name in "qkv"])
    torch.testing.assert_close(stored[f"{ATTENTION.format(1)}query_key_value.weight"], joined, rtol=0, atol=0)

    fresh = AutoModelForCausalLM.from_config(model.config)
    folder = TensorFolder(tmp_path)
    fill(fresh.named_parameters(), [(folder, folder.match(catalog, "model"))], lambda *_: None)
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(parameter, tensors[name], rtol=0, atol=0, msg=name)


def test_the_language_model_out_of_files_of_a_model_for_images(tmp_path):
    """As Qwen3.5 is published: its names are below `model.language_model`, beside a tower and a second prediction."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 96, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_value_head_dim": 8, "pad_token_id": 0} | linear
    seen = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    whole = AutoModelForImageTextToText.from_config(Qwen3_5Config(text_config=text, vision_config=seen))
    whole.save_pretrained(tmp_path)
    wanted = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())

    config = AutoConfig.from_pretrained(tmp_path)
    model = build_model(str(tmp_path), config, dtype=torch.float32, attention="sdpa")
    folder = TensorFolder(tmp_path)
    assert not set(wanted) & set(folder.entries) - {"lm_head.weight"}
    catalog = folder.match(catalog_model(model), model.base_model_prefix)
    materialize(model, torch.device("cpu"))
    fill(model.named_parameters(), [(folder, catalog)], lambda *_: None)
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=0, msg=name)
    assert model.name_or_path == str(tmp_path)  # by which an adapter finds it
