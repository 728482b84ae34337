"""Which parts of a model's layers are compiled, and what is said where that is less than all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Layers are compiled when they first run: once, since rows differ in length and number. That a first row is as
    long as the model is wide must not be taken for a rule, or the next row would have them compiled again."""
    torch.fx.experimental._config.use_duck_shape = False
    for layer in layers:
        for part in _split(layer)[0]:
            part.compile(dynamic=True)


def left_out_of(decoder: nn.Module) -> str | None:
    """Words for what `compile_layers` leaves as it is written; None where there is nothing of that kind."""
    kinds = dict.fromkeys(type(mixer).__name__ for mixer in _split(decoder)[1])
    if not kinds:
        return None
    return (
        f"--compile leaves out {', '.join(kinds)}, whose convolution over tokens takes rows of one length only, and "
        "under --activation-checkpointing selective all of the layers around it"
    )


def nothing_compiled() -> str | None:
    """Words for a first step in which the compiler found nothing to compile. A call that it cannot follow splits a
    layer in two, but not where activation checkpointing is a part of the layer's forward pass: all of that runs as it
    is written then, and the compiler says nothing."""
    if torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        return None
    return (
        "--compile has compiled nothing: layers make a call that the compiler cannot follow; leave it out, or try "
        "another --activation-checkpointing"
    )


def _split(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """(the largest parts of a module without a convolution over tokens, the modules that hold one).

    Such a module, of a state space or linear attention, cuts a row into chunks by arithmetic on its length, which the
    compiler fails at where the length may be any (torch 2.11 to 2.13). Its neighbours are compiled each by itself:
    within one compiled layer it would have to be a call that the compiler does not follow.
    """
    if not any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return [module], []
    if any(isinstance(part, nn.Conv1d) for part in module.children()):
        return [], [module]
    split = [_split(part) for part in module.children()]
    return [part for parts, _ in split for part in parts], [mixer for _, mixers in split for mixer in mixers]
