"""Folders that are complete or not there at all, and the checkpoints kept in them.

A folder is written beside its final name, synced to the disk, given a manifest with the size and hash of every file as
the last of them, and renamed. Whoever reads later can tell a complete folder from any other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftlite.errors import DISK_FULL, RunError
from swiftlite.untrusted import existing, leaves_folder, printable, read_json_file

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")
UNFINISHED_STEP = re.compile(r"\.step-(\d{8,})\.partial")
HIDDEN_STEP = re.compile(r"\.step-(\d{8,})\.(partial|doomed)")
PARTIAL, DOOMED = ".partial", ".doomed"
HASHING_THREADS = 8  # hashlib and fsync let go of the interpreter, so files are sealed side by side
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers raise errors of their own with this in it
GO_ON = "go on with --resume auto"


@contextmanager
def atomic_folder(final: Path, *, manifest: bool = True, again: str = GO_ON) -> Iterator[Path]:
    """Yield an empty folder beside `final`; on success it becomes `final`, on an exception it is removed.

    again: what the user does after making room, for the error. Raises RunError where the disk is full or read-only or
    `final` already holds something; nothing that was there before is touched.
    """
    partial = partial_folder(final)
    with disk_errors(final, again):
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.is_dir() and any(final.iterdir()):
            raise RunError(f"{final.name} is already there", where=str(final), fix="move it away or name another place")
        _clear_leftovers(final)
        partial.mkdir()
        lock = lock_folder(partial)
        try:
            yield partial
            _seal(partial, final.name if manifest else None)
            partial.rename(final)
            _sync(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            os.close(lock)


@contextmanager
def disk_errors(final: Path, again: str) -> Iterator[None]:
    """Turn a full or read-only disk into a RunError that says what to do. again: what to do after making room."""
    try:
        yield
    except Exception as error:
        number = _errno(error)
        if number is None:
            raise
        full = number in DISK_FULL
        reason = "the disk is full" if full else os.strerror(number)
        file = error.filename if isinstance(error, OSError) else None
        raise RunError(
            f"{final.name} cannot be saved: {reason}; what was saved before is untouched",
            where=str(file or final),
            fix=f"free space and {again}" if full else f"see to the folder and {again}",
        ) from error


def _errno(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = RUST_ERRNO.search(str(error))
    return int(found[1]) if found else None


def partial_folder(final: Path) -> Path:
    """Where `final` lies while it is written."""
    return _hidden(final, PARTIAL)


def _hidden(final: Path, suffix: str) -> Path:
    return final.with_name(f".{final.name}{suffix}")


def _clear_leftovers(final: Path) -> None:
    """Remove what a killed run left behind under the hidden names of `final`, or of any step if it is one.

    Raises RunError where a living process is writing there.
    """
    own = {_hidden(final, PARTIAL).name, _hidden(final, DOOMED).name}
    for entry in list(final.parent.iterdir()):
        if entry.name in own or (STEP.fullmatch(final.name) and HIDDEN_STEP.fullmatch(entry.name)):
            try:
                os.close(lock_folder(entry))
            except BlockingIOError:
                raise RunError(
                    "another process is saving into the same folder",
                    where=str(entry),
                    fix="let it finish or stop it, or use another --output-dir",
                ) from None
            except NotADirectoryError:
                entry.unlink()
            shutil.rmtree(entry, ignore_errors=True)


def lock_folder(folder: Path) -> int:
    """Hold a folder for as long as this process lives or the handle is open. Raises BlockingIOError if another does."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks: whatever lies there counts as left over
        pass
    return handle


def _seal(folder: Path, name: str | None) -> None:
    """Bring every file and folder to the disk, the manifest after all others. name: for it, None without one."""
    files = _files(folder)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        list(pool.map(_sync, files))
        hashes = list(pool.map(hash_file, files)) if name is not None else []
    if name is not None:
        entries = {
            path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
            for path, digest in zip(files, hashes, strict=True)
        }
        path = folder / MANIFEST
        path.write_text(json.dumps({"format": 1, "name": name, "files": entries}, indent=2) + "\n", encoding="utf-8")
        _sync(path)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_folder(folder: Path, *, deep: bool = False) -> list[str]:
    """What is wrong with a folder by its manifest, a line each; deep: where sizes are right, compare hashes too."""
    if not folder.is_dir():
        return ["it is not a folder"]
    path = folder / MANIFEST
    try:
        if leaves_folder(folder, path):
            return [f"{MANIFEST} is a link that leaves the folder"]
        listed = read_json_file(path)["files"]
        entries = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in listed.items()}
    except OSError:
        return [f"{MANIFEST} is missing, so it was never completed"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return [f"{MANIFEST} is damaged"]
    problems = [p for name, (size, _) in entries.items() if (p := _size_problem(folder, name, size))]
    if problems or not deep:
        return problems
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        found = pool.map(lambda item: _hash_problem(folder, item[0], item[1][1]), entries.items())
        return [problem for problem in found if problem]


def _other_name(folder: Path) -> list[str]:
    """What is wrong with a sound checkpoint that was renamed: as one of another step it would hide those behind it."""
    name = read_json_file(folder / MANIFEST).get("name", folder.name)  # older ones do not tell
    return [] if name == folder.name else [f"it was saved as {printable(str(name)[:100])}"]


def _size_problem(folder: Path, name: str, size: int) -> str | None:
    file, shown = existing(str(folder / name)), printable(name[:100])
    if file is None or not file.is_file():
        return f"{shown} is missing"
    if not file.resolve().is_relative_to(folder.resolve()):
        return f"{shown} lies outside the folder"
    found = file.stat().st_size
    return None if found == size else f"{shown} has {found:,} bytes instead of {size:,}"


def _hash_problem(folder: Path, name: str, digest: str) -> str | None:
    try:
        same = hash_file(folder / name) == digest
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if same else f"{name} has changed since it was written (its hash differs)"


def step_folder(output: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return output / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders, newest first, complete or not."""
    return [folder for _, folder in _numbered(output, STEP)]


def _numbered(output: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    parent = output / "checkpoints"
    if not parent.is_dir():
        return []
    found = [(int(match[1]), entry) for entry in parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    return sorted((pair for pair in found if pair[1].is_dir()), reverse=True)


def newest_checkpoint(output: Path) -> tuple[Path | None, list[str]]:
    """(the newest complete and intact checkpoint or None, a line on each newer one that was passed over).

    Reads and hashes what it considers; deletes nothing.
    """
    partial = {step: f"step-{step:08d}: saving it was never finished" for step, _ in _numbered(output, UNFINISHED_STEP)}
    passed_over: dict[int, str] = {}
    newest = None
    for step, folder in _numbered(output, STEP):
        problems = check_folder(folder, deep=True) or _other_name(folder)
        if not problems:
            newest = folder
            partial = {other: line for other, line in partial.items() if other > step}
            break
        passed_over[step] = f"{folder.name}: {problems[0]}"
    lines = partial | passed_over
    return newest, [lines[step] for step in sorted(lines, reverse=True)]


def point_at(output: Path, targets: Mapping[str, Path | None]) -> None:
    """Let `checkpoints/NAME` be a link to each folder that is given. A file system without links does without them."""
    for name, folder in targets.items():
        link = output / "checkpoints" / name
        aside = link.with_name(f".{name}{PARTIAL}")
        if folder is not None and folder.is_dir() and (link.is_symlink() or not link.exists()):
            with suppress(OSError):
                aside.unlink(missing_ok=True)
                aside.symlink_to(folder.name, target_is_directory=True)
                aside.replace(link)


def retain(output: Path, keep: int, *, newest: int | None = None, protect: Collection[Path] = ()) -> None:
    """Delete what is older than the newest `keep` complete checkpoints (at least one), but for the protected.

    newest: the step of the one that was just written; those of later steps, which the run was not able to go on from,
    do not count and stay. Nor does a damaged or renamed folder count as one of the `keep`. Raises RunError where a
    folder cannot be moved.
    """
    complete = 0
    for step, folder in _numbered(output, STEP):
        if newest is not None and step > newest:
            continue
        if complete >= max(1, keep) and folder not in protect:
            discard(folder)
        elif not check_folder(folder) and not _other_name(folder):
            complete += 1


def discard(folder: Path) -> None:
    """Delete a folder, if it is there. It leaves under a hidden name before its files go, so that a kill never leaves
    half of it behind. Raises RunError where it cannot be moved.
    """
    doomed = _hidden(folder, DOOMED)
    with disk_errors(folder, GO_ON):
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
