"""Texts -> token ids and which of them are trained: those that share a character with a trained span.

Tokenizers that work on bytes cut a text's bytes into tokens. Where that can be seen, and the text's spans begin and end
where tokens do, lengths in bytes tell which tokens are trained. All else asks the tokenizer for characters' offsets,
which takes half as long again.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[np.ndarray, np.ndarray]  # ids int32 `[tokens]`, trained bool `[tokens]`
Encoded = tuple[np.ndarray, np.ndarray, bool]  # and whether what stands before a span has other tokens by itself
Spans = list[tuple[int, int]]  # `[start, end)`, in characters unless something else is said

PROBE = "Two words, 2 numbers: 31.\n"
NEAR = 32  # characters before white space that may decide its tokens, as special tokens do
ENDINGS = 4096  # of prompts that are remembered


class TextEncoder:
    """Encodes texts with a fast tokenizer; one a process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._lengths = {number: len(token.content) for number, token in added if token.rstrip and not token.lstrip}
        backend = _plain_backend(tokenizer)
        self._last_token = lru_cache(ENDINGS)(self._find_last_token)
        self._bytes = _TokenBytes(backend, tokenizer) if backend is not None else None
        if self._bytes and self._bytes.places(PROBE, self._bytes.encode([PROBE])[0], [(0, len(PROBE))]) is None:
            self._bytes = None

    def __call__(self, texts: list[str], spans: list[Spans | None], *, special_tokens: bool) -> list[Encoded]:
        """spans: of each text, None for all of it; special_tokens: with those that the tokenizer puts around a text."""
        found: list[Encoded | None] = [None] * len(texts)
        if self._bytes and (not special_tokens or self._bytes.stand_alone):
            found = self._by_bytes(self._bytes, texts, spans)
        left = [i for i, tokens in enumerate(found) if tokens is None]
        if left:
            by_offsets = self._by_offsets([texts[i] for i in left], [spans[i] for i in left], special_tokens)
            for i, tokens in zip(left, by_offsets, strict=True):
                found[i] = tokens
        return found

    def _by_bytes(self, of_tokens: _TokenBytes, texts: list[str], spans: list[Spans | None]) -> list[Encoded | None]:
        """None for a text that asks for offsets."""
        found: list[Encoded | None] = []
        for text, ids, wanted in zip(texts, of_tokens.encode(texts), spans, strict=True):
            if wanted is None:
                found.append((np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_), False))
            elif (places := of_tokens.places(text, ids, wanted)) is None:
                found.append(None)
            else:
                found.append(self._marked(text, ids, wanted, places))
        return found

    def _marked(self, text: str, ids: list[int], spans: Spans, places: Spans) -> Encoded:
        """places: the spans in tokens."""
        trained = np.zeros(len(ids), dtype=np.bool_)
        for start, end in places:
            trained[start:end] = True
        starts = [(span[0], place[0]) for span, place in zip(spans, places, strict=True)]
        torn = any(self._ends_otherwise(text, at, ids[:start]) for at, start in starts)
        return np.asarray(ids, dtype=np.int32), trained, torn

    def _by_offsets(self, texts: list[str], spans: list[Spans | None], special_tokens: bool) -> list[Encoded]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special_tokens,
            return_offsets_mapping=any(wanted is not None for wanted in spans),
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        found = []
        for place, wanted in enumerate(spans):
            ids, torn = np.asarray(encoded["input_ids"][place], dtype=np.int32), False
            if wanted is None:
                trained = np.ones(len(ids), dtype=np.bool_)
            else:
                offsets = np.asarray(encoded["offset_mapping"][place], dtype=np.int32).reshape(-1, 2)
                for number, length in self._lengths.items():  # Phi-3's headers take white space of an answer with them
                    offsets[ids == number, 1] = offsets[ids == number, 0] + length
                trained = overlaps(offsets, wanted)
                torn = any(self._is_torn(texts[place], start, ids, offsets) for start, _ in wanted)
            found.append((ids, trained, torn))
        return found

    def _is_torn(self, text: str, end: int, ids: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether the prompt that ends at a character has other tokens by itself. Some offsets leave out the white
        space that a token begins with: where none reaches the prompt's end, the prompt's own tokens tell."""
        if ((offsets[:, 0] < end) & (offsets[:, 1] > end)).any():
            return True
        reached = np.maximum.accumulate(offsets[:, 1])
        before = ids[reached <= end].tolist()
        if end == 0 or (before and before[-1] in self._lengths):  # which takes what stands behind it
            return False
        if end in reached:
            return self._ends_otherwise(text, end, before)
        own = self._tokenizer(text[:end], add_special_tokens=False, verbose=False)["input_ids"]
        return before[len(before) - len(own) :] != own

    def _ends_otherwise(self, text: str, end: int, before: list[int]) -> bool:
        """Whether the white space that a prompt ends with is divided otherwise where no answer follows: tokenizers like
        GPT-2's leave the last blank of several to the word behind them. before: the tokens up to there."""
        if end < 2 or not text[end - 2 : end].isspace():
            return False
        words = text[:end].rstrip()
        return before[-1:] != self._last_token(words[-NEAR:] + text[len(words) : end])

    def _find_last_token(self, text: str) -> list[int]:
        """Empty for a text that has none."""
        if self._bytes:  # in a tenth of the time
            return self._bytes.encode([text])[0][-1:]
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][-1:]


class _TokenBytes:
    """The bytes of each token of a tokenizer whose vocabulary is written in byte-level characters."""

    def __init__(self, backend: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = backend
        self.stand_alone = backend.num_special_tokens_to_add(is_pair=False) == 0  # whether it puts none around a text
        self._bytes = _Vocabulary(backend, tokenizer)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids as the tokenizer gives them, without offsets; one call, which uses every core."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def places(self, text: str, ids: list[int], spans: Spans) -> Spans | None:
        """The spans in tokens. None where the text is not its tokens' bytes, or a span ends within a token."""
        pieces = list(map(self._bytes.__getitem__, ids))
        written = text.encode()
        if b"".join(pieces) != written:
            return None
        bounds = list(accumulate(map(len, pieces), initial=0))
        found = []
        for span in spans:
            edges = span if len(written) == len(text) else [len(text[:edge].encode()) for edge in span]
            start, end = (bisect_left(bounds, edge) for edge in edges)
            if bounds[start] != edges[0] or bounds[end] != edges[1]:
                return None
            found.append((start, end))
        return found


class _Vocabulary(dict[int, bytes]):
    """The bytes of each token, found when they are first asked for."""

    def __init__(self, backend: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__((number, token.content.encode()) for number, token in tokenizer.added_tokens_decoder.items())
        self._backend = backend

    def __missing__(self, number: int) -> bytes:
        self[number] = _bytes_of(self._backend.id_to_token(number))
        return self[number]


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The library's tokenizer behind one of transformers', if that adds nothing to what it does with texts."""
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast
    if any(getattr(type(tokenizer), name) is not getattr(plain, name) for name in ("__call__", "_encode_plus")):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones for themselves, from 256 on for
    the others (GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def _bytes_of(token: str) -> bytes:
    """A token that holds other characters stands for itself; where that is wrong, no text is the same again."""
    if all(character in BYTE_CHARACTERS for character in token):
        return bytes(BYTE_CHARACTERS[character] for character in token)
    return token.encode()


def overlaps(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Which tokens share a character with a span. offsets: `[tokens, 2]` start and end; returns bool `[tokens]`.

    A token without characters (the word mark that some tokenizers put at a start, white space that others trim from
    their offsets) counts as what lies between the token before it and its end, or else as the character it stands at.
    """
    starts, ends = offsets[:, 0].copy(), offsets[:, 1].copy()
    empty = np.flatnonzero(starts == ends)
    if len(empty):
        before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
        gap = before[empty] < starts[empty]
        starts[empty] = np.where(gap, before[empty], starts[empty])
        ends[empty] += ~gap
    trained = np.zeros(len(starts), dtype=np.bool_)
    for start, end in spans:
        trained |= (starts < end) & (ends > start)
    return trained
