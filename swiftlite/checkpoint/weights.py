"""Weights from safetensors into the parameters of a model, each process reading only what it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from swiftlite.checkpoint.boxes import Box, Holding, holdings
from swiftlite.checkpoint.catalog import Catalog, Entry, tied_names
from swiftlite.checkpoint.described import CODED, Unreadable, find_codes, without_codes
from swiftlite.checkpoint.safetensors_files import TensorEntry, damaged, inspect_file, inspect_model_folder
from swiftlite.config.names import PLAIN_MODEL
from swiftlite.dtensors import is_dtensor
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from safetensors import safe_open
    from transformers import PreTrainedModel

SHOWN_NAMES = 3
PIECE = 1 << 20  # numbers that are made of codes at a time: a few MiB


class TensorFolder:
    """Reads parts of tensors, by name, out of the safetensors files of a folder (or out of one file)."""

    def __init__(self, path: Path, *, as_stored: bool = False) -> None:
        """entries: what can be read; numbers also where the files hold codes of them, unless as_stored. Raises
        UserError where files are missing, foreign or damaged. Reads headers, and what describes codes."""
        self.path = path if path.is_dir() else path.parent
        self._stored: dict[str, TensorEntry] = inspect_model_folder(path) if path.is_dir() else inspect_file(path)
        self._open: dict[str, safe_open] = {}
        try:
            self._codes = {} if as_stored else find_codes(self._stored, self._raw, self.path)
        except Unreadable as error:
            raise UserError(str(error), where=str(self.path), fix=f"copy the files again, or {PLAIN_MODEL}") from error
        self.entries = without_codes(self._stored, self._codes)

    @property
    def coded(self) -> bool:
        """Whether some of it is codes in the files."""
        return bool(self._codes)

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor or a part of one, on the CPU, in the type it is stored in; in fp32 where that is one of codes."""
        codes = self._codes.get(name)
        return self._raw(name, part) if codes is None else codes.read(self._raw, part)

    def read_into(self, target: torch.Tensor, name: str, part: tuple[slice, ...]) -> None:
        """The same into memory of the part's shape, in its type; codes a piece at a time."""
        codes = self._codes.get(name)
        if codes is None:
            target.copy_(self._raw(name, part))
            return
        for piece in pieces(target.shape):
            place = zip(part, piece, strict=True)
            inside = tuple(slice(whole.start + of.start, whole.start + of.stop) for whole, of in place)
            target[piece].copy_(codes.read(self._raw, inside))

    def _raw(self, name: str, part: tuple[slice, ...] | None) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._stored[name].file
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except SafetensorError as error:  # its JSON is stricter than Python's
                raise damaged(self.path / file, str(error)) from error
        if not part:
            return self._open[file].get_tensor(name)
        return self._open[file].get_slice(name)[part]

    def find(self, name: str, prefix: str) -> str | None:
        """What these files call a tensor, as `match` has it; None where they lack it."""
        inside = name.removeprefix(f"{prefix}.")
        candidates = (name, inside, f"{prefix}.{name}", f"{prefix}.language_model.{inside}")
        return next((candidate for candidate in candidates if candidate in self.entries), None)

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors of one shape hold the same numbers. Reads them a piece at a time."""
        parts = pieces(self.entries[one].shape)
        return all(torch.equal(self.read(one, part).float(), self.read(other, part).float()) for part in parts)

    def match(self, catalog: Catalog, prefix: str) -> Catalog:
        """The catalog in the names of these files: files of a bare decoder lack `prefix.` before every name, those of a
        model for images too have the language model's below `prefix.language_model.` (Qwen3.5).

        Raises UserError where tensors are missing or of another shape than the model wants.
        """
        named = [(self.find(entry.name, prefix), entry) for entry in catalog]
        missing = [entry.name for name, entry in named if name is None]
        if missing:
            known = {entry.name for entry in catalog}
            foreign = sorted(name for name in self.entries if name not in known)
            strange = f"; the files hold names it does not know, such as {foreign[0]}" if foreign else ""
            raise self._misfit(f"are missing: {shown_names(missing)}{strange}")
        others = [name for name, entry in named if self.entries[name].shape != entry.shape]
        if others:
            raise self._misfit(f"have another shape than config.json says: {shown_names(others)}")
        coded = [name for name, _ in named if self.entries[name].dtype in CODED]
        if coded:
            raise self._misfit(f"are codes whose scales are not there: {shown_names(coded)}")
        return [replace(entry, name=name) for name, entry in named]

    def _misfit(self, problem: str) -> UserError:
        return UserError(
            f"tensors of the model {problem}",
            where=str(self.path),
            fix="check that config.json (and --config-overrides) and the safetensors files belong to the same model",
        )


def match_model(weights: TensorFolder, catalog: Catalog, model: PreTrainedModel) -> Catalog:
    """`match` for tensors of a model, of which files may hold a tied one by any of its names. Raises UserError."""
    prefix, tied = model.base_model_prefix, tied_names(model)

    def as_held(entry: Entry) -> Entry:
        names = (entry.name, *(name for name, first in tied.items() if first == entry.owner))
        held = (name for name in names if weights.find(name, prefix) is not None)
        return replace(entry, name=next(held, entry.name))

    return weights.match([as_held(entry) for entry in catalog], prefix)


def shown_names(names: list[str]) -> str:
    """The first of some names, for a message."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def read_overlap(folder: TensorFolder, entry: Entry, holding: Holding) -> int:
    """Copy what a file's tensor and a holding have in common into the holding, converting the number type. Returns how
    many numbers that are."""
    common = entry.box.overlap(holding.box)
    if common is None:
        return 0
    part = entry.on_disk(common.slices_of(entry.box))
    left_out = [dim for dim in range(len(entry.box.shape)) if dim not in entry.dims]
    target = holding.tensor[common.slices_of(holding.box)]
    in_order = target.permute((*entry.dims, *left_out)).squeeze(tuple(range(len(entry.dims), target.ndim)))
    folder.read_into(in_order, entry.name, part)
    return target.numel()


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Parts of a tensor of about `PIECE` numbers, along its first and, where that is not enough, its last dimension."""
    rest, steps = math.prod(shape[1:]), list(shape)
    if shape:
        steps[0] = max(1, PIECE // max(1, rest))
    if rest > PIECE:
        steps[-1] = max(1, PIECE * shape[-1] // rest)
    ranges = [range(0, size, max(1, step)) for size, step in zip(shape, steps, strict=True)]
    for starts in itertools.product(*ranges):
        places = zip(starts, steps, shape, strict=True)
        yield tuple(slice(first, min(first + step, size)) for first, step, size in places)


class StartValues(Protocol):
    def __call__(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor | None: ...


@torch.no_grad()
def fill(
    tensors: Iterable[tuple[str, torch.Tensor]],
    sources: list[tuple[TensorFolder, Catalog]],
    start_values: StartValues,
) -> None:
    """Give every tensor its values: from the files that know it, over its start values.

    tensors: by name, plain or DTensor; start_values: the values of a box of the tensor `name` of the whole `shape`, or
    None where files hold all of it. Raises UserError where they do not: such memory may hold anything.
    """
    entries: dict[str, list[tuple[TensorFolder, Entry]]] = {}
    for folder, catalog in sources:
        for entry in catalog:
            entries.setdefault(entry.owner, []).append((folder, entry))
    for name, tensor in tensors:
        for holding in holdings(tensor):
            first = start_values(name, tuple(tensor.shape), holding.box)
            if first is not None:
                holding.tensor.copy_(first)
            read = sum(read_overlap(folder, entry, holding) for folder, entry in entries.get(name, ()))
            if first is None and read < holding.tensor.numel():
                raise UserError(
                    f"no file gives values to {name}", fix="check that these files belong to this model, and report it"
                )


def materialize(model: nn.Module, device: torch.device, computing: torch.device | None = None) -> None:
    """Give every parameter on `meta` memory on the device, and move the rest there. Values come later.

    computing: where the model runs, if elsewhere: FSDP brings offloaded parameters there, but no buffers.

    `nn.Module.to_empty` would throw away the buffers that no file holds, such as the frequencies of rotary embeddings,
    and make two parameters of a tied one.
    """
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if id(parameter) not in allocated:
                    memory = _memory_like(parameter, device)
                    allocated[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                setattr(module, name, allocated[id(parameter)])
    model.to(device)  # also lets FSDP take notice of its parameters' memory
    if computing is not None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(computing))


def _memory_like(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """`empty_like` of a tensor on `meta` runs in Python, by code that imports sympy (0.3 s): plain ones do without."""
    if is_dtensor(parameter):
        return torch.empty_like(parameter, device=device)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
