"""Context parallelism: the tokens of one packed row divided over the `cp` ranks, attention exact over all of them.

Each rank runs the model on a contiguous slice of every row. Only attention looks beyond it:

- at least as many query heads as ranks: all-to-all from slices of tokens to shares of heads, attention over the whole
  row, and back (DeepSpeed Ulysses, arXiv 2309.14509). The shares may be uneven, and key/value heads travel only to the
  ranks whose queries read them. Every rank works on the whole row, so causal masks leave nobody idle.
- fewer: keys and values of the row are gathered, and each rank's queries attend to what stands before them (Llama 3,
  arXiv 2407.21783, section 3.3.2). Contiguous slices make the last rank's work the longest.

Both have exact backwards; losses are local sums, and gradients are summed over `cp` with the other data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from swiftlite.errors import UserError
from swiftlite.models.anatomy import attention_heads
from swiftlite.models.attention import attend_row
from swiftlite.models.rotary import LONGROPE, length_limits
from swiftlite.parallel.exchange import exchange, gather_rows, sum_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.layout import Layout
    from swiftlite.data.batches import MicroBatch
    from swiftlite.models.attention import Attend, SharedKeys


@dataclass(frozen=True)
class Context:
    """One packed row that the ranks of a group hold in contiguous slices. tokens: of the row, without padding."""

    group: dist.ProcessGroup
    tokens: int

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def whole_row(self, values: torch.Tensor) -> torch.Tensor:
        """The row's values `[tokens, ...]` from each rank's `[slice, ...]`; the padding at the tail is dropped.

        Gradients of all ranks are summed, so a loss that each rank makes of the whole row is divided by `size`.
        """
        return gather_rows(values, self.group)[: self.tokens]

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank has of some numbers; its gradient, alike on all ranks, is that of each part."""
        return sum_parts(parts, self.group)

    @torch.compiler.disable  # collectives inside autograd functions: the compiled layer is cut here
    def attend(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        borders: torch.Tensor,
        sinks: torch.Tensor | None,
        shared: SharedKeys | None,
    ) -> torch.Tensor:
        """Attention of this rank's slice of the row.

        attend: attention on one process; query: `[1, heads, slice, head_dim]`; key, value: `[1, kv_heads, slice, ...]`;
        borders: int32 `[documents + 1]`, of the whole padded row; sinks: `[heads]` or None; shared: keys that documents
        share, by their place in that row. Returns `[1, slice, heads, value_dim]`.
        Raises UserError where documents share keys and there are fewer heads than ranks.
        """
        if query.shape[1] >= self.size:
            return self._over_heads(attend, query, key, value, borders, sinks, shared)
        if shared is not None:
            raise _too_few_heads(query.shape[1], self.size)
        return self._over_tokens(attend, query, key, value, borders, sinks)

    def _over_heads(self, attend, query, key, value, borders, sinks, shared):  # noqa: ANN001, ANN202
        shares = divide_heads(query.shape[1], key.shape[1], self.size)
        mine, slice_tokens = shares[self.rank], query.shape[2]
        rows = [_pack(query[:, s.queries], key[:, s.keys], value[:, s.keys]) for s in shares]
        heads = len(mine.key_of_query), mine.keys.stop - mine.keys.start
        shapes = ((heads[0], query.shape[3]), (heads[1], key.shape[3]), (heads[1], value.shape[3]))
        width = sum(number * dim for number, dim in shapes)
        packed = exchange(
            torch.cat([row.flatten() for row in rows]),
            [row.numel() for row in rows],
            [slice_tokens * width] * self.size,
            self.group,
        )
        query, key, value = _unpack(packed.view(self.size * slice_tokens, width), shapes)
        if not mine.is_regular:
            key, value = key[:, mine.key_of_query], value[:, mine.key_of_query]
        sinks = None if sinks is None else sinks[mine.queries]
        output = attend_row(attend, query, key, value, borders, sinks, shared)
        width = slice_tokens * output.shape[3]
        parts = [len(share.key_of_query) for share in shares]
        output = exchange(
            output.flatten(), [len(mine.key_of_query) * width] * self.size, [n * width for n in parts], self.group
        )
        parts = zip(output.split([n * width for n in parts]), parts, strict=True)
        return torch.cat([part.view(1, slice_tokens, number, -1) for part, number in parts], dim=2)

    def _over_tokens(self, attend, query, key, value, borders, sinks):  # noqa: ANN001, ANN202
        slice_tokens = query.shape[2]
        start, stop = self.rank * slice_tokens, (self.rank + 1) * slice_tokens
        shapes = tuple((x.shape[1], x.shape[3]) for x in (key, value))
        key, value = _unpack(gather_rows(_pack(key, value), self.group)[:stop], shapes)
        # Documents before the slice have no queries here, those behind it neither queries nor keys.
        return attend(query, key, value, borders.clamp(start, stop) - start, borders.clamp(max=stop), sinks)


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. key_of_query: for each of its query heads the key head, counted from `keys.start`."""

    queries: slice
    keys: slice
    key_of_query: list[int]

    @property
    def is_regular(self) -> bool:
        """Whether the query heads form equal groups, one a key head, as grouped-query attention wants them."""
        keys = self.keys.stop - self.keys.start
        groups, rest = divmod(len(self.key_of_query), keys)
        return not rest and self.key_of_query == [head // groups for head in range(len(self.key_of_query))]


def divide_heads(heads: int, kv_heads: int, size: int) -> list[HeadShare]:
    """Heads in contiguous shares that differ by one at most, each with the key/value heads that it reads."""
    shares, start = [], 0
    for rank in range(size):
        stop = start + heads // size + (rank < heads % size)
        keys = [head * kv_heads // heads for head in range(start, stop)]
        shares.append(HeadShare(slice(start, stop), slice(keys[0], keys[-1] + 1), [key - keys[0] for key in keys]))
        start = stop
    return shares


def _pack(*tensors: torch.Tensor) -> torch.Tensor:
    """Tensors `[1, heads, tokens, dim]` side by side -> `[tokens, sum of heads * dim]`."""
    return torch.cat([tensor[0].transpose(0, 1).flatten(1) for tensor in tensors], dim=1)


def _unpack(rows: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    parts = rows.split([heads * dim for heads, dim in shapes], dim=1)
    return [
        part.view(1, len(rows), heads, dim).transpose(1, 2) for part, (heads, dim) in zip(parts, shapes, strict=True)
    ]


def slice_for_context(batch: MicroBatch, group: dist.ProcessGroup | None) -> MicroBatch:
    """This rank's contiguous slice of a micro-batch; all of it where there is no group.

    The row is padded to a multiple of the ranks by a document of its own without labels. `input_ids`, `position_ids`
    and `labels` become `[1, slice]`, `learnt` and `owner` those of the slice's labels, and the counts of
    tokens those of the slice, without padding: summed over the group they are the row's. Borders, keys, `max_document`
    and `completions` go on describing the whole row.
    """
    if group is None:
        return batch
    rank, size, tokens = dist.get_rank(group), dist.get_world_size(group), batch.input_ids.shape[1]
    length = -(-tokens // size)
    row = batch.padded_to(length * size)
    part = slice(rank * length, (rank + 1) * length)
    first, last = torch.searchsorted(row.learnt, torch.tensor([part.start, part.stop])).tolist()
    return replace(
        row,
        input_ids=row.input_ids[:, part],
        position_ids=row.position_ids[:, part],
        labels=row.labels[:, part],
        learnt=row.learnt[first:last] - part.start,
        owner=None if row.owner is None else row.owner[first:last],
        tokens=max(0, min(batch.tokens - part.start, length)),
        trained_tokens=last - first,
        context=Context(group, tokens),
    )


def check_context_parallel(model_config: PretrainedConfig, layout: Layout, max_length: int) -> None:
    """Refuse by name what context parallelism would compute wrongly. max_length: tokens of the longest document.

    Raises UserError.
    """
    if layout.cp == 1:
        return
    for kind, limit in length_limits(model_config):
        if max_length > limit:
            raise UserError(
                f"{model_config.model_type} scales its rotary embedding ({kind}) by the length of a document once that "
                f"is beyond {limit}; ranks that each hold a part of it would disagree",
                where=f"--context-parallel-size {layout.cp}, --max-length {max_length}",
                fix=f"use --context-parallel-size 1, or --max-length {limit}",
            )


def check_shared_prompts(model_config: PretrainedConfig, layout: Layout, max_length: int) -> None:
    """Refuse prompts that two answers share where attention cannot be divided by heads, or where the length of each
    answer may scale the prompt's rotary embedding otherwise. Raises UserError."""
    heads = attention_heads(model_config.get_text_config()) // layout.tp
    if heads < layout.cp:
        raise _too_few_heads(heads, layout.cp)
    for kind, limit in length_limits(model_config):
        if kind == LONGROPE and max_length > limit:
            raise UserError(
                f"{model_config.model_type} scales its rotary embedding ({kind}) by the length of a document once that "
                f"is beyond {limit}, so a long answer and a short one cannot share their prompt",
                where=f"--max-length {max_length}",
                fix=f"add --no-share-prompt, or use --max-length {limit}",
            )


def _too_few_heads(heads: int, ranks: int) -> UserError:
    return UserError(
        f"a prompt that two answers share needs as many attention heads as context ranks: {heads} of {ranks}",
        fix="add --no-share-prompt, or lower --context-parallel-size",
    )
