"""Trained tensors that a step gives no gradient: nobody calls their layer, or something cuts them off from the loss."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from swiftlite.dtensors import local
from swiftlite.parallel.mesh import Mesh

FIRST = 4096  # numbers of a gradient to look at before all of them


def without_gradient(trained: Iterable[tuple[str, nn.Parameter]], mesh: Mesh) -> list[str]:
    """The places, `model.layers.*.mlp.up_proj.weight` for all layers together, where no gradient is other than zero in
    any process. Experts and layers that a few rows pass by are no places of their own, and the tensors of an adapter
    are one: at the start one of them gets none by design.

    trained: of this process, with gradients that are added up; every process calls it together.
    """
    touched: dict[str, bool] = {}
    for name, parameter in trained:
        place = _place(name)
        touched[place] = touched.get(place) or _is_touched(parameter.grad)
    found = mesh.gather([f"{'+' if moved else '-'}{place}" for place, moved in touched.items()])
    moved = {text[1:] for text in found if text[0] == "+"}
    return [text[1:] for text in found if text[0] == "-" and text[1:] not in moved]


def _place(name: str) -> str:
    """Also without peft's wrapping and the parts of an adapter, whose name is `default`."""
    module = re.sub(r"\.[^.]+\.default(\..*)?$", "", name.removeprefix("base_model.model."))
    return re.sub(r"\.\d+(?=\.)", ".*", module)


def _is_touched(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    numbers = local(gradient).flatten()
    return bool(numbers[:FIRST].any()) or bool(numbers.any())
