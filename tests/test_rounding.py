"""Quantization-aware training: against plain PyTorch with a straight-through estimator, exported, and in layouts."""

import math

import pytest
import torch
from test_eval import evaluate
from test_parity import metrics, planned_rows, render_chat, settings, train_alone
from test_verify import in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.compressed import FORMATS
from swiftlite.models.toys import toy_pairs
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.verification.cases import FULL, Subject


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
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)


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


def test_layouts_round_the_same(tmp_path):
    """Before the first update weights are the same in all, and so are their codes. Behind it, and of what enters a
    layer, numbers that differ in the last bit may lie on either side of a step from one code to the next."""
    subjects = [
        Subject("qwen3", "int4", FULL | {"qat": "int4", "max_steps": 1}),
        Subject("qwen3", "int8", FULL | {"qat": "int8"}),
    ]
    chosen = ("ddp 2", "fsdp full 2", "fsdp full 2, recomputing", "pp 2", "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *subjects):
        if verdict.subject == "int4":
            assert verdict.passed and verdict.difference is not None, verdict
        else:
            found = verdict.difference
            assert found.loss < 1e-4 and found.norm < 1e-3 and found.weights < 2e-3, verdict


def test_what_cannot_be_rounded_is_refused(tmp_path, tiny_model, write_rows, chat_rows):
    for more, what in (
        ({"tuner": "lora"}, "LoRA's are the base's and its own together"),
        ({"tensor_parallel_size": 2, "nproc_per_node": 2}, "which tensor parallelism divides"),
        ({"compile": True}, "makes the products of layers itself"),
    ):
        with pytest.raises(UserError, match=what):
            resolve_config("sft", model="a/b", dataset=["c/d"], qat="int8", **{"tuner": "full"} | more)
    for family, what in (("qwen3-moe", "has experts"), ("gpt2", "keeps matrices in Conv1D")):
        rows = write_rows("rows.jsonl", chat_rows)
        config = resolve_config("sft", **settings(tmp_path, tiny_model(family), rows, max_length=96), qat="fp8")
        with pytest.raises(UserError, match=what) as error:
            train_alone(config)
        assert (error.value.where, error.value.fix) == ("--qat fp8", "leave --qat out")
