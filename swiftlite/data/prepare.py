"""From `--dataset` to the plan of a run: files -> rows -> tokens (cached by content) -> packs in their order."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from swiftlite.config.methods import PAIRED, SAMPLING, asked_at_once, pack_capacity, prompt_limit
from swiftlite.data.audit import build_audit, check_anything_left, eval_section, unread_files
from swiftlite.data.build import bad_row_error, build_entry, check_mapped, check_vocabulary
from swiftlite.data.duplicates import count_trained_on, first_rows
from swiftlite.data.held_out import part_of, split_parts
from swiftlite.data.order import BatchPlan, Part, PlanOptions
from swiftlite.data.rows.content import check_unchanged, content_hash, file_states
from swiftlite.data.rows.formats import check_columns
from swiftlite.data.rows.sources import Source, parse_spec, resolve
from swiftlite.data.store import REJECTED, SEQUENCES, SequenceStore, load_or_build
from swiftlite.data.stream import StreamPlan, stream_identity
from swiftlite.data.tokens.own_tools import load_tools
from swiftlite.data.tokens.tokenize import TokenOptions
from swiftlite.data.tokens.tokenizer_key import tokenizer_key
from swiftlite.data.windows import LARGEST_GROUP, LAYOUT_VERSION, WINDOW_BYTES
from swiftlite.errors import UserError
from swiftlite.imports import default_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig

FORMAT_VERSION = 24  # raise it when the same rows and options give other tokens or counts than before
Progress = Callable[[int, int], None]
LoadTokenizer = Callable[[], "PreTrainedTokenizerBase"]


@dataclass(frozen=True)
class Rejected:
    """The rows that were left out under `--on-bad-row skip`: dicts with file, line, reason, detail and row."""

    entries: list[Entry]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for entry in self.entries:
            now = dict(zip(entry.meta["labels"], (file.label for file in entry.source.files), strict=True))
            for row in map(json.loads, entry.rejected_lines()):
                yield row | {"file": now[row["file"]]}  # the cache knows files by content: it may have met another copy

    def __bool__(self) -> bool:
        return any(entry.rejected.size for entry in self.entries)


@dataclass(frozen=True)
class Asked:
    """What rows that are prompts have for the functions that reward answers. named: by a flag; columns: each of which
    some row has; answered: whether some of them answer themselves."""

    named: str
    columns: tuple[str, ...]
    answered: bool


@dataclass(frozen=True)
class PreparedData:
    """train, eval: the steps; audit: for audit.json; fingerprint: changes with anything that changes the steps;
    asked: of rows that are prompts; questions: the rows of `eval` as prompts, of methods that learn from others'
    answers, and questions_fingerprint: the same of them."""

    train: BatchPlan | StreamPlan
    eval: BatchPlan | None
    audit: dict[str, Any]
    rejected: Rejected | list[dict[str, Any]]
    fingerprint: str
    asked: tuple[Asked, ...] = ()
    questions: BatchPlan | None = None
    questions_fingerprint: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Of all rows that are prompts."""
        return tuple(sorted({name for part in self.asked for name in part.columns}))


@dataclass(frozen=True)
class Entry:
    """One prepared data set. rejected: JSON lines of a mapped file: a cache that is cleared away does not take them;
    rows: those that may take part, as places in `store.firsts`, None for all; repeated: how many there are of those
    that are the same as others."""

    source: Source
    key: str
    store: SequenceStore
    meta: dict[str, Any]
    rejected: pa.Buffer
    rows: np.ndarray | None = None
    repeated: int = 0

    @property
    def tokens(self) -> str:
        """The hash of its sequences."""
        return self.meta["files"][SEQUENCES]

    def rejected_lines(self) -> Iterator[str]:
        return io.TextIOWrapper(pa.BufferReader(self.rejected), encoding="utf-8", newline="\n")


def prepare_data(
    config: RunConfig,
    load_tokenizer: LoadTokenizer,
    progress: Progress | None = None,
    vocabulary: int | None = None,
) -> PreparedData:
    """Read, check, tokenise and pack every data set of the config, or take it from the cache.

    load_tokenizer: called only where tokens have to be made; progress: called with (rows done, rows in all);
    vocabulary: how many tokens the model knows, None where nobody can say.
    Raises UserError for everything that is wrong with the data, with file and line.
    """
    _check(config)
    identity = tokenizer_key(config, load_tokenizer)
    sources, eval_sources = (
        [resolve(parse_spec(text, flag, config.max_samples), config.method) for text in names]
        for flag, names in (("--dataset", config.dataset), ("--eval-dataset", config.eval_dataset))
    )
    files = [file for source in (*sources, *eval_sources) for file in source.files]
    check_mapped(files, config.columns, config.sample_by)
    held_out = [prepare_one(config, source, identity, load_tokenizer, progress) for source in eval_sources]
    if config.streaming:
        _check_rows(held_out, vocabulary)
        return _prepare_stream(config, sources, held_out, identity, load_tokenizer, vocabulary)
    train = [prepare_one(config, source, identity, load_tokenizer, progress) for source in sources]
    _check_rows(train, vocabulary)
    _check_rows(held_out, vocabulary)
    train = _with_unique(config, train, held_out)
    parts, eval_parts = split_parts(config, train, held_out)
    plan, eval_plan = BatchPlan(parts, _plan_options(config)), plan_evaluation(config, eval_parts)
    audit = build_audit(train, plan, held_out, eval_plan)
    if known := count_trained_on(parts, eval_parts):
        audit["eval"]["rows"]["trained_on"] = known
    return PreparedData(
        train=plan,
        eval=eval_plan,
        audit=audit,
        rejected=Rejected([*train, *held_out]),
        fingerprint=_fingerprint(config, [*train, *held_out]),
        asked=(
            asked_of(f"--dataset {' '.join(config.dataset)}", train),
            *([asked_of(f"--eval-dataset {' '.join(config.eval_dataset)}", held_out)] if held_out else []),
        ),
    )


def asked_of(named: str, entries: list[Entry]) -> Asked:
    columns = {name for entry in entries for name in entry.meta["columns"]}
    return Asked(named, tuple(sorted(columns)), any(entry.meta["counts"].get("answered") for entry in entries))


def _check_rows(entries: list[Entry], vocabulary: int | None) -> None:
    """Raises UserError where no row is left, or the model does not know a token of one."""
    check_anything_left(entries)
    for entry in entries:
        check_vocabulary(entry.meta["largest_token"], vocabulary, entry.store.where_from)


def _plan_options(config: RunConfig) -> PlanOptions:
    return PlanOptions(
        seed=config.seed,
        capacity=pack_capacity(config),
        packing=config.packing and config.method not in SAMPLING,  # prompts: their answers are packed
        shuffle=config.shuffle,
        global_batch_size=config.global_batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


def plan_evaluation(config: RunConfig, parts: list[Part]) -> BatchPlan | None:
    """One pass over the evaluation rows in the order of the files; of prompts as many at a time as are answered so."""
    at_once = asked_at_once(config) if config.method in SAMPLING else config.global_batch_size
    options = replace(_plan_options(config), shuffle=False, epochs=1.0, max_steps=None, global_batch_size=at_once)
    return BatchPlan(parts, options) if parts else None


def _prepare_stream(
    config: RunConfig,
    sources: list[Source],
    held_out: list[Entry],
    identity: str,
    load_tokenizer: LoadTokenizer,
    vocabulary: int | None,
) -> PreparedData:
    """The same for `--streaming`: of the text only the first window is read before training."""
    for source in sources:
        if source.spec.count is not None:
            raise UserError(
                "--streaming cannot choose rows of text that it has not read",
                where=source.spec.given,
                fix="leave #COUNT out, or leave --streaming out",
            )
    options = token_options(config)
    key = _digest(
        FORMAT_VERSION, identity, options.max_length, options.overlong, sorted(options.columns.items()),
        sorted(options.placeholders.items()), config.sample_by, config.packing,
        (LAYOUT_VERSION, WINDOW_BYTES, LARGEST_GROUP), [stream_identity(source) for source in sources],
    )  # fmt: skip
    written = [file.path.stat().st_mtime_ns for source in sources for file in source.files if file.path is not None]
    known = _digest(key, version("transformers"), version("tokenizers"), written)
    plan = StreamPlan(
        sources,
        _plan_options(config),
        options,
        load_tokenizer,
        sample_by=config.sample_by,
        stop_at_bad_row=config.on_bad_row == "error",
        record=cache_root(config) / "streams" / f"{known}.jsonl",
        vocabulary=vocabulary,
    )
    order = (
        key, [source.spec.weight for source in sources], config.seed, config.shuffle, config.global_batch_size,
        [entry.tokens for entry in held_out],
    )  # fmt: skip
    eval_plan = plan_evaluation(config, [part_of(entry) for entry in held_out])
    if eval_plan is not None:
        plan.audit |= eval_section(held_out, eval_plan) | unread_files([*sources, *(one.source for one in held_out)])
        plan.rejected += Rejected(held_out)
    return PreparedData(plan, eval_plan, plan.audit, plan.rejected, _digest(order))


def _check(config: RunConfig) -> None:
    if not config.dataset:
        raise UserError("no data set is named", where="--dataset", fix="give --dataset FILE, a folder or a hub id")
    for flag, names in (("--dataset", config.dataset), ("--eval-dataset", config.eval_dataset)):
        twice = next((text for text in names if names.count(text) > 1), None)
        if twice is not None:
            raise UserError("the data set is named twice", where=f"{flag} {twice}", fix=f"weight it: {twice}*2")
    if config.max_length < 2:
        raise UserError("--max-length must be at least 2", where="--max-length", fix="give the longest row in tokens")
    check_columns(config.columns)


def prepare_one(
    config: RunConfig, source: Source, identity: str, load_tokenizer: LoadTokenizer, progress: Progress | None
) -> Entry:
    options = token_options(config)
    before = file_states(source.files)
    content, estimate = content_hash(source.files)
    count = source.spec.count
    layout = (options.share_prompt,) if options.method in PAIRED else ()
    opening = () if options.system is None else ("system", options.system)
    learnt = () if options.train_on == "answers" else ("train_on", options.train_on)
    called = ("tools", json.dumps(options.tools)) if options.tools else ()
    key = _digest(
        FORMAT_VERSION, version("transformers"), version("tokenizers"), identity, content, options.method,
        options.max_length, options.overlong, sorted(options.columns.items()),
        sorted(options.placeholders.items()), config.sample_by,
        (count, config.seed) if count else None, *layout, *opening, *learnt, *called,
    )  # fmt: skip

    def build(folder: Path) -> dict[str, Any]:
        meta = build_entry(
            folder,
            source,
            load_tokenizer(),
            options,
            sample_by=config.sample_by,
            seed=config.seed,
            stop_at_bad_row=config.on_bad_row == "error",
            workers=config.workers,
            expected_rows=min(estimate, count or estimate),
            progress=progress,
        )
        check_unchanged(source.files, before)  # else the tokens would be kept under the hash of other rows
        return meta

    folder, meta = load_or_build(cache_root(config) / "tokens", key, build)
    store = SequenceStore(folder, [file.label for file in source.files])
    entry = Entry(source, key, store, meta, pa.memory_map(str(folder / REJECTED)).read_buffer())
    if config.on_bad_row == "error":
        for row in Rejected([entry]):
            raise bad_row_error(row)
    return entry


def token_options(config: RunConfig) -> TokenOptions:
    """What of the config decides the tokens of a row."""
    return TokenOptions(
        method=config.method,
        max_length=prompt_limit(config) if config.method in SAMPLING else config.max_length,
        overlong=config.overlong,
        template_date=config.template_date,
        columns=dict(config.columns),
        share_prompt=config.share_prompt,
        system=None if config.method == "pretrain" else config.system,
        placeholders=dict(config.placeholders),
        train_on=config.train_on,
        tools=tuple(tool.schema for tool in load_tools(config.tools)) if config.method in SAMPLING else (),
    )


def cache_root(config: RunConfig) -> Path:
    """`--cache-dir`, else `$XDG_CACHE_HOME/swiftlite`, else `~/.cache/swiftlite`."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache()


def _with_unique(config: RunConfig, train: list[Entry], held_out: list[Entry]) -> list[Entry]:
    """The entries to train on with what is known of rows that are the same as others. Raises UserError where
    `--deduplicate` leaves none."""
    firsts = first_rows([entry.store for entry in train], [entry.store for entry in held_out if config.deduplicate])
    repeated = [len(entry.store.firsts) - len(rows) for entry, rows in zip(train, firsts, strict=True)]
    if not any(map(len, firsts)):
        raise UserError(
            "every row to train on is one of the evaluation's, and --deduplicate leaves such rows out",
            where="--eval-dataset",
            fix="give other rows to evaluate, or --eval-fraction",
        )
    rows = firsts if config.deduplicate else [None] * len(train)
    return [replace(entry, rows=r, repeated=n) for entry, r, n in zip(train, rows, repeated, strict=True)]


def _fingerprint(config: RunConfig, entries: list[Entry]) -> str:
    """By the tokens themselves: another version of a library may make the same."""
    return _digest(
        [(entry.tokens, entry.source.spec.weight) for entry in entries],
        len(config.dataset), config.eval_fraction, config.seed, config.packing, config.shuffle,
        config.global_batch_size, config.method, pack_capacity(config), *(["unique"] if config.deduplicate else []),
    )  # fmt: skip


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]
