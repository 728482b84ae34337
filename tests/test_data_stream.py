"""Streaming: every row once an epoch, the same steps from any start, and no window tokenised to find a later one."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from swiftlite.config.resolve import resolve_config
from swiftlite.data import stream, windows
from swiftlite.data.prepare import prepare_data
from swiftlite.data.stream_record import WindowRecord, append_record, read_records
from swiftlite.errors import UserError

LINES = [f"line {i} " + "of some text " * (i % 11) for i in range(400)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2000)


@pytest.fixture
def open_stream(tmp_path, tokenizer):
    """A factory: data set, steps, options -> PreparedData of a streamed run."""
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)

    def run(*dataset, max_steps=40, vocabulary=None, **options):
        chosen = {"max_length": 64, "global_batch_size": 3, "cache_dir": str(tmp_path / "cache")} | options
        config = resolve_config(
            "pretrain", model=str(folder), dataset=[str(name) for name in dataset], streaming=True,
            max_steps=max_steps, output_dir=str(tmp_path / "out"), **chosen,
        )  # fmt: skip
        return prepare_data(config, lambda: tokenizer, vocabulary=vocabulary)

    return run


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


def content(batches):
    return [(b.step, round(b.epoch, 9), [[s.where for s in pack] for pack in b.packs]) for b in batches]


def documents(plan, start=0):
    return [s for batch in plan.steps(start) for pack in batch.packs for s in pack]


def one_epoch(plan):
    """The documents of the first visit of each window."""
    found = []
    for batch in plan.steps():
        found += [s for pack in batch.packs for s in pack]
        if batch.epoch >= 1:
            break
    return found


def test_every_line_is_read_once_an_epoch(open_stream, text_file, tokenizer):
    plan = open_stream(text_file, max_steps=10_000, shuffle=False, packing=False, max_length=512).train
    texts = [tokenizer.decode(s.input_ids[:-1]) for s in one_epoch(plan)]
    assert texts[: len(LINES)] == LINES
    assert plan.audit["rows"]["read"] == len(LINES)
    assert plan.audit["windows"]["read"] == plan.audit["windows"]["all"] > 5


def test_any_step_can_be_the_first(open_stream, text_file, tmp_path):
    whole = content(open_stream(text_file).train.steps())
    assert len(whole) == 40
    for start in (1, 17, 39):
        assert content(open_stream(text_file).train.steps(start)) == whole[start:]
        fresh = open_stream(text_file, cache_dir=str(tmp_path / f"other{start}"))
        assert content(fresh.train.steps(start)) == whole[start:]  # without the record of pack counts
    assert content(open_stream(text_file, seed=1).train.steps()) != whole


def test_a_later_step_is_found_without_tokenising_what_comes_before(open_stream, text_file, monkeypatch):
    plan = open_stream(text_file).train
    last = content(plan.steps())[-1]
    again = open_stream(text_file).train
    read = []
    whole = stream.read_window
    monkeypatch.setattr(stream, "read_window", lambda *args: read.append(args[1]) or whole(*args))
    assert content(again.steps(39)) == [last]
    assert len(read) <= stream.AHEAD + 3  # the step's window, and those that the thread reads ahead


def test_epochs_go_on_in_another_order(open_stream, text_file):
    steps = list(open_stream(text_file, max_steps=400).train.steps())
    first = [s.where for b in steps if b.epoch <= 1 for pack in b.packs for s in pack]
    second = [s.where for b in steps if 1 < b.epoch <= 2 for pack in b.packs for s in pack]
    assert len(first) > 350
    assert len(second) > 350
    assert first[:300] != second[:300]
    order = [list(dict.fromkeys(int(w.rsplit(":", 1)[1]) // 2000 for w in rows)) for rows in (first, second)]
    assert len(order[0]) > 5
    assert order[0][:5] != sorted(order[0][:5])  # windows are shuffled,
    assert order[0][:5] != order[1][:5]  # and anew in each epoch
    assert [b.epoch for b in steps] == sorted(b.epoch for b in steps)


def test_packs_hold_max_length_and_rows_are_split(open_stream, tmp_path, tokenizer):
    path = tmp_path / "long.txt"
    path.write_text("word " * 3000 + "\n" + "short\n")
    plan = open_stream(path, max_steps=6).train
    assert all(sum(len(s.input_ids) for s in pack) <= 64 for b in plan.steps() for pack in b.packs)
    assert plan.audit["rows"]["split"] == 1
    assert plan.describe()["fill"] > 0.9


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_other_file_types(open_stream, tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    table = pa.Table.from_pylist([{"text": line} for line in LINES])
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=50)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    plan = open_stream(path, max_steps=10_000, packing=False, overlong="truncate").train
    wheres = [s.where for s in one_epoch(plan)]
    assert len(set(wheres)) == len(LINES)
    if kind != "jsonl":
        assert set(wheres) == {f"{path}:{i + 1}" for i in range(len(LINES))}


def test_a_bad_line_is_named_by_its_number_or_skipped(open_stream, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": line}) for line in LINES]
    rows[250] = '{"text": '
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match="not valid JSON") as failure:
        documents(open_stream(path, max_steps=500).train)
    assert failure.value.where == f"{path}:251"
    prepared = open_stream(path, max_steps=500, on_bad_row="skip")
    documents(prepared.train)
    (row,) = prepared.rejected
    assert (row["line"], row["reason"]) == (251, "invalid_json")
    assert prepared.audit["rows"]["dropped"] == {"invalid_json": 1}


def test_a_run_that_goes_on_counts_what_it_has_read_before(open_stream, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": line, "id": i}) for i, line in enumerate(LINES)]
    rows[20] = '{"text": '
    path.write_text("\n".join(rows) + "\n")
    whole = open_stream(path, max_steps=30, on_bad_row="skip", shuffle=False)
    before = [s.where for s in documents(whole.train)]
    copy = path.rename(tmp_path / "copy.jsonl")
    for start in (29, 30):  # of a run that was killed behind its last step
        again = open_stream(copy, max_steps=30, on_bad_row="skip", shuffle=False)
        again.train.recount(start)
        assert len(list(again.train.steps(start))) == 30 - start
        assert [(row["file"], row["line"]) for row in again.rejected] == [(str(copy), 21)]
        assert again.audit["rows"] == whole.audit["rows"] and again.audit["windows"] == whole.audit["windows"]
    assert again.audit["rows"]["dropped"] == {"invalid_json": 1}
    assert again.audit["rows"]["used"] >= len(set(before)) > 100
    assert again.audit["rows"]["unused_columns"] == {"id": again.audit["rows"]["read"] - 1}
    assert again.audit["windows"]["read"] < again.audit["windows"]["all"]


def test_stopping_early_ends_the_thread(open_stream, text_file):
    import threading

    before = threading.active_count()
    steps = open_stream(text_file).train.steps()
    next(steps)
    steps.close()
    assert threading.active_count() == before


def test_what_cannot_be_streamed_is_refused(open_stream, tmp_path, text_file):
    for name in ("a.csv", "a.json", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"text\nx\n")
        with pytest.raises(UserError, match="--streaming cannot start in the middle") as failure:
            open_stream(tmp_path / name)
        assert failure.value.where == str(tmp_path / name)
    with pytest.raises(UserError, match="cannot choose rows"):
        open_stream(f"{text_file}#10")
    for options, said in (({}, "add --max-steps"), ({"max_steps": 1, "method": "sft"}, "which only pretrain takes")):
        with pytest.raises(UserError, match=said):
            resolve_config(**{"method": "pretrain", "model": "m", "dataset": ["a.txt"], "streaming": True} | options)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="no row"):
        open_stream(tmp_path / "empty.txt")
    (tmp_path / "blank.txt").write_text("\n" * 50)
    with pytest.raises(UserError, match="no row of the stream can be trained on: 0 read\n"):
        documents(open_stream(tmp_path / "blank.txt").train)
    with pytest.raises(UserError, match=r"400 read, all dropped \(over_long 400\)"):
        documents(open_stream(text_file, overlong="drop", max_length=3).train)


def test_weights_repeat_windows(open_stream, text_file, tmp_path):
    other = tmp_path / "b.txt"
    other.write_text("\n".join(LINES) + "\n")
    options = {"max_steps": 10_000, "packing": False, "overlong": "truncate", "global_batch_size": 1}
    plan = open_stream(f"{text_file}*2", f"{other}*0.5", **options).train  # steps of one row do not reach over an epoch
    wheres = [s.where for s in one_epoch(plan)]
    of_first = [w for w in wheres if w.startswith(str(text_file))]
    assert len(of_first) == 2 * len(LINES)
    assert len(LINES) // 3 < len(wheres) - len(of_first) < len(LINES) * 2 // 3


@pytest.mark.parametrize("weight", [0.1, 1.25, 2])
def test_a_weight_counts_rows_where_it_is_no_whole_number_of_windows(open_stream, text_file, tmp_path, weight):
    other = tmp_path / "b.txt"
    other.write_text("\n".join(f"row {i}" for i in range(200)) + "\n")  # of one window

    def seen(start=0, cache="cache"):
        folder = str(tmp_path / cache)
        options = {"packing": False, "overlong": "truncate", "global_batch_size": 20, "cache_dir": folder}
        prepared = open_stream(text_file, f"{other}*{weight}", max_steps=90, **options)
        return content(prepared.train.steps(start)), prepared.audit["rows"]["read"]

    steps, read = seen()
    assert read == len(LINES) + 200
    wheres = [where for _, _, packs in steps for pack in packs for where in pack]
    size = len(LINES) + int(200 * weight)
    first, second = ([w for w in part if w.startswith(str(other))] for part in (wheres[:size], wheres[size : 2 * size]))
    assert len(first) == len(second) == 200 * weight
    assert (sorted(first) == sorted(second)) == (weight == 2)
    for start in (7, 40, 89):
        assert seen(start)[0] == steps[start:]
        assert seen(start, cache=f"other{start}")[0] == steps[start:]


def test_a_token_that_the_model_does_not_know_is_told_with_its_line(open_stream, text_file, tokenizer):
    known = max(max(tokenizer(line)["input_ids"]) for line in LINES) + 1
    strange = next(text for text in tokenizer.get_vocab() if max(tokenizer(text)["input_ids"]) >= known)
    text_file.write_text("\n".join([*LINES[:300], strange, *LINES[300:]]) + "\n")
    plan = open_stream(text_file, vocabulary=known, shuffle=False, max_steps=10_000).train
    with pytest.raises(UserError, match=f"knows only {known} tokens") as failure:
        list(plan.steps())
    assert failure.value.where == f"{text_file}:301"


def test_records_of_windows_are_read_whole(tmp_path):
    """Text of a bad row may hold what `splitlines` takes for the end of a line."""
    record = WindowRecord({"packs": 1}, {"invalid_json": 1}, {}, [{"reason": "invalid_json", "text": "a\u2028b\x85c"}])
    for window in range(2):
        append_record(tmp_path / "windows.jsonl", window, record)
    assert read_records(tmp_path / "windows.jsonl") == {0: record, 1: record}


def test_small_files_share_windows(open_stream, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 20_000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, line in enumerate(LINES):
        (folder / f"{number:03}.txt").write_text(f"{line}\n\nsecond paragraph")
    prepared = open_stream(folder, sample_by="document", max_steps=10_000, max_length=256)
    wheres = [s.where for s in one_epoch(prepared.train)]
    assert set(wheres) == {f"{folder / name}:1" for name in (f"{number:03}.txt" for number in range(len(LINES)))}
    assert len(wheres) < len(LINES) + 30  # the next epoch begins within a step
    assert prepared.audit["fill"] > 0.9 and 1 < prepared.audit["windows"]["all"] < 10


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_large_row_group_is_cut(open_stream, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(windows, "LARGEST_GROUP", 3000)
    path = tmp_path / f"a.{kind}"
    table = pa.Table.from_pylist([{"text": line} for line in LINES])
    if kind == "parquet":
        pyarrow.parquet.write_table(table.slice(0, 30), path)  # a small group, then a large one
        with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
            writer.write_table(table.slice(0, 30))
            writer.write_table(table.slice(30))
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_batch(table.slice(0, 30).to_batches()[0])
            writer.write_batch(table.slice(30).to_batches()[0])
    plan = open_stream(path, max_steps=10_000, packing=False, overlong="truncate", global_batch_size=1).train
    assert plan.audit["windows"]["all"] > 5
    assert sorted(s.where for s in one_epoch(plan)) == sorted(f"{path}:{i + 1}" for i in range(len(LINES)))


def test_evaluation_rows_and_data_sets_are_audited(open_stream, text_file, tmp_path):
    other, held_out = tmp_path / "b.txt", tmp_path / "eval.jsonl"
    other.write_text("a row\n" * 10)
    held_out.write_text('{"text": "good"}\n{"text": ""}\n{"other": 1}\n' + json.dumps({"text": "word " * 500}) + "\n")
    more = {"eval_dataset": [str(held_out)], "on_bad_row": "skip", "overlong": "drop", "packing": False}
    prepared = open_stream(text_file, other, max_steps=10_000, **more)
    one_epoch(prepared.train)
    rows = prepared.audit["eval"]["rows"]
    assert (rows["read"], rows["used"]) == (4, 1) and sum(rows["dropped"].values()) == 3
    assert {"truncated", "split", "split_by_template"} <= rows.keys() & prepared.audit["rows"].keys()
    assert {row["file"] for row in prepared.rejected} == {str(held_out)}
    parts = prepared.audit["datasets"]
    assert [parts[str(name)]["rows"]["read"] for name in (text_file, other)] == [len(LINES), 10]
    assert sum(part["tokens"] for part in parts.values()) == prepared.audit["tokens"]


def test_a_record_that_was_cut_off_is_left_out_and_written_behind(tmp_path):
    path, record = tmp_path / "windows.jsonl", WindowRecord({"packs": 1}, {}, {}, [{"text": "é"}])
    append_record(path, 0, record)
    path.write_bytes(path.read_bytes() + '[1, {"totals": {"é'.encode()[:-1])
    assert read_records(path) == {0: record}
    append_record(path, 2, record)
    assert read_records(path) == {0: record, 2: record}


def test_what_is_written_for_placeholders_makes_another_stream(open_stream, tmp_path):
    (tmp_path / "a.txt").write_text("I am {{name}}.\n" * 9)
    found = [
        open_stream(tmp_path / "a.txt", placeholders=said) for said in ({}, {"name": "Lu"}, {"name": "Robo the 1st"})
    ]
    assert len({prepared.fingerprint for prepared in found}) == 3
    assert len({prepared.audit["tokens"] for prepared in found}) == 3
    assert [prepared.audit["rows"].get("placeholders_filled") for prepared in found] == [None, 9, 9]


def test_a_file_that_changes_is_noticed(open_stream, tmp_path):
    path = tmp_path / "a.txt"
    lines = [f"line {i:04}" for i in range(30_000)]
    path.write_text("\n".join(lines) + "\n")
    before = open_stream(path).fingerprint
    middle = len(lines) // 2
    lines[middle - 2000 : middle] = [f"{'x' * 19}"] * 1000  # as many bytes
    path.write_text("\n".join(lines) + "\n")
    prepared = open_stream(path, max_steps=10_000)
    assert prepared.fingerprint != before
    steps = prepared.train.steps()
    next(steps)
    with path.open("a") as file:
        file.write("one more\n")
    next(steps)  # rows that are added do not matter
    path.write_text("\n".join(lines[:20_000]) + "\n")
    with pytest.raises(UserError, match="has changed while"):
        list(steps)
