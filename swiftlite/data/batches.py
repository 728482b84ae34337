"""Packs of token sequences -> one padding-free micro-batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from swiftlite.data.order import Pack
from swiftlite.data.order import Sequence as Document

IGNORED = -100


@dataclass(frozen=True)
class Completions:
    """The C answers of a micro-batch that are compared, in the order of its tokens; of a pair the chosen one is first.

    pair: int64 `[C]`, which pair (or, of single answers, which row) it belongs to, counted from 0 in the micro-batch.
    chosen: bool `[C]`, whether it is the chosen one of its pair, or a single answer that is wanted.
    tokens: int64 `[C]`, its trained tokens. last: int64 `[C]`, the place of its last token in the row.
    margin: fp32 `[C]`, of its pair; of an answer of the model's own its advantage. identity: int64 `[C, 2]`, data set
    and sequence; -1 where there is none.
    reference: fp64 `[C]`, log p under the reference, None where that is not wanted or not known yet.
    """

    pair: torch.Tensor
    chosen: torch.Tensor
    tokens: torch.Tensor
    last: torch.Tensor
    margin: torch.Tensor
    identity: torch.Tensor
    reference: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.pair)

    @property
    def data_set(self) -> torch.Tensor:
        """int64 `[C]`, the number of the data set of each."""
        return self.identity[:, 0]

    def to(self, device: torch.device) -> Completions:
        """The same with its tensors on a device."""
        return replace(self, **_on(device, self))


@dataclass(frozen=True)
class Taught:
    """What a teacher says of a micro-batch's trained tokens, or of those of one rank's slice of it.

    ids: int64 `[trained tokens, k]`, the tokens that it finds likeliest at each place; probabilities: fp32 of the same
    shape, 1 in sum at each; weight: what they count beside the token of the text, which counts the rest of 1.
    """

    ids: torch.Tensor
    probabilities: torch.Tensor
    weight: float

    def to(self, device: torch.device) -> Taught:
        """The same with its tensors on a device."""
        return replace(self, **_on(device, self))

    def beside(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, what each counts), `[trained tokens, 1 + k]`. targets: the tokens of the text."""
        own = torch.full_like(self.probabilities[:, :1], 1 - self.weight)
        ids = torch.cat([targets[:, None], self.ids], dim=1)
        return ids, torch.cat([own, self.weight * self.probabilities], dim=1)

    def entropy(self) -> torch.Tensor:
        """Of the teacher's probabilities at each place, `[trained tokens]`."""
        return torch.special.entr(self.probabilities).sum(-1)


@dataclass(frozen=True)
class MicroBatch:
    """The documents of some packs laid end to end; T tokens, D documents, no padding.

    input_ids, position_ids: int64 `[1, T]`, positions restart at 0 in each document.
    labels: int64 `[1, T]`, already shifted: the token to predict at this place, -100 where there is none to learn.
    learnt: int64 `[trained tokens]`, the places that have one. cost: how much work it is, beside others of its step.
    cu_seqlens: int32 `[D + 1]`, document borders; max_document: tokens of the longest; where: the rows, `file:line`.
    context: None, or `parallel.context.Context` where the tokens are one rank's slice of the row.

    Two answers that share their prompt are three documents here, `P | C | R` (see `preference_tokens`), of which C and
    R go on from P: their positions do, and their keys begin with those of P.
    key_index: int64 `[K]`, the places in the row of the keys, document by document; key_cu_seqlens: int32 `[D + 1]`,
    their borders; both None where each document's keys are its own tokens. max_document counts the prompt in.
    completions: the answers that are compared, None for methods without; owner: int64 `[trained tokens]`, the answer
    of each label in the order of the labels.
    noise: int64 `[3, T]`, of each token the key of its document's noise, its position there and the document's tokens;
    None where embeddings get no noise.
    taught: what a teacher says of the trained tokens; None without one, or before it has been asked. reference,
    sampled: fp32 `[trained tokens]`, or those of one rank's slice: their log p under the reference, where a loss wants
    each, and when they were drawn, where that is not now. drawn: fp32 `[trained tokens]`, their log p where an engine
    has drawn them.
    data_set: int64 `[trained tokens]`, the number of the data set of each; None where there is one, and of answers that
    are compared.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    learnt: torch.Tensor
    cu_seqlens: torch.Tensor
    max_document: int
    tokens: int
    trained_tokens: int
    where: list[str]
    cost: float
    context: object | None = None
    key_index: torch.Tensor | None = None
    key_cu_seqlens: torch.Tensor | None = None
    owner: torch.Tensor | None = None
    completions: Completions | None = None
    noise: torch.Tensor | None = None
    taught: Taught | None = None
    reference: torch.Tensor | None = None
    sampled: torch.Tensor | None = None
    drawn: torch.Tensor | None = None
    data_set: torch.Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on a device."""
        return self if device == self.input_ids.device else replace(self, **_on(device, self))

    def padded(self, lengths: Sequence[int]) -> MicroBatch:
        """With further documents behind the others, of which nothing is learnt and which count as no tokens."""
        if not lengths:
            return self
        end, more = self.input_ids.shape[1], sum(lengths)
        steps = self.cu_seqlens.new_tensor(lengths).cumsum(0, dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.position_ids)
        keys = {}
        if self.key_index is not None:
            own = torch.arange(end, end + more).to(self.key_index)
            borders = torch.cat([self.key_cu_seqlens, self.key_cu_seqlens[-1] + steps])
            keys = {"key_index": torch.cat([self.key_index, own]), "key_cu_seqlens": borders}
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, more)),
            position_ids=torch.cat([self.position_ids, positions[None]], dim=1),
            labels=F.pad(self.labels, (0, more), value=IGNORED),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1] + steps]),
            max_document=max(self.max_document, *lengths),
            noise=None if self.noise is None else F.pad(self.noise, (0, more), value=1),
            **keys,
        )

    def padded_to(self, length: int, longest: int | None = None) -> MicroBatch:
        """With what further documents it takes to make the row so many tokens long.

        longest: tokens of one of them at most; None for no more than the longest of the row. So learnt positions exist
        for them, and `max_document` stays true.
        """
        more, longest = length - self.input_ids.shape[1], longest or self.max_document
        return self.padded([min(longest, more - begun) for begun in range(0, more, longest)])


def _on(device: torch.device, holder: MicroBatch | Completions | Taught) -> dict[str, object]:
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    moved = {name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, torch.Tensor)}
    return moved | {
        name: values[name].to(device) for name in ("completions", "context", "taught") if values.get(name) is not None
    }


class _Segment(NamedTuple):
    """A stretch of the row whose tokens attend to one another. start: its place; prompt: tokens of the segment right
    before those of its pair, which it goes on from; answer: whether it is, or ends with, an answer to compare."""

    start: int
    tokens: int
    prompt: range
    answer: bool


def collate(packs: Sequence[Pack]) -> MicroBatch:
    """Lay the documents of the packs end to end, with shifted labels that never cross a document."""
    documents = [document for pack in packs for document in pack]
    segments = _segments(documents)
    lengths = [segment.tokens for segment in segments]
    borders = np.zeros(len(segments) + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    ids = np.concatenate([document.input_ids for document in documents]).astype(np.int64)
    trained = np.concatenate([document.trained for document in documents])
    trained[borders[:-1]] = False  # the first token of a document has nothing before it that could predict it
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(trained[1:], ids[1:], IGNORED)
    before = np.asarray([len(segment.prompt) for segment in segments], dtype=np.int64)
    positions = np.arange(len(ids)) + np.repeat(before - borders[:-1], lengths)
    batch = MicroBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        labels=torch.from_numpy(labels)[None],
        learnt=torch.from_numpy(np.flatnonzero(labels != IGNORED)),
        cu_seqlens=torch.from_numpy(borders),
        max_document=int((before + lengths).max()),
        tokens=len(ids),
        trained_tokens=int(trained.sum()),
        where=[document.where for document in documents],
        cost=len(ids),
    )
    if before.any():
        batch = replace(batch, **_key_side(segments))
    if documents[0].noise is not None:
        keys = np.asarray([document.noise for document in documents], dtype=np.int64)
        noise = np.stack([np.repeat(keys, lengths), positions, np.repeat(lengths, lengths)])
        batch = replace(batch, noise=torch.from_numpy(noise))
    if documents[0].drawn is not None:
        drawn = np.concatenate([document.drawn for document in documents])
        batch = replace(batch, drawn=torch.from_numpy(drawn[trained]))
    if documents[0].preference is not None:
        batch = replace(batch, **_answers(documents, [segment for segment in segments if segment.answer], trained))
    elif documents[0].data_set is not None:  # of answers `Completions` knows it
        tokens = [len(document.input_ids) for document in documents]
        numbers = np.repeat(np.asarray([document.data_set for document in documents], dtype=np.int64), tokens)
        batch = replace(batch, data_set=torch.from_numpy(numbers[trained]))
    return batch


def _segments(documents: list[Document]) -> list[_Segment]:
    found, start = [], 0
    for document in documents:
        tokens, layout, nothing = len(document.input_ids), document.preference, range(0)
        answers = () if layout is None else layout.behind_prompt(tokens)
        if not answers:
            found.append(_Segment(start, tokens, nothing, layout is not None))
        else:
            prompt = range(start, start + layout.prompt)
            if prompt:
                found.append(_Segment(start, len(prompt), nothing, answer=False))
            borders = accumulate(answers, initial=prompt.stop)
            found += [_Segment(begun, own, prompt, answer=True) for begun, own in zip(borders, answers, strict=False)]
        start += tokens
    return found


def _key_side(segments: list[_Segment]) -> dict[str, torch.Tensor]:
    parts = [np.r_[segment.prompt, segment.start : segment.start + segment.tokens] for segment in segments]
    borders = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum([len(part) for part in parts], out=borders[1:])
    index = np.concatenate(parts).astype(np.int64)
    return {"key_index": torch.from_numpy(index), "key_cu_seqlens": torch.from_numpy(borders)}


def _answers(
    documents: list[Document], segments: list[_Segment], trained: np.ndarray
) -> dict[str, torch.Tensor | Completions]:
    """segments: those of the answers; trained: bool `[T]`."""
    layouts = [document.preference for document in documents]
    pair = np.repeat(np.arange(len(documents)), [len(layout.wanted) for layout in layouts])
    chosen = [flag for layout in layouts for flag in layout.wanted]
    identity = np.asarray([document.identity or (-1, -1) for document in documents], dtype=np.int64)
    ends = [segment.start + segment.tokens for segment in segments]
    tokens = torch.tensor([int(trained[part.start : part.start + part.tokens].sum()) for part in segments])
    completions = Completions(
        pair=torch.from_numpy(pair),
        chosen=torch.tensor(chosen),
        tokens=tokens,
        last=torch.tensor(ends) - 1,
        margin=torch.tensor([margin for layout in layouts for margin in layout.margins], dtype=torch.float32),
        identity=torch.from_numpy(identity[pair]),
    )
    return {"completions": completions, "owner": torch.arange(len(segments)).repeat_interleave(tokens)}


def empty_micro_batch() -> MicroBatch:
    """One token that is not learnt and counts for nothing: for a rank that has to take part without rows of its own.

    It holds no answer either, nor a reference's value of one, so that it serves the methods that compare them.
    """
    zero, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=zero,
        position_ids=zero,
        labels=torch.full((1, 1), IGNORED),
        learnt=none,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_document=1,
        tokens=0,
        trained_tokens=0,
        where=[],
        cost=0,
        owner=none,
        completions=Completions(none, none.bool(), none, none, none.float(), none.view(0, 2), none.float()),
        drawn=none.float(),
        data_set=none,
    )
