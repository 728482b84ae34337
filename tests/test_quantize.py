"""QLoRA: what 4 bits make of a weight, how it is trained, divided and loaded."""

import json
import shutil

import pytest
import torch
from test_parity import metrics, settings, train_alone
from test_verify import BF16_LOSS, BF16_NORM, in_real_processes
from torch import nn

from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.quantize import FORMATS, PackedLinear, bytes_a_number, count_quantizable, packing, quantize
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.verification.cases import LORA, Subject


def linear(inputs: int = 128, outputs: int = 48, **more) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, **more).requires_grad_(False)


def packed(layer: nn.Linear, kind: str = "nf4") -> PackedLinear:
    made = PackedLinear(layer, kind)
    made.pack(layer.weight)
    return made


def test_a_layer_of_four_bits_is_that_of_bitsandbytes():
    import bitsandbytes as bnb

    layer = linear()
    theirs = bnb.nn.Linear4bit(128, 48, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=False)
    theirs.load_state_dict(layer.state_dict())
    theirs = theirs.to("cpu")
    x = torch.randn(5, 128)
    assert torch.allclose(packed(layer)(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_numbers_of_eight_bits_are_the_nearest_multiples_of_their_scale():
    layer = linear()
    layer.weight.data[3, 64:] = 0.0
    made = packed(layer, "int8")
    matrix = made(torch.eye(128)).T - layer.bias[:, None]
    blocks, found = (of.view(48, 2, 64) for of in (layer.weight, matrix))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    assert ((blocks - found).abs() <= step / 2 + 1e-6).all() and (found[3, 1] == 0).all()
    assert ((found / step.clamp(min=1e-9)).round() - found / step.clamp(min=1e-9)).abs().max() < 1e-3


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.2), ("int8", 0.01)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward_use_the_same_matrix(dtype, kind, error):
    layer = linear(dtype=dtype, bias=False)
    made = packed(layer, kind)
    matrix = made(torch.eye(128, dtype=dtype)).detach()  # a row for each input
    x = torch.randn(5, 128, dtype=dtype, requires_grad=True)
    made(x).sum().backward()
    assert torch.allclose(x.grad[0], matrix.sum(1), rtol=3e-2, atol=3e-2)
    assert (matrix.T - layer.weight).abs().max() < error * layer.weight.abs().max()
    size = sum(parameter.nbytes for parameter in (made.weight, made.scales))
    assert size == layer.weight.numel() * (FORMATS[kind].bits / 8 + dtype.itemsize / 64)
    assert size == layer.weight.numel() * bytes_a_number(kind, dtype.itemsize)


def test_only_frozen_layers_with_whole_blocks_are_packed():
    model = nn.Sequential(linear(), linear(96), linear().requires_grad_(True), nn.Embedding(8, 64))
    assert count_quantizable([model]) == 128 * 48
    quantize([model], "nf4")
    assert [type(module) for module in model] == [PackedLinear, nn.Linear, nn.Linear, nn.Embedding]
    with pytest.raises(UserError, match="no frozen linear layer"):
        count_quantizable([nn.Sequential(linear(96))])


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_packed_as_they_come_from_the_files(kind):
    layer = linear()
    model = nn.Sequential(linear())
    quantize([model], kind)
    for name, tensor in packing(model, list(model.named_parameters())):
        assert name in ("0.weight", "0.bias")
        tensor.data.copy_(getattr(layer, name.removeprefix("0.")))
    x = torch.randn(3, 128)
    assert torch.equal(model(x), packed(layer, kind)(x))


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    rows = write_rows("rows.jsonl", chat_rows)
    return settings(tmp_path, tiny_model("llama"), rows, max_steps=4, tuner="lora", learning_rate=1e-3)


def test_a_run_trains_beside_the_rounded_weights(base, tmp_path):
    for kind in ("none", *FORMATS):
        train_alone(resolve_config("sft", **base | {"output_dir": str(tmp_path / kind)}, quantization=kind))
    for row, *others in zip(*(metrics(tmp_path / kind) for kind in ("none", "nf4", "int8")), strict=True):
        for other, error in zip(others, (0.05, 0.002), strict=True):
            assert row["loss"] != other["loss"] and row["loss"] == pytest.approx(other["loss"], rel=error)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"tuner": "full"}, "but the tuner is full"),
        ({"dora": True}, "--dora measures"),
        ({"tensor_parallel_size": 2}, "cut through numbers that share a scale"),
    ],
)
def test_what_does_not_go_with_it_is_refused(base, more, what):
    with pytest.raises(UserError, match=what):
        resolve_config("sft", **base | {"quantization": "nf4"} | more)


def test_layouts_divide_the_same_rounded_weights(tmp_path):
    exact, half = {"quantization": "nf4"}, {"quantization": "int8", "precision": "bf16"}
    kinds = [Subject("llama", "fp32", LORA | exact), Subject("llama", "bf16", LORA | half)]
    chosen = ("fsdp full 2", "fsdp full 2, offloaded", "pp 2", "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *kinds):
        if verdict.subject == "fp32":
            assert verdict.passed and verdict.difference is not None, verdict
        else:
            assert verdict.difference.loss < BF16_LOSS and verdict.difference.norm < BF16_NORM, verdict


def test_weights_that_others_have_quantized_are_refused_by_name(base, tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "gptq")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match=r"weights are quantized \(gptq\)") as error:
        train_alone(resolve_config("sft", **base | {"model": str(folder)}))
    assert "--quantization nf4" in error.value.fix
    with pytest.raises(UserError, match=r"weights are quantized \(gptq\)"):
        run_export(ExportOptions(model=str(folder), adapter=None, output=tmp_path / "new", dtype="bf16"))
