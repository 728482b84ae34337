"""What of the trained tensors gets no gradient is told."""

from types import SimpleNamespace

import pytest
import torch
from test_parity import settings
from test_run import train
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from swiftlite.training.guards.untouched import without_gradient


def trained(**gradients):
    parameters = []
    for name, gradient in gradients.items():
        parameters.append((name.replace("__", "."), nn.Parameter(torch.zeros(5000))))
        parameters[-1][1].grad = None if gradient is None else (torch.arange(5000) == gradient).float()
    return parameters


def test_a_place_is_touched_where_any_layer_process_or_tensor_of_an_adapter_is():
    own = trained(
        a__0__w=None, a__1__w=4999, b__0__w=None, b__1__w=5000, c=None, d=-1,
        q__0__proj__lora_A__default__weight=None, q__0__proj__lora_B__default__weight=3,
        x__0__proj__lora_A__default__weight=None, x__0__proj__lora_B__default__weight=5000,
    )  # fmt: skip
    alone = SimpleNamespace(gather=lambda texts: list(dict.fromkeys(texts)))
    assert without_gradient(own, alone) == ["b.*.w", "c", "d", "x.*.proj"]
    with_another = SimpleNamespace(gather=lambda texts: list(dict.fromkeys([*texts, "+c", "-e", "-a.*.w"])))
    assert without_gradient(own, with_another) == ["b.*.w", "d", "x.*.proj", "e"]


@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("cut_off", [False, True])
def test_a_run_tells_it_in_its_first_step(
    tmp_path, tiny_model, write_rows, chat_rows, monkeypatch, capsys, tuner, cut_off
):
    if cut_off:

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x).detach()) * self.up_proj(x))

        monkeypatch.setattr(LlamaMLP, "forward", forward)
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=2)
    train(values, tuner=tuner)
    said = [line for line in capsys.readouterr().out.splitlines() if "learns nothing" in line]
    whole = {"full": "model.layers.*.mlp.gate_proj.weight", "lora": "model.layers.*.mlp.gate_proj"}
    told = f"warning: the gradient of step 1 is zero for {whole[tuner]}: what is trained there learns nothing"
    assert said == [told] * cut_off
