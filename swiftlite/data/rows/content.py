"""What the files of data sets hold: their hash, about how many rows, and whether they change while they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swiftlite.data.rows.sources import DataFile
from swiftlite.errors import UserError

HASH_BLOCK = 1 << 20


def file_states(files: list[DataFile]) -> list[tuple[int, int, int] | None]:
    """What changes with a file that is written or replaced; None for one that is gone, or lies on the hub."""
    return [_file_state(file.path) for file in files]


def _file_state(path: Path | None) -> tuple[int, int, int] | None:
    try:
        found = path and path.stat()
    except OSError:
        return None
    return found and (found.st_ino, found.st_size, found.st_mtime_ns)


def check_unchanged(files: list[DataFile], before: list[tuple[int, int, int] | None]) -> None:
    """Raises UserError where a file is not as it was. before: of `file_states`."""
    for file, then, now in zip(files, before, file_states(files), strict=True):
        if then != now:
            raise UserError(
                "the file has changed while its rows were read",
                where=file.label,
                fix="run again when nothing writes to it any more, or train on a copy",
            )


def check_kept(files: list[DataFile], before: list[tuple[int, int, int] | None], which: Iterable[int]) -> None:
    """The same for some of the files that are read while training: what was added at an end does not matter."""
    for place in which:
        then, now = before[place], _file_state(files[place].path)
        grown = then and now and now[0] == then[0] and now[1] > then[1]
        if then != now and not grown:
            check_unchanged([files[place]], [then])


def content_hash(files: list[DataFile]) -> tuple[str, int]:
    """(hash over kinds and bytes of the files in order, an estimate of their rows)."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        parts = list(pool.map(_hash_file, files))
    digest = hashlib.sha256()
    for file, (part, _) in zip(files, parts, strict=True):
        digest.update(f"{file.kind}/{file.compressed}/".encode() + part)
    return digest.hexdigest(), sum(rows for _, rows in parts)


def _hash_file(file: DataFile) -> tuple[bytes, int]:
    if file.hub is not None:
        from swiftlite.data.rows.hub import fingerprint_and_rows

        return fingerprint_and_rows(file.hub)
    digest, lines, objects, is_array = hashlib.sha256(), 0, 0, file.kind == "json"
    try:
        with file.path.open("rb") as stream:
            while block := stream.read(HASH_BLOCK):
                digest.update(block)
                lines += block.count(b"\n")
                objects += block.count(b"{") if is_array else 0
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=file.label, fix="check its rights") from error
    if is_array:  # which may stand on one line, or a row of it on many
        return digest.digest(), min(lines, objects) if lines > 1 else objects
    return digest.digest(), lines
