"""Results of elementwise operations made again in the backward pass, where autograd would keep them until then.

Autograd keeps what each operation's derivative reads. Much of it is the result of an elementwise operation whose own
inputs are kept as well: the gated product of an MLP beside its gate, a normalized state beside the state and its scale.
Such a result is dropped, and made again by the same operation when it is read, so every bit is the same; four tenths of
what a decoder layer keeps go. Nothing of the architecture has to be known: autograd's graph tells what made a tensor,
and holds the inputs.

Source: https://docs.pytorch.org/docs/stable/autograd.html (torch.autograd.graph.saved_tensors_hooks, Node)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node, saved_tensors_hooks

from swiftlite.models.kernels.norms import normalize

SMALLEST = 4096  # numbers; a smaller tensor is kept


class _Kept(NamedTuple):
    """version: of the tensor at that time. Where there are hooks, autograd itself does not look at it."""

    tensor: torch.Tensor
    version: int


class _Dropped(NamedTuple):
    """What is kept in a tensor's place. node: whose operation makes the numbers; shape: the tensor's own."""

    node: Node
    shape: torch.Size


def rematerialized() -> saved_tensors_hooks:
    """A context: of a forward pass in it, cheap results are not kept for the backward pass.

    Each node that makes one has to run after those that read it, as in any backward pass that is not cut in two.
    """
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> _Kept | _Dropped:
    """Called for each tensor that is to be kept."""
    node = _made_by(tensor) if type(tensor) is torch.Tensor and tensor.numel() >= SMALLEST else None
    return _Kept(tensor, tensor._version) if node is None or not _can_make(node) else _Dropped(node, tensor.shape)


def _made_by(tensor: torch.Tensor) -> Node | None:
    """The node whose result has a tensor's numbers in their order, as `x` has those of `x.flatten(0, 1)`."""
    if not tensor._is_view():
        return tensor.grad_fn
    whole = tensor._base
    same = whole.numel() == tensor.numel() and whole.is_contiguous() and tensor.is_contiguous()
    return whole.grad_fn if same else None


def _unpack(kept: _Kept | _Dropped) -> torch.Tensor:
    """Called for each of them when it is read."""
    if isinstance(kept, _Dropped):
        with torch.no_grad():
            return _make(kept.node).view(kept.shape)
    if kept.tensor._version != kept.version:
        raise RuntimeError(f"a tensor {list(kept.tensor.shape)} was modified in place before its gradient was computed")
    return kept.tensor


def _make(node: Node) -> torch.Tensor:
    return _OPERATIONS[node.name()](node)


def _can_make(node: Node) -> bool:
    if node.name() != _PRODUCT:
        return node.name() in _OPERATIONS
    return all(_holds(node, place) or _can_make(node.next_functions[place][0]) for place in (0, 1))


def _holds(product: Node, place: int) -> bool:
    """Whether a product holds the factor at a place: for the other's gradient, if that has one."""
    return product.next_functions[1 - place][0] is not None


def _multiply(node: Node) -> torch.Tensor:
    first = node._saved_self if _holds(node, 0) else _make(node.next_functions[0][0])
    second = node._saved_other if _holds(node, 1) else _make(node.next_functions[1][0])
    return first * second


_PRODUCT = "MulBackward0"
_OPERATIONS: dict[str, Callable[[Node], torch.Tensor]] = {
    _PRODUCT: _multiply,
    "_RmsNormBackward": lambda node: normalize(*node.saved_tensors),
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
}
