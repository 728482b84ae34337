"""Token log-probabilities from hidden states, in chunks: the `[tokens, vocabulary]` logits never exist as a whole.

Every objective starts here. Only trained positions enter; each chunk's logits are made, reduced to one number a token
and dropped, and made again in the backward pass. The peak memory of the head is one chunk, whatever the number of
tokens and whatever the objective does with the log-probabilities afterwards. Where a loss is known to be a plain sum
over tokens, the gradients are taken while the logits are there, and nothing is made twice.

Under tensor parallelism each rank has some rows of the head and makes the logits of its tokens of the vocabulary only.
What the ranks exchange is two numbers a token in the forward pass and the gradient of the hidden states in the backward
pass, once for all chunks (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from swiftlite.dtensors import is_dtensor
from swiftlite.models.kernels.embedding import takes_gradient
from swiftlite.models.kernels.products import onednn_serves, rounded
from swiftlite.objectives.head import Head, Options, Soft, chunk_tokens, kind_of_head

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class _Share:
    """This rank's tokens of a vocabulary that a group divides: `first` and the ones after it."""

    first: int
    group: dist.ProcessGroup

    def locate(self, targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether a target is here, its row here or 0)."""
        here = (targets >= self.first) & (targets < self.first + rows)
        return here, torch.where(here, targets - self.first, 0)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    summed: bool = False,
    direct: bool = False,
    upstream: torch.Tensor | None = None,
    cast: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    judged: bool = False,
) -> torch.Tensor:
    """log p(target) at each position, in fp32.

    hidden: `[n, hidden]`; weight: `[vocabulary, hidden]`; bias: `[vocabulary]` or None; targets: int64 `[n]`.
    Weight and bias may be DTensors on a 1-D mesh that divides the vocabulary, evenly or not; hidden states, targets and
    the result are the same on all its ranks, and so are the gradients of the hidden states.
    Logits are `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`. Under autocast the product runs in the
    autocast type; the logsumexp is always fp32. summed: promises that the loss is a multiple of their sum (each has the
    same gradient) and of one backward pass, which saves the second making of the logits where the vocabulary is whole.
    direct: the weight's gradient is added to its `.grad` where it is made, if that can be; autograd gets none. Of a sum
    that needs upstream: a number, the gradient that each result will get. cast: the weight in the autocast type, where
    there is such a copy.
    shares: fp32 `[n, c]`, each row 1 in sum: each position has several targets then, int64 `[n, c]`, and what is said
    above of a result is of their mean.
    judged: whether each target is the likeliest token is told too.
    Returns `[n]`, or `[n, columns]`: with shares the mean of log p over a position's targets, by their shares, and that
    of the first one; judged, a last column of 1 where no token is likelier than the (first) target, else 0. All but the
    first column are to be read alone, and pass no gradient on.
    """
    dtype, share, tokens, soft = _product_type(hidden), None, len(targets), None
    if is_dtensor(weight):
        share = _share_of(weight)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    if onednn_serves(hidden.device, dtype):  # filled up here once, not in each product
        hidden, targets, shares = (_filled(x, rounded(tokens)) for x in (hidden, targets, shares))
    if shares is not None:
        targets, soft = _divided(targets, shares, share, weight.shape[0])
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device, kind_of_head(hidden, soft).logit_bytes(dtype))
    at_once = summed and share is None and torch.is_grad_enabled()
    direct = direct and share is None and takes_gradient(weight) and not (at_once and upstream is None)
    options = Options(scale, softcap, chunk, dtype, tokens, weight if direct else None, upstream, cast, soft, judged)
    if at_once:
        return _SummedLogProbs.apply(hidden, weight, bias, targets, options)
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, options, share)


def likeliest_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    count: int,
    within: int,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    cast: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, ids) of the `count` likeliest of the vocabulary's first `within` tokens at each position, fp32
    and int64 `[n, count]`, the likeliest first; probabilities are of those tokens alone, 1 in sum.

    The other parameters as in `token_logprobs`; under tensor parallelism the result is the same on all ranks.
    """
    dtype, share = _product_type(hidden), None
    if is_dtensor(weight):
        share = _share_of(weight)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    chunk = chunk_tokens(weight.shape[0], hidden.device)
    options = Options(scale, softcap, chunk, dtype, len(hidden), None, None, cast)
    head, first = Head(hidden, weight, bias, options), 0 if share is None else share.first
    here = max(0, min(within - first, weight.shape[0]))
    logits = torch.full((len(hidden), count), -torch.inf, device=hidden.device)
    ids = torch.zeros(len(hidden), count, dtype=torch.int64, device=hidden.device)
    for part in options.parts(len(hidden)) if here else ():
        values, rows = head.likeliest(part, min(count, here), here)
        logits[part, : values.shape[1]], ids[part, : rows.shape[1]] = values, rows + first
    if share is not None:
        logits, ids = (_beside(x, share.group) for x in (logits, ids))
        logits, places = logits.topk(count, -1)
        ids = ids.gather(-1, places)
    return logits.softmax(-1), ids


def _product_type(hidden: torch.Tensor) -> torch.dtype:
    """In which the head multiplies."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _filled(values: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """With zeros behind them."""
    return None if values is None else F.pad(values, (*(0, 0) * (values.dim() - 1), 0, rows - len(values)))


def _divided(targets: torch.Tensor, shares: torch.Tensor, share: _Share | None, rows: int) -> tuple[torch.Tensor, Soft]:
    """(the rows here of targets `[n, c]`, what they count here)."""
    if share is None:
        return targets, Soft(shares, shares.new_ones(len(shares)))
    here, targets = share.locate(targets, rows)
    return targets, Soft(shares * here, here[:, 0].to(shares.dtype))


def _beside(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' values `[n, count]` as `[n, ranks * count]`."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group=group)
    return torch.cat(parts, dim=-1)


def _share_of(weight: DTensor) -> _Share:
    mesh = weight.device_mesh
    [placement] = weight.placements
    assert placement.is_shard(0), f"a head placed {placement}"
    rows = -(-weight.shape[0] // mesh.size())  # by the rule of torch.chunk, as Shard divides
    return _Share(mesh.get_local_rank() * rows, mesh.get_group())


class _ChunkedLogProbs(torch.autograd.Function):
    """Takes the gradients in the backward pass, when what the loss makes of each token is known."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: Options,
        share: _Share | None,
    ) -> torch.Tensor:
        head = kind_of_head(hidden, options.soft)(hidden, weight, bias, options)
        logprobs, normalizers = options.results(hidden), hidden.new_empty(len(hidden), dtype=torch.float32)
        here, rows = None, targets
        if share is not None and options.soft is None:
            here, rows = share.locate(targets, weight.shape[0])
        for part in options.parts(hidden.shape[0]):
            logprobs[part], normalizers[part] = head.read(part, rows[part])
        if share is not None:
            _complete(logprobs, normalizers, here, share.group, options)
        options.judge(logprobs)
        options.picked(logprobs).sub_(normalizers[:, None])
        ctx.save_for_backward(hidden, weight, bias, rows, here, normalizers)
        ctx.options, ctx.share = options, share
        return options.without_filling(logprobs)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, rows, here, normalizers = ctx.saved_tensors
        upstream = _filled(ctx.options.of_means(upstream), len(hidden))
        head = kind_of_head(hidden, ctx.options.soft)(hidden, weight, bias, ctx.options, ctx.needs_input_grad)
        found = upstream if here is None else upstream * here
        for part in ctx.options.parts(hidden.shape[0]):
            head.learn_again(part, rows[part], upstream[part], found[part], normalizers[part])
        if head.grad_hidden is not None and ctx.share is not None:
            dist.all_reduce(head.grad_hidden, group=ctx.share.group)
        return *head.gradients(), None, None, None


class _SummedLogProbs(torch.autograd.Function):
    """Takes the gradients of the sum in the forward pass; the backward pass scales them, where it was not known how."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        head = kind_of_head(hidden, options.soft)(hidden, weight, bias, options, ctx.needs_input_grad)
        logprobs = options.results(hidden)
        upstream = logprobs.new_ones(()) if options.upstream is None else options.upstream
        upstream = _filled(upstream.expand(options.tokens), len(hidden))
        for part in options.parts(hidden.shape[0]):
            logprobs[part] = head.learn(part, targets[part], upstream[part])
        ctx.gradients, ctx.upstream, ctx.means = head.gradients(), options.upstream, options.of_means
        return options.without_filling(logprobs)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so there is no second time
        if upstream.numel():
            upstream = ctx.means(upstream)
            expected = upstream[0] if ctx.upstream is None else ctx.upstream
            torch._assert_async((upstream == expected).all(), "the loss is no multiple of the sum")
            if ctx.upstream is None:
                gradients = [None if grad is None else grad.mul_(expected) for grad in gradients]
        return *gradients, None, None


def _complete(
    logits: torch.Tensor,
    normalizers: torch.Tensor,
    here: torch.Tensor | None,
    group: dist.ProcessGroup,
    options: Options,
) -> None:
    """Make a rank's results, `[n]` or `[n, columns]`, and normalizers, `[n]`, those of the whole vocabulary, in place.
    here: of which targets; None where the logits of others are zero already."""
    largest = torch.stack([normalizers, logits[:, -1]] if options.judged else [normalizers])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    picked = options.picked(logits)
    if here is not None:
        picked.masked_fill_(~here[:, None], 0)
    sums = torch.cat([(normalizers - largest[0]).exp_()[:, None], picked], dim=1)
    dist.all_reduce(sums, group=group)
    normalizers.copy_(sums[:, 0].log().add_(largest[0]))
    picked.copy_(sums[:, 1:])
    if options.judged:
        logits[:, -1] = largest[1]
