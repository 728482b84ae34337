"""Packs of token sequences -> one padding-free micro-batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from swiftlite.data.order import Pack

IGNORED = -100


@dataclass(frozen=True)
class MicroBatch:
    """The documents of some packs laid end to end; T tokens, D documents, no padding.

    input_ids, position_ids: int64 `[1, T]`, positions restart at 0 in each document.
    labels: int64 `[1, T]`, already shifted: the token to predict at this place, -100 where there is none to learn.
    cu_seqlens: int32 `[D + 1]`, document borders; max_document: tokens of the longest; where: the rows, `file:line`.
    context: None, or `parallel.context.Context` where the tokens are one rank's slice of the row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    max_document: int
    tokens: int
    trained_tokens: int
    where: list[str]
    context: object | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on a device."""
        if device == self.input_ids.device:
            return self
        moved = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in (
                ("input_ids", self.input_ids),
                ("position_ids", self.position_ids),
                ("labels", self.labels),
                ("cu_seqlens", self.cu_seqlens),
            )
        }
        return replace(self, **moved)


def collate(packs: Sequence[Pack]) -> MicroBatch:
    """Lay the documents of the packs end to end, with shifted labels that never cross a document."""
    documents = [document for pack in packs for document in pack]
    lengths = [len(document.input_ids) for document in documents]
    borders = np.zeros(len(documents) + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    ids = np.concatenate([document.input_ids for document in documents]).astype(np.int64)
    trained = np.concatenate([document.trained for document in documents])
    trained[borders[:-1]] = False  # the first token of a document has nothing before it that could predict it
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(trained[1:], ids[1:], IGNORED)
    positions = np.arange(len(ids)) - np.repeat(borders[:-1], lengths)
    return MicroBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        labels=torch.from_numpy(labels)[None],
        cu_seqlens=torch.from_numpy(borders),
        max_document=max(lengths),
        tokens=len(ids),
        trained_tokens=int(trained.sum()),
        where=[document.where for document in documents],
    )


def empty_micro_batch() -> MicroBatch:
    """One token that is not learnt and counts for nothing: for a rank that has to take part without rows of its own."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(
        input_ids=zero,
        position_ids=zero,
        labels=torch.full((1, 1), IGNORED),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_document=1,
        tokens=0,
        trained_tokens=0,
        where=[],
    )
