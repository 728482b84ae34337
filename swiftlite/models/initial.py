"""What a model starts with that nobody has trained: random numbers by the rules of its own class.

transformers writes them down as `_init_weights`, which is called with each module, after the modules inside it. Here a
decoder layer is made at a time, or a module that lies outside of the layers, so that no process needs memory for more.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InitialValues:
    """Whole tensors by their names in a model. A layer's are a function of the seed and its name: whoever asks for
    which of them, they are the same."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """model: on `meta`, before anything is divided or exchanged in it; it is copied."""
        self._model, self._seed = copy.deepcopy(model), seed
        layers = {id(layer) for layer in dissect(self._model).layers}
        self._layers = [name for name, module in self._model.named_modules() if id(module) in layers]
        self._known: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def __call__(self, name: str) -> torch.Tensor:
        """In fp32, on the CPU. Raises UserError where the class has no rule for it."""
        block = next((layer for layer in self._layers if name.startswith(f"{layer}.")), name.rpartition(".")[0])
        if self._known[0] != block:
            self._known = block, self._made(block)
        value = self._known[1][name]
        if _first_of_rows(value).isnan().any():
            raise UserError(
                f"nothing says what {name} starts with: {type(self._model).__name__} has no rule for it",
                where="--from-scratch",
                fix="give a model that has weights, without --from-scratch",
            )
        return value

    @torch.no_grad()
    def _made(self, block: str) -> dict[str, torch.Tensor]:
        module = copy.deepcopy(self._model.get_submodule(block)).float().to_empty(device="cpu")
        tensors = dict([*module.named_parameters(prefix=block), *module.named_buffers(prefix=block)])
        for tensor in tensors.values():
            if tensor.is_floating_point():
                _first_of_rows(tensor).fill_(torch.nan)  # what no rule reaches shows
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self._seed, "initial", block))
            module.apply(self._model._init_weights)
        return tensors


def _first_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A number of each row, as a view: to look at all of them takes as long as to draw them."""
    return tensor.view(tensor.shape[0] if tensor.dim() else 1, -1)[:, :1]
