"""Causal attention of one document in fp32 on a CPU, in blocks of queries: products, a softmax and products again.

PyTorch's kernel for a CPU multiplies matrices of 32 or 64 queries of one head at a time. Here a block has all heads,
and the library that multiplies matrices gets them as one batch. Keys behind a block's last query are left out.

Source: https://arxiv.org/abs/1706.03762 (section 3.2.1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

BLOCK = 128  # queries at most
# Where it takes less time than PyTorch's kernel (`scripts/measure_attention.py`): heads, and documents in tokens.
SMALLEST_HEAD, SHORTEST, LONGEST = 128, 96, 512

_softmax_backward = torch.ops.aten._softmax_backward_data.out


def gains_by_blocks(tokens: int, size: int) -> bool:
    """Whether attention of a document of so many tokens, with heads of a size, is faster here than PyTorch's kernel."""
    return size >= SMALLEST_HEAD and SHORTEST <= tokens <= LONGEST


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, output: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Write the attention of one document to `output`, of the query's shape, block by block. Yields each block's
    weights, `[kv_heads, queries x groups, keys]`.

    query: `[kv_heads, groups, tokens, size]`, where `groups` heads share a head of key and value, `[kv_heads, tokens,
    size]`; scale: of the scores.
    """
    query = _by_token(query).mul_(scale)
    for rows in _blocks(query.shape[1]):
        weights = _weights(query, key, rows)
        output[:, :, rows] = _by_group(torch.bmm(weights, value[:, : rows.stop]), query)
        yield weights


def block_gradients(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    kept: Iterator[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, of their shapes. upstream: that of the results; kept: begins with the
    blocks' weights, which are taken from it; the rest as `attend_in_blocks` took it."""
    query, upstream = _by_token(query).mul_(scale), _by_token(upstream)
    to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows in _blocks(query.shape[1]):
        weights = next(kept)
        arrived = upstream[:, rows].flatten(1, 2)
        to_value[:, : rows.stop] += torch.bmm(weights.mT, arrived)
        to_scores = torch.bmm(arrived, value[:, : rows.stop].mT)
        _softmax_backward(to_scores, weights, -1, weights.dtype, grad_input=to_scores)
        to_key[:, : rows.stop] += torch.bmm(to_scores.mT, query[:, rows].flatten(1, 2))
        to_query[:, rows] = torch.bmm(to_scores, key[:, : rows.stop]).view_as(to_query[:, rows])
    return to_query.mul_(scale).transpose(1, 2), to_key, to_value


def _blocks(tokens: int) -> Iterator[slice]:
    """The queries in blocks of about the same size."""
    count = -(-tokens // BLOCK)
    for block in range(count):
        yield slice(block * tokens // count, (block + 1) * tokens // count)


def _weights(query: torch.Tensor, key: torch.Tensor, rows: slice) -> torch.Tensor:
    """`[kv_heads, queries x groups, keys]` of a block. query: `[kv_heads, tokens, groups, size]`, scaled."""
    kv_heads, queries, groups, _ = query[:, rows].shape
    scores = torch.bmm(query[:, rows].flatten(1, 2), key[:, : rows.stop].mT)
    future = scores.new_full((queries, queries), -math.inf).triu_(1)
    scores.view(kv_heads, queries, groups, -1)[..., rows] += future[:, None]
    return torch.softmax(scores, -1, out=scores)


def _by_token(rows: torch.Tensor) -> torch.Tensor:
    """A copy of `[kv_heads, groups, tokens, size]` as `[kv_heads, tokens, groups, size]`: a block's queries are rows of
    one matrix there, for each head of keys."""
    return rows.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _by_group(block: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, queries x groups, size]` as `[kv_heads, groups, queries, size]`."""
    return block.unflatten(1, (-1, query.shape[2])).transpose(1, 2)
