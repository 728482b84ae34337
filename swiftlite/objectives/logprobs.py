"""Token log-probabilities from hidden states, in chunks: the `[tokens, vocabulary]` logits never exist as a whole.

Every objective starts here. Only trained positions enter; each chunk's logits are made, reduced to one number a token
and dropped, and made again in the backward pass. The peak memory of the head is one chunk, whatever the number of
tokens and whatever the objective does with the log-probabilities afterwards.
"""

from __future__ import annotations

import torch

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # fp32 logits of one chunk; a GPU needs larger ones to stay busy


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose fp32 logits fill one chunk."""
    return max(16, CHUNK_BYTES.get(device.type, 512 << 20) // (4 * vocabulary))


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
    Logits are `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`. Under autocast the product runs in the
    autocast type; the logsumexp is always fp32. Returns `[n]`.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device)
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, scale, softcap, chunk, dtype)


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
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, chunk, dtype):  # noqa: ANN001, ANN205
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _chunk_logits(hidden[part].to(dtype), cast_weight, cast_bias, scale, softcap)
            normalizers[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - normalizers[part]
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.options = scale, softcap, chunk, dtype
        return logprobs

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        scale, softcap, chunk, dtype = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            rows = hidden[part].to(dtype)
            logits = _chunk_logits(rows, cast_weight, cast_bias, scale, softcap)
            slope = None if softcap is None else 1 - (logits / softcap).square_()  # d softcapped / d raw
            grad = logits.sub_(normalizers[part, None]).exp_().mul_(-upstream[part, None])
            grad.scatter_add_(-1, targets[part, None], upstream[part, None].to(grad.dtype))
            if slope is not None:
                grad *= slope
            if scale != 1.0:
                grad *= scale
            grad = grad.to(dtype)
            if needs_hidden:
                grad_hidden[part] = (grad @ cast_weight).to(hidden.dtype)
            if needs_weight:
                _add_product(grad_weight, grad, rows)
            if needs_bias:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _add_product(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """total += grad.T @ rows, in place; a half-precision product is added up in fp32."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, rows)
    else:
        total += (grad.T @ rows).to(total.dtype)
