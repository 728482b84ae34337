"""Pretraining on text that is tokenised while training (`--streaming`), with the same steps on every resume.

The data are cut into windows that can be read on their own. A window's rows are tokenised, shuffled and packed by
themselves; the order of the windows is a permutation of (seed, epoch). A step is the next `global_batch_size` packs, so
finding a step needs only how many packs each earlier window has: that is written down when it is first known.
Without that record (another machine) earlier windows are tokenised once more, and the steps are still the same; so is
always one that a weight takes in part.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.data.audit import counts_in_words, unread_files
from swiftlite.data.build import bad_row_error, check_vocabulary, chunks, format_of
from swiftlite.data.order import Pack, PlanOptions, Sequence, StepBatch, permutation
from swiftlite.data.packing import best_fit_decreasing
from swiftlite.data.rows.content import check_kept, file_states
from swiftlite.data.rows.sources import DataFile, Source, names_of_sets
from swiftlite.data.stream_record import Tally, WindowRecord, append_record, check_writable, read_records
from swiftlite.data.tokens.tokenize import RawRow, RowTokenizer, TokenBatch, TokenOptions, flags_of
from swiftlite.data.windows import Window, identity, line_at, list_windows, read_window
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_PART = 1e-9  # of a window; a smaller one is rounding
AHEAD = 2  # windows that wait packed while the model trains


@dataclass(frozen=True)
class _Place:
    """One visit of a window: the epoch, how much of it is done before and how much the visit does, the window's number,
    and the part of its rows that is due."""

    epoch: int
    done: float
    share: float
    window: int
    part: float


def stream_identity(source: Source) -> list[str]:
    """What tells one source from another without reading all of it."""
    return [identity(file) for file in source.files if file.path is not None]


class StreamPlan:
    """The steps of a streamed run; the same interface as BatchPlan.

    audit and rejected hold the windows that steps were made of so far (and the first one), not those that the thread
    has read ahead, so that a run counts the same however often it was stopped.
    """

    def __init__(
        self,
        sources: list[Source],
        options: PlanOptions,
        tokens: TokenOptions,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        *,
        sample_by: str,
        stop_at_bad_row: bool,
        record: Path,
        vocabulary: int | None = None,
    ) -> None:
        """record: the file that keeps what is known of each window; vocabulary: how many tokens the model knows.
        Reads the first window, so that what is wrong with tokenizer or rows shows before the model loads.

        Raises UserError for files that cannot be streamed and for bad rows.
        """
        self.total_steps = options.max_steps
        self._options, self._tokens, self._sample_by = options, tokens, sample_by
        self._stop_at_bad_row, self._record, self._vocabulary = stop_at_bad_row, record, vocabulary
        self._files = [file for source in sources for file in source.files]
        self._states = file_states(self._files)
        owners = [place for place, source in enumerate(sources) for _ in source.files]
        self._data_sets = names_of_sets([source.spec.text for source in sources])
        self._windows = list_windows(self._files, owners, sample_by)
        self._owner = np.asarray([owners[window[0].file] for window in self._windows])
        self._weights = [source.spec.weight for source in sources]
        self._formats = [format_of(file, tokens, sample_by) for file in self._files]
        self._shown = [_by_byte(file, sample_by) for file in self._files]
        self._labels = {file.label: place for place, file in enumerate(self._shown)}
        self._run = RowTokenizer(load_tokenizer(), tokens, self._shown)
        check_writable(record)
        self._records = read_records(record)
        self._seen: set[int] = set()
        self._whole = Tally(options.capacity)
        self._by_source = [(source.spec.text, Tally(options.capacity)) for source in sources]
        self.rejected: list[dict[str, Any]] = []
        if not self._windows:
            raise UserError("the data set holds no row", where=sources[0].spec.given, fix="check the files")
        self.audit: dict[str, Any] = unread_files(sources)
        first = next(self._places())
        self._ready = {first: self._read(first)}
        self._count([first.window])

    @property
    def steps_per_epoch(self) -> None:
        """Nobody knows before the end of the first."""

    def steps(self, start_step: int = 0) -> Iterator[StepBatch]:
        """The steps after the first `start_step`. A thread tokenises ahead. Raises UserError for a bad row."""
        results: queue.Queue[Any] = queue.Queue(AHEAD)
        stop = threading.Event()
        worker = threading.Thread(target=self._produce, args=(start_step, results, stop), daemon=True)
        worker.start()
        try:
            step, packs = start_step, []
            while step < self.total_steps:
                item = results.get()
                if isinstance(item, BaseException):
                    raise item
                windows, more = item
                self._count(windows)
                packs += more
                size = self._options.global_batch_size
                while len(packs) >= size and step < self.total_steps:
                    step += 1
                    taken = [pack for pack, _ in packs[:size]]
                    yield StepBatch(step, packs[size - 1][1], taken, data_sets=self._data_sets)
                    packs = packs[size:]
        finally:
            stop.set()
            with suppress(queue.Empty):  # a producer that waits for room sees the stop at once
                while True:
                    results.get_nowait()
            worker.join()

    def recount(self, step: int) -> None:
        """Count what the first `step` steps were made of, as a run that goes on behind them has to."""
        if step:
            windows, _ = next(self._packs_after(step * self._options.global_batch_size - 1))
            self._count(windows)

    def longest(self, count: int) -> None:
        """Nobody knows before the end; the packs of a stream are full ones."""

    def head(self, count: int) -> list[Sequence]:
        """The first sequences of the first window in its order."""
        packs = next(iter(self._ready.values()), [])
        return [sequence for pack in packs for sequence in pack][:count]

    def describe(self) -> dict[str, Any]:
        """What has been read so far; the whole is never known before it was read."""
        return {"rows": self._whole.totals["used"]} | self._whole.numbers()

    def _audit(self) -> dict[str, Any]:
        datasets = {name: tally.audit() for name, tally in self._by_source}
        windows = {"read": len(self._seen), "all": len(self._windows)}
        return self._whole.audit() | {"windows": windows, "datasets": datasets}

    # ---- behind the steps ---------------------------------------------------------------------------------------

    def _produce(self, start_step: int, results: queue.Queue[Any], stop: threading.Event) -> None:
        """In the background: what `_packs_after` finds behind `start_step`."""
        try:
            for item in self._packs_after(start_step * self._options.global_batch_size):
                while not stop.is_set():
                    with suppress(queue.Full):
                        results.put(item, timeout=0.1)
                        break
                if stop.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised where the steps are taken
            results.put(error)

    def _packs_after(self, skip: int) -> Iterator[tuple[list[int], list[tuple[Pack, float]]]]:
        """The packs behind the first `skip`, one window at a time, each with the epoch after it; and the numbers of
        that window and of those before it that were passed."""
        packs_in_epoch, epoch, windows = 0, 0, []
        for place in self._places():
            if place.epoch != epoch:
                if not packs_in_epoch:
                    raise self._nothing_left()
                packs_in_epoch, epoch = 0, place.epoch
            known = self._records.get(place.window) if place.part == 1 else None
            windows.append(place.window)
            if known is not None and known.packs <= skip:
                count = known.packs
            else:
                packs = self._ready.pop(place, None) or self._read(place)
                count = len(packs)
            packs_in_epoch += count
            if count <= skip:
                skip -= count
                continue
            after = [place.epoch + place.done + place.share * (i + 1) / count for i in range(count)]
            yield windows, list(zip(packs, after, strict=True))[skip:]
            skip, windows = 0, []

    def _nothing_left(self) -> UserError:
        """The error for a stream of which every window is known."""
        whole = Tally(self._options.capacity)
        for record in self._records.values():
            whole.add(record)
        dropped = f", all dropped ({counts_in_words(whole.dropped)})" if whole.dropped else ""
        return UserError(
            f"no row of the stream can be trained on: {whole.totals['read']:,} read{dropped}",
            fix="mend the rows, of which rejected_rows.jsonl lists the bad ones, or raise --max-length",
        )

    def _places(self) -> Iterator[_Place]:
        """Windows in their order, epoch after epoch, for ever. Weights repeat windows, or take a part of them."""
        options, epoch = self._options, 0
        while True:
            visits = [self._visits(owner, weight, epoch) for owner, weight in enumerate(self._weights)]
            order, parts = (np.concatenate(arrays) for arrays in zip(*visits, strict=True))
            if options.shuffle:
                places = permutation(len(order), options.seed, epoch, "windows")
                order, parts = order[places], parts[places]
            done, all_parts = np.cumsum([0, *parts]), parts.sum()
            for window, part, before in zip(order.tolist(), parts.tolist(), done.tolist(), strict=False):
                yield _Place(epoch, before / all_parts, part / all_parts, window, part)
            epoch += 1

    def _visits(self, owner: int, weight: float, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(windows of a source in an epoch, the part of its rows that is due of each): all but one are due whole."""
        mine = np.flatnonzero(self._owner == owner)
        whole, rest = int(weight), (weight - int(weight)) * len(mine)
        count = math.ceil(rest - LEAST_PART)
        chosen = permutation(len(mine), self._options.seed, epoch, "weight", owner)[:count]
        parts = np.ones(count)
        parts[-1:] = min(1.0, rest - (count - 1))
        ascending = np.argsort(chosen)
        windows = np.concatenate([np.tile(mine, whole), mine[chosen[ascending]]])
        return windows, np.concatenate([np.ones(whole * len(mine)), parts[ascending]])

    def _read(self, place: _Place) -> list[Pack]:
        """The packs of one window, in the order that its epoch gives them."""
        window = self._windows[place.window]
        batch = TokenBatch()
        for rows in chunks(self._rows(window)):  # what a tokenizer returns takes much more than text or tokens
            batch.extend(self._run(rows))
        check_kept(self._files, self._states, {piece.file for piece in window})
        check_vocabulary(batch.largest(), self._vocabulary, partial(self._where_from, batch))
        data_set = int(self._owner[place.window]) if self._data_sets else None
        sequences = [
            Sequence(ids, flags_of(runs, len(ids)), self._shown[file].where(line), data_set=data_set)
            for ids, runs, (_, file, line) in zip(batch.ids, batch.runs, batch.rows, strict=True)
        ]
        packs = self._packed(sequences, place)
        self._record_window(place.window, batch, packs)  # which is known as a whole, whatever is due of it
        if place.part == 1:
            return packs
        rows = np.asarray([number for number, _, _ in batch.rows], dtype=np.int64)
        return self._packed([sequences[i] for i in self._due(rows, place).tolist()], place)

    def _due(self, rows: np.ndarray, place: _Place) -> np.ndarray:
        """The sequences of a part of a window's rows. rows: the row of each sequence."""
        there = np.unique(rows)
        count = max(1, round(place.part * len(there)))  # as where all rows are known
        chosen = permutation(len(there), self._options.seed, place.epoch, place.window, "part")[:count]
        return np.flatnonzero(np.isin(rows, there[chosen]))

    def _packed(self, sequences: list[Sequence], place: _Place) -> list[Pack]:
        key = (self._options.seed, place.epoch, place.window)
        if self._options.shuffle:
            sequences = [sequences[i] for i in permutation(len(sequences), *key, "rows").tolist()]
        packs = [[sequence] for sequence in sequences]
        if self._options.packing:
            lengths = np.asarray([len(sequence.input_ids) for sequence in sequences], dtype=np.int32)
            packs = [[sequences[i] for i in pack] for pack in best_fit_decreasing(lengths, self._options.capacity)]
            if self._options.shuffle:
                packs = [packs[i] for i in permutation(len(packs), *key, "packs").tolist()]
        return packs

    def _rows(self, window: Window) -> Iterator[RawRow]:
        for number, (file, position, payload) in enumerate(read_window(self._files, window, self._sample_by)):
            yield RawRow(file, position, number, self._formats[file], payload)

    def _where_from(self, batch: TokenBatch, token: int) -> str:
        """`file:line` of the first row with this token or a higher one."""
        rows = zip(batch.ids, batch.rows, strict=True)
        file, line = next(place for ids, (_, *place) in rows if ids.max(initial=-1) >= token)
        return self._files[file].where(self._line(file, line))

    def _record_window(self, number: int, batch: TokenBatch, packs: list[Pack]) -> None:
        """Write down what is known of a window now. Raises UserError for a bad row that is to stop."""
        rejected = [self._placed(row) for row in batch.rejected]
        if rejected and self._stop_at_bad_row:
            raise bad_row_error(self._named(rejected[0]))
        totals = dict(batch.counts) | {
            "packs": len(packs),
            "tokens": sum(len(ids) for ids in batch.ids),
            "trained_tokens": sum(int((runs[1::2] - runs[::2]).sum()) for runs in batch.runs),
        }
        if number not in self._records:
            self._records[number] = WindowRecord(totals, dict(batch.dropped), dict(batch.unused), rejected)
            append_record(self._record, number, self._records[number])

    def _count(self, windows: list[int]) -> None:
        """Count each window once, however often it is visited."""
        for number in windows:
            if number in self._seen:
                continue
            self._seen.add(number)
            record = self._records[number]
            self.rejected += map(self._named, record.rejected)
            _, of_source = self._by_source[self._owner[number]]
            for tally in (self._whole, of_source):
                tally.add(record)
        self.audit |= self._audit()

    def _placed(self, row: dict[str, Any]) -> dict[str, Any]:
        """A bad row with its file by number, since the record is of any copy of the files, and its line."""
        file = self._labels[row["file"]]
        return row | {"file": file, "line": self._line(file, row["line"])}

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"file": self._files[row["file"]].label}

    def _line(self, file: int, position: int) -> int:
        by_byte = _is_by_byte(self._files[file], self._sample_by)
        return line_at(self._files[file], position) if by_byte else position


def _is_by_byte(file: DataFile, sample_by: str) -> bool:
    return file.kind == "jsonl" or (file.kind == "txt" and sample_by == "line")


def _by_byte(file: DataFile, sample_by: str) -> DataFile:
    """The file under a name that says that rows are told by the byte they start at: lines are not counted."""
    return replace(file, label=f"{file.label}@byte") if _is_by_byte(file, sample_by) else file
