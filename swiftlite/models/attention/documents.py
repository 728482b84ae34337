"""Attention for documents laid end to end, without padding and without a mask.

A micro-batch is one row `[1, tokens]` in which documents follow each other. Their borders travel through the model's
own keyword arguments (`cu_seq_lens_q`, the name transformers gives to them for flash attention) to one function
registered with transformers' attention interface:

- CUDA, fp16 and bf16: one kernel for all documents (`swiftlite/models/attention/varlen.py`);
- CPU: document by document, which is the fastest there, as one node of autograd's graph
  (`swiftlite/models/attention/cpu.py`);
- everywhere else: scaled dot product attention, document by document; and where it lacks something, logit soft-capping
  or attention sinks (both kernels above have those), the same arithmetic written out
  (`swiftlite/models/attention/written.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from swiftlite.errors import UserError
from swiftlite.models.attention.cpu import attend_by_document
from swiftlite.models.attention.varlen import attend_by_varlen, serves_varlen
from swiftlite.models.attention.written import Scores, attend_written_out, visible
from swiftlite.models.dtypes import added_in

NAME = "swiftlite_documents"

# (query, key, value, borders of the queries, borders of the keys, sinks) -> `[1, queries, heads, value_dim]`
Attend = Callable[..., torch.Tensor]


class SharedKeys(NamedTuple):
    """Keys that several documents of a row share. index: int64 `[K]`, the places of the keys in the row, document by
    document; borders: int32 `[documents + 1]`, of the keys."""

    index: torch.Tensor
    borders: torch.Tensor


class ContextOfRow(Protocol):
    """How a row that several processes hold in slices is attended to: `swiftlite.parallel.context.Context`.

    attend: takes what `attend_row` takes; borders and shared keys are those of the whole row.
    """

    attend: Callable[..., torch.Tensor]


def register() -> str:
    """Register the attention function and a mask function that makes no mask. Returns the name to ask for."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


@dataclass
class Windows:
    """asked: those of the masks that a decoder had made; given: those that its layers handed to attention."""

    asked: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)


_noted = Windows()


@contextlib.contextmanager
def noted_windows() -> Iterator[Windows]:
    """A context: which sliding windows a forward pass in it has. No mask is made of them here, so a layer that relies
    on one alone would see everything. For one thread at a time."""
    _noted.asked, _noted.given = set(), set()
    yield _noted


def _no_mask(*_args: object, local_size: int | None = None, **_kwargs: object) -> None:
    """Borders come as `cu_seq_lens_q`, so no `[tokens, tokens]` mask is ever built."""
    if local_size is not None:
        _noted.asked.add(local_size)


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    key_index: torch.Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    context: ContextOfRow | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document.

    query: `[1, heads, tokens, head_dim]`; key, value: `[1, kv_heads, tokens, head_dim]`; cu_seq_lens_q: int32
    `[documents + 1]`, the borders; max_length_q: tokens of the longest document, shared ones counted in; context: given
    where the tokens are one process's slice of the row that the borders describe.
    key_index: int64 `[K]`, given where documents go on from a shared prompt: the places in the row of each document's
    keys, of which its queries are the last; cu_seq_lens_k: then their borders.
    Returns `[1, tokens, heads, head_dim]`.
    Raises UserError where the model does not hand the borders over or wants another attention than causal.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as transformers' own functions do
    if cu_seq_lens_q is None or attention_mask is not None or not causal or query.shape[0] != 1:
        raise UserError(
            f"{type(module).__name__} calls its attention in a way that cannot keep packed documents apart",
            fix="use a decoder-only model whose attention passes keyword arguments on to transformers' interface",
        )
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding leaves q and k in fp32 beside a bf16 v
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    window = sliding_window if sliding_window and max_length_q is not None and sliding_window < max_length_q else None
    if sliding_window:
        _noted.given.add(sliding_window)
    if serves_varlen(query, value) and not dropout and softcap is None:
        attend = functools.partial(attend_by_varlen, longest=max_length_q, scaling=scaling, window=window)
    else:
        attend = functools.partial(_by_document, scaling=scaling, dropout=dropout, window=window, softcap=softcap)
    sinks = None if s_aux is None else s_aux.to(added_in(s_aux.dtype))
    shared = None if key_index is None else SharedKeys(key_index, cu_seq_lens_k)
    run = attend_row if context is None else context.attend
    return run(attend, query, key, value, cu_seq_lens_q, sinks, shared), None


def attend_row(
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    sinks: torch.Tensor | None,
    shared: SharedKeys | None,
) -> torch.Tensor:
    """Attention where all of the row is in this process. query: `[1, heads, tokens, head_dim]`; returns the same shape
    with tokens before heads."""
    if shared is None:
        return attend(query, key, value, borders, borders, sinks)
    key, value = key.index_select(2, shared.index), value.index_select(2, shared.index)
    return attend(query, key, value, borders, shared.borders, sinks)


_lengths: MutableMapping[torch.Tensor, list[int]] = WeakTensorKeyDictionary()


def lengths_between(borders: torch.Tensor) -> list[int]:
    """Tokens of each document. Read once, not for each layer: whoever reads a GPU waits for all that it has to do."""
    if borders not in _lengths:
        _lengths[borders] = torch.diff(borders).tolist()
    return _lengths[borders]


@torch.compiler.disable  # one call for each document, so how many depends on the data: a compiled layer is cut here
def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_borders: torch.Tensor,
    key_borders: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of the last tokens of each document (of all, or of none) to those up to them."""
    queries, keys = lengths_between(query_borders), lengths_between(key_borders)
    if query.device.type == "cpu" and not dropout and softcap is None and value.shape[-1] <= query.shape[-1]:
        return attend_by_document(query, key, value, queries, keys, scaling, window, sinks)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    pieces = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    pieces = [piece for piece, count in zip(pieces, queries, strict=True) if count]
    if softcap is None and sinks is None:
        outputs = [_one_document(q, k, v, scaling, dropout, window) for q, k, v in pieces]
    else:
        scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, dropout)
        outputs = [attend_written_out(q, k, v, sinks, scores) for q, k, v in pieces]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


def _one_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys and (window is None or keys <= window):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling)
    mask = visible(queries, keys, window, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
