"""Windows of data files that can be read from their middle: byte ranges of line files, rows of columnar ones.

Streaming needs them so that any place of the data is reached without reading what comes before it. Small files, and
small row groups, share a window: rows are packed within one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swiftlite.data.rows.readers import BATCH_ROWS, MAX_LINE, Payload, bare_line, columnar_rows, read_rows, text_line
from swiftlite.data.rows.sources import DataFile
from swiftlite.errors import UserError, first_line

WINDOW_BYTES = 4 << 20  # about a million tokens of English: enough rows to fill packs, few enough to hold in memory
# Of a row group, unpacked; a larger one is cut, but not into too many pieces: what comes before each in the group is
# unpacked once more, which takes about a hundredth of the time that tokenising it does.
LARGEST_GROUP, MOST_PIECES = 16 << 20, 64
LAYOUT_VERSION = 2  # raise it when the same files give other windows
SAMPLE, SAMPLE_BETWEEN, MOST_SAMPLES = 1 << 20, 1 << 12, 4096


@dataclass(frozen=True)
class Piece:
    """A part of one file. file: its number; start, end: bytes of a line file, or rows, from 0, of a columnar one's row
    group; first_row: the group's, from 1."""

    file: int
    start: int
    end: int
    group: int | None = None
    first_row: int = 1


Window = tuple[Piece, ...]


def list_windows(files: Sequence[DataFile], owners: Sequence[int], sample_by: str) -> list[Window]:
    """Every window of every file in order, each of files of one owner. owners: of each file.

    Raises UserError for files that cannot be read from their middle.
    """
    windows: list[Window] = []
    last, size = None, 0
    for place, file in enumerate(files):
        for piece, taken in _pieces(place, file, sample_by):
            if owners[place] == last and size + taken <= WINDOW_BYTES:
                windows[-1] += (piece,)
                size += taken
            else:
                windows.append((piece,))
                last, size = owners[place], taken
    return windows


def _pieces(place: int, file: DataFile, sample_by: str) -> Iterator[tuple[Piece, int]]:
    """Each with how many bytes it takes."""
    if file.compressed or file.kind in ("json", "csv", "tsv", "hub"):
        plain = "hub data set" if file.kind == "hub" else f"{file.kind} file"
        kind = f"a compressed {plain}" if file.compressed else f"a {plain}"
        raise UserError(
            f"--streaming cannot start in the middle of {kind}",
            where=file.label,
            fix="use jsonl, txt, parquet or arrow files, or leave --streaming out (tokens are kept on disk)",
        )
    if file.kind in ("parquet", "arrow"):
        yield from _pieces_of_groups(place, file)
        return
    size = file.path.stat().st_size
    step = WINDOW_BYTES if file.kind == "jsonl" or sample_by == "line" else max(1, size)
    for at in range(0, size, step):
        end = min(size, at + step)
        yield Piece(place, at, end), end - at


def _pieces_of_groups(place: int, file: DataFile) -> Iterator[tuple[Piece, int]]:
    first = 1
    for group, (rows, size) in enumerate(_groups(file)):
        if rows < 0:
            raise UserError(f"not a sound {file.kind} file: {rows} rows", where=file.label, fix="write it again")
        count = max(1, min(rows, MOST_PIECES, -(-size // LARGEST_GROUP)))
        for start, end in itertools.pairwise(rows * cut // count for cut in range(count + 1)):
            yield Piece(place, start, end, group, first), size // count
        first += rows


def identity(file: DataFile) -> str:
    """A hash of a file's size and of samples of it, those at its beginning and end the largest: it would take hours to
    hash data that are worth streaming."""
    size = file.path.stat().st_size
    digest = hashlib.sha256(f"{file.kind}/{size}/".encode())
    places = [(at, SAMPLE_BETWEEN) for at in range(0, size, max(WINDOW_BYTES, -(-size // MOST_SAMPLES)))]
    with file.path.open("rb") as stream:
        for at, length in [(0, SAMPLE), *places, (max(0, size - SAMPLE), SAMPLE)]:
            stream.seek(at)
            digest.update(stream.read(length))
    return digest.hexdigest()


def read_window(files: Sequence[DataFile], window: Window, sample_by: str) -> Iterator[tuple[int, int, Payload]]:
    """(file, position, payload) of the rows of a window. The position is the row from 1, of line files the byte from
    0."""
    for piece in window:
        for position, payload in _read_piece(files[piece.file], piece, sample_by):
            yield piece.file, position, payload


def _read_piece(file: DataFile, piece: Piece, sample_by: str) -> Iterator[tuple[int, Payload]]:
    if file.kind in ("parquet", "arrow"):
        yield from _read_group(file, piece)
    elif file.kind == "txt" and sample_by != "line":
        yield from read_rows(file, sample_by)
    else:
        for at, line in _lines_within(file, piece):
            yield at, text_line(line) if file.kind == "txt" else line


def line_at(file: DataFile, position: int) -> int:
    """The number of the line that starts at a byte."""
    lines, left = 1, position
    with file.path.open("rb") as stream:
        while left > 0 and (block := stream.read(min(left, SAMPLE))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _lines_within(file: DataFile, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """The lines that start within the piece: every line of a file is in exactly one."""
    with file.path.open("rb") as stream:
        if piece.start:
            stream.seek(piece.start - 1)
            while (rest := stream.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass  # the rest of a line that started earlier
        position = stream.tell()
        while position < piece.end and (line := stream.readline(MAX_LINE + 1)):
            if len(line) > MAX_LINE:
                raise UserError(
                    f"the line has more than {MAX_LINE >> 20} MiB",
                    where=file.where(line_at(file, position)),
                    fix="write one row a line",
                )
            if (row := bare_line(line)).strip():
                yield position, row
            position += len(line)


def _groups(file: DataFile) -> list[tuple[int, int]]:
    """(rows, bytes unpacked) of each row group."""
    import pyarrow
    import pyarrow.parquet

    try:
        if file.kind == "parquet":
            meta = pyarrow.parquet.read_metadata(file.path)
            groups = map(meta.row_group, range(meta.num_row_groups))
            return [(group.num_rows, group.total_byte_size) for group in groups]
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(file.path)))
        batches = map(reader.get_batch, range(reader.num_record_batches))
        return [(batch.num_rows, batch.get_total_buffer_size()) for batch in batches]  # unchecked yet
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"--streaming cannot read the file: {first_line(error)}",
            where=file.label,
            fix="write it as parquet, or as an Arrow file (not a stream)",
        ) from error


def _read_group(file: DataFile, piece: Piece) -> Iterator[tuple[int, Payload]]:
    import pyarrow
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        if file.kind == "parquet":
            whole = pyarrow.parquet.ParquetFile(file.path).iter_batches(BATCH_ROWS, row_groups=[piece.group])
        else:
            whole = iter([pyarrow.ipc.open_file(pyarrow.memory_map(str(file.path))).get_batch(piece.group)])
        first = 0
        for batch in whole:
            end = min(piece.end - first, batch.num_rows)
            for start in range(max(piece.start - first, 0), end, BATCH_ROWS):
                yield batch.slice(start, min(BATCH_ROWS, end - start))
            first += batch.num_rows
            if first >= piece.end:
                return

    yield from columnar_rows(file, batches, piece.first_row + piece.start)
