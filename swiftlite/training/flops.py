"""Model FLOPs of a step, for MFU: what the mathematics needs, recomputation not counted.

Forward and backward take `6 N` per token for the N parameters that a token meets in matrix products (the output head
included, the embedding look-up not) and `12 a d` for each token that it sees in each layer: half of a document, or a
sliding window. Frozen weights need no weight gradient, which leaves `4 N`.
Source: appendix B of PaLM, arXiv 2204.02311.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.models.anatomy import (
    attention_heads,
    attention_windows,
    beside_text,
    expert_share,
    head_of,
    head_sizes,
    tokens_in_view,
)
from swiftlite.planning.devices import find_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How long a FLOP of attention takes, in those of matrix products: PyTorch's kernel for a CPU reaches a quarter of their
# rate on documents of 150 tokens, and a third on 700.
ATTENTION_TIME = {"cpu": 4.0}


class FlopCounter:
    """FLOPs of a step from its token count and its documents' lengths."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        head = head_of(model).weight
        tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        beside = {id(parameter) for parameter in beside_text(model).values()}
        self._in_layers = self._in_head = 0.0
        met = expert_share(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or id(parameter) in beside or (parameter in tables and parameter is not head):
                continue
            share = met if ".experts" in name else 1.0
            flops = (6 if parameter.requires_grad else 4) * parameter.numel() * share
            if parameter is head:
                self._in_head = flops
            else:
                self._in_layers += flops
        self._per_pair = 6 * attention_heads(config) * sum(head_sizes(config))  # of a token and one that it sees
        self._windows = Counter(attention_windows(config))

    def step(self, lengths: list[int]) -> float:
        """lengths: tokens of each document of the step."""
        return (self._in_layers + self._in_head) * sum(lengths) + sum(map(self._attention, lengths))

    def work(self, length: int, trained: int, device: torch.device) -> float:
        """How long a document takes, in FLOPs of matrix products: the head runs at its trained tokens only, and
        attention is slower."""
        attention = ATTENTION_TIME.get(device.type, 1.0) * self._attention(length)
        return self._in_layers * length + self._in_head * trained + attention

    def _attention(self, length: int) -> float:
        """Of a document."""
        seen = sum(layers * tokens_in_view(length, window) for window, layers in self._windows.items())
        return self._per_pair * seen * length


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense peak, or None where it is not known (CPUs, fp32, other devices)."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    known = find_device(torch.cuda.get_device_name(device))
    return known.flops if known else None
