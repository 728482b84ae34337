"""The short way through an adapter gives what peft's own gives."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.kernels import products
from swiftlite.models.kernels.lora import fuse_adapters
from swiftlite.models.kernels.products import FastLinear
from swiftlite.models.toys import toy_config
from swiftlite.models.tuners import adapters_off, apply_tuner


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 6, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def adapted(**more) -> nn.Module:
    torch.manual_seed(0)
    model = peft.get_peft_model(Tiny(), peft.LoraConfig(r=4, target_modules=["first", "second"], **more))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def results(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output, and the gradients of all that is trained."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (1, 0, 12)])
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_output_and_gradients_are_those_of_peft(dtype, tolerance, shape, bias):
    theirs = adapted(bias=bias)
    ours = copy.deepcopy(theirs)
    fuse_adapters(ours)
    assert "FusedLinear" in {type(module).__name__ for module in ours.modules()}
    x = torch.randn(shape)
    for found, expected in zip(results(ours, x, dtype), results(theirs, x, dtype), strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.fixture
def onednn_everywhere(monkeypatch):
    monkeypatch.setattr(products, "onednn_serves", lambda device, dtype: dtype == torch.float32)
    monkeypatch.setattr(products, "SMALLEST", 1)


@pytest.mark.parametrize("kind", [FastLinear, nn.Linear])
@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (1, 33, 12), (1, 0, 12)])
@pytest.mark.parametrize("wants_input", [True, False])
def test_a_frozen_base_layer_shares_one_pass_with_its_adapter(onednn_everywhere, kind, shape, wants_input):
    theirs = adapted(lora_alpha=12)
    ours = copy.deepcopy(theirs)
    for module in (ours.base_model.model.first, ours.base_model.model.second):
        module.base_layer.__class__ = kind
    fuse_adapters(ours)
    gradients, x = [], torch.randn(shape)
    for model in (ours, theirs):
        x = x.detach().requires_grad_(wants_input)
        gradients.append([*results(model, x, torch.float32), x.grad])
    assert ours(x).grad_fn.name() == "_AdaptedBackward"
    for found, expected in zip(*gradients, strict=True):
        assert found is expected is None or (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", [FastLinear, nn.Linear])
@pytest.mark.parametrize("tokens", [5, 32])  # oneDNN is given 32
def test_an_output_may_be_changed_in_place(onednn_everywhere, kind, tokens):
    """As Gemma 3n does."""
    theirs = adapted()
    ours = copy.deepcopy(theirs)
    for module in (ours.base_model.model.first, ours.base_model.model.second):
        module.base_layer.__class__ = kind
    fuse_adapters(ours)
    x, found = torch.randn(2, tokens, 12), []
    for model in (ours, theirs):
        y = model(x)
        y *= 2
        y += 1
        found.append([y, *torch.autograd.grad(y.square().sum(), [p for p in model.parameters() if p.requires_grad])])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_a_base_layer_that_is_trained_has_its_own_gradient():
    theirs = adapted()
    theirs.base_model.model.first.base_layer.weight.requires_grad_()
    ours = copy.deepcopy(theirs)
    fuse_adapters(ours)
    x = torch.randn(7, 12)
    for found, expected in zip(results(ours, x, torch.float32), results(theirs, x, torch.float32), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_adapters_can_be_turned_off():
    model, x = adapted(), torch.randn(3, 12)
    fuse_adapters(model)
    with adapters_off([model]):
        base = model(x)
    assert torch.equal(base, model.unload()(x)) and not torch.equal(base, adapted()(x))


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}])
def test_other_kinds_keep_their_own_forward(more):
    model = adapted(**more)
    fuse_adapters(model)
    assert "FusedLinear" not in {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize(("flag", "value"), [("dora", True), ("lora_dropout", 0.1)])
def test_what_experts_cannot_have_is_told_with_the_layers_that_can(flag, value):
    config = resolve_config("sft", model="m", dataset=["d"], **{flag: value})
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(toy_config("qwen3-moe")) for _ in range(2)]
    with pytest.raises(UserError, match="experts, which lie in one parameter, takes neither DoRA nor dropout") as told:
        apply_tuner(models[0], config, None, print)
    assert told.value.where == f"--{flag.replace('_', '-')}"
    named = told.value.fix.partition("--target-modules ")[2].split()
    assert named == ["q_proj", "k_proj", "v_proj", "o_proj"]
    apply_tuner(models[1], config.model_copy(update={"target_modules": named}), None, print)


@pytest.mark.parametrize("flags", [{"new_tokens": ["<fox>"]}, {"dora": True}, {}])
def test_adapters_of_a_model_without_memory_draw_no_numbers(flags):
    """They are drawn when weights are read; of 256 experts in 60 layers they would be five billion. Ties last."""
    config = resolve_config("sft", model="nowhere", dataset=["d"], **flags)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(toy_config("qwen3"))
    state = torch.get_rng_state()
    wrapped = apply_tuner(model, config, None, print)
    assert torch.equal(torch.get_rng_state(), state) and all(p.is_meta for p in wrapped.parameters())
    base = wrapped.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    assert len({id(p) for end in ends for p in end.parameters()}) == 1 + ("new_tokens" in flags)
