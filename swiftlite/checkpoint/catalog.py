"""Which tensor on disk is which part of which parameter.

Names and shapes differ between memory and disk: adapters wrap modules, tied weights have one entry, the experts of a
mixture are one fused tensor in memory and many on the hub, and queries, keys and values may be one on the hub.
transformers and peft know how to turn a state of memory into one of disk; they are asked once, with tensors on `meta`,
and since all they do is rename, cut and join, each result is made of views that tell which box of which parameter they
came from. Reading and saving then work on boxes alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from swiftlite.checkpoint.boxes import Box
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Entry:
    """A tensor on disk, or a part of one: what stands from `start` on is the box of `owner`, a parameter or buffer by
    its name in memory.

    shape: of the whole tensor on disk; dims: for each dimension on disk the one of the owner along which it runs (one
    that was cut to a single index is left out on disk); start: an index for each dimension on disk, () for the first.
    """

    name: str
    shape: tuple[int, ...]
    owner: str
    box: Box
    dims: tuple[int, ...]
    start: tuple[int, ...] = ()

    def on_disk(self, place: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where a part of the box lies in the tensor on disk. place: a slice of the box for each of its dimensions."""
        starts = self.start or (0,) * len(self.dims)
        return tuple(
            slice(first + place[dim].start, first + place[dim].stop)
            for first, dim in zip(starts, self.dims, strict=True)
        )


Catalog = list[Entry]


def catalog_model(model: PreTrainedModel) -> Catalog:
    """The tensors of `model` as the hub has them. model: on any device, without adapters.

    Raises UserError where transformers does more than rename, cut and join (then only its own loader could read the
    files).
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: _stand_in(tensor) for name, tensor in stored_tensors(model)}
    with _KeepViews() as views:
        on_disk = revert_weight_conversion(model, dict(state))
    return _entries(state, on_disk, views, type(model).__name__)


def take_prefixes(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Let the model's tensors have the prefixes on disk that its files have. names: of the tensors in these.

    Towers for images are published with a `vision_model.` in their names that transformers' classes are without: that
    it is to be written again can be known of nothing but the files, where transformers loads them as well.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    known = get_model_conversion_mapping(model, add_legacy=False)
    if not any(isinstance(each, PrefixChange) for each in known):
        return
    for name in names:
        for renaming in known:
            if isinstance(renaming, WeightRenaming):
                name, _ = renaming.rename_source_key(name)  # which notes whether it was used
    model._weight_conversions = [each for each in known if each.was_used() or not isinstance(each, PrefixChange)]


def catalog_adapter(model: nn.Module) -> Catalog:
    """The tensors of a peft model's adapter as peft writes them, a tied one by each of its names."""
    state, on_disk, views = _adapter_on_disk(model)
    return _entries(state, on_disk, views, type(model).__name__)


def check_adapter(model: nn.Module, names: Iterable[str], where: Path) -> None:
    """Raise UserError where an adapter's file has matrices for layers that `model`, a peft model, lacks, or none for
    some that it has: peft passes over both. names: of the tensors in the file.
    """
    wanted, stored = ({_plain(name) for name in of if ".lora_" in name} for of in (_adapter_on_disk(model)[1], names))
    for lost, problem in ((stored - wanted, "is for layers that the model lacks"), (wanted - stored, "lacks tensors")):
        if lost:
            raise UserError(
                f"the adapter does not fit the model: it {problem}: {min(lost)}"
                + (f" and {len(lost) - 1} more" if len(lost) > 1 else ""),
                where=str(where),
                fix="give the base model that the adapter was trained on",
            )


def unread_of_adapter(catalog: Catalog, names: Iterable[str]) -> dict[str, str]:
    """The tensors of an adapter's file that are not in its catalog, with their names in the base model. peft
    writes embeddings as well where it finds their size changed, or an adapter on them; of a module that is trained
    whole it may write all three copies, of which one counts."""
    known = {_plain(entry.name) for entry in catalog}
    copies = re.compile(r"\.(modules_to_save|original_module)\.")
    unread = [name for name in names if copies.sub(".", _plain(name)) not in known]
    return {name: _plain(name).replace(".base_layer.", ".") for name in unread}


def _adapter_on_disk(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], _KeepViews]:
    """(stand-ins of a peft model's tensors by their names in memory, what peft makes of them for its file, and how)."""
    from peft import get_peft_model_state_dict

    state = {name: _stand_in(tensor) for name, tensor in stored_tensors(model)}
    tied = {name: state[first] for name, first in tied_names(model).items()}
    with _KeepViews() as views:
        on_disk = get_peft_model_state_dict(model, state_dict=state | tied, save_embedding_layers=False)
    return state, on_disk, views


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the first one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in names if first[id(parameter)] != name}


def stored_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, a tied one once, and the buffers that belong to a model's files."""
    kept = set(model.state_dict(keep_vars=True))
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    return [*model.named_parameters(), *buffers]


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _KeepViews(TorchFunctionMode):
    """Views stay views: a copy made only to be contiguous would forget where it came from. What is joined is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor], int]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        result = function(*args, **(kwargs or {}))
        if function is torch.cat:
            tensors, dim = list(args[0]), args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            self._joined[id(result)] = result, tensors, dim % result.ndim
        return result

    def pieces(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """(what a tensor was joined of, where each begins in it), or the tensor itself."""
        if id(tensor) not in self._joined:
            return [(tensor, ())]
        _, tensors, dim = self._joined[id(tensor)]
        ends = itertools.accumulate(piece.shape[dim] for piece in tensors)
        places = [end - piece.shape[dim] for piece, end in zip(tensors, ends, strict=True)]
        return [
            (piece, tuple(place if axis == dim else 0 for axis in range(tensor.ndim)))
            for piece, place in zip(tensors, places, strict=True)
        ]


def _entries(
    state: dict[str, torch.Tensor], on_disk: dict[str, torch.Tensor], views: _KeepViews, architecture: str
) -> Catalog:
    owners = {id(tensor): name for name, tensor in state.items()}
    found = []
    for name, tensor in on_disk.items():
        for view, start in views.pieces(tensor):
            base = view if id(view) in owners else view._base
            owner = owners.get(id(base))
            if owner is None:
                raise UserError(
                    f"the files of {architecture} hold {name} in a form that swiftlite cannot cut",
                    fix="use another model, or report the architecture",
                )
            box, dims = _trace(view, base)
            found.append(Entry(name, tuple(tensor.shape), owner, box, dims, start))
    return found


def _trace(view: torch.Tensor, base: torch.Tensor) -> tuple[Box, tuple[int, ...]]:
    """(the box of `base` that a view shows, the dimension of `base` along which each of the view's runs)."""
    strides = base.stride()
    offset, start = view.storage_offset(), []
    for stride, extent in zip(strides, base.shape, strict=True):
        start.append(0 if extent == 1 else offset // stride)
        offset -= start[-1] * stride
    dims: list[int] = []
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        fits = [
            dim
            for dim in range(base.ndim)
            if dim not in dims and (strides[dim] == stride or (extent == 1 and base.shape[dim] == 1))
        ]
        dims.append(fits[0])
    shape = [1] * base.ndim
    for extent, dim in zip(view.shape, dims, strict=True):
        shape[dim] = extent
    assert offset == 0
    assert math.prod(shape) == view.numel()
    return Box(tuple(start), tuple(shape)), tuple(dims)
