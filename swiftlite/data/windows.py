"""Windows of data files that can be read from their middle: byte ranges of line files, row groups of columnar ones.

Streaming needs them so that any place of the data is reached without reading what comes before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swiftlite.data.readers import BATCH_ROWS, MAX_LINE, UTF8_BOM, Payload, columnar_rows, read_rows, text_line
from swiftlite.data.sources import DataFile
from swiftlite.errors import UserError, first_line

WINDOW_BYTES = 4 << 20  # about a million tokens of English: enough rows to fill packs, few enough to hold in memory
SAMPLE = 1 << 20


@dataclass(frozen=True)
class Window:
    """A part of one file. start, end: bytes of a line file, or row groups of a columnar one; first_row: from 1."""

    file: int
    start: int
    end: int
    first_row: int = 1


def list_windows(files: list[DataFile], sample_by: str) -> list[Window]:
    """Every window of every file in order. Raises UserError for files that cannot be read from their middle."""
    found: list[Window] = []
    for place, file in enumerate(files):
        if file.compressed or file.kind in ("json", "csv", "tsv", "hub"):
            kind = (
                "a compressed file"
                if file.compressed
                else "a hub data set"
                if file.kind == "hub"
                else f"a {file.kind} file"
            )
            raise UserError(
                f"--streaming cannot start in the middle of {kind}",
                where=file.label,
                fix="use jsonl, txt, parquet or arrow files, or leave --streaming out (tokens are kept on disk)",
            )
        if file.kind in ("parquet", "arrow"):
            found += _row_groups(place, file)
        elif file.kind == "txt" and sample_by != "line":
            found.append(Window(place, 0, file.path.stat().st_size))
        else:
            size = file.path.stat().st_size
            found += [Window(place, at, min(size, at + WINDOW_BYTES)) for at in range(0, size, WINDOW_BYTES)]
    return found


def identity(file: DataFile) -> str:
    """A hash of a file's size, beginning and end: it would take hours to hash data that are worth streaming."""
    size = file.path.stat().st_size
    with file.path.open("rb") as stream:
        digest = hashlib.sha256(f"{file.kind}/{size}/".encode() + stream.read(SAMPLE))
        stream.seek(max(0, size - SAMPLE))
        digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def read_window(file: DataFile, window: Window, sample_by: str) -> Iterator[tuple[int, Payload]]:
    """(position, payload) of the rows of a window. The position is the row from 1, of line files the byte from 0."""
    if file.kind in ("parquet", "arrow"):
        yield from _read_groups(file, window)
    elif file.kind == "txt" and sample_by != "line":
        yield from read_rows(file, sample_by)
    else:
        for at, line in _lines_within(file, window):
            yield at, text_line(line) if file.kind == "txt" else line


def line_at(file: DataFile, position: int) -> int:
    """The number of the line that starts at a byte."""
    lines, left = 1, position
    with file.path.open("rb") as stream:
        while left > 0 and (block := stream.read(min(left, SAMPLE))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _lines_within(file: DataFile, window: Window) -> Iterator[tuple[int, bytes]]:
    """The lines that start within the window: every line of a file is in exactly one."""
    with file.path.open("rb") as stream:
        if window.start:
            stream.seek(window.start - 1)
            stream.readline()  # the rest of a line that started earlier
        position = stream.tell()
        while position < window.end and (line := stream.readline(MAX_LINE + 1)):
            if len(line) > MAX_LINE:
                raise UserError(
                    f"a line of more than {MAX_LINE >> 20} MiB",
                    where=file.where(line_at(file, position)),
                    fix="write one row a line",
                )
            text = (line.removeprefix(UTF8_BOM) if position == 0 else line).rstrip(b"\r\n")
            if text.strip():
                yield position, text
            position += len(line)


def _row_groups(place: int, file: DataFile) -> Iterator[Window]:
    row = 1
    for index, rows in enumerate(_group_sizes(file)):
        yield Window(place, index, index + 1, row)
        row += rows


def _group_sizes(file: DataFile) -> list[int]:
    import pyarrow
    import pyarrow.parquet

    try:
        if file.kind == "parquet":
            meta = pyarrow.parquet.read_metadata(file.path)
            return [meta.row_group(index).num_rows for index in range(meta.num_row_groups)]
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(file.path)))
        return [reader.get_batch(index).num_rows for index in range(reader.num_record_batches)]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"--streaming cannot read the file: {first_line(error)}",
            where=file.label,
            fix="write it as parquet, or as an Arrow file (not a stream)",
        ) from error


def _read_groups(file: DataFile, window: Window) -> Iterator[tuple[int, Payload]]:
    import pyarrow
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        if file.kind == "parquet":
            return pyarrow.parquet.ParquetFile(file.path).iter_batches(BATCH_ROWS, row_groups=[window.start])
        return iter([pyarrow.ipc.open_file(pyarrow.memory_map(str(file.path))).get_batch(window.start)])

    yield from columnar_rows(file, batches, window.first_row)
