"""What `--target-modules all-linear` adapts: layers that multiply by their matrix, and do so when they are called.

An adapter acts in its layer's forward pass. A class that gives something else than a product would give something else
than it should; a module whose weight others read, without calling it, would have an adapter that learns nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swiftlite.errors import UserError
from swiftlite.models.anatomy import beside_text, decoder_of, head_of
from swiftlite.models.load import own_attention

# What peft does not adapt, by the model's type: kernels of state spaces read its weight.
REFUSED_BY_PEFT = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj")
TOKENS = 8  # of the row that shows which modules are called


def left_out(model: PreTrainedModel, say: Callable[[str], None]) -> list[str]:
    """What peft should leave out of all linear layers: the last part of a name where all that are called so are meant,
    else whole names. say: is told of it, in one line."""
    unread = unread_by_text(model)
    linear = {name: module for name, module in _linear_modules(model).items() if name not in unread}
    reasons = why_unlike_linear(model, linear)
    refused = REFUSED_BY_PEFT.get(model.config.model_type)
    for name in linear:
        if name not in reasons and _last(name) == refused:
            reasons[name] = "which peft does not adapt in this architecture"
    if told := dict.fromkeys(f"{_last(name)}, {reason}" for name, reason in reasons.items()):
        say(f"LoRA leaves out {'; '.join(told)}")
    if unread:
        say(f"LoRA leaves out {len(unread)} layers that no text goes through, such as {unread[0]}")
    kept = {_last(name) for name in linear if name not in reasons}
    return list(dict.fromkeys(name if _last(name) in kept else _last(name) for name in (*reasons, *unread)))


def unread_by_text(model: PreTrainedModel) -> list[str]:
    """The names of linear layers that no text goes through, such as those of a tower for images."""
    beside = {id(parameter) for parameter in beside_text(model).values()}
    return [name for name, module in _linear_modules(model).items() if id(module.weight) in beside]


def check_named(model: PreTrainedModel, words: list[str]) -> list[str]:
    """The same names. Raises UserError where one is of modules that an adapter does not fit."""
    linear = _linear_modules(model)
    reasons = why_unlike_linear(model, linear) | dict.fromkeys(unread_by_text(model), "which no text goes through")
    for word in words:
        meant = [name for name in linear if name == word or name.endswith(f".{word}")]
        if meant and all(name in reasons for name in meant):
            raise UserError(
                f"LoRA cannot act on {word!r}, {reasons[meant[0]]}", where="--target-modules", fix="leave it out"
            )
    return words


def why_unlike_linear(model: PreTrainedModel, linear: dict[str, nn.Module]) -> dict[str, str]:
    """Of each of them that gives no product when it is called, or is not called, by name, why. An adapter does not fit
    it, nor does any other forward pass of linear layers. model: on `meta`."""
    strange = {
        name: f"whose class {type(module).__name__} gives something else than a product"
        for name, module in linear.items()
        if not _multiplies(module)
    }
    unheard = dict.fromkeys(_not_called(model, linear), "whose weight is read without a call of the layer")
    return unheard | strange


def read_by_kernels(model: PreTrainedModel, linear: Iterable[str]) -> list[str]:
    """The names of linear layers whose weight the module that holds them gives to a kernel, as Mamba 2 does on a GPU
    while it trains, and calls the layer elsewhere."""
    return [name for name in linear if f"_weight=self.{_last(name)}.weight" in _code_of_holder(model, name)]


def _linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    head = head_of(model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    return {name: module for name, module in found.items() if module is not head}


def _multiplies(module: nn.Module) -> bool:
    kind = type(module)
    if kind.forward in (nn.Linear.forward, Conv1D.forward):
        return True
    return isinstance(module, nn.Linear) and _multiplies_small(kind, module)


@torch.no_grad()
def _multiplies_small(kind: type[nn.Linear], module: nn.Linear) -> bool:
    """Whether a class of linear layers with a forward of its own computes what others do: asked of a copy with a small
    matrix, since the module's has no memory yet."""
    asked = copy.copy(module)
    asked.in_features, asked.out_features = 3, 5
    bias = None if module.bias is None else torch.linspace(-1, 1, 5)
    weight, x = torch.linspace(-2, 3, 15).view(5, 3), torch.linspace(-1, 2, 12).view(2, 2, 3)
    asked._parameters = {"weight": weight, "bias": bias}
    try:
        found = kind.forward(asked, x)
    except Exception:  # it may do anything with numbers that it does not expect
        return False
    expected = F.linear(x, weight, bias)
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def _not_called(model: PreTrainedModel, linear: dict[str, nn.Module]) -> list[str]:
    """The names of linear layers that are not called where those that hold them run, of layers whose weight the code
    around them names. The model is run as far as it runs without memory for weights."""
    asked = [name for name, module in linear.items() if module.weight.is_meta and _is_read(model, name)]
    if not asked:
        return []
    trial = copy.deepcopy(model).to("meta").train()
    trial.set_attn_implementation(own_attention(trial))
    done: set[str] = set()
    for part in {part for name in asked for part in [name, *_holders(name)]}:
        trial.get_submodule(part).register_forward_hook(lambda *_, part=part: done.add(part))
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with contextlib.suppress(Exception), _SaysYes():  # a router's choice cannot be made: what was before it has run
        decoder_of(trial)(input_ids=ids, use_cache=False)
    called = {_place(name) for name in asked if name in done}
    passed = {_place(name) for name in asked if done.intersection(_holders(name))}
    return [name for name in asked if _place(name) in passed - called]


def _holders(name: str) -> list[str]:
    """The names of the modules around one, without the model itself."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


class _SaysYes(TorchDispatchMode):
    """Whether a mask hides nothing, and the like, is asked of values that are not there."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if op is torch.ops.aten._local_scalar_dense.default else op(*args, **(kwargs or {}))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _place(name: str) -> str:
    """The same for all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _is_read(model: PreTrainedModel, name: str) -> bool:
    """Whether the code of the module that holds it names the weight of a layer."""
    return f".{_last(name)}.weight" in _code_of_holder(model, name)


def _code_of_holder(model: PreTrainedModel, name: str) -> str:
    return _code_of(type(model.get_submodule(name.rpartition(".")[0])))


@functools.cache
def _code_of(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
