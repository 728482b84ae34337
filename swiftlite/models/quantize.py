"""QLoRA: the frozen matrices of the layers in 4 or 8 bits (arXiv 2305.14314), taken apart where they are used.

A quantized matrix `[outputs, inputs]` is two ordinary parameters: its codes, of 4 or 8 bits each, and one scale for 64
numbers of a row. Both have a row for each row of the matrix and bear the type that the model computes in (the codes'
bits are only stored in it), so FSDP cuts, casts and gathers them like any weight, and each process quantizes just the
rows it holds. In bf16 that is 4.25 or 8.25 bits a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swiftlite.dtensors import is_dtensor, local
from swiftlite.errors import UserError

BLOCK = 64  # numbers that share a scale, as in the paper
NF4 = "nf4"
LARGEST_CODE = 127


@dataclass(frozen=True)
class Format:
    """How numbers are stored. bits: of a code; codes: their type; pack: fp32 `[rows, inputs]` and the type of scales ->
    codes `[rows, inputs * bits / 8]` and scales `[rows, inputs / 64]`; unpack: these and a type -> `[rows, inputs]`."""

    bits: int
    codes: torch.dtype
    pack: Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    unpack: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def _pack_nf4(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """NormalFloat, by the package bitsandbytes."""
    codes, largest = torch.ops.bitsandbytes.quantize_4bit(values, BLOCK, NF4, torch.uint8)
    return codes.view(len(values), -1), largest.view(len(values), -1).to(dtype)


def _unpack_nf4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shape = (len(scales), scales.shape[1] * BLOCK)
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scales.float().flatten(), BLOCK, NF4, shape, dtype)


def _pack_int8(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest multiple of a block's scale, which is a 127th of its largest number."""
    blocks = values.view(len(values), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / LARGEST_CODE).to(dtype)
    steps = scales.float().unsqueeze(-1)
    codes = torch.where(steps > 0, blocks / steps, 0.0).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8).view_as(values), scales


def _unpack_int8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = codes.to(dtype).view(*scales.shape, BLOCK)
    return blocks.mul_(scales.to(dtype).unsqueeze(-1)).view_as(codes)


FORMATS = {
    NF4: Format(4, torch.uint8, _pack_nf4, _unpack_nf4),
    "int8": Format(8, torch.int8, _pack_int8, _unpack_int8),
}


class PackedLinear(nn.Linear):
    """A frozen linear layer.

    weight: codes, `[outputs, inputs / n]` where its type has room for n of them; scales: `[outputs, inputs / 64]`.
    """

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        """Takes the layer's place. Its values come by `pack`. kind: of `FORMATS`."""
        nn.Module.__init__(self)
        if kind == NF4:
            import bitsandbytes  # noqa: F401 - registers the operators

        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, FORMATS[kind]
        rows, held = linear.out_features, 8 * linear.weight.element_size() // self.format.bits
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.weight = nn.Parameter(torch.empty(rows, linear.in_features // held, **like), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(rows, linear.in_features // BLOCK, **like), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled(x.device.type)
        x = x.to(torch.get_autocast_dtype(x.device.type)) if autocast else x
        y = _Product.apply(x, self.weight, self.scales, self.format)
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
        codes, steps = self.format.pack(values.to(weight.device), scales.dtype)
        weight.copy_(codes.view(weight.dtype))
        scales.copy_(steps)


class _Product(torch.autograd.Function):
    """x @ weight.T, keeping the codes for the backward pass instead of the matrix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, form: Format) -> torch.Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.format = form
        return nn.functional.linear(x, _matrix(weight, scales, form, x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return upstream @ _matrix(*ctx.saved_tensors, ctx.format, upstream.dtype), None, None, None


def _matrix(weight: torch.Tensor, scales: torch.Tensor, form: Format, dtype: torch.dtype) -> torch.Tensor:
    return form.unpack(weight.detach().view(form.codes), scales.detach(), dtype)


def bytes_a_number(kind: str, size: int) -> float:
    """Of a packed matrix. size: bytes of the type that the model computes in."""
    return FORMATS[kind].bits / 8 + size / BLOCK


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
            "the model has no frozen linear layer that could be packed",
            where="--quantization",
            fix=f"leave it out: rows have to be multiples of {BLOCK} numbers, and a mixture's experts do not count",
        )
    return count


def quantize(layers: Iterable[nn.Module], kind: str) -> None:
    """Put a `PackedLinear` in the place of each of the `quantizable` layers. kind: of `FORMATS`."""
    for parent, name, module in list(quantizable(layers)):
        setattr(parent, name, PackedLinear(module, kind))


def packing(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of a model for `checkpoint.weights.fill`: codes appear as the matrix they are made of, which is
    packed when the next tensor is asked for. At most one matrix is there unpacked."""
    packed = {id(module.weight): module for module in model.modules() if isinstance(module, PackedLinear)}
    scales = {id(module.scales) for module in packed.values()}
    for name, tensor in tensors:
        if id(tensor) in packed:
            values = packed[id(tensor)].unpacked_like()
            yield name, values
            packed[id(tensor)].pack(values)
        elif id(tensor) not in scales:
            yield name, tensor
