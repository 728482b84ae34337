"""The files of a run folder that reporting writes and reads: whole or not at all, and without secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any

from swiftlite.errors import DISK_FULL, RunError
from swiftlite.untrusted import masked, parse_json

RUN = "run.json"
STATE_TYPES = {
    "id": str,
    "started": str,
    "state": str,
    "seconds": int | float,
    "total_steps": int,
    "facts": dict,
    "messages": list,
}


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a hidden neighbour that then takes the place of `path`. Raises RunError where that fails.

    The neighbour is this process's own: `swiftlite report` may draw what a run that ends draws at the same time.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with disk_errors(path):
            write(partial)
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # on a read-only disk it was never there, and cannot be looked for either
            partial.unlink()
        raise
    return path


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """OSError -> RunError that names the file."""
    try:
        yield
    except OSError as error:
        full = error.errno in DISK_FULL
        raise RunError(
            f"{path.name} cannot be written: {'the disk is full' if full else error.strerror}",
            where=str(path),
            fix="free space and go on with --resume auto" if full else "see to the folder and go on with --resume auto",
        ) from error


def write_run_state(output: Path, state: dict[str, Any]) -> None:
    """What a run says about itself beside its configuration: facts, state, start, seconds, messages."""
    text = json.dumps(masked(state), indent=2, ensure_ascii=False) + "\n"
    write_whole(output / RUN, lambda path: path.write_text(text, encoding="utf-8"))


def read_run_state(output: Path) -> dict[str, Any]:
    """The same, or nothing where there is none; what is not of its type is left out."""
    found = read_json(output / RUN)
    state = {
        key: value
        for key, value in found.items()
        if isinstance(value, STATE_TYPES.get(key, object)) and not (isinstance(value, float) and not isfinite(value))
    }
    messages = state.get("messages", [])
    return state | {"messages": [m for m in messages if isinstance(m, dict) and type(m.get("step")) is int]}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing, damaged or something else."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
