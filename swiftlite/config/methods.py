"""The training methods, and what some of them have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

Method = Literal["sft", "pretrain", "dpo", "kto", "rm"]

PAIRED = ("dpo", "rm")  # compare two answers to one prompt
PREFERENCE = (*PAIRED, "kto")


def pack_capacity(config: RunConfig) -> int:
    """Tokens that a pack may hold: of the methods that compare two answers, as many as a pair may have."""
    return config.max_length * (2 if config.method in PAIRED else 1)
