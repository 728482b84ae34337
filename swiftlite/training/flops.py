"""Model FLOPs of a step, for MFU: what the mathematics needs, recomputation not counted.

Forward and backward take `6 N` per token for the N parameters that a token meets in matrix products (the output head
included, the embedding look-up not) and `6 L a d * length` for causal attention (half of the full square); frozen
weights need no weight gradient, which leaves `4 N`. Source: appendix B of PaLM, arXiv 2204.02311.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftlite.models.anatomy import ATTENTION_KINDS, attention_heads, expert_share, head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense bf16 peak of one device in FLOP/s, from the makers' data sheets (without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
    "B200": 2250e12,
}


# How long a FLOP of attention takes, in those of matrix products: PyTorch's kernel for a CPU reaches a quarter of their
# rate on documents of 150 tokens, and a third on 700.
ATTENTION_TIME = {"cpu": 4.0}


class FlopCounter:
    """FLOPs of a step from its token count and its documents' lengths."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        embedding, head = model.get_input_embeddings().weight, head_of(model).weight
        self._in_layers = self._in_head = 0.0
        met = expert_share(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or (parameter is embedding and parameter is not head):
                continue
            share = met if ".experts" in name else 1.0
            flops = (6 if parameter.requires_grad else 4) * parameter.numel() * share
            if parameter is head:
                self._in_head = flops
            else:
                self._in_layers += flops
        heads, kinds = attention_heads(config), config.to_dict().get("layer_types") or []
        size = config.to_dict().get("head_dim") or config.hidden_size // heads
        layers = config.num_hidden_layers - sum(kind not in ATTENTION_KINDS for kind in kinds)
        self._per_square = 6 * layers * heads * size

    def step(self, lengths: list[int]) -> float:
        """lengths: tokens of each document of the step."""
        return (self._in_layers + self._in_head) * sum(lengths) + self._per_square * sum(n * n for n in lengths)

    def work(self, length: int, trained: int, device: torch.device) -> float:
        """How long a document takes, in FLOPs of matrix products: the head runs at its trained tokens only, and
        attention is slower."""
        attention = self._per_square * ATTENTION_TIME.get(device.type, 1.0) * length * length
        return self._in_layers * length + self._in_head * trained + attention


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense peak, or None where it is not known (CPUs, fp32, other devices)."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for mark, flops in PEAK_FLOPS.items() if mark in name), None)
