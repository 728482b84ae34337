"""Token log-probabilities from hidden states, in chunks: the `[tokens, vocabulary]` logits never exist as a whole.

Every objective starts here. Only trained positions enter; each chunk's logits are made, reduced to one number a token
and dropped, and made again in the backward pass. The peak memory of the head is one chunk, whatever the number of
tokens and whatever the objective does with the log-probabilities afterwards.

Under tensor parallelism each rank has some rows of the head and makes the logits of its tokens of the vocabulary only.
What the ranks exchange is two numbers a token in the forward pass and the gradient of the hidden states in the backward
pass, once for all chunks (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # fp32 logits of one chunk; a GPU needs larger ones to stay busy


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose fp32 logits fill one chunk."""
    return max(16, CHUNK_BYTES.get(device.type, 512 << 20) // (4 * vocabulary))


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
) -> torch.Tensor:
    """log p(target) at each position, in fp32.

    hidden: `[n, hidden]`; weight: `[vocabulary, hidden]`; bias: `[vocabulary]` or None; targets: int64 `[n]`.
    Weight and bias may be DTensors on a 1-D mesh that divides the vocabulary, evenly or not; hidden states, targets and
    the result are the same on all its ranks, and so are the gradients of the hidden states.
    Logits are `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`. Under autocast the product runs in the
    autocast type; the logsumexp is always fp32. Returns `[n]`.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    share = None
    if isinstance(weight, DTensor):
        share = _share_of(weight)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device)
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, scale, softcap, chunk, dtype, share)


def _share_of(weight: DTensor) -> _Share:
    mesh = weight.device_mesh
    assert weight.placements == (Shard(0),), f"a head placed {weight.placements}"
    rows = -(-weight.shape[0] // mesh.size())  # by the rule of torch.chunk, as Shard divides
    return _Share(mesh.get_local_rank() * rows, mesh.get_group())


def _chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if scale != 1.0:
        logits *= scale
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits


class _ChunkedLogProbs(torch.autograd.Function):
    """d log p(y) / d logits = onehot(y) - softmax(logits), taken chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, chunk, dtype, share):  # noqa: ANN001, ANN205
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        here, rows = (None, targets) if share is None else share.locate(targets, weight.shape[0])
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _chunk_logits(hidden[part].to(dtype), cast_weight, cast_bias, scale, softcap)
            normalizers[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, rows[part, None])[:, 0]
        if share is not None:
            _complete(logprobs, normalizers, here, share.group)
        logprobs -= normalizers
        ctx.save_for_backward(hidden, weight, bias, rows, here, normalizers)
        ctx.options = scale, softcap, chunk, dtype, share
        return logprobs

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        hidden, weight, bias, rows, here, normalizers = ctx.saved_tensors
        scale, softcap, chunk, dtype, share = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            inputs = hidden[part].to(dtype)
            logits = _chunk_logits(inputs, cast_weight, cast_bias, scale, softcap)
            slope = None if softcap is None else 1 - (logits / softcap).square_()  # d softcapped / d raw
            grad = logits.sub_(normalizers[part, None]).exp_().mul_(-upstream[part, None])
            found = upstream if here is None else upstream * here
            grad.scatter_add_(-1, rows[part, None], found[part, None].to(grad.dtype))
            if slope is not None:
                grad *= slope
            if scale != 1.0:
                grad *= scale
            grad = grad.to(dtype)
            if needs_hidden:
                grad_hidden[part] = (grad @ cast_weight).to(hidden.dtype)
            if needs_weight:
                _add_product(grad_weight, grad, inputs)
            if needs_bias:
                grad_bias += grad.sum(0)
        if needs_hidden and share is not None:
            dist.all_reduce(grad_hidden, group=share.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


def _complete(logits: torch.Tensor, normalizers: torch.Tensor, here: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make one rank's logits of the targets and normalizers, `[n]` each, those of the whole vocabulary, in place."""
    largest = normalizers.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizers - largest).exp_(), logits.masked_fill_(~here, 0)])
    dist.all_reduce(sums, group=group)
    normalizers.copy_(sums[0].log_().add_(largest))
    logits.copy_(sums[1])


def _add_product(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """total += grad.T @ rows, in place; a half-precision product is added up in fp32."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, rows)
    else:
        total += (grad.T @ rows).to(total.dtype)
