"""Causal attention of many documents on a CPU, as one node of autograd's graph.

PyTorch's kernel for one document after the other, as `scaled_dot_product_attention` chooses it. What is kept for the
backward pass are queries, keys, values and results as they came, once: keys and values that several heads share are not
copied for each of them, and the results lie in the row that the next layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scaling: float | None
) -> torch.Tensor:
    """query: `[1, heads, tokens, head_dim]`; key, value: `[1, kv_heads, tokens, head_dim]`; lengths: of the documents.
    Returns `[1, tokens, heads, head_dim]`."""
    return _ByDocument.apply(query, key, value, lengths, scaling)


class _ByDocument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, lengths, scaling):  # noqa: ANN001, ANN205
        _, heads, tokens, size = query.shape
        output = query.new_empty(1, tokens, heads, size)
        logsums = query.new_empty(heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
        q, k, v, out, sums = _grouped(query, key, value, output, logsums)
        for place in _places(lengths):
            attended = _forward(q[:, :, place], k[:, :, place], v[:, :, place], 0.0, True, scale=scaling)
            out[:, :, place], sums[:, :, place] = attended
        ctx.save_for_backward(query, key, value, output, logsums)
        ctx.lengths, ctx.scaling = lengths, scaling
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        query, key, value, output, logsums = ctx.saved_tensors
        kept = _grouped(query, key, value, output, logsums)
        arrived = _rows_of_groups(upstream, key.shape[1])
        grad_query, grad_key, grad_value = (torch.empty_like(each) for each in (query, key, value))
        grad_q = grad_query[0].unflatten(0, kept[0].shape[:2])
        for place in _places(ctx.lengths):
            of_document = [each[:, :, place] for each in (arrived, *kept)]
            grad_q[:, :, place], to_keys, to_values = _backward(*of_document, 0.0, True, scale=ctx.scaling)
            torch.sum(to_keys, 1, out=grad_key[0, :, place])
            torch.sum(to_values, 1, out=grad_value[0, :, place])
        return grad_query, grad_key, grad_value, None, None


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, logsums: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Views `[kv_heads, groups, tokens, head_dim]` (the last one without head_dim): what a kernel takes for a batch is
    here a head of keys and values, and its heads are the query heads that share it."""
    heads = key.shape[1]
    groups = query.shape[1] // heads
    shared = (each[0, :, None].expand(-1, groups, -1, -1) for each in (key, value))
    return (
        query[0].unflatten(0, (heads, groups)),
        *shared,
        _rows_of_groups(output, heads),
        logsums.unflatten(0, (heads, groups)),
    )


def _rows_of_groups(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The same view of `[1, tokens, heads, head_dim]`."""
    return rows[0].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _places(lengths: list[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        if length:
            yield slice(start, start + length)
        start += length
