"""Tokenises one data set into a cache folder, on every core, with rows and errors in the order of the files."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.config.methods import SAMPLING
from swiftlite.data.order import permutation
from swiftlite.data.rows.formats import count_columns, detect_format, rename_columns
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.rows.readers import parse_payload, read_rows
from swiftlite.data.rows.sources import DataFile, Source
from swiftlite.data.store import SequenceWriter, schema_of
from swiftlite.data.tokens.prompts import PromptTokenizer
from swiftlite.data.tokens.tokenize import RawRow, RowTokenizer, TokenBatch, TokenOptions
from swiftlite.ending import STOPPING
from swiftlite.errors import RunError, UserError
from swiftlite.untrusted import names_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 128  # rows a task: large enough that the batched call of the tokenizer pays, small enough for a lively bar
CHUNK_BYTES = 2 << 20  # of their text: what a tokenizer returns takes a hundred times as much
POOL_FROM_ROWS = 500  # below it, starting processes costs more than it gains
FIRST_ROWS = 100  # of each file, where mapped columns are looked for first
IN_FLIGHT = 3  # tasks a process, so that memory stays flat when the writer is slow

Tokenize = Callable[[list[RawRow]], TokenBatch]


def build_entry(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenOptions,
    *,
    sample_by: str,
    seed: int,
    stop_at_bad_row: bool,
    workers: int | None,
    expected_rows: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """Write the sequences and rejected rows of a source into a folder; returns its meta.

    expected_rows: an estimate for the progress bar. Raises UserError for the first bad row if `stop_at_bad_row`.
    """
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    rows = raw_rows(source, options, sample_by, seed)
    run = (PromptTokenizer if options.method in SAMPLING else RowTokenizer)(tokenizer, options, source.files)
    largest, columns = -1, set[str]()
    processes = _processes(workers) if expected_rows > POOL_FROM_ROWS else 1
    with (
        SequenceWriter(folder, schema_of(options.method)) as writer,
        closing(_map_in_order(run, chunks(rows), processes)) as batches,
    ):
        for batch in batches:
            if batch.rejected and stop_at_bad_row:
                raise bad_row_error(batch.rejected[0])
            counts.update(batch.counts)
            dropped.update(batch.dropped)
            count_columns(unused, batch.unused)
            columns |= batch.columns
            writer.append(batch)
            largest = max(largest, batch.largest())
            if progress is not None:
                progress(counts["read"], max(expected_rows, counts["read"]))
    return {
        "counts": dict(counts),
        "dropped": dict(dropped),
        "unused": dict(unused),
        "columns": sorted(columns),
        "largest_token": largest,
        "labels": [file.label for file in source.files],
    }


class UnfitRow(UserError):
    """A row that cannot be used. A streamed run meets it while training, every process at the same step."""


def bad_row_error(row: dict[str, Any]) -> UnfitRow:
    """The error for a rejected row under `--on-bad-row error`."""
    fix = "mend the row, or leave such rows out with --on-bad-row skip (counted in audit.json, listed in "
    fix += "rejected_rows.jsonl)"
    if row["reason"] == "unknown_format":  # of a file's first row it is true of all of them
        fix = "name the columns that a format reads with --columns KEY=COLUMN, or write rows as docs/data.md tells"
    return UnfitRow(f"{row['detail']} ({row['reason']})", where=f"{row['file']}:{row['line']}", fix=fix)


def check_vocabulary(largest: int, vocabulary: int | None, where: Callable[[int], str]) -> None:
    """Raises UnfitRow where rows hold tokens that the model has no embedding of: on a GPU that is an assertion.

    largest: the highest token of the rows; vocabulary: how many tokens the model knows, None where nobody can say;
    where: `file:line` of the first row with a token that is as high as this or higher.
    """
    if vocabulary is not None and largest >= vocabulary:
        raise UnfitRow(
            f"the tokenizer makes token {largest}, but the model knows only {vocabulary:,} tokens",
            where=where(vocabulary),
            fix="give the model's own --tokenizer, or name the tokens that are to be added with --new-tokens",
        )


def raw_rows(source: Source, options: TokenOptions, sample_by: str, seed: int) -> Iterator[RawRow]:
    """The rows of a source in order; with `#COUNT` a choice of so many that depends on seed and number of rows only."""
    number = itertools.count()
    chosen = _choice(source, sample_by, seed)
    for place, file in enumerate(source.files):
        known = format_of(file, options, sample_by)
        for line, payload in read_rows(file, sample_by):
            index = next(number)
            if chosen is None or (index < len(chosen) and chosen[index]):  # a file that has grown is told at the end
                yield RawRow(place, line, index, known, payload)


def _choice(source: Source, sample_by: str, seed: int) -> np.ndarray | None:
    """Which rows `#COUNT` takes, as a bool per row; all of them where there are fewer."""
    if source.spec.count is None:
        return None
    total = sum(1 for file in source.files for _ in read_rows(file, sample_by))
    chosen = np.zeros(total, dtype=np.bool_)
    chosen[permutation(total, seed, "count")[: source.spec.count]] = True
    return chosen


def format_of(file: DataFile, options: TokenOptions, sample_by: str) -> str | None:
    """The name of the format of the first row whose keys are known, None where no row's are.

    Raises UserError for a format of another method, and where none is known and a mapped column is missing.
    """
    if options.method in SAMPLING:  # whose rows need no answer, and so have no format
        return None
    first = None
    for line, row in _sound_rows(file, sample_by):
        first = first or (line, row)
        try:
            known = detect_format(rename_columns(row, options.columns), options.method)
        except UserError as error:
            raise UserError(error.what, where=file.where(line), fix=error.fix) from error
        if known is not None:
            return known.name
    if first is not None:
        line, row = first
        missing = [column for column in options.columns.values() if column not in row]
        if missing:
            raise _no_column(missing, row, file.where(line))
    return None


def check_mapped(files: Sequence[DataFile], columns: Mapping[str, str], sample_by: str) -> None:
    """Raises UserError for a mapping of which no file of a run has a column, or not that of a key that files have and
    that would be read in its place: that is a slip. Of a mixture it may be meant for one file alone. columns: format
    key -> column; the first rows of each file are looked at before the others."""
    first, keys = None, set[str]()
    for most in (FIRST_ROWS, None) if columns else ():
        for file in files:
            for line, row in itertools.islice(_sound_rows(file, sample_by), most):
                first = first or (row, file.where(line))
                keys |= row.keys()
                if keys.issuperset(columns.values()):
                    return
            if most is None and not _missing(keys, columns):
                return
        if not _missing(keys, columns):
            return
    if first is not None:
        raise _no_column(_missing(keys, columns), *first)


def _missing(keys: Set[str], columns: Mapping[str, str]) -> list[str]:
    """The columns of a mapping that should be among the keys of rows."""
    if keys.isdisjoint(columns.values()):
        return list(columns.values())
    return [column for key, column in columns.items() if column not in keys and key in keys]


def _sound_rows(file: DataFile, sample_by: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, payload in read_rows(file, sample_by):
        with suppress(BadRow):
            yield line, parse_payload(payload)


def _no_column(missing: list[str], row: dict[str, Any], where: str) -> UserError:
    return UserError(
        f"the file has no column {', '.join(missing)}; it has {names_of(row)}",
        where=where,
        fix="correct --columns KEY=COLUMN",
    )


def _processes(workers: int | None) -> int:
    """Processes to use: only Linux forks safely with the libraries that are loaded here."""
    if not sys.platform.startswith("linux"):
        return 1
    return workers or len(os.sched_getaffinity(0))


def chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Tasks of `CHUNK` rows, or of fewer that are long: memory follows the longest row, not what stands beside it."""
    chunk, size = [], 0
    for row in rows:
        chunk.append(row)
        size += _text_size(row.payload)
        if len(chunk) == CHUNK or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _text_size(value: object) -> int:
    """Of a row, or of any part of one that is parsed already: roughly, without its keys and numbers."""
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


def _map_in_order(run: Tokenize, chunks: Iterator[list[RawRow]], processes: int) -> Iterator[TokenBatch]:
    if processes == 1:
        yield from map(run, chunks)
        return
    context = multiprocessing.get_context("fork")  # the tokenizer is inherited, not sent
    with ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(run,)) as pool:
        waiting: deque[Future[TokenBatch]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_work, chunk))
                if len(waiting) >= IN_FLIGHT * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                "a process that tokenises was killed, most likely for want of memory", fix="lower --workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)  # and wait: a process that ends before its workers are told never ends


_worker_run: Tokenize | None = None


def _start_worker(run: Tokenize) -> None:
    """In a fresh process: keep the tokenizer, and keep it to one thread, since there is a process a core.

    Ctrl-C and a terminal that is gone are the parent's to answer. A worker does not outlive a parent that was killed.
    """
    global _worker_run
    gc.freeze()  # garbage of the process that forked holds threads that are not here: collecting it may abort
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _worker_run = run


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(rows: list[RawRow]) -> TokenBatch:
    return _worker_run(rows)
