"""What exact resume needs beside the loadable model: optimizer tensors, fp32 masters and the trainer's counters.

`resume/tensors.safetensors` holds `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step` for each trained parameter NAME, but
for hidden matrices under Muon, which have no `NAME.exp_avg_sq`, and `NAME.master` where the model files hold it in a
smaller type: whole tensors, whatever the layout that wrote them. `trainer_state.json` holds the rest. No pickle. The
tensors lie in a folder of their own because a checkpoint is a model that others load: vLLM and SGLang read each
`*.safetensors` beside `config.json` where there is no index.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from swiftlite.checkpoint.boxes import Holding, holdings, whole
from swiftlite.checkpoint.catalog import Entry
from swiftlite.checkpoint.folder import MANIFEST, check_folder
from swiftlite.checkpoint.tensor_writer import FilePlan
from swiftlite.checkpoint.weights import TensorFolder, read_overlap
from swiftlite.errors import RunError, UserError
from swiftlite.untrusted import read_json_file

STEM, STATE = "resume/tensors", "trainer_state.json"
TENSORS, OLDER_TENSORS = f"{STEM}.safetensors", "resume.safetensors"  # older checkpoints have them in the latter
FORMAT = 1
MOMENTS, COUNTER = ("exp_avg", "exp_avg_sq"), "step"
MOMENTUM = MOMENTS[0]

T = TypeVar("T")
Named = Iterable[tuple[str, nn.Parameter]]


@runtime_checkable
class PacksMoments(Protocol):
    """An optimizer that keeps its moments in another form, or elsewhere, than `fresh_moments` makes them."""

    def begin(self, parameter: nn.Parameter) -> None: ...
    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]: ...
    def put_moments(self, parameter: nn.Parameter, moments: dict[str, torch.Tensor]) -> None: ...


def fresh_moments(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What AdamW keeps of a parameter before its first update, as that makes it."""
    counter = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {COUNTER: counter} | {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in MOMENTS}


def plan_resume_file(
    shapes: dict[str, tuple[int, ...]], *, masters: bool, moments: bool, single: Collection[str] = ()
) -> FilePlan:
    """The layout of `resume/tensors.safetensors`. shapes: of every trained parameter of the whole model, by name.

    masters: also the trained parameters in fp32; moments: False before the first update; single: the parameters that
    have the first moment alone.
    """
    entries = []
    for name, shape in shapes.items():
        kept = kinds_of(name, single) if moments else ()
        kinds = ([("master", shape)] if masters else []) + [(kind, shape) for kind in kept]
        for kind, extent in [*kinds, *([(COUNTER, ())] if moments else [])]:
            key, box = f"{name}.{kind}", whole(extent)
            entries.append((Entry(key, extent, key, box, tuple(range(len(extent)))), torch.float32))
    return FilePlan(entries, STEM, None)


def kinds_of(name: str, single: Collection[str]) -> tuple[str, ...]:
    """The moments of a parameter. single: the names of those that have the first one alone."""
    return (MOMENTUM,) if name in single else MOMENTS


def resume_tensors(trained: Named, optimizer: torch.optim.Optimizer, *, masters: bool) -> dict[str, torch.Tensor]:
    """What this process knows of them, by the names of `plan_resume_file`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trained:
        if masters:
            tensors[f"{name}.master"] = parameter.detach()
        if parameter in optimizer.state:
            packs = isinstance(optimizer, PacksMoments)
            moments = optimizer.moments(parameter) if packs else optimizer.state[parameter]
            tensors |= {f"{name}.{kind}": value for kind, value in moments.items()}
    return tensors


def begin_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Make the moments of a parameter that was never updated, as its first update would."""
    if isinstance(optimizer, PacksMoments):
        optimizer.begin(parameter)
    else:
        optimizer.state[parameter] = fresh_moments(parameter)


def put_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: dict[str, torch.Tensor]) -> None:
    """Let an optimizer go on from these, which are of the kinds that `begin_moments` makes."""
    if isinstance(optimizer, PacksMoments):
        optimizer.put_moments(parameter, moments)
    else:
        optimizer.state[parameter] = moments


def write_trainer_state(folder: Path, state: dict[str, Any]) -> None:
    """state: what `read_trainer_state` gives back, as JSON."""
    (folder / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=2) + "\n", encoding="utf-8")


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """The counters of a checkpoint. Raises UserError where the file is missing or of another format."""
    try:
        state = read_json_file(folder / STATE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the checkpoint has no readable {STATE}", where=str(folder), fix="resume from another checkpoint"
        ) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise UserError(
            f"the checkpoint is of format {found!r:.40}, not {FORMAT}",
            where=str(folder),
            fix="resume with the version that wrote it",
        )
    if not isinstance(state.get("data"), str) or not isinstance(state.get("progress"), dict):
        raise damaged_state(folder, "data, progress")
    return state


def as_saved(kind: type[T], values: dict[str, Any], folder: Path) -> T:
    """The dataclass whose fields a checkpoint keeps. Raises UserError for other fields, or values of other types."""
    unknown = values.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise damaged_state(folder, ", ".join(sorted(unknown))[:200])
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        names = {".".join(map(str, detail["loc"][:1])) for detail in error.errors()}
        raise damaged_state(folder, ", ".join(sorted(names))[:200]) from error


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Write the files of a checkpoint's model, without those that only a resumed run reads. Raises RunError where some
    have not the sizes they had."""
    if problems := check_folder(checkpoint):
        fix = "go on with --resume auto --result last, which makes model/ of the last weights"
        raise RunError(f"the best checkpoint is damaged: {problems[0]}", where=str(checkpoint), fix=fix)
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in (MANIFEST, STATE, OLDER_TENSORS):
            shutil.copyfile(path, folder / path.name)


def damaged_state(folder: Path, what: str) -> UserError:
    """The error for a `trainer_state.json` of other contents than we write. what: is wrong in it."""
    return UserError(
        f"{STATE} is damaged: it lacks what we write, or holds something else: {what}",
        where=str(folder),
        fix="resume from another checkpoint",
    )


@torch.no_grad()
def load_resume_state(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    trained: Named,
    optimizer: torch.optim.Optimizer,
    single: Collection[str] = (),
) -> None:
    """Put masters and optimizer tensors back, each process the parts it holds.

    shapes: of every trained parameter of the whole model; single: those that have the first moment alone. Raises
    UserError where the checkpoint does not fit it.
    """
    older = folder / OLDER_TENSORS
    file = TensorFolder(older if older.is_file() else folder / TENSORS)
    _check_names(folder, file, shapes, single)
    for name, parameter in trained:
        if f"{name}.master" in file.entries:
            _read(file, f"{name}.master", parameter)
        if f"{name}.{COUNTER}" not in file.entries:
            continue
        kinds = kinds_of(name, single)
        state = {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in kinds}
        for kind in kinds:
            _read(file, f"{name}.{kind}", state[kind])
        # A copy: what is read twice, for both ends of a tied weight, is the same memory and would count twice.
        state[COUNTER] = file.read(f"{name}.{COUNTER}").to(parameter.device, copy=True)
        put_moments(optimizer, parameter, state)


def _check_names(folder: Path, file: TensorFolder, shapes: dict[str, tuple[int, ...]], single: Collection[str]) -> None:
    fix = "resume with the flags of the run that wrote it"
    for key, entry in file.entries.items():
        name, _, kind = key.rpartition(".")
        if name not in shapes:
            raise UserError(f"the checkpoint holds {name}, which this run does not train", where=str(folder), fix=fix)
        if kind in MOMENTS and kind not in kinds_of(name, single):  # a mean that AdamW took is no momentum of Muon
            raise UserError(f"the checkpoint holds {key}, which this optimizer has not", where=str(folder), fix=fix)
        if entry.shape != (() if kind == COUNTER else shapes[name]):
            raise UserError(f"{key} has shape {entry.shape}, the parameter {shapes[name]}", where=str(folder), fix=fix)
    for name in {key.removesuffix(f".{COUNTER}") for key in file.entries if key.endswith(f".{COUNTER}")}:
        lacking = [kind for kind in kinds_of(name, single) if f"{name}.{kind}" not in file.entries]
        if lacking:
            raise UserError(f"the checkpoint lacks {name}.{lacking[0]}", where=str(folder), fix=fix)


def _read(file: TensorFolder, key: str, tensor: torch.Tensor) -> None:
    entry = Entry(key, tuple(tensor.shape), key, whole(tensor.shape), tuple(range(tensor.ndim)))
    for holding in holdings(tensor):
        read_overlap(file, entry, Holding(holding.box, holding.tensor))
