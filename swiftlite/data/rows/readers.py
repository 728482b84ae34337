"""Reads the rows of one file: (line or row number from 1, payload). Memory stays flat but for `.json` arrays, texts by
paragraph or document, and columnar files that are compressed as a whole.
Files come from anywhere: lines, rows, batches and what is held as a whole have largest sizes, packed or not.

A payload is a dict, an undecoded JSON line (the workers parse it), or a BadRow for a row that cannot even be read.
What makes the rest of the file unreadable raises UserError with file and line.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swiftlite.data.rows.forms import BadRow
from swiftlite.data.rows.messages import json_type
from swiftlite.data.rows.sources import DataFile
from swiftlite.errors import UserError, first_line
from swiftlite.untrusted import check_depth, parse_json, unequal_keys

Payload = bytes | dict[str, Any] | BadRow
MAX_LINE = 64 << 20  # bytes; a longer line is no row but a file of another type
BATCH_ROWS = 1024
LARGEST_WHOLE = 2 << 30  # bytes of a file that is held in memory as a whole
LARGEST_BATCH = 2 << 30  # bytes of one Arrow record batch, unpacked
UTF8_BOM = b"\xef\xbb\xbf"
SAVE_AS_UTF8 = "save the file as UTF-8 (for example with iconv)"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
MAGIC = {
    b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ": ".xz", b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
}  # fmt: skip
LIKE_UTF16 = "; like UTF-16: convert the file, for example with iconv -f UTF-16 -t UTF-8"


def read_rows(file: DataFile, sample_by: str = "line") -> Iterator[tuple[int, Payload]]:
    """All rows of a file in order. sample_by: what a row of a .txt file is: `line`, `paragraph` or `document`.

    Raises UserError, with file and line where there is one, for what cannot be read at all.
    """
    if file.kind == "hub":
        from swiftlite.data.rows.hub import read_hub

        yield from ((number, drop_nulls(row)) for number, row in read_hub(file.hub))
        return
    try:
        if file.kind == "txt":
            yield from _read_text(file, sample_by)
        else:
            yield from READERS[file.kind](file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read the file: {error}", where=file.label, fix="copy or write it again") from error


def open_bytes(file: DataFile) -> BinaryIO:
    """The file's bytes, unpacked where it is compressed."""
    return OPENERS[file.compressed](file.path)


def _open_zstd(path: Path) -> BinaryIO:
    """Read from its beginning to its end only."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def parse_payload(payload: Payload) -> dict[str, Any]:
    """The row as a dict. Raises BadRow (`not_utf8`, `invalid_json`, `wrong_type`)."""
    if isinstance(payload, dict):
        return payload
    if isinstance(payload, BadRow):
        raise payload
    try:
        row = parse_json(_decoded(payload))
    except ValueError as error:
        raise BadRow("invalid_json", f"not valid JSON: {error}{_why_no_row(payload)}") from error
    if isinstance(row, list):
        raise BadRow("wrong_type", f"a row must be a JSON object, this is an array{_why_no_row(payload)}")
    return _as_object(row)


def _why_no_row(line: bytes) -> str:
    """What a file has been taken for JSON lines with such a line, if that can be seen."""
    if line.lstrip()[:1] == b"[":
        return "; a file that is one JSON array must be named .json"
    return "; a row has to stand in one line" if line.strip() == b"{" else ""


def _as_object(row: object) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    raise BadRow("wrong_type", f"a row must be a JSON object, this is {json_type(row)}")


def drop_nulls(value: Any) -> Any:
    """Without the object keys whose value is null: columnar files fill every struct up to one common set of keys."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def text_line(line: bytes) -> Payload:
    """A line of a .txt file as a row."""
    try:
        return {"text": _decoded(line)}
    except BadRow as bad:
        return bad


def _decoded(line: bytes) -> str:
    """The text of a line. Raises BadRow for what is none: also for NULs, which make UTF-8 of ASCII in UTF-16."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = _like_binary(line) or (LIKE_UTF16 if line.startswith(UTF16_BOMS) else "")
        raise BadRow("not_utf8", f"byte {error.start + 1} of the line is not UTF-8{hint}") from error
    if "\0" in text:
        raise BadRow("not_utf8", f"byte {line.index(0) + 1} of the line is a NUL{_like_binary(line) or LIKE_UTF16}")
    return text


def _like_binary(line: bytes) -> str:
    """Words for the first line of a file whose name tells another type than it has."""
    suffix = next((suffix for magic, suffix in MAGIC.items() if line.startswith(magic)), None)
    return f"; like a {suffix} file: name it as one" if suffix else ""


def _lines(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their number. Raises UserError for a giant one."""
    with open_bytes(file) as stream:
        number = 0
        while line := stream.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise UserError(
                    f"the line has more than {MAX_LINE >> 20} MiB",
                    where=file.where(number),
                    fix="write one row a line; a file that is one JSON array must be named .json",
                )
            if (row := bare_line(line)).strip():
                yield number, row


def bare_line(line: bytes) -> bytes:
    """Without its end, and the byte order mark that begins a file, or one that was joined to another."""
    return line.removeprefix(UTF8_BOM).rstrip(b"\r\n")


def _read_text(file: DataFile, sample_by: str) -> Iterator[tuple[int, Payload]]:
    if sample_by == "line":
        yield from ((number, text_line(line)) for number, line in _lines(file))
        return
    text = _whole_text(file, "train it with --sample-by line, or cut it into several files")
    if sample_by == "document":
        if text.strip():
            yield 1, {"text": text}
        return
    line, counted = 1, 0
    for match in re.finditer(r"(?:^[^\n]*\S[^\n]*(?:\n|$))+", text, re.MULTILINE):  # runs of lines that are not blank
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        yield line, {"text": match.group().rstrip("\n")}


def _whole_text(file: DataFile, fix: str) -> str:
    """The text of a file that has to be held in memory. fix: for one that is too large."""
    with open_bytes(file) as stream:
        data = _whole(file, stream, fix)
    try:
        text = data.removeprefix(UTF8_BOM).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError("the text is not UTF-8", where=file.where(line), fix=SAVE_AS_UTF8) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"the text holds NULs{LIKE_UTF16}", where=file.where(line), fix=SAVE_AS_UTF8)
    return text


def _whole(file: DataFile, stream: BinaryIO, fix: str) -> bytes:
    """All that a stream holds."""
    data = stream.read(LARGEST_WHOLE + 1)
    if len(data) > LARGEST_WHOLE:
        raise UserError(f"the file holds more than {LARGEST_WHOLE >> 30} GiB", where=file.label, fix=fix)
    return data


def _read_json(file: DataFile) -> Iterator[tuple[int, Payload]]:
    """A JSON array of objects. Files that hold JSON lines under this name are common, and read as such."""
    with open_bytes(file) as stream:
        head = stream.read(4096).removeprefix(UTF8_BOM).lstrip()
    if head[:1] == b"{" and _first_line_is_complete(file):
        yield from _lines(file)
        return
    text = _whole_text(file, "write it as JSON lines (.jsonl), which are read one at a time")
    if not text.strip():
        return
    if head[:1] != b"[":
        raise UserError(
            "the file is no JSON array of rows", where=file.where(1), fix="write [ {row}, {row}, ... ] or JSON lines"
        )
    yield from _array_items(file, text)


def _first_line_is_complete(file: DataFile) -> bool:
    _, line = next(_lines(file))
    try:
        return isinstance(parse_json(line.decode("utf-8")), dict)
    except ValueError:
        with open_bytes(file) as stream:  # an indented object is no line; anything else is a broken first line
            return line.strip() not in (b"{", b"[") and len(stream.read(len(line) + 64).splitlines()) > 1


def _array_items(file: DataFile, text: str) -> Iterator[tuple[int, Payload]]:
    """Each with its line; where the whole array stands on one, which would tell nothing, with its number."""
    by_number = "\n" not in text.strip()
    decoder = json.JSONDecoder(object_pairs_hook=unequal_keys)
    blank = re.compile(r"\s*")
    position, line, counted = text.index("[") + 1, 1, 0
    position, number = blank.match(text, position).end(), 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        number += 1
        try:
            row, end = decoder.raw_decode(text, position)
            check_depth(row, text.count("[", position, end) + text.count("{", position, end))
            position = end
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise UserError(f"not valid JSON: {error}", where=file.where(at), fix="mend the file there") from error
        place = number if by_number else line
        try:
            yield place, _as_object(row)
        except BadRow as bad:
            yield place, bad
        position = blank.match(text, position).end()
        if text[position : position + 1] == ",":
            position = blank.match(text, position + 1).end()
        elif text[position : position + 1] != "]":
            at = text.count("\n", 0, position) + 1
            raise UserError("not valid JSON: expected , or ]", where=file.where(at), fix="mend the file there")
    rest = blank.match(text, position + 1).end()
    if rest < len(text):
        at = text.count("\n", 0, rest) + 1
        raise UserError("there is more behind the JSON array", where=file.where(at), fix="write one array a file")


def _read_csv(file: DataFile) -> Iterator[tuple[int, Payload]]:
    csv.field_size_limit(MAX_LINE)
    delimiter = "\t" if file.kind == "tsv" else ","
    with open_bytes(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        taken = [0]  # characters of the row that is being read: a quoted cell may go on over any number of lines
        reader = csv.reader(_csv_lines(file, text, taken), delimiter=delimiter, strict=True)
        header, line = None, 1
        try:
            for cells in reader:
                taken[0] = 0
                if header is None and cells:
                    header = _unequal(cells, file.where(line))
                elif cells and len(cells) != len(header):
                    yield line, BadRow("wrong_columns", f"{len(cells)} cells, but {len(header)} columns in the header")
                elif cells:
                    yield line, dict(zip(header, cells, strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"not valid CSV: {error}", where=file.where(line), fix="mend the quotes there") from error
        except UnicodeDecodeError as error:
            bad = (number for number, line in _lines(file) if isinstance(text_line(line), BadRow))
            raise UserError("the text is not UTF-8", where=file.where(next(bad, 1)), fix=SAVE_AS_UTF8) from error


def _unequal(header: list[str], where: str) -> list[str]:
    """The header. Raises UserError for one whose names would hide a column."""
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"the header names the column {twice!r:.60} twice", where=where, fix="rename or remove one of them"
        )
    return header


def _csv_lines(file: DataFile, text: io.TextIOWrapper, taken: list[int]) -> Iterator[str]:
    """The lines of a CSV text. taken: one counter of characters, which the reader of the rows sets back."""
    number = 0
    while line := text.readline(MAX_LINE + 1):
        number += 1
        taken[0] += len(line)
        if "\0" in line:
            raise UserError(f"the text holds NULs{LIKE_UTF16}", where=file.where(number), fix=SAVE_AS_UTF8)
        if taken[0] > MAX_LINE:
            raise UserError(
                f"the row has more than {MAX_LINE >> 20} MiB", where=file.where(number), fix="mend the quotes there"
            )
        yield line


def _read_parquet(file: DataFile) -> Iterator[tuple[int, Payload]]:
    import pyarrow.parquet

    yield from _columnar(file, lambda stream: pyarrow.parquet.ParquetFile(stream).iter_batches(BATCH_ROWS))


def _read_arrow(file: DataFile) -> Iterator[tuple[int, Payload]]:
    """Both forms of Arrow IPC: the file format, and the stream that `datasets.save_to_disk` writes."""
    import pyarrow

    def batches(stream: BinaryIO) -> Iterator[Any]:
        magic = stream.read(6)
        stream.seek(0)
        if magic == b"ARROW1":
            reader = pyarrow.ipc.open_file(stream)
            return (reader.get_batch(index) for index in range(reader.num_record_batches))
        return iter(pyarrow.ipc.open_stream(stream))

    yield from _columnar(file, batches)


def _columnar(file: DataFile, batches: Callable[[BinaryIO], Iterator[Any]]) -> Iterator[tuple[int, Payload]]:
    with open_bytes(file) as opened:
        stream = opened if opened.seekable() else io.BytesIO(_whole(file, opened, "unpack the file"))
        yield from columnar_rows(file, lambda: batches(stream))


def columnar_rows(
    file: DataFile, batches: Callable[[], Iterator[Any]], first: int = 1
) -> Iterator[tuple[int, Payload]]:
    """(row number, row) of Arrow record batches. first: the number of the first. Raises UserError for damaged ones.

    Arrow reads buffers as they lie in the file; offsets that point anywhere would end the process without a check
    (https://arrow.apache.org/docs/format/Security.html).
    """
    import pyarrow

    number = first - 1
    try:
        for batch in batches():
            batch.validate(full=True)  # before anything is asked of it, its size included
            if batch.nbytes > LARGEST_BATCH:
                raise UserError(
                    f"{batch.num_rows:,} rows take more than {LARGEST_BATCH >> 30} GiB",
                    where=file.where(number + 1),
                    fix="write shorter rows, or smaller record batches",
                )
            _unequal(batch.schema.names, file.label)
            for row in batch.to_pylist():
                number += 1
                yield number, drop_nulls(row)
    # ValueError and OverflowError are of dates that Python lacks, too
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(
            f"not a sound {file.kind} file: {first_line(error)}", where=file.where(number + 1), fix="write it again"
        ) from error


OPENERS: dict[str, Callable[[Path], BinaryIO]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".zst": _open_zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
READERS: dict[str, Callable[[DataFile], Iterator[tuple[int, Payload]]]] = {
    "jsonl": _lines,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
