"""Context parallelism: the tokens of one packed row divided over the `cp` ranks, attention exact over all of them.

Each rank runs the model on a share of every row, most of it whole documents (`parallel/division.py`), and attends to
those by itself. Attention to documents that lie on several ranks:

- at least as many query heads as ranks: all-to-all from slices of tokens to shares of heads, attention over whole
  documents, and back (DeepSpeed Ulysses, arXiv 2309.14509). The shares may be uneven, and key/value heads travel only
  to the ranks whose queries read them. Every rank works on whole documents, so causal masks leave nobody idle.
- fewer: keys and values are gathered, and each rank's queries attend to what stands before them (Llama 3, arXiv
  2407.21783, section 3.3.2). The last rank's work is the longest.

Both have exact backwards; losses are local sums, and gradients are summed over `cp` with the other data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from swiftlite.errors import UserError
from swiftlite.models.attention.documents import attend_row
from swiftlite.models.rotary import LONGROPE, length_limits
from swiftlite.parallel.division import SLACK, Division, divide_evenly, divide_row
from swiftlite.parallel.exchange import exchange, gather_rows, sum_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.layout import Layout
    from swiftlite.data.batches import MicroBatch
    from swiftlite.models.attention.documents import Attend, SharedKeys


@dataclass(frozen=True)
class Context:
    """One packed row that the ranks of a group hold in slices. tokens: of the row, without padding."""

    group: dist.ProcessGroup
    tokens: int
    division: Division

    def to(self, device: torch.device) -> Context:
        """The same with its tensors on a device."""
        return replace(self, division=self.division.to(device))

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
        return gather_rows(values, self.group).index_select(0, self.division.found[: self.tokens])

    def in_slice(self, places: torch.Tensor) -> torch.Tensor:
        """Where in this rank's slice these places of the row are: beyond its ends, for those that others hold."""
        return self.division.found[places] - self.rank * len(self.division.places)

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
        _borders_in_row: torch.Tensor,
        sinks: torch.Tensor | None,
        shared: SharedKeys | None,
    ) -> torch.Tensor:
        """Attention of this rank's slice of the row.

        attend: attention on one process; query: `[1, heads, slice, head_dim]`; key, value: `[1, kv_heads, slice, ...]`;
        sinks: `[heads]` or None; shared: keys that documents share, by their place in the row.
        Returns `[1, slice, heads, value_dim]`.
        Raises UserError where documents share keys and there are fewer heads than ranks.
        """
        division, is_divisible = self.division, query.shape[1] >= self.size
        if shared is not None and not is_divisible:
            raise _too_few_heads(query.shape[1], self.size)
        if not sum(division.counts):
            return attend(query, key, value, division.own, division.own, sinks)
        together = partial(self._over_heads, keys=shared) if is_divisible else self._over_tokens
        if len(division.own) == 1:
            return together(attend, query, key, value, sinks)
        own_tokens = query.shape[2] - division.counts[self.rank]
        pieces = [x.tensor_split([own_tokens], dim=2) for x in (query, key, value)]
        own, divided = zip(*pieces, strict=True)
        own = attend(*own, division.own, division.own, sinks)
        return torch.cat([own, together(attend, *divided, sinks)], dim=1)

    def _over_heads(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        keys: SharedKeys | None,
    ) -> torch.Tensor:
        """As `attend`, each rank with a share of the heads over the whole row. keys: that documents share."""
        counts = self.division.counts
        shares = divide_heads(query.shape[1], key.shape[1], self.size)
        mine, tokens = shares[self.rank], query.shape[2]
        rows = [_pack(query[:, s.queries], key[:, s.keys], value[:, s.keys]) for s in shares]
        heads = len(mine.key_of_query), mine.keys.stop - mine.keys.start
        shapes = ((heads[0], query.shape[3]), (heads[1], key.shape[3]), (heads[1], value.shape[3]))
        width = sum(number * dim for number, dim in shapes)
        packed = exchange(
            torch.cat([row.flatten() for row in rows]),
            [row.numel() for row in rows],
            [count * width for count in counts],
            self.group,
        )
        query, key, value = _unpack(packed.view(sum(counts), width), shapes)
        if not mine.is_regular:
            key, value = key[:, mine.key_of_query], value[:, mine.key_of_query]
        sinks = None if sinks is None else sinks[mine.queries]
        output = attend_row(attend, query, key, value, self.division.shared, sinks, keys)
        dim, parts = output.shape[3], [len(share.key_of_query) for share in shares]
        receive = [tokens * number * dim for number in parts]
        output = exchange(output.flatten(), [count * heads[0] * dim for count in counts], receive, self.group)
        parts = zip(output.split(receive), parts, strict=True)
        return torch.cat([part.view(1, tokens, number, dim) for part, number in parts], dim=2)

    def _over_tokens(
        self, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """As `attend`, each rank with the queries of its slice over the keys before them."""
        counts, borders = self.division.counts, self.division.shared
        start, most = sum(counts[: self.rank]), max(counts)
        stop = start + counts[self.rank]
        shapes = tuple((x.shape[1], x.shape[3]) for x in (key, value))
        rows = F.pad(_pack(key, value), (0, 0, 0, most - counts[self.rank]))
        parts = zip(gather_rows(rows, self.group).split(most), counts, strict=True)
        key, value = _unpack(torch.cat([part[:count] for part, count in parts])[:stop], shapes)
        if start == stop:  # nothing to ask, but the others' backward sends gradients here
            return value[:, :1, :0].transpose(1, 2).expand(-1, -1, query.shape[1], -1)
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


def slice_for_context(
    batch: MicroBatch, group: dist.ProcessGroup | None, *, slice_tokens: int | None = None
) -> MicroBatch:
    """This rank's share of a micro-batch; all of it where there is no group.

    slice_tokens: of each rank, where that is settled; else as many as keep documents whole, or an even part.
    The row is padded by documents of their own without labels. `input_ids`, `position_ids` and `labels` become
    `[1, slice]`, `noise` `[3, slice]`, `learnt`, `owner`, `drawn` and `data_set` those of its labels, and the counts of
    tokens those of the slice, without padding: summed over the group they are the row's. Borders, keys, `max_document`
    and `completions` go on describing the whole row; `taught` is the slice's already.
    """
    if group is None:
        return batch
    tokens, size, rank = batch.input_ids.shape[1], dist.get_world_size(group), dist.get_rank(group)
    even = slice_tokens or -(-tokens // size)
    if batch.key_index is None:
        lengths = torch.diff(batch.cu_seqlens[batch.cu_seqlens <= batch.tokens]).tolist()  # without padding
        division = divide_row(lengths, size, rank, even, 0 if slice_tokens else int(even * SLACK))
        row = batch.padded_to(len(division.found))
    else:  # a pair's prompt and answers are documents that read one another
        row = batch.padded_to(even * size)
        division = divide_evenly(row.cu_seqlens, size, rank, even)
    learnt = torch.isin(division.places, row.learnt).nonzero().flatten()
    labels = torch.searchsorted(row.learnt, division.places[learnt])  # which of the row's
    return replace(
        row,
        input_ids=row.input_ids[:, division.places],
        position_ids=row.position_ids[:, division.places],
        labels=row.labels[:, division.places],
        learnt=learnt,
        owner=None if row.owner is None else row.owner[labels],
        drawn=None if row.drawn is None else row.drawn[labels],
        data_set=None if row.data_set is None else row.data_set[labels],
        noise=None if row.noise is None else row.noise[:, division.places],
        tokens=int((division.places < batch.tokens).sum()),
        trained_tokens=len(learnt),
        context=Context(group, tokens, division),
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
    heads = getattr(model_config.get_text_config(), "num_attention_heads", None)
    if heads and heads // layout.tp < layout.cp:  # a model without attention is refused for what it has instead
        raise _too_few_heads(heads // layout.tp, layout.cp)
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
