"""Attention of one document as its definition writes it, for what no kernel has: soft-capped scores (Gemma 2).

A block of queries at a time, with the keys that one of them sees; the backward pass computes the scores again. So
nothing of the size `[queries, keys]` exists. Where weights are dropped out, all of it is one block, which is kept.

Source: https://arxiv.org/abs/1706.03762 (section 3.2.1), https://arxiv.org/abs/2408.00118 (section 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from swiftlite.models.dtypes import added_in

BLOCK = 128  # queries


class Scores(NamedTuple):
    """What becomes of a query's products with keys. window: tokens that it sees, itself among them."""

    scaling: float
    window: int | None
    softcap: float | None
    dropout: float


def attend_written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Attention of a document's last tokens to those up to them.

    query: `[1, heads, queries, head_dim]`; key, value: `[1, heads, keys, ...]`; sinks: `[heads]`, in fp32 at least: one
    learned score more for each softmax, without a value (gpt-oss). Returns `[1, heads, queries, value_dim]`.
    """
    if scores.dropout:
        return _write(query, key, value, sinks, scores)
    return _InBlocks.apply(query, key, value, sinks, scores)


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        scores: Scores,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.scores = scores
        output = value.new_empty(*query.shape[:3], value.shape[3])
        for rows, seen in _blocks(query.shape[2], key.shape[2], scores.window):
            output[:, :, rows] = _write(query[:, :, rows], key[:, :, seen], value[:, :, seen], sinks, scores)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        to_query = torch.empty_like(query)
        to_key, to_value = (torch.zeros_like(each, dtype=added_in(each.dtype)) for each in (key, value))
        to_sinks = None if sinks is None else torch.zeros_like(sinks)
        for rows, seen in _blocks(query.shape[2], key.shape[2], ctx.scores.window):
            block = query[:, :, rows], key[:, :, seen], value[:, :, seen], *([] if sinks is None else [sinks])
            block = [each.detach().requires_grad_() for each in block]
            with torch.enable_grad():
                attended = _write(*block[:3], block[3] if len(block) > 3 else None, ctx.scores)
            found = torch.autograd.grad(attended, block, upstream[:, :, rows])
            to_query[:, :, rows] = found[0]
            to_key[:, :, seen] += found[1]
            to_value[:, :, seen] += found[2]
            if sinks is not None:
                to_sinks += found[3]
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_sinks, None


def _blocks(queries: int, keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys that one of them sees). The queries are the last of the document's tokens."""
    before = keys - queries
    for begin in range(0, queries, BLOCK):
        end = min(begin + BLOCK, queries)
        yield slice(begin, end), slice(max(0, before + begin - window + 1) if window else 0, before + end)


def _write(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    scaling, window, softcap, dropout = scores
    weights = (query * (scaling / (softcap or 1))) @ key.transpose(2, 3)
    if softcap is not None:
        weights = torch.tanh(weights) * softcap
    queries, keys = query.shape[2], key.shape[2]
    weights = weights.masked_fill(~visible(queries, keys, window, query.device), float("-inf"))
    weights = weights.to(added_in(weights.dtype))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(1, -1, queries, 1)
        weights = torch.cat([weights, column], dim=-1)
    weights = weights.softmax(-1)[..., :keys].to(value.dtype)
    return F.dropout(weights, p=dropout, training=dropout > 0) @ value


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a query may look: itself and the `window - 1` tokens before it (transformers' count).

    The queries are the last of `keys` tokens. Returns `[queries, keys]`.
    """
    positions = torch.arange(keys, device=device)
    distance = positions[keys - queries :, None] - positions[None, :]
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)
