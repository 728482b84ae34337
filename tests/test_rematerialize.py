"""What is made again in the backward pass has the same bits, and is not kept until then."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from test_parity import metrics, settings, train_alone

from swiftlite.config.resolve import resolve_config
from swiftlite.models.kernels import rematerialize
from swiftlite.models.kernels.rematerialize import rematerialized
from swiftlite.models.toys import toy_config
from swiftlite.training import divide, step
from swiftlite.training.precision import Precision

ROWS, FEATURES = 100, 64  # more numbers than a tensor that is always kept has
FULL, LORA = {"tuner": "full"}, {"tuner": "lora", "lora_rank": 4}
MATRIX = (FEATURES, FEATURES)


def gated(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def normalized(x, weight, down):
    return (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))) @ down


def flattened(x, up, down):
    return (0.5 * F.gelu(x @ up, approximate="tanh")).flatten(0, 1) @ down


@pytest.mark.parametrize(
    ("function", "shapes", "frozen", "kept"),
    [
        (gated, [(ROWS, FEATURES), MATRIX, MATRIX, MATRIX], (), 3),  # what comes in, gate and up
        (normalized, [(ROWS, FEATURES), (FEATURES,), MATRIX], (), 1),
        (normalized, [(ROWS, FEATURES), (FEATURES,), MATRIX], (1,), 1),  # whose product holds no normalized state
        (flattened, [(4, ROWS // 4, FEATURES), MATRIX, MATRIX], (), 2),
    ],
)
def test_only_what_results_are_made_of_is_kept(monkeypatch, function, shapes, frozen, kept):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).requires_grad_(i not in frozen) for i, shape in enumerate(shapes)]
    learnt = [each for each in inputs if each.requires_grad]
    expected = torch.autograd.grad(function(*inputs).square().sum(), learnt)
    held, pack = set(), rematerialize._pack

    def note(tensor):
        left = pack(tensor)
        if isinstance(left, rematerialize._Kept) and tensor.numel() == ROWS * FEATURES:
            held.add(tensor.untyped_storage().data_ptr())
        return left

    monkeypatch.setattr(rematerialize, "_pack", note)
    with rematerialized():
        output = function(*inputs)
    assert len(held) == kept
    found = torch.autograd.grad(output.square().sum(), learnt)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_what_was_changed_since_is_told_of():
    x, weight = torch.randn(ROWS, FEATURES).requires_grad_(), torch.randn(MATRIX).requires_grad_()
    with rematerialized():
        gate = x @ weight
        output = F.silu(gate) @ weight
    gate.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", FULL), ("llama", LORA), ("gemma2", FULL), ("gpt2", FULL), ("qwen3-moe", FULL)],
)
def test_a_run_learns_the_same_bit_for_bit(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch, family, more):
    monkeypatch.setattr(divide, "drops_cheap_results", lambda *_: True)
    data, rows = write_rows("rows.jsonl", chat_rows), {}
    for name in ("made again", "kept"):
        if name == "kept":
            monkeypatch.setattr(step, "rematerialized", nullcontext)
        values = settings(tmp_path, tiny_model(family), data, output_dir=str(tmp_path / name), micro_batch_size=4)
        train_alone(resolve_config("sft", **(values | more)))
        rows[name] = [(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / name)]
    assert rows["made again"] == rows["kept"]


@pytest.mark.parametrize(
    ("compiled", "tokens", "dropped"), [(False, 1, False), (False, 1 << 20, True), (True, 1 << 20, False)]
)
def test_results_are_dropped_where_they_are_many(compiled, tokens, dropped):
    config = resolve_config("sft", model="m", dataset=["d"], compile=compiled)
    toy, precision = toy_config("llama"), Precision("fp32", torch.float32)
    assert divide.drops_cheap_results(config, toy, precision, torch.device("cpu"), tokens) == dropped
