"""Turning queries and keys by their positions on a CPU in fp32, as one node of autograd's graph instead of twelve.

Decoders that turn the halves of each head (RoFormer, arXiv 2104.09864, as GPT-NeoX lays it out) do so in a function of
transformers that their attention calls by name. In place of it a module's attention here calls one that writes the
result in two passes over the heads, and its gradient in two. As with norms nothing is assumed of the function but its
name: what it computes is found by calling it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from swiftlite.models.classes import known_as
from swiftlite.models.kernels.products import PLAIN, are_plain_fp32

WIDENED = (torch.float32, torch.bfloat16)  # what queries and keys may be: times fp32 both are that
NAME = "apply_rotary_pos_emb"


def fuse_rotations(model: nn.Module) -> None:
    """Let each attention of a model that calls the function by its name call the one of this module, in place."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, FunctionType) and NAME in forward.__code__.co_names and NAME in forward.__globals__:
            module.__class__ = _fused_class(type(module))


@functools.cache
def _fused_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class with a forward of its own; the module that defines it stays as it is, and so do other models."""

    @known_as(plain)
    class Fused(plain):
        forward = _calling_rotation(plain.forward)

    return Fused


def _calling_rotation(function: FunctionType) -> FunctionType:
    """A copy of a function, or of what decorators made of it, for which the name stands for another function."""
    names, cells, attributes = function.__globals__, function.__closure__ or (), dict(function.__dict__)
    if decorated := attributes.get("__wrapped__"):
        attributes["__wrapped__"] = ours = _calling_rotation(decorated)
        cells = tuple(CellType(ours) if cell.cell_contents is decorated else cell for cell in cells)
    else:
        names = names | {NAME: _rotation(names[NAME])}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__dict__ = function.__kwdefaults__, attributes
    return copy


@functools.cache
def _rotation(plain: Callable) -> Callable:
    """A function that does the same, in one node where it can."""
    turns_halves: bool | None = None  # known once there was an input

    def rotate(*given, **more):  # noqa: ANN002, ANN003, ANN202 - some turn one tensor, or take the sine first
        nonlocal turns_halves
        if more or not _serves(*given):
            return plain(*given, **more)
        query, key, cos, sin = given
        if turns_halves is None:
            turns_halves = _turns_halves(plain, query.shape[-1])
        if not turns_halves:
            return plain(query, key, cos, sin)
        return _Rotation.apply(query.float(), key.float(), cos, sin)

    return rotate


def _serves(*given: object) -> bool:
    """Whether these are queries and keys `[rows, heads, tokens, size]`, cosines and sines `[rows, tokens, size]`, all
    plain tensors."""
    if len(given) != 4 or not all(isinstance(each, torch.Tensor) for each in given):
        return False
    query, key, cos, sin = given
    by_token = [each.shape[:1] + each.shape[2:] if each.ndim == 4 else None for each in (query, key)]
    if by_token != [cos.shape, sin.shape] or cos.shape != sin.shape:
        return False
    turned = all(type(each) in PLAIN and each.dtype in WIDENED for each in (query, key))
    return turned and are_plain_fp32(cos, sin, also_under_autocast=True)


@torch.no_grad()
def _turns_halves(plain: Callable, size: int) -> bool:
    query, key, cos, sin = torch.linspace(-2, 3, 4 * 3 * size).view(4, 1, 3, size).unbind()
    query, key = query[None], key[None]
    ours = _turn(query, cos[:, None], sin[:, None]), _turn(key, cos[:, None], sin[:, None])
    found = plain(query, key, cos, sin)
    return all(torch.allclose(*both, rtol=1e-5, atol=1e-6) for both in zip(found, ours, strict=True))


def _turn(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rows * cos + (-second half | first half) * sin`. rows: `[rows, heads, tokens, size]`; others: `[rows, 1, tokens,
    size]`."""
    first, second = rows.chunk(2, -1)
    for_first, for_second = sin.chunk(2, -1)
    turned = rows * cos
    into_first, into_second = turned.chunk(2, -1)
    into_first.addcmul_(second, for_first, value=-1)
    into_second.addcmul_(first, for_second)
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        ctx.save_for_backward(cos, sin)
        return _turn(query, cos, sin), _turn(key, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_query: torch.Tensor, to_key: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Turned back: each half's sine is what the other half was multiplied by."""
        cos, sin = ctx.saved_tensors
        back = sin.roll(sin.shape[-1] // 2, -1).neg_()
        return _turn(to_query, cos, back), _turn(to_key, cos, back), None, None
