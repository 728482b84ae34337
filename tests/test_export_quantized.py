"""`swiftlite export --quantization`: what the files hold, by hand and by NumPy; what stays; what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from test_parity import settings, train_alone
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from swiftlite import imports
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.cli.app import main
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import RunError, UserError
from swiftlite.models.compressed import FORMATS, nearest, pack, round_inputs
from swiftlite.models.load import build_model
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.serving.compress import choose
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.serving.infer import InferOptions, run_infer

PACKAGE = "compressed_tensors"
ROUNDS_EXPERTS = pytest.mark.skipif(
    tuple(map(int, hf.__version__.split(".")[:2])) < (5, 22), reason="older ones round the experts of fp8 to bf16"
)
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")  # fmt: skip
LAYERS = {f"model.layers.{place}.{name}" for place in range(2) for name in PROJECTIONS}


def export(model, output, quantization, **options):
    return run_export(
        ExportOptions(model=str(model), adapter=None, output=output, quantization=quantization, **options)
    )


def read(folder):
    """All tensors of a folder, by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def toy(folder, architecture="llama", **changes):
    config = toy_config(architecture)
    for name, value in changes.items():
        setattr(config, name, value)
    return write_toy(folder, config)


def on_meta(config):
    return build_model("nowhere", config, dtype=torch.float32, attention="eager")


def words_in_numpy(words):
    """The codes of 4 bits in int32 words, the lowest bits first."""
    unsigned = words.numpy().view(np.uint32)
    return (
        np.stack([(unsigned >> np.uint32(4 * k)) & np.uint32(15) for k in range(8)], -1)
        .reshape(len(words), -1)
        .astype(np.int64)
        - 8
    )


def values_in_numpy(tensors, layer):
    """The matrix that a layer's tensors stand for, by NumPy alone."""
    codes = tensors.get(f"{layer}.weight")
    codes = words_in_numpy(tensors[f"{layer}.weight_packed"]) if codes is None else codes.float().numpy()
    scales = tensors[f"{layer}.weight_scale"].float().numpy()
    return codes * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def test_int8_by_hand():
    matrix = torch.tensor([[127.5, 1.4, -1.6, -127.5], [0.0, 0.0, 0.0, 0.0], [2.55, 0.0301, -0.0299, 0.01]])
    tensors = pack(matrix, FORMATS["int8"], None, torch.float32)
    assert tensors["weight"].dtype == torch.int8
    assert tensors["weight"].tolist() == [[127, 1, -2, -128], [0, 0, 0, 0], [127, 2, -1, 0]]
    torch.testing.assert_close(tensors["weight_scale"], torch.tensor([[1.0], [1.0], [0.02]]))


def test_fp8_by_hand():
    matrix = torch.tensor([[448.0, -448.0, 17.0, 19.0], [0.875, 0.0, 0.03, -0.5]])
    tensors = pack(matrix, FORMATS["fp8"], None, torch.bfloat16)
    assert tensors["weight"].dtype == torch.float8_e4m3fn
    assert tensors["weight"].float()[0].tolist() == [448, -448, 16, 20]  # steps of 2 there; halves go to the even one
    assert tensors["weight_scale"].dtype == torch.bfloat16
    assert tensors["weight_scale"].tolist() == [[1.0], [2.0**-9]]
    assert tensors["weight"].float()[1].tolist() == [448, 0, 15, -256]
    assert tensors["weight"].view(torch.uint8)[0].tolist() == [0x7E, 0xFE, 0x58, 0x5A]


def test_int4_by_hand():
    row = [7.5, -7.5, 1.0, 2.4, -3.6, 0.5, 1.5, 0.0]  # with a scale of 1: halves go to the even one
    matrix = torch.tensor([row * 4 + [value / 8 for value in row] * 4])
    tensors = pack(matrix, FORMATS["int4"], 32, torch.float32)
    codes = [7, -8, 1, 2, -4, 0, 2, 0]
    word = sum((code + 8) << 4 * place for place, code in enumerate(codes))
    assert tensors["weight_packed"].dtype == torch.int32
    assert [value & 0xFFFFFFFF for value in tensors["weight_packed"][0].tolist()] == [word] * 8
    assert tensors["weight_scale"].tolist() == [[1.0, 0.125]]
    assert tensors["weight_shape"].tolist() == [1, 64] and tensors["weight_shape"].dtype == torch.int64
    assert words_in_numpy(tensors["weight_packed"])[0].tolist() == codes * 8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_becomes_its_nearest_code(name, dtype):
    torch.manual_seed(0)
    form, group = FORMATS[name], 64 if FORMATS[name].grouped else None
    matrix = torch.randn(48, 256) * torch.logspace(-1, 1, 48)[:, None]
    tensors = pack(matrix, form, group, dtype)
    found = values_in_numpy({f"a.{key}": tensor for key, tensor in tensors.items()}, "a")
    found = torch.from_numpy(found.astype(np.float32))
    scales = tensors["weight_scale"].float().repeat_interleave(256 // tensors["weight_scale"].shape[1], 1)
    step = scales if form.kind == "int" else torch.maximum(matrix.abs(), scales * 2**-6) * 2**-3
    error = (found - matrix).abs() / step
    inside = (matrix / scales > form.lowest) & (matrix / scales < form.largest)
    assert inside.float().mean() > 0.97 and error[inside].max() <= 0.5 + 1e-4
    assert error.max() <= 0.5 + form.steps * torch.finfo(dtype).eps / 2 + 1e-4  # where the scale was rounded down


def test_inputs_are_rounded_token_by_token():
    x = torch.tensor([[[127.5, 3.4, 0.0], [0.0, 0.0, 0.0], [1.275, 0.0149, -1.0]]])
    found = round_inputs(x, FORMATS["int8"])
    torch.testing.assert_close(found, torch.tensor([[[127.0, 3.0, 0.0], [0.0, 0.0, 0.0], [1.27, 0.01, -1.0]]]))
    assert round_inputs(x.bfloat16(), FORMATS["fp8"]).dtype == torch.bfloat16
    assert not nearest(torch.full((1, 2), 1e-12), FORMATS["int8"], torch.float16)[0].any()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_files_hold_what_config_json_says(name, family, tmp_path, tiny_model):
    base = tiny_model(family)
    export(base, tmp_path / "out", name, dtype="bf16")
    tensors, whole, form = read(tmp_path / "out"), read(base), FORMATS[name]
    parts = ["weight_packed", "weight_scale", "weight_shape"] if name == "int4" else ["weight", "weight_scale"]
    rest = {key for key in whole if key.removesuffix(".weight") not in LAYERS}
    assert set(tensors) == {f"{layer}.{part}" for layer in LAYERS for part in parts} | rest
    assert ("lm_head.weight" in tensors) == (family == "llama")
    assert all(torch.equal(tensors[key], whole[key].bfloat16()) for key in rest)
    for layer in LAYERS:
        matrix = whole[f"{layer}.weight"]
        assert tensors[f"{layer}.weight_scale"].dtype == torch.bfloat16
        assert tensors[f"{layer}.weight_scale"].shape == (len(matrix), matrix.shape[1] // 64 if form.grouped else 1)
        error = np.abs(values_in_numpy(tensors, layer) - matrix.numpy()).max(1)
        step = 2**-3 if name == "fp8" else 1 / form.steps  # of the largest number
        rounded_scale = form.steps * torch.finfo(torch.bfloat16).eps / 2 if name != "fp8" else 0
        assert (error <= matrix.abs().amax(1).numpy() * step * (0.5 + rounded_scale)).all()
    section = config_of(tmp_path / "out")["quantization_config"]
    (group,) = section["config_groups"].values()
    assert section["quant_method"] == "compressed-tensors" and section["quantization_status"] == "compressed"
    assert section["format"] == group["format"] == form.name and section["ignore"] == ["lm_head"]
    assert group["targets"] == ["Linear"] and group["weights"]["symmetric"] and not group["weights"]["dynamic"]
    code = {"fp8": (8, "float"), "int8": (8, "int"), "int4": (4, "int")}[name]
    assert (group["weights"]["num_bits"], group["weights"]["type"]) == code
    if name == "int4":
        assert group["weights"]["strategy"] == "group" and group["weights"]["group_size"] == 64
        assert group["input_activations"] is None
    else:
        assert group["weights"]["strategy"] == "channel"
        inputs = {"num_bits": 8, "type": code[1], "symmetric": True, "strategy": "token", "dynamic": True}
        assert group["input_activations"] == inputs
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"


@pytest.mark.parametrize(("hidden", "inner", "group"), [(128, 256, 128), (128, 192, 64), (64, 160, 32), (160, 128, 32)])
def test_a_group_divides_the_inputs_of_all_layers(hidden, inner, group, tmp_path):
    base = toy(tmp_path / "base", hidden_size=hidden, intermediate_size=inner, head_dim=hidden // 4)
    done = export(base, tmp_path / "out", "int4")
    tensors = read(tmp_path / "out")
    assert done.chosen.group == group and not done.chosen.misfits
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (hidden, inner // group)
    assert tensors["model.layers.0.mlp.down_proj.weight_packed"].shape == (hidden, inner // 8)


def test_a_layer_that_does_not_fit_stays_and_is_told(tmp_path, capsys):
    base = toy(tmp_path / "base", intermediate_size=72)
    with pytest.raises(SystemExit) as stopped:
        main(["export", "-m", str(base), "-o", str(tmp_path / "out"), "--quantization", "int4"])
    assert stopped.value.code == 0
    stays = [f"model.layers.{place}.mlp.{name}_proj" for place in range(2) for name in ("gate", "up", "down")]
    out = capsys.readouterr().out
    assert f"fit their shapes: {', '.join(stays[:3])} and 3 more\n" in out and "8 matrices are int4" in out
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == [*stays, "lm_head"]
    tensors, whole = read(tmp_path / "out"), read(base)
    assert all(torch.equal(tensors[f"{layer}.weight"], whole[f"{layer}.weight"]) for layer in stays)


def test_what_is_told_is_of_the_folder_and_of_rounded_inputs(tmp_path, tiny_model, monkeypatch):
    """Where the files are changed after they were read back, the numbers are."""
    done = {name: export(tiny_model("llama"), tmp_path / name, name) for name in FORMATS}
    assert 2e-3 < done["int8"].total < done["fp8"].total < done["int4"].total < 0.2
    assert done["int8"].agreement > done["int4"].agreement > 0.5
    only_weights = {}
    for name in FORMATS:
        monkeypatch.setattr("swiftlite.serving.compress.round_inputs", lambda x, form: x)
        only_weights[name] = export(tiny_model("llama"), tmp_path / f"{name}-weights", name).total
    assert only_weights["int4"] == done["int4"].total
    assert only_weights["int8"] < 0.9 * done["int8"].total and only_weights["fp8"] < 0.9 * done["fp8"].total
    monkeypatch.undo()
    real = FilePlan.write

    def flipped(self, folder, held):
        real(self, folder, held)
        slot = next(slot for slot in self.slots if slot.entry.name.endswith("weight_packed"))
        content = bytearray((folder / slot.file).read_bytes())
        content[slot.offset] ^= 1
        (folder / slot.file).write_bytes(content)

    monkeypatch.setattr(FilePlan, "write", flipped)
    with pytest.raises(RunError, match=r"weight_packed was read back"):
        export(tiny_model("llama"), tmp_path / "flipped", "int4")
    monkeypatch.setattr("swiftlite.serving.export._read_back", lambda *_: None)
    assert export(tiny_model("llama"), tmp_path / "flipped", "int4").total != done["int4"].total


def test_shards_and_a_merged_adapter(tmp_path, tiny_model, write_rows, chat_rows):
    rows = write_rows("rows.jsonl", chat_rows)
    lora = {"tuner": "lora", "lora_rank": 4, "lora_alpha": 64, "learning_rate": 1e-2, "max_steps": 2}
    train_alone(resolve_config("sft", **settings(tmp_path, tiny_model("llama"), rows, max_length=128) | lora))
    done = export(tmp_path / "out", tmp_path / "int8", "int8", max_shard_size="50KB")
    export(tmp_path / "out", tmp_path / "whole", "none")
    assert done.merge < 1e-5
    tensors, merged, base = read(tmp_path / "int8"), read(tmp_path / "whole"), read(tiny_model("llama"))
    index = json.loads((tmp_path / "int8" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors) and len(list((tmp_path / "int8").glob("*.safetensors"))) > 2
    layer = "model.layers.1.mlp.up_proj"
    wanted = pack(merged[f"{layer}.weight"], FORMATS["int8"], None, torch.float32)
    assert all(torch.equal(tensors[f"{layer}.{name}"], tensor) for name, tensor in wanted.items())
    assert not torch.equal(merged[f"{layer}.weight"], base[f"{layer}.weight"])


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_experts_one_by_one_and_their_router_as_it_is(name, tmp_path, tiny_model, capsys):
    done = export(tiny_model("qwen3-moe"), tmp_path / "out", name)
    tensors, whole = read(tmp_path / "out"), read(tiny_model("qwen3-moe"))
    section = config_of(tmp_path / "out")["quantization_config"]
    assert section["ignore"] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    assert torch.equal(tensors["model.layers.1.mlp.gate.weight"], whole["model.layers.1.mlp.gate.weight"])
    assert done.chosen.has_experts and len(done.chosen.entries) == 2 * (4 + 4 * 3)
    for layer in ("model.layers.1.mlp.experts.3.down_proj", "model.layers.0.mlp.experts.2.gate_proj"):
        matrix = whole[f"{layer}.weight"].numpy()
        assert np.abs(values_in_numpy(tensors, layer) - matrix).max() < 0.08 * np.abs(matrix).max()
    assert done.total < 0.2


def test_a_reward_models_head_stays(tmp_path, tiny_model):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model("llama"), num_labels=1)
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "base")
    export(tmp_path / "base", tmp_path / "out", "fp8")
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["score"]
    assert torch.equal(read(tmp_path / "out")["score.weight"], model.score.weight)


def test_a_gate_of_one_number_and_a_linear_router_stay():
    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = hf.Qwen2MoeConfig(**common, **heads, **experts, shared_expert_intermediate_size=64)
    model = on_meta(config)
    chosen = choose(model, "fp8")
    assert "model.layers.0.mlp.shared_expert_gate" in chosen.misfits
    assert set(chosen.ignored) == {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate", "lm_head"}
    assert "model.layers.0.mlp.shared_expert.up_proj" in chosen.linear
    model.model.layers[0].mlp.gate = torch.nn.Linear(64, 4, bias=False, device="meta")
    chosen = choose(model, "fp8")
    assert "model.layers.0.mlp.gate" in chosen.ignored and "model.layers.0.mlp.gate" not in chosen.misfits


def test_a_layer_that_stays_is_named_as_on_disk_too():
    common = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = hf.MixtralConfig(**common, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    chosen = choose(on_meta(config), "int4")
    layer = "model.layers.0"
    assert chosen.ignored == [f"{layer}.mlp.gate", "lm_head", f"{layer}.block_sparse_moe.gate"]
    assert f"{layer}.block_sparse_moe.experts.3.w2" in chosen.entries and len(chosen.entries) == 4 + 4 * 3


def test_what_cannot_be_stored_so_is_refused_by_name(tmp_path, tiny_model):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"GPT2LMHeadModel keeps matrices in Conv1D"):
        export(tiny_model("gpt2"), out, "fp8")
    with pytest.raises(UserError, match=r"experts, whose matrices transformers does not read in int8") as error:
        export(tiny_model("qwen3-moe"), out, "int8")
    assert "fp8 or int4" in error.value.fix
    with pytest.raises(UserError, match="unknown quantization 'q4'"):
        export(tiny_model("llama"), out, "q4")
    common = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    fused = hf.GptOssConfig(**common, **heads, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UserError, match="GptOssExperts has several experts in one tensor"):
        export(write_toy(tmp_path / "fused", fused), out, "fp8")
    joined = hf.GraniteMoeConfig(**common, **heads, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UserError, match=r"GraniteMoeExperts has several .*input_linear\.weight"):
        choose(on_meta(joined), "fp8")
    narrow = toy(tmp_path / "narrow", "qwen3-moe", moe_intermediate_size=48)
    with pytest.raises(UserError, match=r"experts whose inputs are no multiple of 32 \(.*down_proj"):
        export(narrow, out, "int4")
    slim = toy(tmp_path / "slim", hidden_size=40, intermediate_size=40, head_dim=12)
    with pytest.raises(UserError, match="no linear layer in its decoder layers that fits"):
        export(slim, out, "fp8")
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = math.inf
    model.save_pretrained(tmp_path / "infinite")
    AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "infinite")
    with pytest.raises(UserError, match=r"up_proj\.weight holds infinite numbers"):
        export(tmp_path / "infinite", out, "int8")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.parametrize("name", FORMATS)
def test_other_commands_read_such_a_folder(name, tmp_path, tiny_model, write_rows, chat_rows, capsys):
    """As the numbers that its codes stand for."""
    export(tiny_model("llama"), tmp_path / "coded", name)
    again = export(tmp_path / "coded", tmp_path / "plain", "none")
    assert again.total == 0.0 and "quantization_config" not in config_of(tmp_path / "plain")
    tensors, plain = read(tmp_path / "coded"), read(tmp_path / "plain")
    for layer in LAYERS:
        assert np.array_equal(plain[f"{layer}.weight"].numpy(), values_in_numpy(tensors, layer).astype(np.float32))
    losses = []
    for folder in ("coded", "plain"):
        capsys.readouterr()
        run_infer(InferOptions(model=str(tmp_path / folder), prompts=["hi"], max_new_tokens=8, precision="fp32"))
        rows = write_rows("rows.jsonl", chat_rows[:8])
        values = settings(tmp_path, tmp_path / folder, rows, tuner="lora", max_steps=1, max_length=128)
        said = capsys.readouterr().out
        train_alone(resolve_config("sft", **values | {"output_dir": str(tmp_path / f"out-{folder}")}))
        losses.append((said, (tmp_path / f"out-{folder}" / "metrics.jsonl").read_text().split(",")[2]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("flag", ["--quant_bits 4", "--quant_method awq", "--export_quantization_bit 4"])
def test_other_tools_flags_are_refused_and_ours_is_named(flag, tmp_path, tiny_model, capsys):
    words = ["export", "-m", str(tiny_model("llama")), "-o", str(tmp_path / "out"), *flag.split()]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and "unknown flag" in err and "write `--quantization fp8`" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not imports.is_installed(PACKAGE), reason="pip install 'swiftlite[compressed-tensors]'")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "fp8"),
        ("llama-tied", "int8"),
        ("qwen2", "int4"),
        ("qwen3-moe", "int4"),
        pytest.param("qwen3-moe", "fp8", marks=ROUNDS_EXPERTS),
    ],
)
def test_transformers_computes_the_same(family, name, tmp_path, tiny_model):
    done = export(tiny_model(family), tmp_path / "out", name)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    done.chosen.restore(ours, tmp_path / "out")
    ids = torch.arange(3, 60).view(1, -1)
    with torch.no_grad(), done.chosen.rounded_inputs(ours):
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=0, atol=1e-6)
