"""Causal attention of many documents on a GPU by one kernel: flash attention for rows of any length.

Source: https://docs.pytorch.org/docs/stable/nn.attention.varlen.html, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from swiftlite.models.attention.sinks import share_with_sinks, sink_gradients

LENGTH_STEP = 256  # cuDNN makes a plan for each shape, which must not be as many as there are lengths
LARGEST_HEAD, HEAD_STEP, AMPERE = 256, 8, (8, 0)  # of flash attention
ASKS_FOR_GROUPS = torch.__version__ >= "2.12"  # whether fewer heads of keys than of queries are an option of their own

_backward = torch.ops.aten._flash_attention_backward.default


class Row(NamedTuple):
    """How a row is divided. query_borders, key_borders: int32 `[documents + 1]`; longest: tokens of a document at most;
    window: tokens that a query sees, itself among them; scaling: of the scores."""

    query_borders: torch.Tensor
    key_borders: torch.Tensor
    longest: int
    window: int | None
    scaling: float | None

    @property
    def sides(self) -> tuple[int, int]:
        """How many tokens a query sees to its left and right, which says that attention is causal as well."""
        return -1 if self.window is None else self.window - 1, 0


def serves_varlen(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch's kernel for rows of documents takes such tensors: flash attention runs on Ampere and later, and
    has 16-bit types and heads of at most 256 in steps of 8. Latent attention's values are narrower than its keys, and
    are filled up."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    head = query.shape[-1]
    fits = value.shape[-1] <= head <= LARGEST_HEAD and head % HEAD_STEP == 0
    return fits and torch.cuda.get_device_capability(query.device) >= AMPERE


def attend_by_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_borders: torch.Tensor,
    key_borders: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of the last tokens of each document to those up to them.

    query: `[1, heads, queries, head_dim]`; key, value: `[1, kv_heads, keys, ...]`; borders: of both; sinks: `[heads]`
    in fp32, or None. Returns `[1, queries, heads, value_dim]`.
    """
    width = value.shape[-1]
    value = value if width == query.shape[-1] else F.pad(value, (0, query.shape[-1] - width))
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    row = Row(query_borders, key_borders, longest, window, scaling)
    if sinks is None and _are_alike(query, row):
        output = _attend_side_by_side(query, key, value, row)
    elif sinks is None:
        output, _ = _attend(query, key, value, row)
    else:
        output = _WithSinks.apply(query, key, value, sinks, row)
    return output[None, ..., :width]


def _are_alike(query: torch.Tensor, row: Row) -> bool:
    """Whether documents of one length fill the row, as windows of text do. query: `[queries, heads, head_dim]`."""
    documents = row.query_borders.shape[0] - 1
    whole = row.query_borders is row.key_borders and row.window is None
    return whole and row.longest % LENGTH_STEP == 0 and documents * row.longest == query.shape[0]


def _attend_side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row) -> torch.Tensor:
    """Such documents as a batch, for which PyTorch has faster kernels (cuDNN's on Hopper). All `[tokens, heads,
    head_dim]`."""
    batch = [part.unflatten(0, (-1, row.longest)).transpose(1, 2) for part in (query, key, value)]
    options = {"is_causal": True, "scale": row.scaling, "enable_gqa": query.shape[1] > key.shape[1]}
    return F.scaled_dot_product_attention(*batch, **options).transpose(1, 2).flatten(0, 1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """(results `[queries, heads, head_dim]`, what each softmax divides by as a logarithm `[heads, queries]`)."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    options: dict[str, object] = {"enable_gqa": True} if ASKS_FOR_GROUPS and query.shape[1] > key.shape[1] else {}
    return varlen_attn(
        query, key, value, row.query_borders, row.key_borders, row.longest, row.longest,
        return_aux=AuxRequest(lse=True), scale=row.scaling, window_size=row.sides, **options,
    )  # fmt: skip


class _WithSinks(torch.autograd.Function):
    """PyTorch's own node for this kernel has no gradient of the logarithms."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, row: Row
    ) -> torch.Tensor:
        output, total = share_with_sinks(*_attend(query, key, value, row), sinks)
        ctx.save_for_backward(query, key, value, sinks, output, total, row.query_borders, row.key_borders)
        ctx.row = row.longest, row.window, row.scaling
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, total, query_borders, key_borders = ctx.saved_tensors
        row = Row(query_borders, key_borders, *ctx.row)
        left, right = row.sides
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        gradients = _backward(
            upstream.contiguous(), query, key, value, output, total, row.query_borders, row.key_borders, row.longest,
            row.longest, 0.0, row.window is None, *no_dropout, scale=row.scaling, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
        return *gradients, sink_gradients(upstream, output, total, sinks), None
