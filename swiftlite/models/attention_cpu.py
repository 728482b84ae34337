"""Causal attention of many documents on a CPU, as one node of autograd's graph.

One document after the other, in blocks (`swiftlite/models/attention_blocks.py`) or by PyTorch's kernel, as
`scaled_dot_product_attention` chooses it. What is kept for the backward pass are queries, keys, values and results as
they came, once: keys and values that several heads share are not copied for each of them, and the results lie in the
row that the next layer reads. Of documents in blocks weights are kept as well: such a document has at most four times a
head's size in tokens, so they take no more than two rows of states.

In 16 bits the kernel's backward pass takes up to eight times as long as in fp32 where documents are short and heads
small, so there gradients are taken in fp32 (`scripts/measure_attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from swiftlite.models.attention_blocks import attend_in_blocks, block_gradients, gains_by_blocks

# Tokens of a document x (a head's size)^1.5, up to which gradients in fp32 take less time than in 16 bits: 994 tokens
# with heads of 32, 351 with heads of 64, 124 with heads of 128.
WIDE = 180_000

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend_by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scaling: float | None
) -> torch.Tensor:
    """query: `[1, heads, tokens, head_dim]`; key, value: `[1, kv_heads, tokens, head_dim]`; lengths: of the documents.
    Returns `[1, tokens, heads, head_dim]`."""
    return _ByDocument.apply(query, key, value, lengths, query.shape[-1] ** -0.5 if scaling is None else scaling)


class _ByDocument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, lengths, scale):  # noqa: ANN001, ANN205
        _, heads, tokens, size = query.shape
        output = query.new_empty(1, tokens, heads, size)
        logsums = query.new_empty(heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
        q, k, v, out, sums = _grouped(query, key, value, output, logsums)
        # Selective checkpointing keeps the results of single operations, and knows PyTorch's kernel for one.
        written_out = query.dtype == torch.float32 and not is_in_torch_dispatch_mode()
        kept: list[torch.Tensor] = []
        for place, length in _places(lengths):
            if written_out and gains_by_blocks(length, size):
                document = q[:, :, place], key[0, :, place], value[0, :, place]
                for weights in attend_in_blocks(*document, scale, out[:, :, place]):
                    kept += [weights] if any(ctx.needs_input_grad) else []
            else:
                attended = _forward(q[:, :, place], k[:, :, place], v[:, :, place], 0.0, True, scale=scale)
                out[:, :, place], sums[:, :, place] = attended
        ctx.save_for_backward(query, key, value, output, logsums, *kept)
        ctx.lengths, ctx.scale, ctx.written_out = lengths, scale, written_out
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        query, key, value, output, logsums, *kept = ctx.saved_tensors
        q, *others = _grouped(query, key, value, output, logsums)
        arrived, weights = _rows_of_groups(upstream, key.shape[1]), iter(kept)
        grad_query, grad_key, grad_value = (torch.empty_like(each) for each in (query, key, value))
        grads = grad_query[0].unflatten(0, q.shape[:2]), grad_key[0], grad_value[0]
        for place, length in _places(ctx.lengths):
            if ctx.written_out and gains_by_blocks(length, query.shape[-1]):
                document = arrived[:, :, place], q[:, :, place], key[0, :, place], value[0, :, place]
                found = block_gradients(*document, ctx.scale, weights)
            else:
                document = [each[:, :, place] for each in (arrived, q, *others)]
                if query.dtype.itemsize == 2 and length * query.shape[-1] ** 1.5 <= WIDE:
                    document = [each.float() for each in document]
                to_query, to_keys, to_values = _backward(*document, 0.0, True, scale=ctx.scale)
                found = to_query, to_keys.sum(1), to_values.sum(1)
            for grad, of_document in zip(grads, found, strict=True):
                grad[..., place, :] = of_document
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


def _places(lengths: list[int]) -> Iterator[tuple[slice, int]]:
    """(where a document is, its length) of those that have tokens."""
    start = 0
    for length in lengths:
        if length:
            yield slice(start, start + length), length
        start += length
