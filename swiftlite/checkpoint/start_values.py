"""Values of what no file holds: fresh adapters, and the rows of new tokens. The same in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from swiftlite.checkpoint.boxes import Box, whole
from swiftlite.seeds import derive_seed


class FreshValues:
    """Start values by parameter name; a random tensor is a function of (seed, name), whoever holds which part of it."""

    def __init__(
        self, seed: int, new_rows: dict[str, torch.Tensor], initial: Callable[[str], torch.Tensor] | None = None
    ) -> None:
        """new_rows: embedding or head -> `[hidden]`, the value of each row that the files lack; initial: the whole
        tensor of a name, where there are no files."""
        self._seed, self._new_rows, self._initial = seed, new_rows, initial

    def __call__(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor | None:
        if self._initial is not None:
            return self._initial(name)[box.slices_of(whole(shape))]
        if name in self._new_rows:
            return self._new_rows[name].expand(shape)[box.slices_of(whole(shape))]
        if ".lora_A." in name or ".lora_embedding_B." in name:
            return self._random(name, shape)[box.slices_of(whole(shape))]
        if ".lora_B." in name or ".lora_embedding_A." in name:
            return torch.zeros(box.shape)
        if ".lora_magnitude_vector." in name:
            return torch.zeros(box.shape)  # until `start_dora`
        return None

    def _random(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """peft's own choice for A: uniform in +-1/sqrt(inputs); standard normal for an embedding's B."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, name))
        if ".lora_embedding_B." in name:
            return torch.randn(shape, generator=generator)
        bound = 1 / math.sqrt(shape[1])
        return torch.rand(shape, generator=generator).mul_(2 * bound).sub_(bound)


@torch.no_grad()
def start_dora(model: nn.Module) -> None:
    """Give DoRA's magnitudes their start: the norms of the rows of the base weight, which has to be there (arXiv
    2402.09353, equation 5). GPT-2 keeps its matrices transposed."""
    for name, module in model.named_modules():
        if name.endswith("lora_magnitude_vector.default"):
            layer = model.get_submodule(name.removesuffix(".lora_magnitude_vector.default"))
            inputs = 0 if layer.fan_in_fan_out else 1
            module.weight.copy_(torch.linalg.vector_norm(layer.get_base_layer().weight.float(), dim=inputs))
