"""Activation checkpointing: what a layer's forward pass leaves out is computed again in the backward pass."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.models.anatomy import Anatomy

Context = AbstractContextManager[Any]
Contexts = tuple[Context, Context]  # of a layer's forward pass, and of its recomputation


def set_activation_checkpointing(
    model: PreTrainedModel,
    anatomy: Anatomy,
    mode: str,
    *,
    again: Callable[[], Context] = nullcontext,
    compiled: bool = False,
) -> None:
    """`full` recomputes each layer in the backward; `selective` keeps the results of matrix products and attention;
    `offload` is `full` with the layers' inputs in the host's memory meanwhile.

    again: called where a layer's forward pass begins, gives the context of its recomputation; compiled: layers will be.

    Raises UserError where the architecture has no checkpointing.
    """
    if mode == "none":
        return
    own = (_tagged_where_compiled if compiled else _kept) if mode == "selective" else _nothing_kept
    options: dict[str, object] = {"use_reentrant": False}
    if mode == "selective" or again is not nullcontext:
        options["context_fn"] = own if again is nullcontext else partial(_with_again, own, again)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer releases rename the method, 5.17 has only this name
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise UserError(str(error), fix="use --activation-checkpointing none") from error
    anatomy.embedding.register_forward_hook(_require_grad)
    if mode == "offload":
        _SavedInHost(anatomy.decoder)


class _SavedInHost:
    """Hooks of a decoder: what its forward pass saves for the backward lies in the host's memory, pinned where there is
    a GPU. A checkpointed layer saves its input alone, so weights stay where they are.

    Source: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._saving: AbstractContextManager | None = None
        decoder.register_forward_pre_hook(self._enter)
        decoder.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _decoder: nn.Module, _args: object) -> None:
        self._saving = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
        self._saving.__enter__()

    def _leave(self, _decoder: nn.Module, _args: object, _output: object) -> None:
        self._saving.__exit__(None, None, None)


def _require_grad(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Frozen embeddings would leave a checkpointed first layer without an input that needs a gradient."""
    return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_(True)


def _nothing_kept() -> Contexts:
    return nullcontext(), nullcontext()


def _with_again(own: Callable[[], Contexts], again: Callable[[], Context]) -> Contexts:
    forward, recomputation = own()
    return forward, _Both(again(), recomputation)


class _Both(AbstractContextManager):
    """Two contexts as one, entered as often as they can be: zero-bubble recomputes a layer twice."""

    def __init__(self, outer: Context, inner: Context) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *failure: object) -> None:
        self._inner.__exit__(*failure)
        self._outer.__exit__(*failure)


def kept_operations() -> set[object]:
    """Whose results `selective` keeps: products of matrices and attention."""
    import torch.nn.attention.varlen  # its attention is an operation once it is imported

    ops = torch.ops.aten
    kept = {ops.mm.default, ops.addmm.default, ops.bmm.default, ops._scaled_mm.default}
    kept |= {ops._scaled_dot_product_flash_attention_for_cpu.default, ops._scaled_dot_product_flash_attention.default}
    kept |= {ops._scaled_dot_product_efficient_attention.default, ops._scaled_dot_product_cudnn_attention.default}
    return kept | {torch.ops.torch_attn._varlen_attn.default, torch.ops.mkldnn._linear_pointwise.default}


def _tagged_where_compiled() -> Contexts:
    """A layer that the compiler cannot follow runs as it is written. PyTorch's contexts would then give back results
    that the layer has changed in place since."""
    return _kept() if torch._guards.TracingContext.try_get() is None else _tagged()


def _tagged() -> Contexts:
    """For compiled layers: the compiler decides by the policy.

    Source: https://docs.pytorch.org/docs/stable/checkpoint.html (selective activation checkpointing).
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = kept_operations()

    def policy(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _kept() -> Contexts:
    """PyTorch's own contexts count all operations of a layer, and so want the same ones of its recomputation. Where a
    layer holds units of FSDP (experts), those are gathered ahead in the forward pass, and within the recomputation."""
    operations, results = kept_operations(), deque()
    return _Keep(operations, results), _GiveBack(operations, results)


@dataclass
class _Kept:
    """The result of an operation, and how often each of its tensors had been changed in place by then."""

    op: Any
    result: Any
    versions: list[int]


class _Keep(TorchDispatchMode):
    """Keeps the results of some operations in their order.

    What changes one of them in place has it copied first. PyTorch itself does not know of all such changes: a linear
    layer's output is the memory of a product, but no view of it.
    """

    def __init__(self, operations: set[object], results: deque[_Kept]) -> None:
        super().__init__()
        self._operations, self._results = operations, results
        self._by_memory: dict[int, list[_Kept]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _changed_by(op, args, kwargs or {}):
            for kept in self._by_memory.pop(_memory_of(tensor), ()):
                kept.result = tree_map_only(torch.Tensor, torch.Tensor.clone, kept.result)
                kept.versions = _versions(kept.result)
        result = op(*args, **(kwargs or {}))
        if op in self._operations:
            own = tree_map_only(torch.Tensor, torch.Tensor.detach, result)  # the result itself becomes part of a graph
            self._results.append(_Kept(op, own, _versions(own)))
            for part in _tensors_in(own):
                self._by_memory.setdefault(_memory_of(part), []).append(self._results[-1])
        return result

    def __exit__(self, *failure: object) -> None:
        self._by_memory.clear()  # results are let go as they are given back
        super().__exit__(*failure)


class _GiveBack(TorchDispatchMode):
    """Gives them back instead of computing them again, each once.

    Raises RuntimeError where another operation is asked for, or a result has been changed in place since.
    """

    def __init__(self, operations: set[object], results: deque[_Kept]) -> None:
        super().__init__()
        self._operations, self._results = operations, results

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op not in self._operations:
            return op(*args, **(kwargs or {}))
        kept = self._results.popleft()
        if kept.op is not op or kept.versions != _versions(kept.result):
            raise RuntimeError(f"{op} is recomputed, but what was kept is of {kept.op}, or was changed in place since")
        return kept.result


@cache
def _changed_arguments(op: Any) -> list[tuple[int, str]]:
    """(place, name) of each argument that an operation changes in place."""
    arguments = op._schema.arguments if isinstance(op, torch._ops.OpOverload) else []
    changes = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    return [(place, arguments[place].name) for place, changed in enumerate(changes) if changed]


def _changed_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operation changes in place."""
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in _changed_arguments(op)]
    return _tensors_in(given)


def _memory_of(tensor: torch.Tensor) -> int:
    """The same for all tensors in one piece of memory."""
    return tensor.untyped_storage()._cdata


def _tensors_in(result: Any) -> list[torch.Tensor]:
    return [part for part in tree_leaves(result) if isinstance(part, torch.Tensor)]


def _versions(result: Any) -> list[int]:
    """How often each tensor of a result has been changed in place."""
    return [part._version for part in _tensors_in(result)]
