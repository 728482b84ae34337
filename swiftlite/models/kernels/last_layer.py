"""The last layer's MLP, only where something is learnt.

What the last layer makes of a token is read at that token alone: by the output head where a token is learnt, by nobody
elsewhere. So its MLP runs on those tokens, and leaves zeros at the others, which get no gradient. Prompts and earlier
turns are often more than half of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

PLACES = "learnt_places"  # a keyword argument of the decoder, which hands it on to its layers


class LearntPlacesOnly:
    """Hooks of one layer and of its MLP: `[1, tokens, hidden]` in and out, computed at the places given.

    The places reach the layer among its own keyword arguments, since a pipeline has several micro-batches under way. A
    recomputation in the backward pass begins behind the layer's hooks (transformers 5.24), so `again` tells it.
    """

    def __init__(self, layer: nn.Module, mlp: nn.Module) -> None:
        self._places: torch.Tensor | None = None
        self._tokens = 0
        # Bound methods: a deep copy of the layer then has hooks of its own.
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        mlp.register_forward_pre_hook(self._choose)
        mlp.register_forward_hook(self._put_back)

    def _begin(self, _layer: nn.Module, _args: object, kwargs: dict[str, object]) -> None:
        self._places = kwargs.get(PLACES)

    def again(self) -> AbstractContextManager[None]:
        """Where a layer whose forward pass begins now is recomputed: with the places of its micro-batch."""
        return _With(self, self._places)

    def _choose(self, _mlp: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._places is None:
            return None
        hidden, *rest = args
        self._tokens = hidden.shape[1]
        return hidden.index_select(1, self._places), *rest

    def _put_back(self, _mlp: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor | None:
        if self._places is None:
            return None
        everywhere = output.new_zeros(1, self._tokens, output.shape[2])
        return everywhere.index_copy(1, self._places, output)


class _With(AbstractContextManager):
    """Entered twice where gradients of inputs and those of weights are taken apart, which a generator cannot be."""

    def __init__(self, spared: LearntPlacesOnly, places: torch.Tensor | None) -> None:
        self._spared, self._places = spared, places

    def __enter__(self) -> None:
        self._before, self._spared._places = self._spared._places, self._places

    def __exit__(self, *_failure: object) -> None:
        self._spared._places = self._before


def spare_last_mlp(layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Let the MLP of the last decoder layer skip tokens that nothing is learnt at. Leaves a layer alone that has none,
    or a mixture of experts, whose router balances over all tokens. Returns `again` of `set_activation_checkpointing`.
    """
    mlp = getattr(layer, "mlp", None)
    if isinstance(mlp, nn.Module) and not any("expert" in name for name, _ in mlp.named_modules()):
        return LearntPlacesOnly(layer, mlp).again
    return nullcontext
