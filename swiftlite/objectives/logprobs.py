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
from swiftlite.models.embedding import takes_gradient
from swiftlite.models.products import onednn_serves, rounded
from swiftlite.objectives.head import Options, chunk_tokens, kind_of_head

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
    Returns `[n]`.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    share = None
    if is_dtensor(weight):
        share = _share_of(weight)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device, kind_of_head(hidden).logit_bytes(dtype))
    at_once = summed and share is None and torch.is_grad_enabled()
    direct = direct and share is None and takes_gradient(weight) and not (at_once and upstream is None)
    tokens = len(targets)
    if onednn_serves(hidden.device, dtype):  # filled up here once, not in each product
        more = rounded(tokens) - tokens
        hidden, targets = F.pad(hidden, (0, 0, 0, more)), F.pad(targets, (0, more))
    options = Options(scale, softcap, chunk, dtype, tokens, weight if direct else None, upstream, cast)
    if at_once:
        return _SummedLogProbs.apply(hidden, weight, bias, targets, options)
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, options, share)


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
        head = kind_of_head(hidden)(hidden, weight, bias, options)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        here, rows = (None, targets) if share is None else share.locate(targets, weight.shape[0])
        for part in options.parts(hidden.shape[0]):
            logprobs[part], normalizers[part] = head.read(part, rows[part])
        if share is not None:
            _complete(logprobs, normalizers, here, share.group)
        logprobs -= normalizers
        ctx.save_for_backward(hidden, weight, bias, rows, here, normalizers)
        ctx.options, ctx.share = options, share
        return options.without_filling(logprobs)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, rows, here, normalizers = ctx.saved_tensors
        upstream = F.pad(upstream, (0, len(hidden) - len(upstream)))
        head = kind_of_head(hidden)(hidden, weight, bias, ctx.options, ctx.needs_input_grad)
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
        head = kind_of_head(hidden)(hidden, weight, bias, options, ctx.needs_input_grad)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        upstream = logprobs.new_ones(()) if options.upstream is None else options.upstream
        upstream = F.pad(upstream.expand(options.tokens), (0, len(hidden) - options.tokens))
        for part in options.parts(hidden.shape[0]):
            logprobs[part] = head.learn(part, targets[part], upstream[part])
        ctx.gradients, ctx.upstream = head.gradients(), options.upstream
        return options.without_filling(logprobs)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so there is no second time
        if upstream.numel():
            expected = upstream[0] if ctx.upstream is None else ctx.upstream
            torch._assert_async((upstream == expected).all(), "the loss is no multiple of the sum")
            if ctx.upstream is None:
                gradients = [None if grad is None else grad.mul_(expected) for grad in gradients]
        return *gradients, None, None


def _complete(logits: torch.Tensor, normalizers: torch.Tensor, here: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make one rank's logits of the targets and normalizers, `[n]` each, those of the whole vocabulary, in place."""
    largest = normalizers.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizers - largest).exp_(), logits.masked_fill_(~here, 0)])
    dist.all_reduce(sums, group=group)
    normalizers.copy_(sums[0].log_().add_(largest))
    logits.copy_(sums[1])
