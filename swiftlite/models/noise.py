"""Noise on the embeddings of tokens in training: NEFTune, arXiv 2310.05914, algorithm 1.

A number of it is a function of its document's key, the token's position and the channel, and of nothing else: no
generator is asked, so it does not matter which process makes which part, in which order, or whether it is made again.
It is a hash in 32-bit integers, which every device computes to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

AT_A_TIME = 1 << 22  # numbers that are made at a time: what the hash holds beside its result
GOLDEN = 0x9E3779B9  # 2^32 by the golden ratio: neighbouring channels begin far apart
# A bijection of 32 bits of which each bit of the input changes each of the result about half of the time. Source:
# "lowbias32" of https://github.com/skeeto/hash-prospector, which was found by search.
SHIFTS, FACTORS = (16, 15, 15), (0x21F0AAAD, 0xD35A2D97)
STEPS = 1 << 23  # of a number between 0 and 1: what fp32 holds exactly


class EmbeddingNoise:
    """Adds noise to what an embedding gives, while it is told whose."""

    def __init__(self, alpha: float) -> None:
        """alpha: of the paper, the noise's 2-norm over a document is about `alpha / sqrt(3)`."""
        self._alpha = alpha
        self._of: torch.Tensor | None = None

    def attach(self, embedding: nn.Module) -> None:
        """Behind all that is there by now: under tensor parallelism the sum over the ranks."""
        embedding.register_forward_hook(self)

    @contextmanager
    def of(self, tokens: torch.Tensor | None) -> Iterator[None]:
        """tokens: int64 `[3, rows, T]`, as `MicroBatch.noise` has it; None for no noise inside the block."""
        self._of = tokens
        try:
            yield
        finally:
            self._of = None

    def __call__(self, _module: nn.Module, _args: object, embedded: torch.Tensor) -> torch.Tensor | None:
        """embedded: `[rows, T, width]`; a hook's None leaves it as it is."""
        return None if self._of is None else embedded + self._noise(embedded)

    @torch.no_grad()
    def _noise(self, embedded: torch.Tensor) -> torch.Tensor:
        width = embedded.shape[-1]
        keys, positions, lengths = self._of.flatten(1)
        found = torch.empty(len(keys), width, dtype=embedded.dtype, device=embedded.device)
        count = max(1, AT_A_TIME // width)
        for start in range(0, len(keys), count):
            part = slice(start, start + count)
            scale = self._alpha / (lengths[part] * width).float().sqrt()
            found[part] = uniform(keys[part], positions[part], width) * scale[:, None]
        return found.view_as(embedded)


def uniform(keys: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers between -1 and 1, without bias: fp32 `[T, width]`. keys, positions: int64 `[T]`, of each token."""
    low, high = keys.contiguous().view(torch.int32).view(-1, 2).T
    channels = torch.arange(width, dtype=torch.int32, device=keys.device)
    of_token = _mixed(_mixed(positions.int() ^ low) ^ high)
    numbers = _mixed(channels * _signed(GOLDEN) + of_token[:, None])
    numbers = _mixed(numbers.bitwise_xor_(high[:, None]))
    return (numbers.bitwise_right_shift_(8).float() + 0.5) / STEPS


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """In place. x: int32; products wrap around."""
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)  # `>>` alone would draw the sign in
        if factor is not None:
            x *= _signed(factor)
    return x


def _signed(word: int) -> int:
    """32 bits as torch reads them."""
    return word - (1 << 32) if word >= 1 << 31 else word
