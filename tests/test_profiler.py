"""`--profile`: what is recorded, and to which module and kind of work it is put down."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from test_parity import settings
from test_run import train

from swiftlite.training import profiler as profiler_module
from swiftlite.training.profiler import REST, StepProfiler, kind_of


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    return settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=5)


@pytest.fixture
def profilers(monkeypatch):
    made = []

    class Kept(StepProfiler):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr("swiftlite.training.run.StepProfiler", Kept)
    return made


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_table_and_a_trace_of_two_steps(base, tmp_path, profilers, checkpointing, capfd):
    train(base, profile=True, activation_checkpointing=checkpointing)
    assert capfd.readouterr().err == ""
    (profiler,) = profilers
    table = profiler.table
    assert sum(table.kinds.values()) == pytest.approx(table.wall)
    assert {"matrix products", "attention", "optimizer", REST} <= set(table.kinds)
    assert all(spent > 0 for spent in table.kinds.values())
    for module in ("layers.mlp", "layers.self_attn", "layers.input_layernorm", "head and loss"):
        forward, backward = table.modules[module]
        assert forward > 0 and (backward > 0 or module == "head and loss"), module
    assert table.modules["optimizer"][0] > 0
    folder = tmp_path / "out" / "profile"
    text = (folder / "rank-00000.txt").read_text()
    assert "matrix products" in text and "layers.mlp" in text
    with gzip.open(folder / "rank-00000.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    steps = {event["name"] for event in trace if event["name"].startswith("ProfilerStep#")}
    assert len(steps) == profiler_module.RECORDED


def test_modules_bear_no_marks_afterwards(base, tmp_path, profilers):
    train(base, profile=True)
    (profiler,) = profilers
    modules = [module for part in profiler._parts for module in part.scorer.modules()]
    hooks = [hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    assert not [hook for hook in hooks if hook.__module__ == profiler_module.__name__]


def test_a_run_that_is_too_short_writes_nothing(base, tmp_path, profilers):
    train(base, profile=True, max_steps=profiler_module.WARM + profiler_module.RECORDED - 1)
    assert profilers[0].table is None
    assert not (tmp_path / "out" / "profile").exists()
    assert (tmp_path / "out" / "model").is_dir()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("c10d::allreduce_", "communication"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copies"),
        ("aten::mul", "element by element"),
    ],
)
def test_kinds_of_work(name, kind):
    assert kind_of(name) == kind


def test_work_of_the_backward_pass_belongs_to_the_module_of_the_forward(tmp_path):
    layer = torch.nn.Linear(256, 256)
    for hook in profiler_module._bracket(layer, "layer"):
        assert hook is not None
    with torch.profiler.profile(acc_events=True) as recorded, torch.profiler.record_function("ProfilerStep#0"):
        (layer(torch.randn(64, 256)).tanh() ** 2).sum().backward()
    table = profiler_module.tabulate(recorded.events(), on_gpu=False)
    forward, backward = table.modules["layer"]
    assert forward > 0 and backward > 0
    assert table.modules["outside the model"][1] > 0  # of tanh and the square
