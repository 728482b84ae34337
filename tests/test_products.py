"""Products by oneDNN are those of PyTorch's own library, forwards and backwards: a run with them is the same run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_parity import metrics, settings
from test_run import train
from torch import nn

from swiftlite.models import processor
from swiftlite.models.dtypes import fast_at_bf16
from swiftlite.models.kernels import products
from swiftlite.models.kernels.products import FastLinear, ProductSum, linear, product, rounded, use_fast_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Lets oneDNN serve on any processor and at any size. Returns the shapes it was given."""
    found, real = [], products._by_onednn

    def counted(*factors, **options):
        found.append([tuple(factor.shape) for factor in factors if factor is not None])
        return real(*factors, **options)

    monkeypatch.setattr(products, "_by_onednn", counted)
    monkeypatch.setattr(products, "SMALLEST", 1)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    return found


@pytest.mark.parametrize("shape", [(64,), (1, 45), (3, 32), (1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_and_its_gradients(calls, shape, with_bias):
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes):
        return torch.randn(*sizes, generator=generator)

    inputs = [numbers(*shape, 24), numbers(40, 24), numbers(40) if with_bias else None]
    upstream = numbers(*shape, 40)

    def run(function, dtype):
        leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
        result = function(*leaves)
        result.backward(upstream.to(dtype))
        return [result.detach(), *(x.grad for x in leaves if x is not None)]

    found, expected = run(linear, torch.float32), run(F.linear, torch.float64)
    assert len(calls) == 3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)


def test_gradients_without_strides_and_transposed_factors(calls):
    x, weight = torch.randn(32, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    linear(x, weight).sum().backward()  # whose gradient is one number, expanded
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(32, 16))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(8, 16))
    a, b = torch.randn(16, 33), torch.randn(16, 7)
    for over_tokens in (False, True):
        torch.testing.assert_close(product(a.T, b.T, over_tokens=over_tokens), a.T @ b)
    assert len(calls) == 5


@pytest.mark.parametrize("trained", [False, True])
def test_a_frozen_layer_does_not_keep_its_input(calls, trained):
    x, weight = torch.randn(32, 16, requires_grad=True), torch.randn(8, 16, requires_grad=trained)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        linear(x, weight).sum().backward()
    assert kept == ([x.shape] if trained else []) + [weight.shape]
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(32, 16))


@pytest.mark.parametrize("shape", [(2, 5, 16), (32, 16)])
def test_an_output_may_be_changed_in_place(calls, shape):
    x, weight, bias, found = torch.randn(shape), torch.randn(8, 16), torch.randn(8), []
    for function in (linear, F.linear):
        given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = function(*given)
        y *= 2
        found.append(torch.autograd.grad(y.square().sum(), given))
    assert calls
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_products(calls, dtype):
    parts = [(torch.randn(t, 50).to(dtype), torch.randn(t, 20).to(dtype)) for t in (32, 5, 40)]
    total = ProductSum(torch.empty(50, 20), dtype)
    assert torch.equal(total.total, torch.zeros(50, 20))
    for a, b in parts:
        total.add(a, b)
    expected = sum(a.double().T @ b.double() for a, b in parts).float()
    torch.testing.assert_close(total.total, expected, **({} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}))
    assert bool(calls) == (dtype == torch.float32)


def test_what_oneDNN_does_not_serve(calls):
    x, weight = torch.randn(8, 16), torch.randn(8, 16)
    for one, other in (
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (x[:0], weight),
        (x[0], weight),
    ):
        assert torch.equal(linear(one, other), F.linear(one, other))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(x.to("meta"), weight.to("meta")).is_meta
    assert not calls


def test_modules_keep_names_and_weights(calls, monkeypatch):
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Own(8, 8))
    names = [name for name, _ in model.named_parameters()]
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    use_fast_products(model)
    assert type(model[0]) is nn.Linear
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    use_fast_products(model)
    assert [type(module) for module in copy.deepcopy(model)] == [FastLinear, Own]
    assert [name for name, _ in model.named_parameters()] == names


ZEN_5 = {"vendor_id": "AuthenticAMD", "cpu family": "26", "flags": "fpu avx2 avx512f avx512_bf16"}


@pytest.fixture
def describe_processor(monkeypatch, tmp_path):
    """Takes what the system says of its first processor."""

    def describe(known: dict[str, str]) -> None:
        first = "".join(f"{name}\t: {value}\n" for name, value in known.items())
        (tmp_path / "cpuinfo").write_text(f"{first}\nvendor_id\t: AnotherOne\nflags\t\t: none\n")

    monkeypatch.setattr(processor, "INFORMATION", tmp_path / "cpuinfo")
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    return describe


@pytest.mark.parametrize(
    ("differing", "onednn", "bf16"),
    [
        ({}, True, True),
        ({"cpu family": "25"}, False, True),
        ({"flags": "fpu avx2 avx512f"}, True, False),
        ({"flags": "fpu avx2"}, False, False),
        ({"vendor_id": "GenuineIntel"}, False, True),
        ({"vendor_id": "GenuineIntel", "flags": "fpu avx512f amx_bf16"}, False, True),
    ],
    ids=["zen 5", "zen 4", "without bf16", "without AVX-512", "intel", "AMX"],
)
def test_what_is_fast_is_the_processors(differing, onednn, bf16, describe_processor):
    describe_processor(ZEN_5 | differing)
    assert products.prefers_onednn.__wrapped__() == onednn
    assert fast_at_bf16(torch.device("cpu")) == bf16


def test_nothing_is_chosen_where_the_processor_is_not_known(describe_processor):
    assert not products.prefers_onednn.__wrapped__()
    assert not fast_at_bf16(torch.device("cpu"))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tuner": "lora"},
        {"activation_checkpointing": "selective"},
        {"packing": False},
        {"qat": "int4", "max_steps": 1},  # behind an update a last bit may decide about a code
    ],
    ids=["full", "lora", "recomputed", "unpacked", "rounded"],
)
def test_the_same_run(calls, more, tiny_model, write_rows, chat_rows, tmp_path, monkeypatch):
    base = settings(tmp_path, tiny_model("qwen3"), write_rows("rows.jsonl", chat_rows), **more)
    train(base, output_dir=str(tmp_path / "one"))
    served = len(calls)
    assert served > 100
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    train(base, output_dir=str(tmp_path / "other"))
    assert len(calls) == served
    for mine, theirs in zip(metrics(tmp_path / "one"), metrics(tmp_path / "other"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
        assert mine["tokens"] == theirs["tokens"]


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 32), (32, 32), (225, 256), (257, 320), (513, 576)])
def test_few_lengths_are_multiplied(tokens, expected):
    assert rounded(tokens) == expected
