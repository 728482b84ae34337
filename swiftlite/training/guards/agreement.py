"""What the processes of a run have to have in common. Each machine is started by a line of its own and reads its own
disk: where they differ, each would train something else, or wait in vain for a step that the others do not take.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite import __version__
from swiftlite.checkpoint.weights import TensorFolder
from swiftlite.config.changes import other_settings
from swiftlite.errors import RunError, UserError
from swiftlite.parallel.world import World

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.schema import RunConfig

LIBRARIES = ("torch", "transformers")
OF_THE_FIRST = ("output_dir", "template_date")  # which may come from a clock
SAMPLES, SAMPLE = 16, 1 << 12  # of each file of weights, which are too large to be read for this


def agreed(config: RunConfig, world: World) -> RunConfig:
    """The config with what the first process decides for all. Raises UserError where this one was started otherwise."""
    here = {"versions": _versions(), "settings": config.model_dump(mode="json")}
    there = json.loads(world.same("settings", json.dumps(here)))
    others = [f"{name} {found} instead of {there['versions'].get(name)}" for name, found in here["versions"].items()
              if found != there["versions"].get(name)]  # fmt: skip
    others += other_settings(here["settings"], there["settings"])
    if others:
        raise UserError(
            f"process {world.rank} was started otherwise than process 0: {', '.join(others)}",
            where=socket.gethostname(),
            fix="start all machines with the same flags, recipe, environment variables and versions",
        )
    return config.model_copy(update={name: there["settings"][name] for name in OF_THE_FIRST})


def _versions() -> dict[str, str]:
    return {"swiftlite": __version__} | {name: version(name) for name in LIBRARIES}


def check_same_rows(world: World, fingerprint: str) -> None:
    """Raises RunError where this process has read other rows than the first: each would compute steps of its own."""
    if world.same("rows", fingerprint) != fingerprint:
        raise RunError(
            f"process {world.rank} has read other rows, or another tokenizer, than process 0",
            fix="start again when nothing writes to the data; on several machines give all of them the same files",
        )


def check_same_weights(world: World, config: PretrainedConfig, folders: Sequence[TensorFolder]) -> None:
    """Raises UserError where this process would read another model than the first. config: of the model, before
    anything has changed it; folders: where its weights, and those of an adapter or a checkpoint, are."""
    if world.size == 1:
        return
    settings = config.to_dict() | {"_name_or_path": None}  # a folder may have another name elsewhere
    described = json.dumps(settings, sort_keys=True, default=str)
    kinds = {"the settings of the model": hashlib.sha256(described.encode()).hexdigest()}
    kinds |= {str(folder.path): _identity(folder) for folder in folders}
    mine = list(kinds.values())
    theirs = json.loads(world.same("weights", json.dumps(mine)))
    for what, one, other in zip(kinds, mine, theirs, strict=True):
        if one != other:
            raise UserError(
                f"process {world.rank} finds another model than process 0",
                where=f"{what}, {socket.gethostname()}",
                fix="give all machines the same files",
            )


def _identity(folder: TensorFolder) -> str:
    """By names and shapes of the tensors, and by samples of each file."""
    digest = hashlib.sha256(repr(sorted(folder.entries.items())).encode())
    for file in sorted({entry.file for entry in folder.entries.values()}):
        _add_samples(digest, folder.path / file)
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as opened:
        for number in range(SAMPLES):
            opened.seek(max(0, size - SAMPLE) * number // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE))
