"""QLoRA: the frozen matrices of the layers in 4 bits (NormalFloat, arXiv 2305.14314), taken apart where they are used.

A quantized matrix `[outputs, inputs]` is two ordinary parameters: its codes, eight bits of which are two numbers, and
one scale for 64 numbers of a row. Both have a row for each row of the matrix and bear the type that the model computes
in (the codes' bits are only stored in it), so FSDP cuts, casts and gathers them like any weight, and each process
quantizes just the rows it holds. 4.25 bits a number where that type has 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from swiftlite.dtensors import is_dtensor, local
from swiftlite.errors import UserError

BLOCK = 64  # numbers that share a scale, as in the paper
KIND = "nf4"


class Linear4bit(nn.Linear):
    """A frozen linear layer, by the package bitsandbytes.

    weight: `[outputs, inputs / n]` where the type has room for n codes; scales: `[outputs, inputs / 64]`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Takes the layer's place. Its values come by `pack`."""
        nn.Module.__init__(self)
        import bitsandbytes  # noqa: F401 - registers the operators

        self.in_features, self.out_features = linear.in_features, linear.out_features
        rows, held = linear.out_features, 2 * linear.weight.element_size()
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.weight = nn.Parameter(torch.empty(rows, linear.in_features // held, **like), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(rows, linear.in_features // BLOCK, **like), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled(x.device.type)
        x = x.to(torch.get_autocast_dtype(x.device.type)) if autocast else x
        y = _Product.apply(x, self.weight, self.scales)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def unpacked_like(self) -> torch.Tensor:
        """Memory for the values of the rows that this process has, in place of the codes: fp32, as `pack` wants it."""
        weight, shape = self.weight, (self.out_features, self.in_features)
        if not is_dtensor(weight):
            return torch.empty(shape, device=weight.device)
        from torch.distributed.tensor import DTensor

        rows = weight.to_local()
        values = torch.empty(len(rows), self.in_features, device=rows.device)
        mesh, placements = weight.device_mesh, weight.placements
        return DTensor.from_local(
            values, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(self.in_features, 1)
        )

    @torch.no_grad()
    def pack(self, values: torch.Tensor) -> None:
        """Quantize the rows that this process has. values: as `unpacked_like` makes it."""
        weight, scales, values = map(local, (self.weight, self.scales, values))
        if not len(values):
            return
        codes, largest = torch.ops.bitsandbytes.quantize_4bit(values.to(weight.device), BLOCK, KIND, torch.uint8)
        weight.copy_(codes.view(len(values), -1).view(weight.dtype))
        scales.copy_(largest.view(len(values), -1))


class _Product(torch.autograd.Function):
    """x @ weight.T, keeping the codes for the backward pass instead of the matrix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scales)
        return nn.functional.linear(x, _matrix(weight, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scales = ctx.saved_tensors
        return upstream @ _matrix(weight, scales, upstream.dtype), None, None


def _matrix(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, shape = weight.detach().view(torch.uint8), (len(scales), scales.shape[1] * BLOCK)
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scales.detach().float().flatten(), BLOCK, KIND, shape, dtype)


def quantizable(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(its parent, its name there, the layer) of every frozen linear layer whose rows are whole blocks."""
    for layer in layers:
        for parent in layer.modules():
            for name, module in parent.named_children():
                frozen = type(module) is nn.Linear and not module.weight.requires_grad
                if frozen and module.in_features % BLOCK == 0:
                    yield parent, name, module


def count_quantizable(layers: Iterable[nn.Module]) -> int:
    """Parameters that `quantize` packs. Raises UserError where there are none."""
    count = sum(module.weight.numel() for *_, module in quantizable(layers))
    if not count:
        raise UserError(
            "the model has no frozen linear layer that 4 bits could hold",
            where="--quantization",
            fix=f"leave it out: rows have to be multiples of {BLOCK} numbers, and a mixture's experts do not count",
        )
    return count


def quantize(layers: Iterable[nn.Module]) -> None:
    """Put a `Linear4bit` in the place of each, in place."""
    for parent, name, module in list(quantizable(layers)):
        setattr(parent, name, Linear4bit(module))


def packing(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of a model for `checkpoint.weights.fill`: codes appear as the matrix they are made of, which is
    packed when the next tensor is asked for. At most one matrix is there unpacked."""
    packed = {id(module.weight): module for module in model.modules() if isinstance(module, Linear4bit)}
    scales = {id(module.scales) for module in packed.values()}
    for name, tensor in tensors:
        if id(tensor) in packed:
            values = packed[id(tensor)].unpacked_like()
            yield name, values
            packed[id(tensor)].pack(values)
        elif id(tensor) not in scales:
            yield name, tensor
