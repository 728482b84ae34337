"""Token sequences on disk: an Arrow IPC file, memory-mapped and read without a copy; and the cache folder it lies in.

A data set is prepared once: the folder's name is a hash of everything that decides its tokens. Memory stays flat while
it is written (record batches) and while it is read (the operating system pages it).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from swiftlite.config.methods import PREFERENCE, SAMPLING
from swiftlite.data.packing import number_type
from swiftlite.data.tokens.preference_tokens import Preference
from swiftlite.data.tokens.tokenize import TokenBatch, flags_of
from swiftlite.errors import DISK_FULL, UserError

try:
    import fcntl
except ImportError:  # Windows: processes that start together each prepare the data, and one of them wins the rename
    fcntl = None

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("runs", pa.list_(pa.int32())),  # trained [start, end) pairs
        ("row", pa.int64()),
        ("file", pa.int32()),
        ("line", pa.int64()),
        ("trained", pa.int32()),
        ("digest", pa.int64()),  # of tokens, runs and answers
    ]
)
PREFERENCE_SCHEMA = pa.schema(
    [*SCHEMA, ("prompt", pa.int32()), ("chosen", pa.int32()), ("desirable", pa.bool_()), ("margin", pa.float32())]
)
PROMPT_SCHEMA = pa.schema([*SCHEMA, ("asked", pa.string())])
SEQUENCES, REJECTED, META = "sequences.arrow", "rejected.jsonl", "meta.json"
BATCH_TOKENS = 1 << 18  # of a record batch: each takes some kilobytes of memory while it is read


def schema_of(method: str) -> pa.Schema:
    """What is kept of a sequence."""
    if method in SAMPLING:
        return PROMPT_SCHEMA
    return PREFERENCE_SCHEMA if method in PREFERENCE else SCHEMA


class SequenceWriter:
    """Appends TokenBatches to an Arrow file; a context manager."""

    def __init__(self, folder: Path, schema: pa.Schema = SCHEMA) -> None:
        """schema: of `schema_of`."""
        self._schema = schema
        self._writer = pa.ipc.new_file(str(folder / SEQUENCES), self._schema)
        self._rejected = (folder / REJECTED).open("w", encoding="utf-8")
        self._waiting, self._tokens = TokenBatch(), 0

    def __enter__(self) -> SequenceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._rejected, self._writer:  # both are closed where the disk is full, too
            if kind is None:
                self._write()

    def append(self, batch: TokenBatch) -> None:
        """Write the sequences, in record batches of many, and the rejected rows as JSON lines."""
        for row in batch.rejected:
            self._rejected.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        for column in ("ids", "runs", "rows", "preferences", "asked"):
            getattr(self._waiting, column).extend(getattr(batch, column))
        self._tokens += sum(map(len, batch.ids))
        if self._tokens >= BATCH_TOKENS:
            self._write()

    def _write(self) -> None:
        """Write what waits."""
        batch, self._waiting, self._tokens = self._waiting, TokenBatch(), 0
        if not batch.ids:
            return
        numbers, files, lines = (np.asarray(column) for column in zip(*batch.rows, strict=True))
        trained = np.asarray([int((runs[1::2] - runs[::2]).sum()) for runs in batch.runs], dtype=np.int32)
        columns = [
            _list_array(batch.ids),
            _list_array(batch.runs),
            _arrow(numbers, pa.int64()),
            _arrow(files, pa.int32()),
            _arrow(lines, pa.int64()),
            _arrow(trained, pa.int32()),
            _arrow(_digests(batch), pa.int64()),
        ]
        if self._schema is PROMPT_SCHEMA:
            columns.append(pa.array(batch.asked, pa.string()))
        for field in list(self._schema)[len(columns) :]:
            columns.append(pa.array([getattr(preference, field.name) for preference in batch.preferences], field.type))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))


def _digests(batch: TokenBatch) -> np.ndarray:
    """Of each sequence 64 bits of a hash of all that is learnt of it, or asked in it."""
    answers = [repr(preference).encode() for preference in batch.preferences]
    answers = answers or [asked.encode() for asked in batch.asked] or [b""] * len(batch.ids)
    found = [
        hashlib.blake2b(b"".join((ids, b"/", runs, answer)), digest_size=8).digest()
        for ids, runs, answer in zip(batch.ids, batch.runs, answers, strict=True)
    ]
    return np.frombuffer(b"".join(found), dtype=np.int64)


def _list_array(parts: list[np.ndarray]) -> pa.ListArray:
    offsets = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return pa.ListArray.from_arrays(_arrow(offsets, pa.int32()), _arrow(np.concatenate(parts), pa.int32()))


# Arrow's own `pa.array` and `to_numpy` would import pandas: a quarter of a second.


def _arrow(numbers: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """A column of integers."""
    same = np.ascontiguousarray(numbers, dtype=dtype.to_pandas_dtype())
    return pa.Array.from_buffers(dtype, len(same), [None, pa.py_buffer(same)])


def _numpy(column: pa.Array) -> np.ndarray:
    """A view of numbers, without nulls."""
    return np.from_dlpack(column)


@dataclass(frozen=True)
class _Columns:
    """One record batch as numpy views into the mapped file."""

    ids: np.ndarray
    id_offsets: np.ndarray
    runs: np.ndarray
    run_offsets: np.ndarray
    file: np.ndarray
    line: np.ndarray


class SequenceStore:
    """Reads the sequences of one prepared data set by index, zero-copy.

    lengths, trained: tokens and trained tokens of each sequence, int32; digests: int64, the same for sequences that are
    the same; firsts: the first sequence of each row that has any, ascending (a row that was split has several, one
    after another); preferences: column -> values, of the methods that compare answers, else None.
    """

    def __init__(self, folder: Path, labels: list[str]) -> None:
        """labels: names of the files, as they are called in this run."""
        self._labels = labels
        self._source = pa.memory_map(str(folder / SEQUENCES))
        reader = pa.ipc.open_file(self._source)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._columns = [_numpy_columns(batch) for batch in batches]
        self._asked = [batch.column("asked") for batch in batches] if "asked" in reader.schema.names else None
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        empty = np.empty(0, dtype=np.int32)
        self.lengths = np.concatenate([empty, *(np.diff(columns.id_offsets) for columns in self._columns)])
        self.trained = np.concatenate([empty, *(_numpy(batch.column("trained")) for batch in batches)])
        no_digest = np.empty(0, dtype=np.int64)
        self.digests = np.concatenate([no_digest, *(_numpy(batch.column("digest")) for batch in batches)])
        self._rows = [_numpy(batch.column("row")) for batch in batches]  # in the mapped file
        self.firsts = self._find_firsts()
        self.preferences = None
        if "prompt" in reader.schema.names:
            names = [field.name for field in list(PREFERENCE_SCHEMA)[len(SCHEMA) :]]
            table = pa.Table.from_batches(batches, PREFERENCE_SCHEMA)
            self.preferences = {name: table.column(name).to_numpy() for name in names}

    def row_numbers(self) -> np.ndarray:
        """The number in its data set of each row that has a sequence, int64, ascending."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._rows])[self.firsts]

    def _find_firsts(self) -> np.ndarray:
        found, before = [np.empty(0, dtype=number_type(len(self)))], -1
        for start, rows in zip(self._starts, self._rows, strict=False):
            opens = np.diff(rows, prepend=before) != 0
            found.append((np.flatnonzero(opens) + start).astype(found[0].dtype))
            before = rows[-1]
        return np.concatenate(found)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray, str]:
        """(ids int32 `[n]`, trained bool `[n]`, `file:line`) of one sequence."""
        which, place = self._find(index)
        columns = self._columns[which]
        ids = columns.ids[columns.id_offsets[place] : columns.id_offsets[place + 1]]
        runs = columns.runs[columns.run_offsets[place] : columns.run_offsets[place + 1]]
        return ids, flags_of(runs, len(ids)), f"{self._labels[columns.file[place]]}:{columns.line[place]}"

    def asked(self, index: int) -> str | None:
        """The row of a prompt as JSON, None where sequences are no prompts."""
        if self._asked is None:
            return None
        which, place = self._find(index)
        return self._asked[which][place].as_py()

    def _find(self, index: int) -> tuple[int, int]:
        """(record batch, place in it) of a sequence."""
        which = int(np.searchsorted(self._starts, index, side="right")) - 1
        return which, index - int(self._starts[which])

    def where_from(self, token: int) -> str:
        """`file:line` of the first sequence that holds this token or a higher one; there has to be one."""
        return next(where for ids, _, where in map(self.read, range(len(self))) if ids.max(initial=-1) >= token)

    def preference(self, index: int) -> Preference | None:
        """How the answers of a sequence are laid out, None where it holds none to compare."""
        if self.preferences is None:
            return None
        return Preference(**{name: values[index].item() for name, values in self.preferences.items()})


def _numpy_columns(batch: pa.RecordBatch) -> _Columns:
    ids, runs = batch.column("input_ids"), batch.column("runs")
    return _Columns(
        ids=_numpy(ids.values),
        id_offsets=_numpy(ids.offsets),
        runs=_numpy(runs.values),
        run_offsets=_numpy(runs.offsets),
        file=_numpy(batch.column("file")),
        line=_numpy(batch.column("line")),
    )


def load_or_build(root: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """(folder, meta) of a cache entry. `build(folder)` fills a fresh folder and returns its meta.

    Processes that ask for the same key at once wait for the first of them. The folder appears by a rename, complete or
    not at all; one whose files do not match their recorded hashes is built again. Raises UserError where the cache
    cannot be written.
    """
    final = root / key
    if (meta := _read_meta(final)) is not None:  # also where nothing can be written
        return final, meta
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{key}.lock") as locked:
            meta = _read_meta(final)
            if meta is None:
                meta = _build_aside(final, build, locked=locked)
    except OSError as error:
        if error.errno is None:  # none of a disk, but of a package or a tokenizer that fails
            raise
        full = error.errno in DISK_FULL
        raise UserError(
            f"cannot write the token cache: {error.strerror or error}",
            where=str(root),
            fix=f"{'free some space, or name' if full else 'name'} another folder with --cache-dir",
        ) from error
    return final, meta


def _build_aside(final: Path, build: Callable[[Path], dict[str, Any]], *, locked: bool) -> dict[str, Any]:
    """locked: no other process builds it at the same time."""
    partial = final.with_name(f".{final.name}.partial" if locked else f".{final.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        meta = build(partial)
        meta["files"] = {name: _file_hash(partial / name) for name in (SEQUENCES, REJECTED)}
        (partial / META).write_text(json.dumps(meta), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """The meta of a sound entry, None for one that is missing or damaged."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        sound = all(_file_hash(folder / name) == digest for name, digest in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if sound else None


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Yields whether others wait: not all systems, and not all file systems of clusters, have locks."""
    with path.open("w") as file:
        if not _flock(file):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough while a forked worker still has the file open


def _flock(file: IO[str]) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return False
    return True
