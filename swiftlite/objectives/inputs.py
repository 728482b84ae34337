"""What a model is called with: a row of packed documents, a document alone, or a few tokens to try it with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from swiftlite.models.attention.documents import lengths_between

if TYPE_CHECKING:
    from swiftlite.data.batches import MicroBatch


def decoder_inputs(batch: MicroBatch | Probe, hidden: torch.Tensor | None = None) -> dict[str, object]:
    """What decoder and model are called with; attention finds the documents' borders among it."""
    entering = {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    return entering | {
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "use_cache": False,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens if batch.key_index is None else batch.key_cu_seqlens,
        "key_index": batch.key_index,
        "max_length_q": batch.max_document,
        "max_length_k": batch.max_document,
        "context": batch.context,
    }


def one_document(batch: MicroBatch | Probe) -> dict[str, object]:
    """What decoder and model are called with where a row is one document: what every architecture knows."""
    return {"input_ids": batch.input_ids, "use_cache": False}


class Document(NamedTuple):
    """input_ids: `[1, n]`, with the prompt before them that an answer goes on from; tokens: its own, the last of these;
    is_run: not the prompt of answers that follow, which is part of each of them."""

    input_ids: torch.Tensor
    tokens: int
    is_run: bool


def side_by_side(noise: torch.Tensor, runs: list[torch.Tensor]) -> torch.Tensor:
    """`MicroBatch.noise` of rows of their own, `[3, rows, longest]`."""
    pieces = noise.T.split([len(run) for run in runs])
    return pad_sequence(list(pieces), batch_first=True, padding_value=1).permute(2, 0, 1)


def documents_of(batch: MicroBatch | Probe) -> list[Document]:
    """The documents of a row, one by one."""
    lengths = lengths_between(batch.cu_seqlens)
    if batch.key_index is None:
        pieces = batch.input_ids.split(lengths, dim=1)
        return [Document(ids, length, is_run=True) for ids, length in zip(pieces, lengths, strict=True)]
    spans = lengths_between(batch.key_cu_seqlens)
    pieces = batch.input_ids[:, batch.key_index].split(spans, dim=1)
    goes_on = [own < keys for own, keys in zip(lengths, spans, strict=True)]
    is_prompt = [follows and not answer for answer, follows in pairwise([*goes_on, False])]
    return [Document(ids, own, not prompt) for ids, own, prompt in zip(pieces, lengths, is_prompt, strict=True)]


@dataclass(frozen=True)
class Probe:
    """The part of a micro-batch that is read here, of two documents of 3 and 5 tokens."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    learnt: torch.Tensor
    cu_seqlens: torch.Tensor
    max_document: int = 5
    context: None = None
    key_index: None = None
    noise: None = None
    taught: None = None

    def second(self) -> Probe:
        """The second document alone."""
        return replace(self._tokens(slice(3, None)), learnt=self.learnt[:5], cu_seqlens=self.cu_seqlens[1:] - 3)

    def first(self, tokens: int) -> Probe:
        """Of one document the beginning."""
        return replace(
            self._tokens(slice(tokens)), learnt=self.learnt[:tokens], cu_seqlens=self.cu_seqlens.clamp(max=tokens)
        )

    def _tokens(self, place: slice) -> Probe:
        parts = {name: getattr(self, name)[:, place] for name in ("input_ids", "position_ids", "labels")}
        return replace(self, **parts)


def make_probe(vocabulary: int, device: torch.device) -> Probe:
    ids = (torch.arange(8, device=device) * 7 + 3).remainder(vocabulary)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device)
    borders = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    return Probe(ids, positions, ids, torch.arange(8, device=device), borders)
