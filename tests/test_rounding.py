"""Quantization-aware training: against plain PyTorch with a straight-through estimator, exported, and in layouts."""

import json
import math
import shutil

import pytest
import torch
import transformers as hf
from test_eval import evaluate
from test_export_quantized import PROJECTIONS, export, read, values_in_numpy
from test_parity import metrics, planned_rows, render_chat, settings, train_alone
from test_verify import in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.cli.app import main
from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models import rounding
from swiftlite.models.compressed import FORMATS, pack, round_matrix
from swiftlite.models.dtypes import DTYPES
from swiftlite.models.load import build_model, load_config
from swiftlite.models.toys import toy_config, toy_pairs, write_toy
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.training.plan import outline_of
from swiftlite.training.qat import check_rounding
from swiftlite.verification.cases import FULL, Subject

CPU = torch.device("cpu")


def straight(values, form, size):
    """The nearest codes of `[..., n]`, a scale for each `size` numbers, with the gradient of the values themselves."""
    steps, (low, high), whole = {"int8": (127.5, (-128, 127), True), "int4": (7.5, (-8, 7), True)}.get(
        form, (448.0, (-448, 448), False)
    )
    parts = values.detach().reshape(*values.shape[:-1], -1, size)
    scales = (parts.abs().amax(-1, keepdim=True) / steps).clamp(min=1e-30)
    codes = (parts / scales).clamp(low, high)
    codes = codes.round() if whole else codes.to(torch.float8_e4m3fn).float()
    return values + ((codes * scales).reshape(values.shape) - values).detach()


class Plain(torch.nn.Linear):
    """A layer that computes so by PyTorch's own autograd."""

    def forward(self, x):
        group = 64 if self.form == "int4" else self.in_features
        x = x if self.form == "int4" else straight(x, self.form, self.in_features)
        return torch.nn.functional.linear(x, straight(self.weight, self.form, group), self.bias)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen2", {"activation_checkpointing": "full"})])
def test_loss_and_gradient_equal_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, form, family, more):
    values = settings(tmp_path, tiny_model(family), write_rows("rows.jsonl", chat_rows), max_steps=1, qat=form, **more)
    config = resolve_config("sft", **values)
    train_alone(config)
    (row,) = metrics(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(values["model"], dtype=torch.float32, attn_implementation="eager")
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.__class__, layer.form = Plain, form
    tokenizer, total, count = AutoTokenizer.from_pretrained(values["model"]), 0.0, 0
    for place in next(planned_rows(config)):
        ids, trained = render_chat(tokenizer, chat_rows[place]["messages"])
        logits, learnt = model(torch.tensor([ids]), use_cache=False).logits[0, :-1], torch.tensor(trained[1:])
        total += torch.nn.functional.cross_entropy(logits[learnt], torch.tensor(ids[1:])[learnt], reduction="sum")
        count += int(learnt.sum())
    (total / count).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert row["loss"] == pytest.approx((total / count).item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(
        norm, rel=1e-5 if form == "int4" else 1e-4
    )  # where inputs may get other codes


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_what_is_exported_has_the_loss_that_was_trained(tmp_path, tiny_model, write_rows, chat_rows, method):
    rows = write_rows("rows.jsonl", toy_pairs(24) if method == "dpo" else chat_rows)
    more = {"eval_fraction": 0.3, "max_steps": 4, "eval_steps": 4, "learning_rate": 1e-2, "qat": "int4"}
    train_alone(resolve_config(method, **settings(tmp_path, tiny_model("llama"), rows, **more)))
    logged = metrics(tmp_path / "out")[-1]["eval_loss"]
    [found] = evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert found.loss == logged  # by the rounding of its run
    if method == "dpo":
        return
    folder = tmp_path / "coded"
    run_export(ExportOptions(model=str(tmp_path / "out"), adapter=None, output=folder, quantization="int4"))
    recipe = {"dataset": [str(rows)], "eval_fraction": 0.3, "max_length": 160, "cache_dir": str(tmp_path / "cache")}
    [coded] = evaluate(model=str(folder), **recipe)
    assert coded.loss == pytest.approx(logged, rel=1e-6)
    (tmp_path / "out" / "model").rename(tmp_path / "plain")
    [plain] = evaluate(model=str(tmp_path / "plain"), **recipe)
    assert plain.loss != pytest.approx(logged, rel=1e-6)


@pytest.mark.parametrize("saved", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", FORMATS)
def test_layers_multiply_what_the_files_will_hold(
    tmp_path, tiny_model, write_rows, chat_rows, monkeypatch, form, saved
):
    """Code by code and scale by scale, whatever type the files have, of weights that are fp32 meanwhile."""
    last, real = {}, rounding.RoundedLinear.forward

    def kept(layer, x):
        with torch.no_grad():
            last[id(layer)] = layer.rounding.weight(layer.weight, torch.float32)
        return real(layer, x)

    monkeypatch.setattr(rounding.RoundedLinear, "forward", kept)
    more = {"eval_fraction": 0.3, "max_steps": 2, "eval_steps": 2, "learning_rate": 1e-2, "qat": form}
    rows = write_rows("rows.jsonl", chat_rows)
    values = settings(tmp_path, tiny_model("llama"), rows, save_dtype=saved, **more)
    train_alone(resolve_config("sft", **values))  # it ends with an evaluation
    export(tmp_path / "out", tmp_path / "coded", form)
    tensors = read(tmp_path / "coded")
    names = [f"model.layers.{place}.{name}" for place in range(2) for name in PROJECTIONS]  # as they run
    assert len(last) == len(names)
    for name, multiplied in zip(names, last.values(), strict=True):
        assert tensors[f"{name}.weight_scale"].dtype == DTYPES[saved]
        torch.testing.assert_close(multiplied.numpy(), values_in_numpy(tensors, name).astype("float32"), rtol=0, atol=0)


def test_codes_that_were_not_trained_are_told(tmp_path, tiny_model, write_rows, chat_rows):
    rows = write_rows("rows.jsonl", chat_rows)
    for saved in ("fp32", "bf16"):
        more = {"max_steps": 1, "qat": "int4", "save_dtype": saved, "output_dir": str(tmp_path / saved)}
        train_alone(resolve_config("sft", **settings(tmp_path, tiny_model("llama"), rows) | more))
    for place, (model, words, told) in enumerate(
        [
            ("fp32", ("int4",), None),
            ("bf16", ("int4",), None),
            ("fp32/checkpoints/step-00000001", ("int4", {"dtype": "fp32"}), None),
            ("fp32/model", ("int4", {"dtype": "bf16"}), "scales in fp32: in bf16 many codes are others"),
            ("bf16", ("int4", {"dtype": "fp32"}), "scales in bf16: in fp32 many codes are others"),
            ("fp32", ("int8",), "what it bears is int4 and not int8"),
            (tiny_model("llama"), ("int8", {"dtype": "bf16"}), None),
        ]
    ):
        form, more = words[0], (words[1:] or ({},))[0]
        found = export(tmp_path / model, tmp_path / f"coded-{place}", form, **more).untrained
        assert found is None if told is None else told in found


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_multiplied_is_what_codes_stand_for(form):
    """Of rows of zeros, of numbers too small for a scale, of one that hides the others, and between any two codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = torch.cat([codes, (codes[1:] + codes[:-1]) / 2]).view(torch.int32)
    near = torch.cat([(between + step).view(torch.float32) for step in (-1, 0, 1)]).clamp(-448, 448)
    torch.manual_seed(0)
    matrix = torch.randn(64, 2048) * torch.logspace(-44, 38, 64)[:, None]
    matrix[0], matrix[1], matrix[:2, 0] = 0, 1e-3, torch.tensor([0, 1e30])
    matrix[2, : len(near)] = near
    for dtype in DTYPES.values():
        held = matrix.to(dtype).float()
        held = held[held.isfinite().all(1)]
        tensors = {f"a.{key}": tensor for key, tensor in pack(held, FORMATS[form], 64, dtype).items()}
        found = round_matrix(held, FORMATS[form], 64, dtype)
        assert len(held) > 20 and torch.equal(found, torch.from_numpy(values_in_numpy(tensors, "a")).float())


def test_an_evaluation_rounds_where_it_is_told_to(tmp_path, tiny_model, write_rows, chat_rows):
    rows, model = write_rows("rows.jsonl", chat_rows), str(tiny_model("llama"))
    values = settings(tmp_path, model, rows, max_steps=2, learning_rate=1e-2, qat="int4")
    train_alone(resolve_config("sft", **values))
    export(model, tmp_path / "coded", "int4")
    shutil.copytree(tmp_path / "out" / "model", tmp_path / "plain")

    def loss(*words):
        found = tmp_path / "found.json"
        told = ["--dataset", str(rows), "--max-length", "160", "--cache-dir", str(tmp_path / "cache")]
        with pytest.raises(SystemExit) as stopped:
            main(["eval", *map(str, words), *told, "--json", str(found)])
        assert stopped.value.code == 0
        [row] = json.loads(found.read_text())
        return row["loss"]

    rounded = loss("--model", model, "--qat", "int4")
    assert rounded == pytest.approx(loss("--model", tmp_path / "coded"), rel=1e-6)
    assert rounded != pytest.approx(loss("--model", model), rel=1e-6)
    before = loss("--recipe", tmp_path / "out" / "config.yaml")
    assert rounded == pytest.approx(before, rel=1e-6)
    exact = pytest.approx(loss("--model", tmp_path / "out", "--qat", "none"), rel=1e-6)
    assert loss("--model", tmp_path / "plain") == exact
    assert loss("--model", tmp_path / "out") != exact


def test_layouts_round_the_same(tmp_path):
    """Before the first update weights are the same in all, and so are their codes. Behind it, and of what enters a
    layer, numbers that differ in the last bit may lie on either side of a step from one code to the next. In bf16 FSDP
    gathers weights in fp32 where files have that, since codes are of more bits than products."""
    in_half = {"precision": "bf16", "save_dtype": "fp32"}
    subjects = [
        Subject("qwen3", "int4", FULL | {"qat": "int4", "max_steps": 1}),
        Subject("qwen3", "int4 in bf16", FULL | {"qat": "int4", "max_steps": 1} | in_half),
        Subject("qwen3", "int8", FULL | {"qat": "int8"}),
    ]
    chosen = ("ddp 2", "fsdp full 2", "fsdp full 2, recomputing", "pp 2", "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *subjects):
        found = verdict.difference
        if verdict.subject == "int4":
            assert verdict.passed and found is not None, verdict
        elif verdict.subject == "int8":
            assert found.loss < 1e-4 and found.norm < 1e-3 and found.weights < 2e-3, verdict
        elif verdict.case in ("ddp 2", "fsdp full 2"):
            assert found.loss < 2e-7, verdict


def test_what_cannot_be_rounded_is_refused(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    for more, what in (
        ({"tuner": "lora"}, "LoRA's are the base's and its own together"),
        ({"tensor_parallel_size": 2, "nproc_per_node": 2}, "which tensor parallelism divides"),
        ({"compile": True}, "makes the products of layers itself"),
    ):
        with pytest.raises(UserError, match=what):
            resolve_config("sft", model="a/b", dataset=["c/d"], qat="int8", **{"tuner": "full"} | more)
    monkeypatch.setattr("swiftlite.training.run.prepare_run", lambda *_: pytest.fail("rows were read first"))
    for family, what in (("qwen3-moe", "has experts"), ("gpt2", "keeps matrices in Conv1D")):
        rows = write_rows("rows.jsonl", chat_rows)
        config = resolve_config("sft", **settings(tmp_path, tiny_model(family), rows, max_length=96), qat="fp8")
        for refused in (train_alone, lambda config: outline_of(config, load_config(config.model), "cpu")):
            with pytest.raises(UserError, match=what) as error:
                refused(config)
            assert (error.value.where, error.value.fix) == ("--qat fp8", "leave --qat out")


def test_what_is_rounded_at_a_time_is_planned_for(tiny_model):
    model, held = str(tiny_model("llama")), {}
    for form in ("none", "int4", "int8"):
        more = {"tuner": "full", "max_length": 128, "activation_checkpointing": "none"}
        config = resolve_config("sft", model=model, dataset=["c/d"], qat=form, **more)
        held[form] = outline_of(config, load_config(model), "cuda").holds(config, Layout(), None).workspace
    largest, tokens = 128 * 64, config.micro_batch_size * 128
    assert held["int4"] - held["none"] == 12 * largest
    assert held["int8"] - held["none"] == 12 * (largest + tokens * 128)


class Doubled(torch.nn.Linear):
    """A class of linear layers that gives something else than a product."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_that_does_not_run_as_linear_ones_do_is_refused():
    model = build_model("nowhere", toy_config("llama"), dtype=torch.float32, attention="eager")
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj, whose class Doubled gives something else"):
        check_rounding(model, "int8", CPU)
    mamba = hf.MambaConfig(hidden_size=64, time_step_rank=16, state_size=8, num_hidden_layers=2, vocab_size=512)
    model = build_model("nowhere", mamba, dtype=torch.float32, attention="eager")
    with pytest.raises(UserError, match="dt_proj, whose weight is read without a call of the layer"):
        check_rounding(model, "fp8", CPU)
    mamba2 = build_model("nowhere", toy_config("mamba2"), dtype=torch.float32, attention="eager")
    assert any(name.endswith("out_proj") for name in check_rounding(mamba2, "int8", CPU).linear)
    with pytest.raises(UserError, match="out_proj, whose weight kernels on GPUs read"):
        check_rounding(mamba2, "int8", torch.device("cuda"))


def test_layers_that_stay_as_they_are_are_told(tmp_path, write_rows, chat_rows, capsys):
    config = toy_config("llama")
    config.intermediate_size = 72
    rows = write_rows("rows.jsonl", chat_rows)
    model = write_toy(tmp_path / "toy", config)
    train_alone(resolve_config("sft", **settings(tmp_path, model, rows, max_steps=1, qat="int4")))
    told = (
        "note: --qat int4 leaves as they are, since the format does not fit their shapes: model.layers.0.mlp.gate_proj"
    )
    assert told in capsys.readouterr().out


def test_losses_of_rounded_weights_are_no_measure_for_others(tmp_path, tiny_model, write_rows, chat_rows, capsys):
    """A run that is to bear rounding at its end evaluates worse when that begins."""
    rows, often = write_rows("rows.jsonl", chat_rows), {"eval_fraction": 0.25, "eval_steps": 1, "save_steps": 1}
    values = settings(tmp_path, tiny_model("llama"), rows, keep_checkpoints=9, **often)
    train_alone(resolve_config("sft", **values | {"max_steps": 2}))
    train_alone(resolve_config("sft", **values | {"max_steps": 4, "resume": "auto", "qat": "int4"}))
    assert "the best evaluation so far is none any more: it had --qat none -> int4" in capsys.readouterr().out


def test_a_reference_is_rounded_in_an_evaluation_as_in_its_run(tmp_path, write_rows):
    """Where the files of what a run began as have another type than its own."""
    model = write_toy(tmp_path / "toy", toy_config("llama"))
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    rows, more = write_rows("pairs.jsonl", toy_pairs(24)), {"eval_fraction": 0.3, "max_steps": 2, "eval_steps": 2}
    more |= {"learning_rate": 1e-2, "qat": "int4", "save_dtype": "fp32"}
    train_alone(resolve_config("dpo", **settings(tmp_path, model, rows, **more)))
    [found] = evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert found.loss == metrics(tmp_path / "out")[-1]["eval_loss"]


def test_values_of_a_reference_are_not_those_of_another_rounding(tmp_path, tiny_model, write_rows):
    """They lie in one cache, where a run finds what another one has computed."""
    rows, folders = write_rows("pairs.jsonl", toy_pairs(24)), tmp_path / "cache" / "reference"
    for place, more in enumerate(({}, {"qat": "int4"}, {"qat": "int4", "save_dtype": "bf16"}, {"qat": "int4"})):
        more = {"reference": "precompute", "max_steps": 1, "output_dir": str(tmp_path / str(place))} | more
        train_alone(resolve_config("dpo", **settings(tmp_path, tiny_model("llama"), rows) | more))
        (row,) = metrics(tmp_path / str(place))
        assert row["loss"] == pytest.approx(math.log(2), abs=1e-7)  # the reference is what it begins as
    assert len(list(folders.iterdir())) == 3
