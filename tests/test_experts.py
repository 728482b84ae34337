"""Grouped products of experts run in the type of autocast, and in no other; on a CPU `auto` leaves mixtures in fp32."""

import copy

import pytest
import torch
from test_parity import settings, train_alone
from transformers import AutoModelForCausalLM

from swiftlite.config.resolve import resolve_config
from swiftlite.models.experts import find_experts, use_autocast_experts
from swiftlite.models.toys import toy_config
from swiftlite.training import precision, setup


@pytest.fixture
def types(monkeypatch):
    """Of what was multiplied in groups."""
    found, real = [], torch.nn.functional.grouped_mm

    def grouped_mm(given, weight, **options):
        found.append((given.dtype, weight.dtype))
        return real(given, weight, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    return found


def mixture():
    """The experts of a layer as transformers runs them, and as we do."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(toy_config("qwen3-moe")).float()
    ours = copy.deepcopy(plain)
    use_autocast_experts(ours)
    return [find_experts(model)[0][1] for model in (plain, ours)]


def results(experts, *, autocast):
    """The output, and the gradients of what enters and of the weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, 64, generator=generator, requires_grad=True)
    chosen = torch.arange(128).view(64, 2) % experts.num_experts
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = experts(hidden, chosen, torch.rand(64, 2, generator=generator))
    output.float().square().sum().backward()
    return output.detach().float(), hidden.grad, experts.gate_up_proj.grad, experts.down_proj.grad


def test_under_autocast_experts_multiply_in_its_type(types):
    plain, ours = mixture()
    exact = results(plain, autocast=False)
    types.clear()
    found = results(ours, autocast=True)
    assert set(types) == {(torch.bfloat16, torch.bfloat16)}
    for got, wanted in zip(found, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() < 0.01 * wanted.norm()


def test_without_autocast_nothing_changes(types):
    plain, ours = mixture()
    assert all(torch.equal(*pair) for pair in zip(*(results(m, autocast=False) for m in (plain, ours)), strict=True))
    assert set(types) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize(("architecture", "name"), [("qwen3", "bf16"), ("qwen3-moe", "fp32")])
def test_auto_precision_of_a_mixture_on_a_cpu(
    monkeypatch, tmp_path, tiny_model, write_rows, chat_rows, architecture, name
):
    """Few tokens meet an expert there: its weights are no use in another type."""
    found, real = [], setup.resolve_precision
    monkeypatch.setattr(precision, "CPU_WIDTH", 1)
    monkeypatch.setattr(precision, "fast_at_bf16", lambda _: True)
    monkeypatch.setattr(setup, "resolve_precision", lambda *a, **k: found.append(real(*a, **k)) or found[-1])
    values = settings(tmp_path, tiny_model(architecture), write_rows("rows.jsonl", chat_rows), precision="auto")
    train_alone(resolve_config("sft", **values | {"max_steps": 1}))
    assert {each.name for each in found} == {name}
