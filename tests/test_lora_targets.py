"""`--target-modules all-linear` adapts every layer in which an adapter can learn something, and no other."""

import pytest
import torch
import transformers as hf
from peft.tuners.lora import LoraLayer
from test_architectures import ALONE, EQUAL, EXPERTS, config_of
from test_parity import metrics, settings, train_alone
from torch import nn
from transformers.pytorch_utils import Conv1D

from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.attention import documents as attention
from swiftlite.models.load import build_model
from swiftlite.models.lora_targets import check_named, left_out
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.models.tuners import apply_tuner

STATE = {"state_size": 8}
JAMBA = EXPERTS | {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
NEMOTRON_H = {
    "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "n_groups": 2, "chunk_size": 16, "head_dim": 8,
}  # fmt: skip
READ, PEFT = "whose weight is read without a call", "which peft does not adapt"
LEFT_OUT = {
    "a router that gives a tuple": (
        *ALONE["chunks, and a decoder of another name"][:2], {"router": "whose class Llama4Router gives something else"}
    ),
    "groups of a product": ("DeepseekV4Config", {}, {"o_a_proj": "whose class DeepseekV4GroupedLinear gives"}),
    "a coefficient": (*EQUAL["gemma3n"], {"correction_coefs": READ}),
    "a step of time": ("JambaConfig", JAMBA, {"dt_proj": READ}),
    "mamba": ("MambaConfig", STATE, {"dt_proj": READ, "out_proj": PEFT}),
    "falcon_mamba": ("FalconMambaConfig", STATE, {"dt_proj": READ, "out_proj": PEFT}),
    "falcon_h1": (*ALONE["a state that its config is silent about"][:2], {"out_proj": PEFT}),
    "nemotron_h": ("NemotronHConfig", NEMOTRON_H, {"out_proj": PEFT}),
    "nothing": ("LlamaConfig", {}, {}),
    "nothing of linear layers with code of their own": ("FalconConfig", {}, {}),
    "nothing of convolutions over one token": ("GPT2Config", {}, {}),
}  # fmt: skip


def built(name, changes):
    if not hasattr(hf, name):
        pytest.skip(f"this release of transformers has no {name}")
    return build_model("nowhere", config_of(name, changes), dtype=torch.float32, attention=attention.register())


@pytest.mark.parametrize("what", LEFT_OUT)
def test_layers_that_cannot_learn_by_an_adapter_are_left_out_and_told(what):
    name, changes, expected = LEFT_OUT[what]
    model, said = built(name, changes), []
    linear = {last_part(name) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    config = resolve_config("sft", model="nowhere", dataset=["rows.jsonl"], tuner="lora")
    wrapped = apply_tuner(model, config, None, said.append)
    adapted = {last_part(name) for name, module in wrapped.named_modules() if isinstance(module, LoraLayer)}
    assert linear - adapted - {"base_layer"} == {*expected, "lm_head"}
    assert len(said) == bool(expected)
    for last, why in expected.items():
        assert f"{last}, {why}" in said[0]


def last_part(name):
    return name.rpartition(".")[2]


def test_a_layer_is_left_out_alone_where_others_have_its_name():
    model = built("LlamaConfig", {})
    strange = model.model.layers[1].mlp.up_proj
    strange.__class__ = type("Strange", (nn.Linear,), {"forward": lambda self, x: (x, self.weight)})
    assert left_out(model, print) == ["model.layers.1.mlp.up_proj"]
    strange.__class__ = nn.Linear
    assert left_out(model, print) == []


def test_what_is_named_and_cannot_learn_is_refused():
    model = built(*EQUAL["gemma3n"])
    assert check_named(model, ["q_proj", "prediction_coefs"]) == ["q_proj", "prediction_coefs"]
    with pytest.raises(UserError, match="LoRA cannot act on 'correction_coefs', whose weight is read"):
        check_named(model, ["q_proj", "correction_coefs"])


@pytest.mark.parametrize("what", ["a router that gives a tuple", "a coefficient", "falcon_h1"])
def test_every_adapter_has_a_gradient(tmp_path, write_rows, chat_rows, what, capsys):
    """Of what `lora_B` begins with nothing comes back: after two steps it is no longer zero."""
    name, changes, _ = LEFT_OUT[what]
    source = write_toy(tmp_path / "source", config_of(name, changes | {"max_position_embeddings": 512}))
    plain = hf.AutoModelForCausalLM.from_pretrained(source)
    for parameter in plain.parameters():  # some begin as zero, and what is multiplied by them has no gradient
        parameter.data += 0.05 * torch.randn(parameter.shape)
    plain.save_pretrained(source)
    data = write_rows("rows.jsonl", chat_rows)
    train_alone(resolve_config("sft", **settings(tmp_path, source, data, tuner="lora", max_steps=2)))
    assert len(metrics(tmp_path / "out")) == 2
    assert capsys.readouterr().out.count("note: LoRA leaves out") == 1
    trained = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    adapters = {name: p for name, p in trained.named_parameters() if "lora_B" in name}
    assert adapters and not [name for name, p in adapters.items() if not p.any()]


def test_the_default_trains_a_state_space_model(tmp_path, write_rows, chat_rows):
    data = write_rows("rows.jsonl", chat_rows)
    source = write_toy(tmp_path / "source", toy_config("mamba2"))
    train_alone(resolve_config("sft", **settings(tmp_path, source, data, tuner="lora", max_steps=2)))
    first, second = metrics(tmp_path / "out")
    assert second["loss"] < first["loss"]
