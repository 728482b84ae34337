"""What files hold of a model, where names and shapes on disk are others than in memory."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, core_model_loading

from swiftlite.checkpoint.boxes import Box, Holding
from swiftlite.checkpoint.catalog import catalog_model
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.checkpoint.weights import TensorFolder, fill

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
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", with_joined_attention)
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
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
