"""`--profile`: what is recorded, and to which module and kind of work it is put down."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from test_parity import settings
from test_run import train

from swiftlite.training import profiler as profiler_module
from swiftlite.training.profiler import COMMUNICATION, REST, StepProfiler, kind_of


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
    assert {len(line) for line in text.split("module")[1].splitlines()[1:]} == {
        len("layers.post_attention_layernorm ") + 24
    }
    with gzip.open(folder / "rank-00000.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    steps = {event["name"] for event in trace if event["name"].startswith("ProfilerStep#")}
    assert len(steps) == profiler_module.RECORDED
    assert table.messages == (0, 0) and profiler_module.MEANWHILE not in text


def test_modules_bear_no_marks_afterwards(base, tmp_path, profilers):
    train(base, profile=True)
    (profiler,) = profilers
    modules = [module for part in profiler._parts for module in part.scorer.modules()]
    hooks = [hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    assert not [hook for hook in hooks if hook.__module__ == profiler_module.__name__]


def test_a_run_that_is_too_short_writes_nothing_and_says_so(base, tmp_path, profilers, capsys):
    train(base, profile=True, max_steps=profiler_module.WARM + profiler_module.RECORDED - 1)
    assert profilers[0].table is None
    assert not (tmp_path / "out" / "profile").exists()
    assert (tmp_path / "out" / "model").is_dir()
    assert "note: nothing is profiled: that takes 4 steps, 3 are left\n" in capsys.readouterr().out


def test_modules_that_bear_no_marks_are_not_told(tmp_path):
    """As compiled layers do; all of their work would stand outside the model."""
    here = SimpleNamespace(rank=0, device=torch.device("cpu"))
    with StepProfiler(tmp_path, here, [], by_module=False) as profiler:
        for _ in range(profiler_module.WARM + profiler_module.RECORDED):
            torch.randn(64, 64) @ torch.randn(64, 64)
            profiler.step()
    text = (tmp_path / "rank-00000.txt").read_text()
    assert "matrix products" in text and "module" not in text


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


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, message):
        with torch.profiler.record_function(message):
            pass
        time.sleep(0.05)
        return x.clone()


@pytest.mark.parametrize(("message", "kind"), [("c10d::alltoall_base_", COMMUNICATION), ("nothing", REST)])
def test_a_function_of_autograd_waits_for_its_message_or_for_python(message, kind):
    with torch.profiler.profile(acc_events=True) as recorded, torch.profiler.record_function("ProfilerStep#0"):
        Waits.apply(torch.randn(64, 256), message)
    table = profiler_module.tabulate(recorded.events(), on_gpu=False)
    assert table.kinds[kind] > 50 and sum(table.kinds.values()) == pytest.approx(table.wall)


@pytest.mark.parametrize(
    ("mark", "inside", "kind"),
    [
        ("FSDP::post_backward_rs_wait (layers.0)", "aten::view", COMMUNICATION),
        ("FSDP::post_backward_reduce", "c10d::allreduce_", COMMUNICATION),
        ("FSDP::post_backward_reduce", "aten::view", REST),
    ],
)
def test_what_fsdp_marks_waits_for_its_message_or_for_python(mark, inside, kind):
    mark_of, step = torch.profiler.record_function, "ProfilerStep#0"
    with torch.profiler.profile(acc_events=True) as recorded, mark_of(step), mark_of(mark):
        with mark_of(inside):
            pass
        time.sleep(0.05)
    table = profiler_module.tabulate(recorded.events(), on_gpu=False)
    assert table.kinds[kind] > 50 and sum(table.kinds.values()) == pytest.approx(table.wall)


def span(name: str, start: float, end: float, thread: int = 1, *, mark: bool = False, on_gpu: bool = False):
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    at = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, thread=thread, time_range=at, is_user_annotation=mark, device_type=kind)


def test_a_message_is_hidden_while_operations_run():
    events = [
        span("gloo:all_gather", 0, 100, thread=2, mark=True),
        span("gloo:all_gather", 50, 120, thread=3, mark=True),
        span("aten::copy_", 0, 120, thread=3),  # the message's own
        span("FSDP::post_backward", 0, 200, mark=True),
        span("autograd::engine::evaluate_function: x", 0, 200),
        span("LayerBackward", 0, 200),
        span("c10d::_reduce_scatter_base_", 100, 120),
        span("aten::mm", 10, 40),
        span("aten::empty", 20, 30),  # inside it
        span("aten::mul", 90, 110),
        span("aten::mul", 130, 140),
    ]
    assert profiler_module._messages(events, on_gpu=False) == (120, 30 + 20)
    kernels = [
        span("ncclDevKernel_AllGather", 0, 10, on_gpu=True),
        span("gemm", 4, 30, on_gpu=True),
        span("aten::mm", 0, 9),
    ]
    assert profiler_module._messages(kernels, on_gpu=True) == (10, 6)


def test_weights_of_the_next_layer_travel_meanwhile(tmp_path, tiny_model, write_rows, chat_rows):
    words = ["sft", "--model", tiny_model("llama"), "--dataset", write_rows("rows.jsonl", chat_rows), "--tuner", "full",
             "--nproc-per-node", 2, "--sharding", "full", "--profile", "--max-steps", 5, "--max-length", 128,
             "--micro-batch-size", 1, "--global-batch-size", 4, "--output-dir", tmp_path / "out",
             "--cache-dir", tmp_path / "cache"]  # fmt: skip
    command = [sys.executable, "-m", "swiftlite", *map(str, words)]
    done = subprocess.run(command, capture_output=True, timeout=180, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = (tmp_path / "out" / "profile" / f"rank-{rank:05d}.txt").read_text().splitlines()
        (meanwhile,) = (line for line in lines if line.startswith(profiler_module.MEANWHILE))
        assert float(meanwhile.split()[-1].rstrip("%")) > 0
