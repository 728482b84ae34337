"""Matrix products of linear layers in fp32 on a CPU, by the faster of the two libraries that PyTorch brings along.

PyTorch multiplies fp32 matrices by MKL, which on processors of other makers than Intel does not use AVX-512. oneDNN,
which PyTorch uses for other types, does: on AMD's Zen 5, whose units are 512 bits wide, it has 2.2 times the rate, and
there linear layers and the output head go through it, forwards and backwards. On Zen 4, which does such an instruction
in two halves, and with AVX2 alone it has 1.1 times the rate (`scripts/measure_step.py` measures both), which is less
than what its copies and filled-up rows cost. What is chosen depends on the machine and the shapes alone.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swiftlite.models.processor import instructions, processor

SMALLEST = 1 << 20  # multiplications: below, what a call costs is more than what the product gains
SLICE_ROWS = 1024  # of a sum of products that are made at a time
ROUND, LONG, ROUND_LONG = 32, 256, 64  # what oneDNN is given are multiples of so many tokens, if few or more
ZEN_5 = 26  # AMD's number of the first family of processors with units of 512 bits
PLAIN = (torch.Tensor, nn.Parameter)  # no DTensor, whose products exchange something


@functools.cache
def prefers_onednn() -> bool:
    """Whether this machine's processor is an AMD with AVX-512 of full width."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    known = processor()
    is_new = known.get("vendor_id") == "AuthenticAMD" and int(known.get("cpu family", 0)) >= ZEN_5
    return is_new and "avx512f" in instructions()


def onednn_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products on a device, of a type, are oneDNN's: in bf16 PyTorch itself sees to that."""
    if device.type != "cpu":
        return False
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and prefers_onednn()


def rounded(tokens: int) -> int:
    """How many tokens oneDNN is given in place of so many. It compiles a program for each count and matrix, which takes
    a millisecond and half a megabyte for as long as the process lives."""
    multiple = ROUND if tokens <= LONG else ROUND_LONG
    return -(-tokens // multiple) * multiple


def product(a: torch.Tensor, b: torch.Tensor, *, over_tokens: bool = False) -> torch.Tensor:
    """`a @ b.T` without a gradient. a: `[..., k]`; b: `[n, k]`; both may be transposed. Returns `[..., n]`.

    over_tokens: k is a number of tokens, else the second dimension from the right of a is.
    """
    return _by_onednn(a, b, over_tokens=over_tokens) if _gains(a, b) else F.linear(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `torch.nn.functional.linear` does. x: `[..., k]`; weight: `[n, k]`; bias: `[n]`; returns `[..., n]`."""
    if _gains(x, weight) and weight.is_contiguous():
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


class ProductSum:
    """The sum of `a.T @ b` over several a `[t, n]` and b `[t, k]`, in fp32, and added to what is there already."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, total: torch.Tensor | None = None) -> None:
        """like: has the shape of the sum, `[n, k]`, and its device; dtype: of the factors; total: fp32, to be added
        to in place."""
        self._like, self._sum = like, total
        self._by_onednn = dtype == torch.float32 and onednn_serves(like.device, dtype)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if self._by_onednn:
            self._add_by_onednn(a, b)
        elif a.is_cuda and a.dtype != torch.float32:
            self._add_by_cublas(a, b)
        elif self._sum is None:
            self._sum = (a.T @ b).float()
        elif a.dtype == torch.float32:
            self._sum.addmm_(a.T, b)
        else:
            for rows in _slices(a.shape[-1]) if a.device.type == "cpu" else [slice(None)]:
                self._sum[rows] += a[:, rows].T @ b

    def _add_by_cublas(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Which sums up in fp32 and need not round what it made to the factors' type."""
        if self._sum is None:
            self._sum = torch.mm(a.T, b, out_dtype=torch.float32)
        else:
            torch.addmm(self._sum, a.T, b, out_dtype=torch.float32, out=self._sum)

    def _add_by_onednn(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Where n is a vocabulary, a second matrix of the sum's size would be the largest of a step. oneDNN wants rows
        that lie one after another, and is fastest on as many as a core's caches hold. PyTorch transposes a matrix four
        times as fast as a part of the columns of one, so that is copied first."""
        self._sum = self.total
        for rows in _slices(a.shape[-1]):
            self._sum[rows] += product(a[:, rows].contiguous().T.contiguous(), b.T, over_tokens=True)

    @property
    def total(self) -> torch.Tensor:
        return torch.zeros_like(self._like, dtype=torch.float32) if self._sum is None else self._sum


def _slices(rows: int) -> Iterator[slice]:
    for start in range(0, rows, SLICE_ROWS):
        yield slice(start, start + SLICE_ROWS)


class FastLinear(nn.Linear):
    """A linear layer whose products are `linear`'s."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def use_fast_products(model: nn.Module) -> None:
    """Make every plain linear layer of a model a FastLinear, in place, where that is faster."""
    if prefers_onednn():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FastLinear


def are_plain_fp32(*tensors: torch.Tensor, also_under_autocast: bool = False) -> bool:
    """Whether all of them are plain fp32 tensors on a CPU, and no autocast makes products of something else."""
    if tensors[0].device.type != "cpu" or (torch.is_autocast_enabled("cpu") and not also_under_autocast):
        return False
    return all(type(tensor) in PLAIN and tensor.dtype == torch.float32 for tensor in tensors)


def no_view(result: torch.Tensor) -> torch.Tensor:
    """The same numbers, for an autograd function to give. What it gives may be changed in place then, as Gemma 3n does
    with a linear layer's output; autograd refuses that of a view which was made inside of a function."""
    return result.data


def _gains(a: torch.Tensor, b: torch.Tensor) -> bool:
    large = a.ndim > 1 and a.numel() * b.shape[0] >= SMALLEST
    return large and onednn_serves(a.device, a.dtype) and are_plain_fp32(a, b)


def _by_onednn(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, over_tokens: bool = False
) -> torch.Tensor:
    """`a @ b.T + bias`, the number of tokens rounded up with zeros."""
    rows, tokens = a.shape[-2], a.shape[-1 if over_tokens else -2]
    more = rounded(tokens) - tokens
    if more and over_tokens:
        a, b = F.pad(a, (0, more)), F.pad(b, (0, more))
    elif more:
        a = F.pad(a, (0, 0, 0, more))
    return torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "").narrow(-2, 0, rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad  # of a frozen layer the input is not kept
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return no_view(_by_onednn(x, weight, bias))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        upstream = upstream.contiguous()  # the expanded gradient of a sum has no strides that oneDNN knows
        rows = upstream.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grad_x = _by_onednn(upstream, weight.T)
        if ctx.needs_input_grad[1]:
            grad_weight = _by_onednn(rows.T, x.reshape(rows.shape[0], -1).T, over_tokens=True)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias
