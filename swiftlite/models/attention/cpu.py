"""Causal attention of many documents on a CPU, as one node of autograd's graph.

One document after the other, in blocks (`swiftlite/models/attention/blocks.py`) or by PyTorch's kernel, as
`scaled_dot_product_attention` chooses it. What is kept for the backward pass are queries, keys, values and results as
they came, once: keys and values that several heads share are not copied for each of them, and the results lie in the
row that the next layer reads. Of documents in blocks weights are kept as well: such a document has at most four times a
head's size in tokens, so they take no more than two rows of states.

A document longer than a sliding window goes in tiles: the queries that see all before them, and then `TILE` at a time
with the keys that one of them sees. So its time grows with its length, not with the length's square.

In 16 bits the kernel's backward pass takes up to eight times as long as in fp32 where documents are short and heads
small, so there gradients are taken in fp32 (`scripts/measure_attention.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from swiftlite.models.attention.blocks import attend_in_blocks, block_gradients, gains_by_blocks
from swiftlite.models.attention.sinks import share_with_sinks, sink_gradients
from swiftlite.models.dtypes import added_in

# Tokens of a document x (a head's size)^1.5, up to which gradients in fp32 take less time than in 16 bits: 994 tokens
# with heads of 32, 351 with heads of 64, 124 with heads of 128.
WIDE = 180_000
TILE = 64  # queries behind the first window (`scripts/measure_attention.py`)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Tile(NamedTuple):
    """A part of the row's queries, and the keys that they see. mask: `[queries, keys]`, added to the scores; None where
    queries and keys are the same tokens, and each sees those up to itself."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None

    @property
    def length(self) -> int:
        return self.keys.stop - self.keys.start


def attend_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: list[int],
    keys: list[int],
    scaling: float | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of each document (of all, or of none) to those up to them.

    query: `[1, heads, tokens, head_dim]`; key, value: `[1, kv_heads, key_tokens, head_dim]`; queries, keys: how many of
    them each document has; window: tokens that a query sees, itself among them; sinks: `[heads]` in fp32 at least
    (`swiftlite/models/attention/sinks.py`). Values may be narrower than keys. Returns `[1, tokens, heads, value_dim]`.
    """
    size, width = query.shape[-1], value.shape[-1]
    value = value if width == size else F.pad(value, (0, size - width))  # the kernel takes heads of one size
    tiles = list(_tiles(queries, keys, window, query.dtype))
    output = _ByDocument.apply(query, key, value, sinks, tiles, size**-0.5 if scaling is None else scaling)
    return output[..., :width]


class _ByDocument(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        tiles: list[Tile],
        scale: float,
    ) -> torch.Tensor:
        _, heads, tokens, size = query.shape
        output = query.new_empty(1, tokens, heads, size)
        logsums = query.new_empty(heads, tokens, dtype=added_in(query.dtype))
        q, k, v, out, sums = _grouped(query, key, value, output, logsums)
        # Selective checkpointing keeps the results of single operations, and knows PyTorch's kernel for one.
        ctx.written_out = query.dtype == torch.float32 and sinks is None and not is_in_torch_dispatch_mode()
        kept: list[torch.Tensor] = []
        for tile in tiles:
            rows, columns, mask = tile
            if ctx.written_out and mask is None and gains_by_blocks(tile.length, size):
                document = q[:, :, rows], key[0, :, columns], value[0, :, columns]
                for weights in attend_in_blocks(*document, scale, out[:, :, rows]):
                    kept += [weights] if any(ctx.needs_input_grad) else []
            else:
                states = q[:, :, rows], k[:, :, columns], v[:, :, columns]
                attended = _forward(*states, 0.0, mask is None, attn_mask=mask, scale=scale)
                out[:, :, rows], sums[:, :, rows] = attended
        if sinks is not None:
            output, logsums = share_with_sinks(output, logsums, sinks)
        ctx.save_for_backward(query, key, value, output, logsums, sinks, *kept)
        ctx.tiles, ctx.scale = tiles, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsums, sinks, *kept = ctx.saved_tensors
        q, k, v, out, sums = _grouped(query, key, value, output, logsums)
        arrived, weights = _rows_of_groups(upstream, key.shape[1]), iter(kept)
        to_query, to_key, to_value = (torch.empty_like(each) for each in (query, key, value))
        # Windows overlap; and keys of a document without queries are in no tile.
        in_tiles = sum(tile.length for tile in ctx.tiles)
        each_once = in_tiles == key.shape[2] and all(tile.mask is None for tile in ctx.tiles)
        if not each_once:
            to_key, to_value = (torch.zeros_like(each, dtype=added_in(each.dtype)) for each in (key, value))
        for tile in ctx.tiles:
            rows, columns, mask = tile
            if ctx.written_out and mask is None and gains_by_blocks(tile.length, query.shape[-1]):
                document = arrived[:, :, rows], q[:, :, rows], key[0, :, columns], value[0, :, columns]
                found = block_gradients(*document, ctx.scale, weights)
            else:
                states = [each[:, :, rows] for each in (arrived, q)] + [each[:, :, columns] for each in (k, v)]
                states += [out[:, :, rows], sums[:, :, rows]]
                if query.dtype.itemsize == 2 and tile.length * query.shape[-1] ** 1.5 <= WIDE:
                    states, mask = [each.float() for each in states], mask if mask is None else mask.float()
                of_query, *of_keys = _backward(*states, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
                found = of_query, *(each.sum(1) for each in of_keys)
            to_query[0].unflatten(0, q.shape[:2])[..., rows, :] = found[0]
            for grad, of_tile in zip((to_key[0], to_value[0]), found[1:], strict=True):
                if each_once:
                    grad[..., columns, :] = of_tile
                else:
                    grad[..., columns, :] += of_tile
        to_sinks = None if sinks is None else sink_gradients(upstream, output, logsums, sinks)
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_sinks, None, None


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


def _tiles(queries: list[int], keys: list[int], window: int | None, dtype: torch.dtype) -> Iterator[Tile]:
    """Those of all documents that have queries."""
    start = key_start = 0
    for count, key_count in zip(queries, keys, strict=True):
        before = key_count - count
        for begin, end, first_key, mask in _parts(count, before, window, dtype) if count else ():
            shown = slice(key_start + first_key, key_start + before + end)
            yield Tile(slice(start + begin, start + end), shown, mask)
        start, key_start = start + count, key_start + key_count


def _parts(
    count: int, before: int, window: int | None, dtype: torch.dtype
) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
    """(first query, the one behind the last, first key, mask) of the tiles of a document. before: tokens that have no
    queries here."""
    first = 0
    if not before:
        first = min(count, window or count)
        yield 0, first, 0, None
    elif window is None:
        yield 0, count, 0, torch.full((count, before + count), -math.inf, dtype=dtype).triu_(before + 1)
    for begin in range(first, count if window else 0, TILE):
        end = min(begin + TILE, count)
        unseen = before + begin - window + 1  # keys before those that the first query sees; less than none at the start
        band = _band(window, dtype)[: end - begin]
        yield begin, end, max(unseen, 0), band[:, max(-unseen, 0) : before + end - unseen]


@functools.lru_cache(maxsize=8)
def _band(window: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where one of `TILE` queries sees a key, -inf elsewhere. The first key is the first one that the first query
    sees. Returns `[TILE, TILE + window - 1]`."""
    seen = torch.ones(TILE, TILE + window - 1, dtype=torch.bool).triu().tril(window - 1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
