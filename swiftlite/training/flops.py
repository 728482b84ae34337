"""Model FLOPs of a step, for MFU: what the mathematics needs, recomputation not counted.

Forward and backward take `6 N` per token for the N parameters that a token meets in matrix products (the output head
included, the embedding look-up not) and `6 L a d * length` for causal attention (half of the full square); frozen
weights need no weight gradient, which leaves `4 N`. Source: appendix B of PaLM, arXiv 2204.02311.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftlite.models.anatomy import head_of

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


class FlopCounter:
    """FLOPs of a step from its token count and its documents' lengths."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings().weight
        tied = head_of(model).weight is embedding
        self._per_token = 0.0
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or (parameter is embedding and not tied):
                continue
            share = 1.0
            if ".experts" in name:
                share = config.num_experts_per_tok / config.num_experts if "num_experts" in config.to_dict() else 1.0
            self._per_token += (6 if parameter.requires_grad else 4) * parameter.numel() * share
        heads = config.num_attention_heads
        size = config.to_dict().get("head_dim") or config.hidden_size // heads
        self._per_square = 6 * config.num_hidden_layers * heads * size

    def step(self, lengths: list[int]) -> float:
        """lengths: tokens of each document of the step."""
        return self._per_token * sum(lengths) + self._per_square * sum(n * n for n in lengths)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense peak, or None where it is not known (CPUs, fp32, other devices)."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for mark, flops in PEAK_FLOPS.items() if mark in name), None)
