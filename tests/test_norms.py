"""Norms of one node: the classes' own results and gradients, and only where the formula is theirs."""

import copy

import pytest
import torch
from test_parity import metrics, settings, train_alone
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from swiftlite.config.resolve import resolve_config
from swiftlite.models.kernels import norms, rotation
from swiftlite.models.kernels.norms import fuse_norms, widen_layer_norms
from swiftlite.models.kernels.rematerialize import rematerialized

WIDTH = 32


class CentredRMSNorm(nn.Module):
    """Called like the others, and holds the same."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)


class BiasedRMSNorm(LlamaRMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))  # as it begins: only later it makes a difference

    def forward(self, x):
        return super().forward(x) + self.bias


class WeightlessRMSNorm(LlamaRMSNorm):
    """Its weight may be of another width than what it is given, as in Falcon Mamba."""

    def __init__(self, width):
        super().__init__(width)
        del self.weight
        self.weight = nn.Buffer(torch.ones(width // 2))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class UnusedWeightRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class OutsideRMSNorm(LlamaRMSNorm):
    """Adds to the root instead of the mean square."""

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class FlaggedRMSNorm(LlamaRMSNorm):
    """What it computes is not known by its class."""

    centred = False

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True) if self.centred else x)


def pair(kind, seed=0):
    torch.manual_seed(seed)
    plain = kind(WIDTH)
    nn.init.normal_(plain.weight)
    fused = copy.deepcopy(plain)
    fuse_norms(nn.Sequential(fused))
    return plain, fused


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, GptOssRMSNorm])
@pytest.mark.parametrize("shape", [(1, 7, WIDTH), (2, 3, 4, WIDTH), (5, WIDTH), (1, 0, WIDTH)])
@pytest.mark.parametrize("learnt", [(True, True), (True, False), (False, True)])
def test_results_and_gradients_are_the_classes_own(kind, shape, learnt):
    plain, fused = pair(kind)
    x, upstream, found = 3 * torch.randn(shape) + 1, torch.randn(shape), []
    for module in (plain, fused):
        inputs = x.clone().requires_grad_(learnt[0])
        module.weight.requires_grad_(learnt[1])
        result = module(inputs)
        result.backward(upstream)
        found.append((result, inputs.grad, module.weight.grad))
    assert result.grad_fn.name() == "_RmsNormBackward"
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, CentredRMSNorm])
def test_a_class_with_another_formula_keeps_its_own_forward(kind):
    plain, fused = pair(kind)
    x = torch.randn(4, WIDTH, requires_grad=True)
    assert torch.equal(fused(x), plain(x)) and fused(x).grad_fn.name() != "_RmsNormBackward"


@pytest.mark.parametrize("kind", [BiasedRMSNorm, WeightlessRMSNorm, UnusedWeightRMSNorm, OutsideRMSNorm])
def test_a_norm_that_holds_or_adds_something_else_keeps_its_own_forward(kind):
    """Also where that makes no difference yet: a new weight is all ones, a new bias zero."""
    plain = kind(WIDTH)
    fused = copy.deepcopy(plain)
    fuse_norms(nn.Sequential(fused))
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(2):
        assert torch.equal(fused(x), plain(x)) and fused(x).grad_fn.name() != "_RmsNormBackward"
        for parameter in (*plain.parameters(), *fused.parameters()):
            parameter.data += 0.5


def test_each_norm_of_a_class_is_asked_for_itself():
    norms = nn.ModuleList([FlaggedRMSNorm(WIDTH), FlaggedRMSNorm(WIDTH)])
    norms[1].centred = True
    fuse_norms(norms)
    x = torch.randn(4, WIDTH) + 1
    for norm in norms:
        own = FlaggedRMSNorm.forward(norm, x)
        torch.testing.assert_close(norm(x), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_keep_their_own_forward(dtype):
    plain, fused = (module.to(dtype) for module in pair(LlamaRMSNorm))
    x = torch.randn(4, WIDTH, dtype=dtype)
    assert torch.equal(fused(x), plain(x))


def test_autocast_leaves_norms_in_fp32():
    plain, fused = pair(LlamaRMSNorm)
    x, found = torch.randn(4, WIDTH, requires_grad=True), []
    for norm in (plain, fused):
        with torch.autocast("cpu", torch.bfloat16):
            result = norm(x)
        found.append([result, *torch.autograd.grad(result.square().sum(), [x, norm.weight])])
    assert result.grad_fn.name() == "_RmsNormBackward"
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_fused_module_is_called_as_before_and_holds_the_same():
    plain, fused = pair(LlamaRMSNorm)
    assert str(fused) == str(plain) and isinstance(fused, LlamaRMSNorm)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert type(copy.deepcopy(fused)) is type(fused)


def test_what_a_norm_gives_is_made_again_bit_by_bit():
    _, fused = pair(LlamaRMSNorm)
    x, matrix = torch.randn(200, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)
    learnt = [x, matrix, fused.weight]
    expected = torch.autograd.grad((fused(x) @ matrix).square().sum(), learnt)
    with rematerialized():
        normed = fused(x)
        output = (normed @ matrix).square().sum()
    normed.data.zero_()  # nobody reads it again
    found = torch.autograd.grad(output, learnt)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norm_takes_what_is_wider_than_its_weights(bias):
    plain = nn.LayerNorm(WIDTH, bias=bias, dtype=torch.bfloat16)
    nn.init.normal_(plain.weight)
    wide, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    widen_layer_norms(nn.Sequential(wide))
    x = torch.randn(4, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = wide(x)
    expected = exact(x)
    assert torch.equal(found, expected) and torch.equal(wide(x.bfloat16()), plain(x.bfloat16()))
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_layer_norms_in_bf16_beside_embeddings_in_fp32(tiny_model, write_rows, chat_rows, tmp_path):
    """GPT-2 with a new token: its embedding is trained, in fp32, and its layers are frozen in bf16."""
    data = write_rows("rows.jsonl", chat_rows)
    base = settings(tmp_path, tiny_model("gpt2"), data, tuner="lora", new_tokens=["<new>"])
    train_alone(resolve_config("sft", **base))
    half = base | {"output_dir": str(tmp_path / "half"), "precision": "bf16"}
    train_alone(resolve_config("sft", **half))
    for exact, rounded in zip(metrics(tmp_path / "out"), metrics(tmp_path / "half"), strict=True):
        assert rounded["loss"] == pytest.approx(exact["loss"], rel=5e-3)


@pytest.mark.parametrize(("module", "node"), [(norms, norms._RmsNorm), (rotation, rotation._Rotation)])
@pytest.mark.parametrize("more", [{}, {"tuner": "lora"}, {"activation_checkpointing": "selective"}])
def test_the_same_run_without_a_node(module, node, more, tiny_model, write_rows, chat_rows, tmp_path, monkeypatch):
    base = settings(tmp_path, tiny_model("qwen3"), write_rows("rows.jsonl", chat_rows), **more)
    calls, formula = [], node.apply
    monkeypatch.setattr(node, "apply", lambda *given: calls.append(1) or formula(*given))
    train_alone(resolve_config("sft", **base))
    assert len(calls) > 20
    monkeypatch.setattr(module, "are_plain_fp32", lambda *_, **__: False)
    train_alone(resolve_config("sft", **base | {"output_dir": str(tmp_path / "other")}))
    for mine, theirs in zip(metrics(tmp_path / "out"), metrics(tmp_path / "other"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
