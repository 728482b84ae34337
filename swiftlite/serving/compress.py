"""`swiftlite export --quantization`: which matrices of a model become codes and scales, in memory and on the disk.

Those of the linear layers inside the decoder layers do, and those of a mixture's experts where files have them one by
one. What stays is what engines leave as it is too: embedding, output head, norms, routers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swiftlite.checkpoint.boxes import whole
from swiftlite.checkpoint.catalog import Catalog, Entry, catalog_model
from swiftlite.checkpoint.weights import TensorFolder, shown_names
from swiftlite.config.types import plain_word
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect, expert_count
from swiftlite.models.compressed import FORMATS, GROUPS, Format, config_section, pack, round_inputs, stored
from swiftlite.models.experts import holds_experts
from swiftlite.models.matrices import is_matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLAG = "--quantization"
MULTIPLE = 16  # of a layer's inputs and outputs, in the products of 8 bits of GPUs
STRANGE_SHARE = 0.1  # of the decoder layers' numbers, in matrices that engines do not know as linear layers


@dataclass(frozen=True)
class Chosen:
    """What becomes codes. name: of the format, as the flag has it; entries: the matrices, by their layers' names on
    disk; linear: layers whose inputs are rounded as well; ignored: those that stay as they are, though an engine would
    take them for linear ones; misfits: of them those that stay for their shape; group: how many numbers share a scale,
    None for a row."""

    name: str
    form: Format
    entries: Mapping[str, Entry]
    linear: frozenset[str]
    ignored: list[str]
    misfits: list[str]
    group: int | None

    @property
    def section(self) -> dict[str, Any]:
        """Of config.json."""
        return config_section(self.form, self.group, self.ignored)

    @property
    def has_experts(self) -> bool:
        return len(self.entries) > len(self.linear)

    def stand_ins(self, dtype: torch.dtype) -> dict[str, list[tuple[Entry, torch.dtype]]]:
        """What the files have for each tensor that becomes codes. dtype: of scales."""
        return {
            entry.name: [
                (Entry(f"{layer}.{name}", shape, f"{layer}.{name}", whole(shape), tuple(range(len(shape)))), kind)
                for name, (shape, kind) in stored(entry.shape, self.form, self.group, dtype).items()
            ]
            for layer, entry in self.entries.items()
        }

    @torch.no_grad()
    def packed(self, model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors of the files that hold codes, scales and shapes. Raises UserError for infinite weights."""
        parameters, packed = dict(model.named_parameters()), {}
        for layer, entry in self.entries.items():
            matrix = _on_disk(parameters[entry.owner], entry).contiguous()
            if not matrix.isfinite().all():
                raise UserError(f"{entry.name} holds infinite numbers", fix="export another checkpoint of the run")
            tensors = pack(matrix, self.form, self.group, dtype)
            packed |= {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        return packed

    @torch.no_grad()
    def restore(self, model: nn.Module, folder: Path) -> None:
        """Give a model in fp32 the values that the files in `folder` stand for."""
        parameters, files = dict(model.named_parameters()), TensorFolder(folder)
        for layer, entry in self.entries.items():
            matrix = _on_disk(parameters[entry.owner], entry)
            files.read_into(matrix, f"{layer}.weight", tuple(slice(0, size) for size in matrix.shape))

    @contextmanager
    def rounded_inputs(self, model: nn.Module) -> Iterator[None]:
        """Here the linear layers multiply what an engine would. The inputs of experts stay as they are: they go from
        one matrix to the next inside of one module."""
        names = self.linear if self.form.rounds_inputs else ()
        hooks = [model.get_submodule(name).register_forward_pre_hook(partial(_round, self.form)) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _round(form: Format, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return round_inputs(inputs[0], form), *inputs[1:]


def named_format(word: str) -> str | None:
    """The format that the flag names, None for `none`. Raises UserError."""
    plain = plain_word(word)
    if plain != "none" and plain not in FORMATS:
        raise UserError(f"unknown quantization {word!r}", where=FLAG, fix=f"give none, {', '.join(FORMATS)}")
    return None if plain == "none" else plain


def choose(model: PreTrainedModel, name: str) -> Chosen:
    """model: on `meta`, without adapters; name: of a format. Raises UserError for one that cannot be stored so."""
    form, layers = FORMATS[name], dissect(model).layers
    prefix = next(path for path, module in model.named_modules() if module is layers)
    catalog: dict[str, Catalog] = {}
    for entry in catalog_model(model):
        catalog.setdefault(entry.owner, []).append(entry)
    linear, experts = {}, {}
    for path, module in layers.named_modules(prefix=prefix):
        if isinstance(module, nn.Linear):
            linear[path] = module
        elif holds_experts(module):
            experts |= _experts(path, module, catalog)
    _check_known(model, layers)
    if experts and name == "int8":
        raise _refused(model, "has experts, whose matrices transformers does not read in int8", f"{FLAG} fp8 or int4")
    routed = expert_count(model.config)
    wanted = {path: module for path, module in linear.items() if not _is_router(path, module, routed)}
    fits = {path: module for path, module in wanted.items() if _fits(module, form)}
    entries = _by_layer(_entry(path, catalog) for path in fits) | experts
    if not entries:
        raise _refused(model, "has no linear layer in its decoder layers that fits the format")
    misfits = [path for path in wanted if path not in fits]
    return Chosen(
        name, form, entries, frozenset(fits), _ignored(model, fits, catalog), misfits, _group(model, entries, form)
    )


def _ignored(model: nn.Module, fits: Mapping[str, nn.Linear], catalog: Mapping[str, Catalog]) -> list[str]:
    """By the names that layers have in memory and, where those are others, on disk."""
    names = [path for path, module in model.named_modules() if path not in fits and _looks_linear(module)]
    on_disk = _by_layer(entry for path in names for entry in catalog.get(f"{path}.weight", ()))
    return list(dict.fromkeys([*names, *on_disk]))


def _by_layer(entries: Iterable[Entry]) -> dict[str, Entry]:
    return {entry.name.removesuffix(".weight"): entry for entry in entries}


def _is_router(path: str, module: nn.Linear, experts: float) -> bool:
    return module.out_features == experts and not path.endswith("_proj")


def _fits(module: nn.Linear, form: Format) -> bool:
    multiple = GROUPS[-1] if form.grouped else MULTIPLE
    return module.in_features % multiple == 0 and module.out_features % MULTIPLE == 0


def _looks_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer for engines, as routers are that have a class of their own."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) or (weight is not None and weight.ndim == 2 and is_matrix(module, "weight"))


def _experts(path: str, module: nn.Module, catalog: Mapping[str, Catalog]) -> dict[str, Entry]:
    """The matrices of all experts in a module, by their names on disk. Raises UserError where files have several
    experts in one tensor."""
    entries = [entry for key in module._parameters for entry in catalog.get(f"{path}.{key}", ())]
    for entry in entries:
        if len(entry.shape) > 2 or (len(entry.shape) == 2 and not entry.name.endswith(".weight")):
            raise UserError(
                f"{type(module).__name__} has several experts in one tensor ({entry.name}); engines want the codes of "
                "each expert by itself",
                where=FLAG,
                fix=f"export without {FLAG}",
            )
    return _by_layer(entry for entry in entries if len(entry.shape) == 2)


def _check_known(model: nn.Module, layers: nn.Module) -> None:
    """Raises UserError where many of the layers' numbers are in matrices that are neither linear layers nor experts."""
    strange: dict[str, int] = {}
    for module in layers.modules():
        if not isinstance(module, nn.Linear) and not holds_experts(module):
            count = sum(p.numel() for name, p in module._parameters.items() if is_matrix(module, name))
            strange[type(module).__name__] = strange.get(type(module).__name__, 0) + count
    if sum(strange.values()) > STRANGE_SHARE * sum(p.numel() for p in layers.parameters()):
        raise _refused(model, f"keeps matrices in {max(strange, key=strange.get)}, which is no nn.Linear")


def _entry(path: str, catalog: Mapping[str, Catalog]) -> Entry:
    """Of a linear layer's matrix. Raises UserError where files have it otherwise than memory."""
    entries = catalog.get(f"{path}.weight", [])
    entry = entries[0] if len(entries) == 1 else None
    if entry is None or entry.dims != (0, 1) or entry.shape != entry.box.shape or not entry.name.endswith(".weight"):
        raise UserError(
            f"the files of the model have {path} as a part of another tensor, or in another order",
            where=FLAG,
            fix=f"export without {FLAG}",
        )
    return entry


def _group(model: nn.Module, entries: Mapping[str, Entry], form: Format) -> int | None:
    """The largest group that all matrices can be divided into: engines read one size for all."""
    if not form.grouped:
        return None
    misfits = [entry.name for entry in entries.values() if entry.shape[1] % GROUPS[-1]]
    if misfits:
        why = f"has experts whose inputs are no multiple of {GROUPS[-1]} ({shown_names(misfits)})"
        raise _refused(model, why, f"{FLAG} fp8")
    return next(group for group in GROUPS if not any(entry.shape[1] % group for entry in entries.values()))


def _refused(model: nn.Module, why: str, instead: str = "") -> UserError:
    fix = f"export with {instead}" if instead else f"export without {FLAG}"
    return UserError(f"{type(model).__name__} {why}", where=FLAG, fix=fix)


def _on_disk(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """A view of the part of a parameter that an entry is, in the order of its dimensions on disk."""
    part = tensor[entry.box.slices_of(whole(tensor.shape))]
    left_out = [dim for dim in range(part.ndim) if dim not in entry.dims]
    return part.permute((*entry.dims, *left_out)).squeeze(tuple(range(len(entry.dims), part.ndim)))
