"""Gradients that embedding and head add to a weight on their own, against autograd's."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from swiftlite.models.kernels import products
from swiftlite.models.kernels.embedding import DirectEmbedding, use_direct_embeddings
from swiftlite.models.kernels.rematerialize import rematerialized
from swiftlite.objectives.logprobs import token_logprobs

VOCABULARY, WIDTH = 1301, 16


class Tied(nn.Module):
    """Embedding, something on the way, and a head with the embedding's weight."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, **options: bool) -> torch.Tensor:
        hidden = self.between(self.embed(ids[None])).tanh()[0]
        return token_logprobs(hidden, self.embed.weight, None, targets, chunk=16, **options)


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def turned(request, monkeypatch):
    monkeypatch.setattr(products, "onednn_serves", lambda *_: request.param)


@pytest.mark.parametrize("around", [nullcontext, rematerialized])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("summed", [False, True])
def test_direct_gradients_of_a_tied_weight_are_those_of_autograd(turned, summed, padding, around):
    torch.manual_seed(0)
    model = Tied(padding)
    direct = copy.deepcopy(model)
    use_direct_embeddings(direct)
    assert type(direct.embed) is DirectEmbedding
    for factor in (-0.5, -0.02):  # the second time gradients are there
        ids, targets = torch.randint(0, 30, (40,)), torch.randint(0, VOCABULARY, (40,))
        known = {"upstream": torch.tensor(factor)} if summed else {}
        expected = model(ids, targets)
        with around():
            found = direct(ids, targets, summed=summed, direct=True, **known)
        torch.testing.assert_close(found, expected)
        for logprobs in (expected, found):
            (logprobs.sum() * factor).backward()
    for (name, left), right in zip(model.named_parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-5, atol=1e-6, msg=name)
        assert right.grad.is_contiguous()


def test_autograd_gets_none_of_them():
    model = Tied(None)
    use_direct_embeddings(model)
    told = []
    model.embed.weight.register_hook(told.append)
    known = {"summed": True, "direct": True, "upstream": torch.ones(())}
    model(torch.arange(5), torch.arange(5), **known).sum().backward()
    assert all(gradient is None for gradient in told)
    assert model.embed.weight.grad.count_nonzero()


def test_an_upstream_gradient_other_than_the_one_foretold_is_an_error():
    model = Tied(None)
    logprobs = model(torch.arange(5), torch.arange(5), summed=True, direct=True, upstream=torch.tensor(-0.5))
    with pytest.raises(RuntimeError, match="no multiple of the sum"):
        logprobs.sum().backward()


def test_whoever_watches_embeddings_sees_the_ids(monkeypatch):
    model, forward, seen = Tied(None), nn.Embedding.forward, []
    use_direct_embeddings(model)
    monkeypatch.setattr(nn.Embedding, "forward", lambda self, ids: seen.append(ids.tolist()) or forward(self, ids))
    assert model(torch.arange(5), torch.arange(5)).requires_grad
    assert seen == [[[0, 1, 2, 3, 4]]]


def test_what_is_not_trained_in_fp32_stays_with_autograd():
    half, frozen = nn.Embedding(9, 4, dtype=torch.bfloat16), nn.Embedding(9, 4).requires_grad_(False)
    scaled = nn.Embedding(9, 4, scale_grad_by_freq=True)
    model = nn.ModuleList([half, frozen, scaled])
    use_direct_embeddings(model)
    assert type(scaled) is nn.Embedding
    ids = torch.tensor([[1, 2, 1]])
    assert not frozen(ids).requires_grad
    half(ids).sum().backward()
    assert half.weight.grad[1].tolist() == [2.0] * 4
    with torch.no_grad():
        assert not DirectEmbedding(9, 4)(ids).requires_grad


def test_no_trained_token_gives_no_gradient():
    model = Tied(None)
    logprobs = token_logprobs(
        model.between(model.embed.weight[:0]), model.embed.weight, None, torch.arange(0), summed=True, direct=True
    )
    logprobs.sum().backward()
    assert model.embed.weight.grad is None or not model.embed.weight.grad.count_nonzero()
