"""bf16 weights without masters, and updates in the backward pass: rounding that is right on average, the same curve."""

import pytest
import torch
from test_parity import metrics, settings, train_alone
from test_verify import BF16_LOSS, BF16_NORM, in_real_processes
from torch import nn

from swiftlite.checkpoint.folder import list_checkpoints
from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.parallel.mesh import build_mesh
from swiftlite.training.guards.failures import NotFinite
from swiftlite.training.optimizer import UpdatesInBackward
from swiftlite.training.optimizers import adamw_paged
from swiftlite.training.optimizers.adamw_8bit import AdamW8bit
from swiftlite.training.optimizers.adamw_bf16 import (
    AdamWBf16,
    noise_for,
    round_stochastically,
    update_factors,
    update_rounded,
)
from swiftlite.verification.cases import FULL, LORA, Subject

CPU = torch.device("cpu")
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
ALONE = {"global_batch_size": 1, "max_grad_norm": 0.0, "optimizer_in_backward": True}
EARLY = {
    "optimizer_in_backward": True,
    "max_grad_norm": 0.0,
    "micro_batch_size": None,
    "gradient_accumulation_steps": 1,
}
BF16 = {"pure_bf16": True, "precision": "bf16"}


def test_rounding_goes_to_a_neighbour_and_is_right_on_average():
    chance = torch.Generator().manual_seed(0)
    for value in (1.0 + 1 / 512, -3.1, 0.0, 1e-20, -65504.0):
        values = torch.full((100_000,), value)
        rounded = round_stochastically(values, noise_for(values, chance)).float()
        step = torch.tensor(value).to(torch.bfloat16).float().abs() / 128
        assert (rounded - value).abs().max() <= step
        assert (rounded.double().mean() - value).abs() <= 0.01 * step


@pytest.mark.parametrize("kind", [AdamWBf16, AdamW8bit])
def test_updates_that_nearest_rounding_would_lose_are_made(kind):
    torch.manual_seed(0)
    start = torch.randn(64, 128).bfloat16()
    moves = []
    for parameter, optimizer in ((nn.Parameter(start.float()), torch.optim.AdamW), (nn.Parameter(start.clone()), kind)):
        running = optimizer([{"params": [parameter]}], **OPTIONS)
        for _ in range(20):  # of 1e-4 each, for weights that lie up to 1.6e-2 apart
            parameter.grad = torch.ones_like(parameter)
            running.step()
        moves.append((parameter.detach().float() - start.float()).mean().item())
    assert moves[1] == pytest.approx(moves[0], rel=0.05)


@pytest.mark.parametrize("count", [1.0, 7.0])
def test_the_update_in_one_kernel_is_that_of_pytorch(count):
    torch.manual_seed(0)
    options = {**OPTIONS, "lr": 0.05}
    weights, gradient = torch.randn(300).bfloat16(), torch.randn(300).bfloat16()
    exact = nn.Parameter(weights.float())
    exact.grad, plain = gradient.float(), torch.optim.AdamW([exact], **options)
    mean, square = torch.randn(300), torch.rand(300)
    state = {"step": torch.tensor(count - 1), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
    plain.state[exact] = state
    plain.step()
    factors = update_factors(*options["betas"], 0.05, options["weight_decay"], options["eps"], count, CPU)
    noise = torch.zeros(300, dtype=torch.int16)  # which rounds to zero
    update_rounded(weights, mean, square, gradient, noise, factors)
    torch.testing.assert_close(mean, state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(square, state["exp_avg_sq"], rtol=1e-5, atol=1e-6)
    left_over = (exact.detach() - weights.float()) * exact.detach().sign()
    assert (left_over > -1e-5).all()
    assert (left_over <= weights.float().abs() / 128 + 1e-6).all()


def test_the_same_seed_rounds_alike():
    def run(seed):
        parameter = nn.Parameter(torch.ones(50, 3, dtype=torch.bfloat16))
        optimizer = AdamWBf16([{"params": [parameter]}], seed=seed, names={id(parameter): "w"}, **OPTIONS)
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.fixture
def start(tmp_path, tiny_model, write_rows, chat_rows):
    data = write_rows("rows.jsonl", chat_rows)

    def resolve(out, **more):
        values = settings(tmp_path, tiny_model("llama"), data, output_dir=str(tmp_path / out))
        return resolve_config("sft", **values | more)

    def train(out, **more):
        train_alone(resolve(out, **more))
        return [(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / out)]

    train.resolve = resolve
    return train


def weights_of(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_in_the_backward_pass_are_the_same_training(start, tmp_path, optimizer):
    late = start("late", **ALONE | {"optimizer_in_backward": False}, optimizer=optimizer)
    assert start("early", **ALONE, optimizer=optimizer) == [pytest.approx(pair, rel=1e-6) for pair in late]
    assert weights_of(tmp_path / "early") == weights_of(tmp_path / "late")


def test_gradients_are_never_all_there_and_no_step_tells_the_norm_of_another():
    parameter = nn.Parameter(torch.ones(3, 4))
    updates = UpdatesInBackward(torch.optim.AdamW([parameter], lr=0.1), [parameter], (), build_mesh(Layout(), CPU))
    parameter.sum().backward()  # nothing is learnt: a check of memory
    assert parameter.grad is None and torch.equal(parameter, torch.ones(3, 4))
    with updates.during_backward():
        parameter.sum().backward()
    assert parameter.grad is None and updates.norm(0.0, 1.0) == pytest.approx(12**0.5)
    assert updates.norm(0.0, 1.0) == 0.0  # of a step without a trained token


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "paged_adamw", "muon"])
def test_bf16_weights_learn_and_go_on_bit_for_bit(start, tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(adamw_paged, "SMALLEST", 1)
    exact = start("exact", precision="bf16", optimizer=optimizer)
    found = start("whole", **BF16, optimizer=optimizer, save_steps=2)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in exact], rel=1e-2)
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    assert start("again", **BF16, optimizer=optimizer, resume=checkpoint) == found[2:]
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"max_grad_norm": 1.0}, "cannot clip", "--max-grad-norm 0"),
        ({"global_batch_size": 4}, "a step has 4", "--gradient-accumulation-steps 1"),
        ({"precision": "fp16"}, "overflow", "--precision bf16"),
        ({"on_nonfinite": "skip"}, "cannot skip", "leave one"),
        ({"optimizer_in_backward": False, "pure_bf16": True}, "the precision is fp32", "leave one"),
    ],
)
def test_what_contradicts_is_refused(start, change, words, fix):
    with pytest.raises(UserError, match=words) as error:
        start.resolve("refused", **ALONE | change)
    assert fix in error.value.fix


def test_weights_that_were_changed_before_a_bad_gradient_are_not_saved(start, tmp_path):
    with pytest.raises(NotFinite):
        start("bad", **ALONE, learning_rate=1e30, warmup_ratio=0.0)
    assert metrics(tmp_path / "bad") and not list_checkpoints(tmp_path / "bad")


def test_layouts_train_the_same(tmp_path):
    early = Subject("llama-tied", "early", FULL | EARLY), Subject("llama-tied", "early, LoRA", LORA | EARLY)
    muon = Subject("llama-tied", "early, Muon", FULL | EARLY | {"optimizer": "muon"})
    bf16 = Subject("llama-tied", "bf16", FULL | BF16)
    chosen = ("ddp 2", "fsdp full 2", "fsdp full 2, offloaded", "tp 2", "pp 2", "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *early, muon, bf16):
        if verdict.subject == "bf16":
            assert verdict.difference.loss < BF16_LOSS and verdict.difference.norm < BF16_NORM, verdict
        elif verdict.case == "pp 2":
            assert "pipeline" in verdict.refused
        else:
            assert verdict.passed and verdict.difference is not None, verdict


def test_what_moves_to_the_host_is_said_to_be_without_effect_on_a_cpu(start, capsys):
    start("moved", optimizer="paged_adamw", offload="cpu", activation_checkpointing="offload")
    said = capsys.readouterr().out
    for flag in ("--optimizer paged_adamw", "--offload cpu"):
        assert f"{flag} has no effect on a CPU" in said
    assert "--activation-checkpointing offload is full on a CPU" in said
