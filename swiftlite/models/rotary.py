"""Rotary embeddings whose frequencies follow the length of a sequence, in rows of several documents.

LongRoPE (arXiv 2402.13753) has two sets of frequencies, one for sequences within the length of pretraining and one for
longer ones. transformers picks one set by the last position of all that it is given, so in a packed row a long document
would change the short ones beside it.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.models.classes import known_as

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LONGROPE = "longrope"
FOLLOWING_LENGTH = ("dynamic", LONGROPE)  # transformers' kinds
ONE_AT_A_TIME = threading.Lock()  # a module writes the set it picks into a buffer, which micro-batches in threads share


def length_limits(config: PretrainedConfig) -> list[tuple[str, int]]:
    """(kind, tokens up to which the frequencies are those of pretraining) of each rotary embedding of such a kind."""
    values = config.get_text_config().to_dict()
    rotary = values.get("rope_parameters") or {}
    found = []
    for entry in (rotary, *(nested for nested in rotary.values() if isinstance(nested, dict))):
        if entry.get("rope_type") in FOLLOWING_LENGTH:
            name = "original_max_position_embeddings"
            limit = entry.get(name) or values.get(name) or values["max_position_embeddings"]
            found.append((entry["rope_type"], int(limit)))
    return found


def scale_by_document(model: nn.Module) -> None:
    """Let each rotary embedding of LongRoPE pick the frequencies of each document by itself, in place."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == LONGROPE or (isinstance(kinds, dict) and LONGROPE in kinds.values()):
            module.__class__ = _by_document(type(module))


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """For each token the length of its document. positions: `[rows, tokens]`, which go up by one inside a document."""
    begins = torch.ones_like(positions)
    begins[:, 1:] = positions.diff(dim=1) != 1
    document = begins.cumsum(1) - 1
    last = torch.zeros_like(positions).scatter_reduce(1, document, positions, "amax")
    return last.gather(1, document) + 1


@functools.cache
def _by_document(plain: type[nn.Module]) -> type[nn.Module]:
    @known_as(plain)
    class ByDocument(plain):
        def forward(
            self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
        ) -> tuple[torch.Tensor, ...]:
            chosen = {} if layer_type is None else {"layer_type": layer_type}
            rotary = self.config.rope_parameters
            limit = (rotary if layer_type is None else rotary[layer_type]).get("original_max_position_embeddings")
            with ONE_AT_A_TIME:
                found = super().forward(x, position_ids, **chosen)
                if limit is None:  # another kind, of other layers
                    return found
                short = document_lengths(position_ids) <= limit
                if short.all() or not short.any():
                    return found
                inside = super().forward(x, position_ids.masked_fill(~short, 0), **chosen)
            return tuple(torch.where(short[..., None], *pair) for pair in zip(inside, found, strict=True))

    return ByDocument
