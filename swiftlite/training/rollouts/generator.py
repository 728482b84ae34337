"""Who answers prompts in a run: the model itself, a copy of it, or an engine beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """A prompt that is to be answered. ids: its tokens; key: what the answer's random numbers are a function of, of
    which the last part tells the answers to one prompt apart; most: tokens that the answer may have."""

    ids: list[int]
    key: tuple[object, ...]
    most: int


@dataclass(frozen=True)
class Generation:
    """An answer. ids: with the token that ended it, if one did; logprobs: log p of each where it was drawn, None where
    that is by the weights that learn from it."""

    ids: list[int]
    logprobs: list[float] | None = None


class Generator(Protocol):
    """pads: whether documents of several lengths can share a row in the model that is trained."""

    @property
    def pads(self) -> bool: ...

    def ready(self) -> AbstractContextManager[None]:
        """A context in which it answers as the weights are now. Every process enters it."""

    def generate(self, requests: Sequence[Request], temperature: float) -> Iterator[Generation]:
        """An answer to each, in order; the same prompt comes several times in a row. temperature: that logits are
        divided by, 0 for the likeliest token each time. Within `ready`."""
