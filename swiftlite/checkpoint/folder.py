"""Folders that are complete or not there at all, and the checkpoints kept in them.

A folder is written beside its final name, synced to the disk, given a manifest with the size and hash of every file as
the last of them, and renamed. Whoever reads later can tell a complete folder from any other.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftlite.errors import RunError

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")
PARTIAL, DOOMED = ".partial", ".doomed"
LARGEST_MANIFEST = 16 << 20


@contextmanager
def atomic_folder(final: Path, *, manifest: bool = True) -> Iterator[Path]:
    """Yield an empty folder beside `final`; on success it becomes `final`, on an exception it is removed.

    Raises RunError where the disk is full or read-only; nothing that was there before is touched.
    """
    partial = final.with_name(f".{final.name}{PARTIAL}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(final.parent)
        partial.mkdir()
        try:
            yield partial
            _sync_files(partial)
            if manifest:
                _write_manifest(partial)
            _sync(partial)
            partial.rename(final)
            _sync(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise _save_error(error, final) from error


def _save_error(error: OSError, final: Path) -> RunError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "the disk is full" if full else (error.strerror or str(error))
    return RunError(
        f"{final.name} cannot be saved: {reason}; what was saved before is untouched",
        where=str(final),
        fix="free space and go on with --resume auto" if full else "check the folder and go on with --resume auto",
    )


def _clear_leftovers(parent: Path) -> None:
    """Remove what a killed run left behind under hidden names."""
    for entry in parent.iterdir():
        if entry.name.startswith(".") and entry.name.endswith((PARTIAL, DOOMED)):
            shutil.rmtree(entry, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    for path in _files(folder):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _hash(path)}
        for path in _files(folder)
    }
    path = folder / MANIFEST
    path.write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def check_folder(folder: Path, *, deep: bool = False) -> list[str]:
    """What is wrong with a folder by its manifest, worst first; deep: compare hashes as well as sizes."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            return [f"{MANIFEST} is larger than any real one"]
        listed = json.loads(path.read_text(encoding="utf-8"))["files"]
        entries = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in listed.items()}
    except OSError:
        return [f"{MANIFEST} is missing, so it was never completed"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{MANIFEST} is damaged"]
    problems = []
    for name, (size, digest) in entries.items():
        file = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(f"{MANIFEST} names {name}, which is outside the folder")
        elif not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        elif deep and _hash(file) != digest:
            problems.append(f"{name} has changed since it was written (its hash differs)")
    return problems


def step_folder(output: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return output / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders, newest first, complete or not."""
    parent = output / "checkpoints"
    if not parent.is_dir():
        return []
    found = [(int(match[1]), entry) for entry in parent.iterdir() if (match := STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found, reverse=True)]


def newest_checkpoint(output: Path) -> tuple[Path | None, list[str]]:
    """(the newest complete and intact checkpoint or None, a line on each newer one that was passed over)."""
    passed_over = []
    for folder in list_checkpoints(output):
        problems = check_folder(folder, deep=True)
        if not problems:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {problems[0]}")
    return None, passed_over


def retain(output: Path, keep: int, *, protect: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` checkpoints and the protected ones.

    A folder leaves under a hidden name before its files go, so that a kill never leaves half of one behind.
    """
    for folder in list_checkpoints(output)[max(1, keep) :]:
        if folder not in protect:
            doomed = folder.with_name(f".{folder.name}{DOOMED}")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
