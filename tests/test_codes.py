"""Weights that files hold as codes beside scales: every kind against arithmetic by hand, and runs from such files."""

import itertools
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from test_architectures import EQUAL, SHAPE
from test_parity import metrics, settings, train_alone
from transformers import AutoModelForCausalLM

from swiftlite.checkpoint.weights import TensorFolder
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.toys import write_toy
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.serving.load import load_for_answers
from swiftlite.serving.source import find_source
from swiftlite.verification.compare import weights_difference

FP8 = torch.float8_e4m3fn


def of_blocks(weight, rows, columns, scale_type=torch.float32):
    """(codes, scales, numbers) of an 8-bit float with a scale for each block."""
    codes, numbers = torch.zeros_like(weight).to(FP8), torch.zeros_like(weight)
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scale = 2.0 ** torch.ceil(torch.log2(weight[place].abs().max() / 448))
        scales[i, j], codes[place] = scale, (weight[place] / scale).to(FP8)
        numbers[place] = codes[place].float() * scale
    return codes, scales.to(scale_type), numbers


def of_rows(weight, zero=0):
    """The same of whole numbers with a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().clamp(-120, 120) + zero
    return codes.to(torch.int8), scales, (codes - zero) * scales


def of_bits(weight, bits, group):
    """The same of a few bits, as 32-bit numbers that hold several."""
    rows, columns = weight.shape
    half, each = 1 << bits - 1, 32 // bits
    scales = weight.view(rows, -1, group).abs().amax(-1) / (half - 1)
    codes = (weight / scales.repeat_interleave(group, 1)).round().numpy().astype(np.int64)
    packed = np.zeros((rows, columns // each), dtype=np.uint32)
    for place in range(each):
        packed |= ((codes[:, place::each] + half).astype(np.uint32)) << np.uint32(bits * place)
    numbers = torch.from_numpy(codes).float() * scales.repeat_interleave(group, 1)
    return torch.from_numpy(packed.view(np.int32)), scales, numbers


BITSANDBYTES = ("nf4", "nf4 of nested scales", "fp4", "int8")


def of_bitsandbytes(weight, kind):
    """(tensors as transformers saves them, numbers), by the library itself."""
    from bitsandbytes import functional

    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        saved = {"a.weight": codes, "a.SCB": scales, "a.weight_format": torch.zeros((), dtype=torch.uint8)}
        return saved, codes.float() * (scales / 127)[:, None]
    codes, state = functional.quantize_4bit(weight, quant_type=kind[:3], compress_statistics="nested" in kind)
    saved = {f"a.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return saved | {"a.weight": codes}, functional.dequantize_4bit(codes, state)


def of_microscales(weight):
    """(bytes, exponents, numbers) of experts `[experts, inputs, outputs]`."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    turned = weight.transpose(1, 2)
    groups = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    places = (scaled.abs()[..., None] - table).abs().argmin(-1)
    codes = places + 8 * (scaled < 0)
    numbers = table[places] * scaled.sign() * torch.exp2(exponents)[..., None]
    pairs = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return pairs, (exponents + 127).to(torch.uint8), numbers.reshape(turned.shape).transpose(1, 2)


SECTIONS = {  # of config.json
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
    },
}


def folder_of(path, tensors, section=None):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": section} if section else {}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return TensorFolder(path)


@pytest.mark.parametrize(
    "kind", ["blocks", "exponents", "one", "rows", "zeros", "bits", "bytes", "experts", *BITSANDBYTES]
)
def test_codes_are_read_as_the_numbers_that_they_stand_for(tmp_path, kind):
    torch.manual_seed(0)
    weight, name = torch.randn(72, 96), "a.weight"
    if kind in ("blocks", "exponents"):
        codes, scales, numbers = of_blocks(weight, 16, 16)
        scales = scales if kind == "blocks" else (torch.log2(scales) + 127).to(torch.uint8)
        tensors = {name: codes, "a.weight_scale_inv": scales, "a.activation_scale": torch.ones(1)}
    elif kind == "one":
        codes, scales, numbers = of_blocks(weight, 72, 96)
        tensors = {name: codes, "a.weight_scale": scales.reshape(())}
    elif kind in ("rows", "zeros"):
        codes, scales, numbers = of_rows(weight, 3 if kind == "zeros" else 0)
        zeros = {"a.weight_zero_point": torch.full((72, 1), 3, dtype=torch.int8)} if kind == "zeros" else {}
        tensors = {name: codes, "a.weight_scale": scales} | zeros
    elif kind in BITSANDBYTES:  # whose CPU code is wrong about blocks that reach over the end of a row
        weight = torch.randn(72, 128)
        tensors, numbers = of_bitsandbytes(weight, kind)
    elif kind in ("bits", "bytes"):
        packed, scales, numbers = of_bits(weight, 4 if kind == "bits" else 8, 32)
        tensors = {"a.weight_packed": packed, "a.weight_scale": scales, "a.weight_shape": torch.tensor([72, 96])}
    else:
        name, weight = "a.up", torch.randn(3, 64, 20)
        pairs, exponents, numbers = of_microscales(weight)
        tensors = {"a.up_blocks": pairs, "a.up_scales": exponents}
    section = {"quant_method": "fp8", "weight_block_size": [16, 16 if kind in ("blocks", "exponents") else 32]}
    found = folder_of(tmp_path / "model", tensors | {"b.weight": torch.ones(2)}, section)
    assert set(found.entries) == {name, "b.weight"} and found.entries[name].shape == tuple(numbers.shape)
    assert (numbers - weight).abs().mean() < 0.15  # what is compared is near what was written
    read = found.read(name)
    assert torch.equal(read, numbers) or (kind in BITSANDBYTES and torch.allclose(read, numbers, rtol=1e-6, atol=1e-7))
    draw = random.Random(0)
    for _ in range(30):
        ends = [sorted(draw.sample(range(size + 1), 2)) for size in numbers.shape]
        part = tuple(slice(*pair) for pair in ends)
        assert torch.equal(found.read(name, part), read[part]), part


def test_blocks_that_do_not_divide_a_matrix(tmp_path):
    torch.manual_seed(0)
    codes, scales, numbers = of_blocks(torch.randn(576, 130), 128, 128)  # as DeepSeek V3's latent projection has it
    found = folder_of(tmp_path / "model", {"a.weight": codes, "a.weight_scale_inv": scales}, {"quant_method": "fp8"})
    assert scales.shape == (5, 2) and torch.equal(found.read("a.weight"), numbers)


def in_codes(source, target, method):
    """(a folder whose layers are codes, one that holds the same numbers)."""
    tensors, exact = load_file(source / "model.safetensors"), {}
    coded = dict(tensors)
    for name, weight in tensors.items():
        place = name.removesuffix(".weight")
        if method == "mxfp4" and weight.dim() == 3:
            pairs, exponents, exact[name] = of_microscales(coded.pop(name))
            coded |= {f"{name}_blocks": pairs, f"{name}_scales": exponents}
        elif method == "fp8" and name.endswith("proj.weight"):
            coded[name], coded[f"{place}.weight_scale_inv"], exact[name] = of_blocks(weight, 32, 32)
        elif method == "compressed-tensors" and name.endswith("proj.weight"):
            packed, scales, exact[name] = of_bits(coded.pop(name), 4, 32)
            shape = torch.tensor(weight.shape)
            coded |= {f"{place}.weight_packed": packed, f"{place}.weight_scale": scales, f"{place}.weight_shape": shape}
    folders = []
    for name, of_folder in (("coded", coded), ("exact", tensors | exact)):
        folder = shutil.copytree(source, target / name)
        save_file({k: v.contiguous() for k, v in of_folder.items()}, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    path = folders[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": SECTIONS[method]}))
    return folders


@pytest.fixture(params=["fp8", "mxfp4", "compressed-tensors"])
def coded(request, tmp_path, tiny_model):
    source = tiny_model("qwen3-moe" if request.param == "fp8" else "llama")
    if request.param == "mxfp4":
        sizes = SHAPE | EQUAL["gpt_oss"][1] | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512}
        source = write_toy(tmp_path / "gpt-oss", hf.GptOssConfig(**sizes))
    return in_codes(source, tmp_path, request.param)


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_run_is_that_from_the_numbers(tmp_path, coded, write_rows, chat_rows, tuner):
    values = settings(tmp_path, "", write_rows("rows.jsonl", chat_rows), max_steps=2, tuner=tuner, max_length=96)
    for folder in coded:
        out = {"model": str(folder), "output_dir": str(tmp_path / f"out-{folder.name}")}
        train_alone(resolve_config("sft", **values | out))
    one, other = (metrics(tmp_path / f"out-{folder.name}") for folder in coded)
    assert [(row["loss"], row["grad_norm"]) for row in one] == [(row["loss"], row["grad_norm"]) for row in other]
    results = [tmp_path / f"out-{folder.name}" / "model" for folder in coded]
    assert weights_difference(*results) == 0.0
    if tuner == "full":
        assert "quantization_config" not in json.loads((results[0] / "config.json").read_text())


def test_a_tied_tensor_beside_codes_may_have_any_of_its_names(tmp_path, tiny_model):
    folder, exact = in_codes(tiny_model("llama-tied"), tmp_path, "compressed-tensors")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found, wanted = (load_for_answers(find_source(str(one), None), precision="fp32")[0] for one in (folder, exact))
    ids = torch.arange(1, 9)[None]
    assert torch.equal(found(ids).logits, wanted(ids).logits)


def test_codes_of_no_type_are_saved_in_bf16(tmp_path, coded, write_rows, chat_rows):
    """Where config.json names none."""
    path = coded[0] / "config.json"
    settings_of_it = json.loads(path.read_text())
    del settings_of_it["dtype"]
    path.write_text(json.dumps(settings_of_it))
    values = settings(tmp_path, coded[0], write_rows("rows.jsonl", chat_rows), max_steps=1, max_length=96)
    train_alone(resolve_config("sft", **values))
    run_export(ExportOptions(model=str(coded[0]), adapter=None, output=tmp_path / "plain"))
    for folder in (tmp_path / "out" / "model", tmp_path / "plain"):
        assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_numbers_are_exported_and_answer(tmp_path, coded):
    with_codes, exact = coded
    done = run_export(ExportOptions(model=str(with_codes), adapter=None, output=tmp_path / "plain"))
    assert done.total == 0.0 and weights_difference(tmp_path / "plain", exact) == 0.0
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")


def test_codes_without_scales_are_refused(tmp_path, coded, write_rows, chat_rows):
    file = Path(coded[0]) / "model.safetensors"
    tensors = {
        name: tensor for name, tensor in load_file(file).items() if not name.endswith(("_scale", "_inv", "_scales"))
    }
    save_file(tensors, file, {"format": "pt"})
    values = settings(tmp_path, coded[0], write_rows("rows.jsonl", chat_rows), max_length=96)
    with pytest.raises(UserError, match="are codes whose scales are not there|are missing|has no scales"):
        train_alone(resolve_config("sft", **values))
