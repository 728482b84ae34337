"""Linear layers in bf16 that cast nothing twice give what autocast gives, and never the product of an old weight."""

import copy
import threading

import pytest
import torch
from test_parity import metrics, settings
from test_run import train_alone
from torch import nn

from swiftlite.config.resolve import resolve_config
from swiftlite.models.kernels import half_products
from swiftlite.models.kernels.half_products import (
    HalfLinear,
    as_half,
    half_layers,
    half_weight,
    half_weights,
    use_half_products,
)


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 1200, bias=bias), nn.Tanh(), nn.Linear(1200, 40, bias=bias))


def half_of(plain: nn.Module) -> nn.Module:
    ours = copy.deepcopy(plain)
    use_half_products(ours)
    return ours


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all that is trained."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    with half_weights(half_layers(model)):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.fixture
def calls(monkeypatch):
    """How often a product was made here."""
    found, real = [], half_products._Product.apply
    monkeypatch.setattr(half_products._Product, "apply", lambda *given: found.append(1) or real(*given))
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 33, 48), (7, 48)])
def test_results_and_gradients_are_those_of_autocast(calls, bias, frozen, shape):
    plain = network(bias)
    if frozen:
        plain[0].to(frozen).requires_grad_(requires_grad=False)
    x = torch.randn(shape)
    theirs, ours = results(plain, x), results(half_of(plain), x)
    assert len(calls) == 2 and torch.equal(ours[0], theirs[0])
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= 5e-3 * expected.norm()


def test_gradients_of_several_passes_are_added_in_fp32():
    plain, x = network(), torch.randn(64, 48)
    ours = half_of(plain)
    results(ours, x)
    first = [p.grad.clone() for p in ours.parameters()]
    with half_weights(half_layers(ours)):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = ours(x)
            y.float().square().sum().backward()
    for parameter, once in zip(ours.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * once, rtol=1e-5, atol=1e-5)


def test_an_output_may_be_changed_in_place(calls):
    plain, x = network(), torch.randn(2, 5, 48)
    for model in (plain, half_of(plain)):
        for layer in (model[0], model[2]):
            layer.register_forward_hook(lambda _layer, _given, output: output.mul_(2))
    theirs, ours = results(plain, x), results(model, x)
    assert calls
    for found, expected in zip(ours, theirs, strict=True):
        assert (found - expected).norm() <= 5e-3 * expected.norm()


def test_a_copy_is_of_the_weight_as_it_is():
    plain = network()
    ours, x = half_of(plain), torch.randn(5, 48)
    results(ours, x)
    for model in (plain, ours):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(1.5)  # which no count of versions tells
    assert torch.equal(results(ours, x)[0], results(plain, x)[0])


def test_without_a_copy_and_without_autocast_layers_are_as_ever(calls):
    plain = network()
    ours, x = half_of(plain), torch.randn(5, 48)
    results(ours, x)
    before = len(calls)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), plain(x))
    with half_weights(half_layers(ours)):
        assert torch.equal(ours(x), plain(x))
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(ours(x), plain(x))
    assert len(calls) == before


def test_threads_share_copies_and_other_models_do_not(calls):
    ours, x = half_of(network()), torch.randn(5, 48)
    lane, other = copy.deepcopy(ours), copy.deepcopy(ours)
    for mine, theirs in zip(lane.parameters(), ours.parameters(), strict=True):
        mine.data = theirs.data
    found = {}

    def run(name: str, model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found[name] = model(x)

    with half_weights(half_layers(ours)):
        for name, model in (("lane", lane), ("other", other)):
            thread = threading.Thread(target=run, args=(name, model))
            thread.start()
            thread.join()
    assert len(calls) == 2 and torch.equal(found["lane"], found["other"])


def test_an_input_is_cast_once_until_it_changes():
    x = torch.randn(4, 8, requires_grad=True) * 1
    assert as_half(x) is as_half(x) and as_half(as_half(x)) is as_half(x) and as_half(x).requires_grad
    with torch.no_grad():
        assert not as_half(x).requires_grad
    assert as_half(x).requires_grad
    before = as_half(x)
    with torch.no_grad():
        x.add_(1)
    assert torch.equal(as_half(x), x.bfloat16()) and not torch.equal(as_half(x), before)


def test_other_layers_and_weights_stay():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Own(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    use_half_products(model)
    assert [type(module) for module in model] == [HalfLinear, Own, HalfLinear]
    with half_weights(half_layers(model)), torch.autocast("cpu", torch.bfloat16):
        assert half_weight(model[0]) is not None
        assert half_weight(model[2]) is None  # trained in bf16: its gradient has no fp32 to be added to


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tuner": "lora"},
        {"tuner": "freeze", "trainable_layers": 1},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"optimizer": "adamw-8bit"},
        {"pure_bf16": True},
    ],
)
def test_the_same_run_without_them(more, tiny_model, write_rows, chat_rows, tmp_path, monkeypatch, calls):
    base = settings(tmp_path, tiny_model("qwen3"), write_rows("rows.jsonl", chat_rows), precision="bf16", **more)
    base |= {"max_steps": 6, "learning_rate": 3e-3}
    train_alone(resolve_config("sft", **base))
    assert bool(calls) != ("pure_bf16" in more)
    monkeypatch.setattr("swiftlite.training.divide.use_half_products", lambda _: None)
    train_alone(resolve_config("sft", **base | {"output_dir": str(tmp_path / "other")}))
    mine, theirs = metrics(tmp_path / "out"), metrics(tmp_path / "other")
    assert len(mine) == len(theirs) == 6
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
