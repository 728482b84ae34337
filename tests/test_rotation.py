"""Rotary embeddings of one node: the functions' own results and gradients, and only where the formula is theirs."""

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3 import modeling_qwen3

from swiftlite.models.kernels import rotation
from swiftlite.models.kernels.rotation import NAME, fuse_rotations

SIZE = 16


def turn_back(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, -sin)


def noting_calls(function):
    @functools.wraps(function)
    def noted(*args, **kwargs):
        noted.calls += 1
        return function(*args, **kwargs)

    noted.calls = 0
    return noted


class Attention(nn.Module):
    """As transformers' attention calls the function, in a class whose forward is decorated."""

    @noting_calls
    def forward(self, q, k, cos, sin, scale=1.0, *, more=0.0):
        """The doc."""
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q * scale + more, k


def attention_of(function):
    """A class whose module has another function by the name."""
    names = {"nn": nn, NAME: function, "__name__": __name__}
    source = "class Attention(nn.Module):\n    def forward(self, *args):\n        return apply_rotary_pos_emb(*args)\n"
    exec(source, names)
    return names["Attention"]()


def turn_one(x, cos, sin, unsqueeze_dim=1):
    """As Gemma 4 has it."""
    return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim)[0]


def turn_one_sine_first(tensor, sin, cos):
    """As GPT-J has it."""
    return turn_one(tensor, cos, sin)


def inputs(turned=SIZE, dtype=torch.float32):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 5, heads, SIZE, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (4, 2))
    angles = torch.randn(1, 5, turned // 2)
    angles = torch.cat((angles, angles), -1)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def fused(plain):
    ours = copy.deepcopy(plain)
    fuse_rotations(nn.Sequential(ours))
    return ours


@pytest.mark.parametrize("function", [apply_rotary_pos_emb, modeling_qwen3.apply_rotary_pos_emb])
def test_results_and_gradients_are_the_functions_own(function):
    plain, found = attention_of(function), []
    for attention in (plain, fused(plain)):
        given = inputs()
        results = attention(*given)
        torch.manual_seed(1)
        upstream = [torch.randn(result.shape) for result in results]
        found.append((*results, *torch.autograd.grad(results, given[:2], upstream)))
    assert results[0].grad_fn.name() == results[1].grad_fn.name() == "_RotationBackward"
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.shape == theirs.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_are_turned_in_fp32_under_autocast(dtype):
    plain = attention_of(apply_rotary_pos_emb)
    q, k, cos, sin = inputs()
    given = q.detach().to(dtype).requires_grad_(), k.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = [attention(*given, cos, sin) for attention in (plain, fused(plain))]
    gradients = [torch.autograd.grad([one.square().sum() for one in each], given) for each in found]
    assert "_RotationBackward" in {one.grad_fn.name() for one in found[1]}
    for theirs, ours in zip((*found[0], *gradients[0]), (*found[1], *gradients[1]), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= (1e-6 if ours.dtype == torch.float32 else 1e-2) * theirs.norm()


def test_halves_with_angles_of_their_own():
    """Nothing says that both halves of a head have the same ones."""
    q, k, cos, sin = (each.double().detach() for each in inputs())
    cos, sin = torch.randn_like(cos), torch.randn_like(sin)
    assert torch.autograd.gradcheck(rotation._Rotation.apply, (q.requires_grad_(), k.requires_grad_(), cos, sin))
    torch.testing.assert_close(rotation._Rotation.apply(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin))


@pytest.mark.parametrize(
    "function", [turn_back, modeling_cohere.apply_rotary_pos_emb, modeling_glm.apply_rotary_pos_emb]
)
def test_another_formula_stays(function):
    plain = attention_of(function)
    for ours, theirs in zip(fused(plain)(*inputs()), plain(*inputs()), strict=True):
        assert torch.equal(ours, theirs) and ours.grad_fn.name() != "_RotationBackward"


def test_what_the_formula_is_not_for_stays():
    plain = attention_of(apply_rotary_pos_emb)
    ours = fused(plain)
    for given in (inputs(dtype=torch.bfloat16), inputs(dtype=torch.float64)):
        assert all(map(torch.equal, ours(*given), plain(*given)))
    q, k, cos, sin = inputs()
    by_token = q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2  # the dimension of the heads
    assert all(map(torch.equal, ours(*by_token), plain(*by_token)))
    without_rows = [each[0].detach() for each in (q, k)]
    assert all(map(torch.equal, ours(*without_rows, cos, sin), plain(*without_rows, cos, sin)))
    glm = attention_of(modeling_glm.apply_rotary_pos_emb)
    part_of_a_head = inputs(turned=SIZE // 2)
    assert all(map(torch.equal, fused(glm)(*part_of_a_head), glm(*part_of_a_head)))


def test_a_fused_module_is_called_as_before_and_others_stay():
    plain, theirs = Attention(), Attention.forward
    ours = fused(plain)
    q, _ = ours(*inputs(), 2.0, more=1.0)
    torch.testing.assert_close(q, plain(*inputs(), 2.0, more=1.0)[0])
    assert q.grad_fn.next_functions[0][0].next_functions[0][0].name() == "_RotationBackward"
    assert theirs.calls == 2 and isinstance(ours, Attention) and str(ours) == str(plain)
    assert type(plain) is Attention and Attention.forward is theirs
    assert inspect.signature(type(ours).forward) == inspect.signature(theirs)
    assert type(copy.deepcopy(ours)) is type(ours)


@pytest.mark.parametrize("family", ["gptj", "gemma3n", "gemma4"])
def test_functions_of_other_forms_are_called_as_they_are(family):
    q, k, cos, sin = inputs()
    given, function = {
        "gptj": ((q, sin, cos), turn_one_sine_first),
        "gemma3n": ((q, cos, sin), turn_one),
        "gemma4": ((q, cos, sin, 1), turn_one),
    }[family]
    module = attention_of(function)
    expected = module(*given)
    fuse_rotations(module)
    assert torch.equal(module(*given), expected)
