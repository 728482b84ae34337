"""Token log-probabilities and losses against plain PyTorch in fp64."""

import pytest
import torch

from swiftlite.data.batches import empty_micro_batch
from swiftlite.objectives import logprobs
from swiftlite.objectives.head import FusedHead, SoftHead, chunk_tokens
from swiftlite.objectives.logprobs import token_logprobs
from swiftlite.objectives.scorer import _tolerance
from swiftlite.objectives.supervised import dynamic_loss, supervised_loss
from swiftlite.training.losses import TokenLoss


def plain(hidden, weight, bias, targets, scale=1.0, softcap=None):
    logits = scale * (hidden @ weight.T + (0 if bias is None else bias))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def inputs(n=37, hidden=16, vocabulary=101, dtype=torch.float64):
    torch.manual_seed(0)
    return (
        torch.randn(n, hidden, dtype=dtype, requires_grad=True),
        torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True),
        torch.randn(vocabulary, dtype=dtype, requires_grad=True),
        torch.randint(0, vocabulary, (n,)),
    )


@pytest.fixture(params=["plain", "filled", "fused"])
def kinds(request, monkeypatch):
    """Tokens are filled up to what oneDNN likes; a GPU's head, in the operations that it fuses."""
    monkeypatch.setattr(logprobs, "onednn_serves", lambda *_: request.param == "filled")
    if request.param == "fused":
        monkeypatch.setattr(logprobs, "kind_of_head", lambda _, soft=None: FusedHead if soft is None else SoftHead)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [5, 37, 1000])
def test_value_and_gradients_equal_the_full_softmax(options, with_bias, chunk):
    hidden, weight, bias, targets = inputs()
    bias = bias if with_bias else None
    upstream = torch.randn(37)
    ours = token_logprobs(hidden, weight, bias, targets, chunk=chunk, **options)
    torch.testing.assert_close(ours.double(), plain(hidden, weight, bias, targets, **options), rtol=1e-5, atol=1e-5)
    wanted = [x for x in (hidden, weight, bias) if x is not None]
    got = torch.autograd.grad((ours * upstream).sum(), wanted)
    expected = torch.autograd.grad((plain(hidden, weight, bias, targets, **options) * upstream).sum(), wanted)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_gradients_of_a_sum_are_taken_on_the_way(options, chunk):
    hidden, weight, bias, targets = inputs()
    ours = token_logprobs(hidden, weight, bias, targets, chunk=chunk, summed=True, **options)
    torch.testing.assert_close(ours.double(), plain(hidden, weight, bias, targets, **options), rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(ours.sum() * -0.02, (hidden, weight, bias))
    expected = torch.autograd.grad(
        plain(hidden, weight, bias, targets, **options).sum() * -0.02, (hidden, weight, bias)
    )
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("kinds")
def test_a_loss_that_is_no_sum_is_not_taken_for_one():
    hidden, weight, bias, targets = inputs()
    ours = token_logprobs(hidden, weight, bias, targets, summed=True)
    with pytest.raises(RuntimeError, match="no multiple of the sum"):
        ours.square().sum().backward()


@pytest.mark.usefixtures("kinds")
def test_a_token_weighs_as_much_as_it_is_probable():
    """Whose gradient is that of -p alone, since d p = p d log p."""
    hidden, weight, bias, targets = inputs()
    loss = dynamic_loss(token_logprobs(hidden, weight, bias, targets, chunk=5), 7)
    expected = plain(hidden, weight, bias, targets)
    assert loss.item() == pytest.approx(-(expected.exp() * expected).sum().item() / 7, rel=1e-5)
    got = torch.autograd.grad(loss, (hidden, weight, bias))
    for left, right in zip(got, torch.autograd.grad(-expected.exp().sum() / 7, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 2.0}])
def test_the_likeliest_tokens_are_known_beside_what_counts(options, several, summed):
    """Half of the targets are; log p and gradients are those without."""
    hidden, weight, bias, targets = inputs()
    targets = torch.where(torch.arange(37) % 2 == 0, (hidden @ weight.T + bias).argmax(-1), targets)
    right = targets == (hidden @ weight.T + bias).argmax(-1)
    if several:
        options = options | {"shares": torch.tensor([0.5, 0.3, 0.2]).expand(37, 3)}
        targets = torch.stack([targets, (targets + 1) % 101, (targets + 7) % 101], dim=-1)
    options = options | {"chunk": 5, "summed": summed}
    told = token_logprobs(hidden, weight, bias, targets, judged=True, **options)
    plainly = token_logprobs(hidden, weight, bias, targets, **options)
    assert told[:, -1].tolist() == right.float().tolist() and 0 < right.sum() < 37
    torch.testing.assert_close(told[:, :-1], plainly if several else plainly[:, None], rtol=0, atol=0)
    counted = told[:, 0].sum() * -0.02, (plainly[:, 0] if several else plainly).sum() * -0.02
    got, expected = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in counted)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_token_as_likely_as_another_is_one_of_the_likeliest():
    hidden, weight, _, _ = inputs()
    twice = weight[:50].detach().repeat_interleave(2, dim=0)  # tokens 0 and 1 have the same logits, and so on
    likeliest = (hidden @ twice.T).argmax(-1)
    for target in (likeliest, likeliest ^ 1):
        assert token_logprobs(hidden, twice, None, target, judged=True)[:, -1].all()
    assert not token_logprobs(hidden, twice, None, (likeliest + 2) % 100, judged=True)[:, -1].any()


def test_a_loss_is_the_same_number_whether_or_not_tokens_are_judged():
    """To the last bit: numbers that lie apart in memory are added up in another order."""
    batch = empty_micro_batch()
    for count in (30, 100, 1000, 4000):
        plain = torch.randn(count, generator=torch.Generator().manual_seed(count)) - 5
        judged = torch.stack([plain, torch.ones(count)], dim=1)
        assert TokenLoss(7, judged=True)(judged, batch)[0].item() == TokenLoss(7)(plain, batch)[0].item()


def test_frozen_head_gets_no_gradient():
    hidden, weight, _, targets = inputs()
    token_logprobs(hidden, weight.detach(), None, targets).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.usefixtures("kinds")
def test_no_trained_token_gives_exact_zero_with_a_gradient():
    hidden, weight, _, targets = inputs()
    loss = supervised_loss(token_logprobs(hidden[:0], weight, None, targets[:0]), 10)
    loss.backward()
    assert loss.item() == 0.0
    assert not weight.grad.any()


def test_one_chunk_is_all_the_memory_the_head_takes():
    """The largest tensor the head makes does not grow with the number of tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    Largest.seen = max(Largest.seen, tensor.numel())
            return result

    peaks = []
    for tokens in (256, 2048):
        hidden, weight, _, targets = inputs(tokens, 8, 5000, torch.float32)
        Largest.seen = 0
        with Largest():
            token_logprobs(hidden, weight, None, targets, chunk=64).sum().backward()
        peaks.append(Largest.seen)
    assert peaks[0] == peaks[1] == 64 * 5000


def test_chunks_are_bounded_in_bytes():
    assert chunk_tokens(151_936, torch.device("cpu")) * 151_936 * 4 <= 64 << 20
    assert chunk_tokens(10**9, torch.device("cpu")) == 16
    assert chunk_tokens(8192, torch.device("cpu")) == 256
    assert chunk_tokens(151_936, torch.device("cpu")) == 96  # a multiple of 32
    assert chunk_tokens(128_256, torch.device("cuda"), 2) == 2048  # of 128


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_a_head_in_bf16_takes_a_weight_that_was_cast_already(summed, tokens):
    hidden, weight, bias, targets = inputs(tokens, 64, 1000, torch.float32)
    hidden, weight, bias = ((each / 8).detach().requires_grad_() for each in (hidden, weight, bias))
    found = []
    for cast in (None, weight.detach().bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            ours = token_logprobs(hidden, weight, bias, targets, summed=summed, cast=cast)
        found.append([ours, *torch.autograd.grad(ours.sum() / 7, (hidden, weight, bias))])
    assert all(map(torch.equal, *found)) and len(ours) == tokens and not ours._is_view()
    whole = [each.detach().bfloat16().double().requires_grad_() for each in (hidden, weight, bias)]
    exact = plain(*whole, targets)
    for got, expected in zip(found[0], [exact, *torch.autograd.grad(exact.sum() / 7, whole)], strict=True):
        assert (got - expected).norm() <= 1e-2 * expected.norm()


def test_bf16_logits_are_summed_in_fp32():
    hidden, weight, _, targets = inputs(200, 64, 1000, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = token_logprobs(hidden, weight, None, targets)
    assert ours.dtype == torch.float32
    exact = plain(hidden.bfloat16().double(), weight.bfloat16().double(), None, targets)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=0.15)


def test_the_check_of_documents_allows_for_the_type_of_products():
    hidden = torch.zeros(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert _tolerance(hidden) == _tolerance(hidden.bfloat16())
    assert _tolerance(hidden) < 1e-3
