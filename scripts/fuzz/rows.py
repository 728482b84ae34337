"""Row files of every format and kind, and how a run reads them: to tokens, or window by window."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

USER, ANSWER = {"role": "user", "content": "What is 2?"}, {"role": "assistant", "content": "It is four."}
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"a": "number"}}}
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sft", {"messages": [{"role": "system", "content": "Be short."}, USER, ANSWER]}),
    ("sft", {"messages": [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "thinking": "two"}], "system": "x"}),
    ("sft", {"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": [TOOL]}),
    ("sft", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "x"}),
    ("sft", {"instruction": "Add", "input": "1 1", "output": "2", "history": [["a", "b"]], "system": "s"}),
    ("sft", {"prompt": "One and", "completion": " two"}),
    ("sft", {"prompt": [USER], "completion": [ANSWER]}),
    ("sft", {"query": "q", "response": "r", "history": []}),
    ("pretrain", {"text": "Once upon a time."}),
    ("dpo", {"prompt": "One and", "chosen": " two", "rejected": " ten", "margin": 0.5}),
    ("dpo", {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}),
    ("rm", {"messages": [USER, ANSWER], "rejected_response": "No.", "margin": "1.5"}),
    ("dpo", {"messages": [USER, ANSWER], "rejected_messages": [USER, {**ANSWER, "content": "No."}]}),
    ("kto", {"prompt": [USER], "completion": [ANSWER], "label": True}),
    ("kto", {"prompt": "One and", "completion": " two", "label": "false"}),
)
NAMES = (
    "messages", "conversations", "role", "content", "from", "value", "train", "weight", "tools", "tool_calls",
    "function", "name", "arguments", "system", "history", "prompt", "completion", "chosen", "rejected", "label",
    "margin", "text", "thinking", "rejected_response", "rejected_messages", "input", "output", "instruction",
)  # fmt: skip
KINDS = (".jsonl", ".jsonl", ".json", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow")


def written(found: list[Any], valid: list[dict[str, Any]], kind: str) -> bytes:
    """Rows as a file. valid: for the columnar kinds, which cannot hold everything."""
    if kind in (".parquet", ".arrow"):
        return _columnar(found, valid, kind)
    if kind in (".csv", ".tsv"):
        return _csv(found, "\t" if kind == ".tsv" else ",")
    if kind == ".txt":
        return b"\n".join(json.dumps(row).encode() for row in found)
    lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in found]
    escaped = [json.dumps(row).encode() for row in found]
    joined = [one if place % 2 else other for place, (one, other) in enumerate(zip(lines, escaped, strict=True))]
    return b"[" + b",\n".join(joined) + b"]" if kind == ".json" else b"\n".join(joined)


def _csv(found: list[Any], delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    keys = list(found[0]) if isinstance(found[0], dict) else ["text"]
    writer.writerow(keys)
    for row in found:
        cells = [row.get(key) for key in keys] if isinstance(row, dict) else [row]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])
    return text.getvalue().encode("utf-8", "surrogatepass")


def _columnar(found: list[Any], valid: list[dict[str, Any]], kind: str) -> bytes:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.Table.from_pylist([row for row in found if isinstance(row, dict)])
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError, TypeError, ValueError):
        table = pyarrow.Table.from_pylist(valid)
    sink = io.BytesIO()
    try:
        if kind == ".parquet":
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    except pyarrow.ArrowException:  # such as a struct without fields, which parquet does not know
        return b""
    return sink.getvalue()


def packed(kind: str, content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """(suffix, content), gzipped now and then."""
    return (f"{kind}.gz", gzip.compress(content, mtime=0)) if chance.random() < 0.1 else (kind, content)


@functools.cache
def _tokenizer() -> Any:
    from swiftlite.models.toys import toy_tokenizer

    return toy_tokenizer()


def prepare() -> None:
    """Load what every run has loaded by the time it reads rows."""
    _tokenizer()


def read(folder: Path, scratch: Path, facts: dict[str, Any]) -> bool:
    """To tokens on disk, as a run does; or in windows, as a streamed run does."""
    from swiftlite.data.build import build_entry
    from swiftlite.data.rows.sources import parse_spec, resolve
    from swiftlite.data.tokens.tokenize import TokenOptions

    path = next(folder.iterdir())
    source = resolve(parse_spec(str(path)))
    options = TokenOptions(facts["method"], 64, "truncate", "2026-01-01", {})
    if facts["stream"] and path.suffix in (".jsonl", ".txt", ".parquet", ".arrow"):
        return _read_windows(source)
    meta = build_entry(
        scratch, source, _tokenizer(), options, sample_by="line", seed=1, stop_at_bad_row=not facts["skip"],
        workers=1, expected_rows=1, progress=None,
    )  # fmt: skip
    return bool(meta["counts"].get("used"))


def _read_windows(source: Any) -> bool:
    from swiftlite.data.rows.forms import BadRow
    from swiftlite.data.rows.readers import parse_payload
    from swiftlite.data.windows import list_windows, read_window

    sound = 0
    for window in list_windows(source.files, [0] * len(source.files), "line"):
        for _, _, payload in read_window(source.files, window, "line"):
            try:
                sound += bool(parse_payload(payload))
            except BadRow:
                continue
    return sound > 0
