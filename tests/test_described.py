"""Which codes are told apart, and which are refused: wrong numbers would train another model without a word."""

import json

import pytest
import torch
from test_codes import FP8, SECTIONS, folder_of, in_codes, of_bits, of_bitsandbytes, of_blocks, of_microscales, of_rows
from transformers import AutoConfig

from swiftlite.checkpoint.weights import TensorFolder
from swiftlite.errors import UserError
from swiftlite.models.anatomy import check_plain_weights
from swiftlite.serving.load import load_for_answers
from swiftlite.serving.source import find_source

PACKED = SECTIONS["compressed-tensors"]


def scheme(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def packed_down(zeros, bits):
    """int32 `[rows * bits / 32, groups]` of zero points `[rows, groups]`, which lie between those of a code."""
    words = torch.zeros(-(-zeros.shape[0] * bits // 32), zeros.shape[1], dtype=torch.int64)
    for row, values in enumerate(zeros):
        words[row * bits // 32] |= (values.long() + (1 << bits - 1)) << row * bits % 32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 96), (8, 48)])
def test_packed_zero_points(tmp_path, bits, group):
    torch.manual_seed(0)
    packed, scales, numbers = of_bits(torch.randn(74, 96), bits, group)
    zeros = torch.randint(-(1 << bits - 1), 1 << bits - 1, scales.shape)
    tensors = {"a.weight_packed": packed, "a.weight_scale": scales, "a.weight_shape": torch.tensor([74, 96])}
    tensors |= {"a.weight_zero_point": packed_down(zeros, bits)}
    found = folder_of(tmp_path / "model", tensors, scheme(num_bits=bits, group_size=group))
    wanted = numbers - (zeros * scales).repeat_interleave(group, 1)
    assert torch.allclose(found.read("a.weight"), wanted, rtol=0, atol=1e-5)
    part = (slice(5, 37), slice(50, 96))
    assert torch.equal(found.read("a.weight", part), found.read("a.weight")[part])
    assert set(found.entries) == {"a.weight"}


@pytest.mark.parametrize("packed", [True, False])
def test_columns_in_the_order_of_activations(tmp_path, packed):
    torch.manual_seed(0)
    weight, order = torch.randn(8, 96), torch.randperm(96)
    groups = (torch.arange(96) // 32)[order]  # of each column
    words, scales, numbers = of_bits(weight, 8, 32)
    codes = torch.round(numbers / scales.repeat_interleave(32, 1))
    tensors = {"a.weight_scale": scales, "a.weight_g_idx": groups.int()}
    if packed:
        tensors |= {"a.weight_packed": words, "a.weight_shape": torch.tensor([8, 96])}
    else:
        tensors["a.weight"] = codes.to(torch.int8)
    found = folder_of(tmp_path / "model", tensors, scheme(num_bits=8, group_size=32))
    assert torch.allclose(found.read("a.weight"), codes * scales[:, groups])
    part = (slice(2, 5), slice(30, 70))
    assert torch.equal(found.read("a.weight", part), found.read("a.weight")[part])


@pytest.mark.parametrize(("size", "blocks"), [(192, 96), (320, 192), (448, 128)])
def test_the_size_of_a_block_is_that_of_config_json(tmp_path, size, blocks):
    codes, scales, numbers = of_blocks(torch.randn(size, size), blocks, blocks)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    found = folder_of(tmp_path / "model", tensors, {"quant_method": "fp8", "weight_block_size": [blocks, blocks]})
    assert torch.equal(found.read("a.weight"), numbers)


@pytest.mark.parametrize("name", ["scale", "qscale_weight"])
def test_other_names_of_scales(tmp_path, name):
    """DeepSeek V4's and Mistral's."""
    codes, scales, numbers = of_blocks(torch.randn(64, 64), 64, 64)
    found = folder_of(tmp_path / "model", {"a.weight": codes, f"a.{name}": scales.reshape(())})
    assert torch.equal(found.read("a.weight"), numbers)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bitsandbytes_codes_in_another_type(tmp_path, storage):
    """bnb_4bit_quant_storage, which FSDP asks for."""
    tensors, numbers = of_bitsandbytes(torch.randn(70, 128), "nf4 of nested scales")
    tensors["a.weight"] = tensors["a.weight"].flatten().view(storage)[:, None]
    found = folder_of(tmp_path / "model", tensors)
    assert torch.allclose(found.read("a.weight"), numbers, rtol=1e-6, atol=1e-7)
    part = (slice(3, 11), slice(5, 99))
    assert torch.equal(found.read("a.weight", part), found.read("a.weight")[part])


def packed_tensors(**others):
    words, scales, _ = of_bits(torch.ones(8, 96), 4, 32)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([8, 96])} | others
    return {f"a.{name}": tensor for name, tensor in tensors.items() if tensor is not None}


def scaled_tensors(**others):
    codes, scales, _ = of_rows(torch.ones(8, 96))
    tensors = {"weight": codes, "weight_scale": scales} | others
    return {f"a.{name}": tensor for name, tensor in tensors.items() if tensor is not None}


def tabled_tensors(state=None, **others):
    tensors, _ = of_bitsandbytes(torch.ones(8, 96), "nf4")
    name = "a.weight.quant_state.bitsandbytes__nf4"
    if state is not None:
        said = json.loads(bytes(tensors[name].tolist())) | state if isinstance(state, dict) else state
        text = said if isinstance(said, bytes) else json.dumps(said).encode()
        tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
    tensors |= {f"a.weight.{name}": tensor for name, tensor in others.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def experts_tensors(**others):
    blocks, scales, _ = of_microscales(torch.ones(2, 64, 6))
    return {f"a.up_{name}": tensor for name, tensor in ({"blocks": blocks, "scales": scales} | others).items()}


F8 = torch.ones(8, 96).to(FP8)
REFUSED = {
    "three bits": packed_tensors(weight_packed=torch.zeros(8, 9, dtype=torch.int32)),
    "NVFP4": packed_tensors(weight_shape=None, weight_packed=torch.zeros(8, 48, dtype=torch.uint8)),
    "NVFP4 in 8 bits": scaled_tensors(weight=torch.zeros(8, 48, dtype=torch.uint8), weight_scale_2=torch.ones(())),
    "a global scale": scaled_tensors(weight_global_scale=torch.ones(())),
    "4-bit floats as whole numbers": scaled_tensors(weight_scale=None, weight_scale_inv=torch.ones(8, 6)),
    "bytes": scaled_tensors(weight=torch.zeros(8, 96, dtype=torch.uint8)),
    "exponents of whole numbers": scaled_tensors(weight_scale=torch.zeros(8, 1, dtype=torch.uint8)),
    "two scales": scaled_tensors(weight_scale_inv=torch.ones(8, 1), weight=F8),
    "scales of too many rows": scaled_tensors(weight_scale=torch.ones(16, 1)),
    "scales of no rows": scaled_tensors(weight_scale=torch.ones(0, 1)),
    "scales of rows that are not there": scaled_tensors(
        weight=torch.ones(0, 96).to(FP8), weight_scale_inv=torch.ones(8, 1), weight_scale=None
    ),
    "blocks of no known size": scaled_tensors(weight_scale=torch.ones(3, 1)),
    "a scale for each third": scaled_tensors(weight_scale=torch.ones(4)),
    "too many dimensions": scaled_tensors(weight_scale=torch.ones(8, 1, 1)),
    "whole scales": scaled_tensors(weight_scale=torch.ones(8, 1, dtype=torch.int32)),
    "zeros of other shape": scaled_tensors(weight_zero_point=torch.zeros(5, 1, dtype=torch.int8)),
    "packed zeros of other shape": packed_tensors(weight_zero_point=torch.zeros(3, 3, dtype=torch.int32)),
    "groups that are not there": packed_tensors(weight_g_idx=torch.full((96,), 3, dtype=torch.int32)),
    "groups of other columns": packed_tensors(weight_g_idx=torch.zeros(95, dtype=torch.int32)),
    "a kernel's order": scaled_tensors(
        weight_scale=None, SCB=torch.ones(8), weight_format=torch.tensor(2, dtype=torch.uint8)
    ),
    "a shape of other rows": packed_tensors(weight_shape=torch.tensor([9, 96])),
    "a shape of no columns": packed_tensors(weight_shape=torch.tensor([8, 0])),
    "a shape below none": packed_tensors(weight_shape=torch.tensor([8, -96])),
    "a shape of one": packed_tensors(weight_shape=torch.tensor([768])),
    "no packed scales": packed_tensors(weight_scale=None),
    "numbers and codes": packed_tensors(weight=torch.ones(8, 96)),
    "no JSON": tabled_tensors(b"{"),
    "no UTF-8": tabled_tensors(b"\xff\xfe{"),
    "deep JSON": tabled_tensors(b"[" * 60000),
    "a list": tabled_tensors(b"[1]"),
    "a huge shape": tabled_tensors({"shape": [1 << 40, 1 << 20]}),
    "a shape of texts": tabled_tensors({"shape": ["8", "96"]}),
    "a negative block": tabled_tensors({"blocksize": -64}),
    "a block of none": tabled_tensors({"blocksize": 0}),
    "a long text": tabled_tensors(b" " * (1 << 17)),
    "no scales of blocks": tabled_tensors(absmax=None),
    "other scales of blocks": tabled_tensors(absmax=torch.ones(3)),
    "another table": tabled_tensors(quant_map=torch.ones(8)),
    "nesting without parts": tabled_tensors({"nested_offset": 0.5, "nested_blocksize": 256}),
    "an offset that is none": tabled_tensors({"nested_offset": "a", "nested_blocksize": 256}),
    "scales of other experts": experts_tensors(scales=torch.zeros(1, 6, 2, dtype=torch.uint8)),
    "blocks of 16": experts_tensors(blocks=torch.zeros(2, 6, 4, 8, dtype=torch.uint8)),
    "blocks of floats": experts_tensors(blocks=torch.zeros(2, 6, 2, 16)),
    "flat blocks": experts_tensors(blocks=torch.zeros(2, 192, dtype=torch.uint8)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_sure_is_refused(tmp_path, case):
    with pytest.raises(UserError, match=r"^a(\.|_| has )"):
        folder_of(tmp_path / "model", REFUSED[case], PACKED)


MAKERS = [packed_tensors, scaled_tensors, tabled_tensors, experts_tensors]


@pytest.mark.parametrize("make", MAKERS)
def test_codes_are_made_numbers_a_piece_at_a_time(tmp_path, make, monkeypatch):
    torch.manual_seed(0)
    tensors = make() | {
        name: torch.randint(0, 100, tensor.shape, dtype=tensor.dtype)
        for name, tensor in make().items()
        if name.endswith(("_packed", "weight", "_blocks"))
    }
    folder = folder_of(tmp_path / "model", tensors, PACKED)
    (name,) = folder.entries
    whole, sizes = folder.read(name), []
    raw = TensorFolder._raw
    monkeypatch.setattr(
        TensorFolder,
        "_raw",
        lambda self, name, part: sizes.append(raw(self, name, part).numel()) or raw(self, name, part),
    )
    monkeypatch.setattr("swiftlite.checkpoint.weights.PIECE", 20)
    part = (slice(1, whole.shape[0]), *[slice(3, size - 1) for size in whole.shape[1:]])
    target = torch.zeros(whole[part].shape, dtype=torch.float64)
    folder.read_into(target, name, part)
    assert torch.equal(target.float(), whole[part]) and whole.unique().numel() > 9
    assert max(sizes) <= 64


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_without_the_fault_is_read(tmp_path, make):
    folder = folder_of(tmp_path / "model", make(), PACKED)
    (name,) = folder.entries
    assert folder.read(name).shape == folder.entries[name].shape


def test_no_method_but_those_that_are_read(tmp_path):
    """Of what a config.json may hold, whoever wrote it."""

    def check(section, at="quantization_config"):
        values = {at: section, "model_type": "llama"}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"text_config": values} if at == "text" else values))
        check_plain_weights(AutoConfig.from_pretrained(tmp_path), "here", "do")

    for section in SECTIONS.values():
        check(section)
        check(section, "compression_config")
    rotated = PACKED | {"transform_config": {"config_groups": {"R1": {}}}}
    strange = [{"quant_method": method} for method in ("gptq", "awq", "modelopt", ["fp8"], {"fp8": 1}, None)]
    groups = PACKED | {"config_groups": {"a": {"format": "nvfp4-pack-quantized"}}}
    sparse = PACKED | {"format": "marlin-24"}
    for section in (*strange, rotated, groups, sparse):
        for at in ("quantization_config", "compression_config"):
            with pytest.raises(UserError, match="weights are quantized"):
                check(section, at)


def test_codes_that_config_json_does_not_tell_of_answer_as_the_numbers(tmp_path, tiny_model):
    """transformers takes 8-bit floats for numbers then."""
    coded, exact = in_codes(tiny_model("qwen3-moe"), tmp_path, "fp8")
    path = coded / "config.json"
    values = json.loads(path.read_text())
    values["compression_config"] = values.pop("quantization_config")
    path.write_text(json.dumps(values))
    models = [load_for_answers(find_source(str(folder), None), precision="fp32")[0] for folder in (coded, exact)]
    one, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert "compression_config" not in models[0].config.to_dict()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_codes_that_transformers_would_take_for_numbers_give_no_answer(tmp_path, tiny_model, key):
    folder = in_codes(tiny_model("qwen3-moe"), tmp_path, "fp8")[0]
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["quantization_config"]
    path.write_text(json.dumps(values | {key: {"quant_method": "modelopt"}}))
    with pytest.raises(UserError, match=r"weights are quantized \(modelopt\)"):
        load_for_answers(find_source(str(folder), None), precision="fp32")
