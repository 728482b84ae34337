"""Which parameters are hidden matrices: what a decoder layer multiplies hidden states by.

They are what Muon was made for (https://kellerjordan.github.io/posts/muon/): embeddings, output heads and vectors are
none. An architecture's own linear layers and routers count, and so do both matrices of a LoRA adapter. What is fused
into one parameter, such as queries, keys and values, is one matrix.
"""

from __future__ import annotations

from torch import nn

from swiftlite.models.anatomy import dissect
from swiftlite.models.experts import holds_experts


def hidden_matrices(base: nn.Module) -> set[int]:
    """Ids of the hidden matrices of a causal language model, trained or not. base: on `meta` will do, whole, with its
    adapters. Those of experts in one parameter are `[experts, rows, columns]`."""
    modules = dissect(base).layers.modules()
    return {id(p) for module in modules for name, p in module._parameters.items() if is_matrix(module, name)}


def is_matrix(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a module inside a decoder layer is a hidden matrix, or one for each expert."""
    parameter = module._parameters[name]
    if parameter is None or isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
        return False
    return parameter.ndim == 3 if holds_experts(module) else parameter.ndim == 2 and name == "weight"
