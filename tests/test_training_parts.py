"""Schedules, clipping, precision and FLOP counts."""

import math

import pytest
import torch

from swiftlite.config.layout import Layout
from swiftlite.config.schema import RunConfig
from swiftlite.parallel.mesh import build_mesh
from swiftlite.seeds import derive_seed
from swiftlite.training import precision
from swiftlite.training.flops import peak_flops
from swiftlite.training.interval import Interval
from swiftlite.training.optimizer import clip_gradients
from swiftlite.training.precision import resolve_precision
from swiftlite.training.schedule import rate_at, schedule_notes, warmup_steps


def rates(kind, total=20, warmup=4, **options):
    return [rate_at(s, peak=2.0, kind=kind, total=total, warmup=warmup, **options) for s in range(1, total + 1)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant_with_warmup"])
def test_warmup_reaches_the_peak_and_first_step_moves(kind):
    got = rates(kind)
    assert got[:4] == [0.5, 1.0, 1.5, 2.0]
    assert max(got) == 2.0


def test_cosine_is_half_a_period_above_its_minimum():
    got = rates("cosine", minimum=0.2)
    assert got[4] == 2.0
    assert got[12] == pytest.approx(0.2 + 1.8 * 0.5)
    assert got[-1] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 15 / 16)))


def test_wsd_is_flat_then_falls_over_the_last_part():
    got = rates("wsd", decay_ratio=0.25)
    assert got[4:16] == [2.0] * 12
    assert got[15:] == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"warmup_steps": 11}, "-steps 11, and the run has 10 steps: the learning rate is at its peak in the last one"),
        ({"warmup_steps": 10, "lr_scheduler": "wsd"}, "and does not decay"),
        ({"warmup_ratio": 1.0}, "--warmup-ratio 1, and the run has 10 steps"),
        ({"warmup_ratio": 0.9}, None),
        ({"warmup_steps": 11, "lr_scheduler": "constant"}, None),  # which is noted to have no warm-up at all
        ({"warmup_steps": 6, "lr_scheduler": "wsd", "decay_ratio": 0.5}, "overlap"),
        ({"warmup_steps": 5, "lr_scheduler": "wsd", "decay_ratio": 0.5}, None),
        ({"early_stopping_patience": 4, "eval_steps": 2}, "acts at step 10 at the earliest, and the run has 10"),
        ({"early_stopping_patience": 3, "eval_steps": 2}, None),
        ({"early_stopping_patience": 1, "eval_steps": 0.5}, "with --eval-steps 0.5 acts at step 10 at the earliest"),
        ({"early_stopping_patience": 4, "eval_steps": "epoch/2"}, "with --eval-steps epoch/2 acts at step 10"),
        ({"early_stopping_patience": 3, "eval_steps": "epoch/2"}, None),
        ({}, None),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_told(values, said):
    config = RunConfig(**values)
    notes = [*schedule_notes(config, 10, warmup_steps(10, config.warmup_steps, config.warmup_ratio), 4)]
    assert len(notes) == bool(said) and all(said in note for note in notes)


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (4, [4, 8, 10]),
        (0.25, [3, 6, 9, 10]),
        (100, [10]),
        ("epoch", [4, 8, 10]),
        ("epoch/3", [2, 3, 4, 6, 7, 8, 10]),
        ("epoch/9", list(range(1, 11))),
        ("never", []),
        (None, []),
    ],
)
def test_what_is_done_again_and_again_in_ten_steps_of_two_and_a_half_epochs(every, due):
    interval = Interval.of(every, 10)
    epochs = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5]
    assert [s for s in range(1, 11) if interval.is_due(s, epochs[s - 1], epochs[s], s == 10)] == due
    for step in range(10):
        left, really = interval.times_left(step, epochs[step], 10, 4), sum(one > step for one in due)
        assert really <= left <= really + (every == "epoch/3")  # where the last step is one of them
    assert interval.times_left(0, 0.0, 10, None) == (10 if str(every).startswith("epoch") else len(due))
    assert interval.step_of(1, 4) == (100 if every == 100 else due[0] if due else None)


def test_linear_and_constant():
    assert rates("linear")[-1] == pytest.approx(2.0 / 16)
    assert rates("constant") == [2.0] * 20


def test_warmup_ratio_rounds_up_and_never_exceeds_the_run():
    assert warmup_steps(100, None, 0.03) == 3
    assert warmup_steps(10, None, 0.03) == 1
    assert warmup_steps(5, 50, 0.0) == 5


def test_clipping_returns_the_norm_before_and_scales_all_together():
    a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))
    a.grad, b.grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
    norm = clip_gradients([a, b], 1.0, build_mesh(Layout(), torch.device("cpu")))
    assert norm == pytest.approx(4.0)
    assert torch.cat([a.grad.flatten(), b.grad.flatten()]).norm().item() == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients([a, b], 0.0, build_mesh(Layout(), torch.device("cpu"))) == pytest.approx(1.0, rel=1e-5)


def test_the_norm_of_a_large_matrix_is_exact():
    torch.manual_seed(0)
    matrix, scalar = torch.nn.Parameter(torch.zeros(8192, 128)), torch.nn.Parameter(torch.zeros(()))
    matrix.grad, scalar.grad = torch.rand(8192, 128) ** 4, torch.tensor(100.0)
    exact = math.hypot(matrix.grad.double().norm().item(), 100)
    norm = clip_gradients([matrix, scalar], 0.0, build_mesh(Layout(), torch.device("cpu")))
    assert norm == pytest.approx(exact, rel=1e-6)  # that of PyTorch is 3e-5 too small


def test_precision_names():
    assert resolve_precision("fp16", torch.device("cpu")).dtype == torch.float16
    assert resolve_precision("fp16", torch.device("cpu")).loss_scale().dynamic
    assert not resolve_precision("bf16", torch.device("cpu")).loss_scale().dynamic


@pytest.mark.parametrize(
    ("device", "fast", "width", "name"),
    [
        ("cpu", True, 576, "bf16"),
        ("cpu", True, 256, "fp32"),
        ("cpu", False, 4096, "fp32"),
        ("cuda", True, 64, "bf16"),
        ("cuda", False, 64, "fp32"),
    ],
)
def test_auto_is_bf16_where_that_is_faster(monkeypatch, device, fast, width, name):
    monkeypatch.setattr(precision, "fast_at_bf16", lambda _: fast)
    assert resolve_precision("auto", torch.device(device), width=width).name == name
    assert resolve_precision("auto", torch.device(device), width=width, pure_bf16=True).name == "bf16"


def test_seeds_differ_by_step_and_micro_batch():
    seeds = {derive_seed(42, step, index) for step in range(50) for index in range(4)}
    assert len(seeds) == 200
    assert derive_seed(42, 7, 1) == derive_seed(42, 7, 1) < 2**63


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 836e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_device_has_the_peak_of_its_own_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak


def test_a_loss_scale_does_not_shrink_to_nothing():
    scale = resolve_precision("fp16", torch.device("cpu")).loss_scale()
    for _ in range(60):
        scale.update(overflowed=True)
    assert scale.value == precision.SMALLEST_FP16_SCALE and not scale.can_shrink
