"""What a model starts with that nobody has trained: random numbers by the rules of its own class.

transformers writes them down as `_init_weights`, which is called with each module, after the modules inside it. Here a
decoder layer is made at a time, or a module that lies outside of the layers, so that no process needs memory for more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.seeds import derive_seed


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
        value = self._known[1].get(name)
        if value is None or value.sum().isnan():  # the sum: to look at each number takes half as long as to draw it
            raise UserError(
                f"nothing says what {name} starts with: {type(self._model).__name__} has no rule for it",
                where="--from-scratch",
                fix="give a model that has weights, without --from-scratch",
            )
        return value

    @torch.no_grad()
    def _made(self, block: str) -> dict[str, torch.Tensor]:
        """The tensors of a module, without the whole numbers that no rule reaches; of others such numbers are NaN."""
        module = copy.deepcopy(self._model.get_submodule(block)).float().to_empty(device="cpu")
        before = {}
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            else:
                before[id(tensor)] = tensor._version
        with torch.random.fork_rng(devices=[]), self._in_its_place(block, module) as owner:
            torch.manual_seed(derive_seed(self._seed, "initial", block))
            module.apply(owner._init_weights)
        tensors = [*module.named_parameters(prefix=block), *module.named_buffers(prefix=block)]
        return {name: tensor for name, tensor in tensors if before.get(id(tensor)) != tensor._version}

    @contextmanager
    def _in_its_place(self, block: str, module: nn.Module) -> Iterator[PreTrainedModel]:
        """The innermost model that has it, whose rules are its own; they may look it up there by what it is."""
        if not block:
            yield module
            return
        path, _, last = block.rpartition(".")
        holder, usual = self._model.get_submodule(path), self._model.get_submodule(block)
        setattr(holder, last, module)
        try:
            around = (m for name, m in self._model.named_modules() if not name or f"{block}.".startswith(f"{name}."))
            *_, owner = (found for found in around if isinstance(found, PreTrainedModel))
            yield owner
        finally:
            setattr(holder, last, usual)
