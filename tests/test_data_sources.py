"""Data set names, file types and what cannot be read: every error names the file and its true line."""

import bz2
import csv
import gzip
import json
import lzma
import time

import pyarrow as pa
import pyarrow.parquet
import pytest

from swiftlite.config.resolve import resolve_config
from swiftlite.config.save import dump_config
from swiftlite.data.audit import losses_in_words, unread_files
from swiftlite.data.rows.content import content_hash
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.rows.readers import MAX_LINE, parse_payload, read_rows
from swiftlite.data.rows.sources import as_data_file, parse_spec, resolve
from swiftlite.data.windows import list_windows, read_window
from swiftlite.errors import UserError

ROWS = [{"text": "eins"}, {"text": "zwei, mit Komma"}, {"text": 'drei "Zitat"\nneue Zeile'}]


def read(path, sample_by="line"):
    return [(line, parse_payload(payload)) for line, payload in read_rows(as_data_file(path), sample_by)]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows=ROWS, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_arrow_file(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "a.jsonl": write_jsonl,
    "b.jsonl.json": write_jsonl,
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.csv": write_csv,
    "a.tsv": lambda path: write_csv(path, delimiter="\t"),
    "a.parquet": lambda path: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "a.pq": lambda path: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "a.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
}


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    ".bz2": bz2.compress,
    ".XZ": lzma.compress,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", WRITERS)
def test_every_file_type(tmp_path, name, suffix):
    path = tmp_path / name
    WRITERS[name](path)
    packed = tmp_path / f"{name}{suffix}"
    packed.write_bytes(COMPRESS[suffix](path.read_bytes()))
    assert [row for _, row in read(packed)] == ROWS


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".XZ"])
def test_compressed_files_of_several_parts_are_whole_and_cut_ones_are_told(tmp_path, suffix):
    """Tools that compress by several threads write parts end to end."""
    path = tmp_path / f"a.jsonl{suffix}"
    part = COMPRESS[suffix](b'{"text": "a"}\n' * 10_000)
    path.write_bytes(part * 2)
    assert len(read(path)) == 20_000
    path.write_bytes(part[:-8])
    with pytest.raises(UserError, match="cannot read"):
        read(path)


def test_lines_and_rows_are_numbered_as_an_editor_does(tmp_path):
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert read(jsonl) == [(1, {"text": "a"}), (3, {"text": "b"})]
    table = tmp_path / "a.csv"
    table.write_text('text\n"two\nlines"\nlast\n')
    assert read(table) == [(2, {"text": "two\nlines"}), (4, {"text": "last"})]
    array = tmp_path / "a.json"
    array.write_text('[\n {"text": "a"},\n\n {"text":\n  "b"}\n]')
    assert read(array) == [(2, {"text": "a"}), (4, {"text": "b"})]
    array.write_text('[{"text": "a"}, {"text": "b"}, {"text": "c"}]\n')
    assert [place for place, _ in read(array)] == [1, 2, 3]  # on one line, whose number would tell nothing


def test_text_by_line_paragraph_and_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n \nthree\n")
    assert read(path) == [(1, {"text": "one"}), (2, {"text": "two"}), (5, {"text": "three"})]
    assert read(path, "paragraph") == [(1, {"text": "one\ntwo"}), (5, {"text": "three"})]
    assert read(path, "document") == [(1, {"text": "one\ntwo\n\n \nthree\n"})]


def test_a_long_line_of_blanks_between_paragraphs_is_quickly_read(tmp_path):
    """As tables in text have them; a search from each blank would take the square of their number."""
    path = tmp_path / "a.txt"
    path.write_text("one\n" + " " * 300_000 + "\ntwo\n")
    begun = time.monotonic()
    assert [row["text"] for _, row in read(path, "paragraph")] == ["one", "two"]
    assert time.monotonic() - begun < 10


def test_columnar_files_lose_the_nulls_that_their_schema_adds(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "tool", "name": "n", "content": "b"}]},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    assert [row for _, row in read(path)] == rows


# ---- names ----------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_apart():
    spec = parse_spec("owner/name:sub@train#100*0.5")
    assert (spec.name, spec.subset, spec.split, spec.count, spec.weight) == ("owner/name", "sub", "train", 100, 0.5)
    assert spec.path is None


def test_an_existing_path_wins_over_every_suffix(tmp_path):
    odd = tmp_path / "a#10*2.jsonl"
    odd.touch()
    assert parse_spec(str(odd)).path == odd
    spec = parse_spec(f"{odd}#5*3")
    assert (spec.path, spec.count, spec.weight) == (odd, 5, 3.0)
    folder = tmp_path / "v1:x@y"
    folder.mkdir()
    assert parse_spec(f"{folder}@test").split == "test"
    assert parse_spec(f"{folder}@test").path == folder


@pytest.mark.parametrize("suffix", ["#0", "#-1", "#many", "*0", "*x", "*-2", "*inf", "@", ""])
def test_a_bad_suffix_is_named(tmp_path, suffix):
    with pytest.raises(UserError) as failure:
        parse_spec(f"{tmp_path / 'a.jsonl'}{suffix}" if suffix else " ")
    assert "SUBSET" in failure.value.fix


@pytest.mark.parametrize("suffix", ["*2#3", "#3#4", "#3@train:a"])
def test_suffixes_in_another_order_are_told(tmp_path, suffix):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="twice, or in another order"):
        parse_spec(str(tmp_path / "a.jsonl") + suffix)


def test_folders_are_read_in_order_and_by_split(tmp_path):
    for name in ("train-00001.jsonl", "train-00000.jsonl", "test/a.jsonl", ".hidden.jsonl", "README.md", "state.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name)

    def names(suffix=""):
        return [str(f.path.relative_to(tmp_path)) for f in resolve(parse_spec(f"{tmp_path}{suffix}")).files]

    assert names("@test") == ["test/a.jsonl"]
    assert names() == names("@train") == ["train-00000.jsonl", "train-00001.jsonl"]  # not the test rows
    with pytest.raises(UserError, match="no data file of split dev") as failure:
        names("@dev")
    assert failure.value.fix == "give one of its splits: train, test"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no data file"):
        resolve(parse_spec(str(tmp_path / "empty")))


def test_what_runs_have_written_below_a_folder_is_no_data(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    for name, config in (("run", dump_config(resolve_config("sft", model="a/b", dataset="c/d"))), ("data", "x: 1\n")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(config)
        write_jsonl(tmp_path / name / "metrics.jsonl")
        write_jsonl(tmp_path / name / "model" / "config.json")
    source = resolve(parse_spec(str(tmp_path)))
    assert [file.path.parent.name for file in source.files] == [tmp_path.name, "data", "model"]
    assert not any("run" in file.path.parts for file in source.files)
    assert source.unread == (str(tmp_path / "run"),)
    (tmp_path / "data" / "model" / "model.safetensors").touch()
    source = resolve(parse_spec(str(tmp_path)))
    assert [file.path.name for file in source.files] == ["a.jsonl", "metrics.jsonl"]
    assert source.unread == (str(tmp_path / "data" / "model"), str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("*.jsonl", r"pattern of 2 files, such as .*/a\.jsonl"),
        ("a*", r"pattern of 1 file, such as .*/a\.jsonl"),
        ("[b].jsonl", r"pattern of 1 file, such as .*/b\.jsonl"),
        ("c*", "is not a weight"),
    ],
)
def test_a_pattern_that_no_shell_has_expanded_is_told_so(tmp_path, name, said):
    for file in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / file)
    with pytest.raises(UserError, match=said):
        resolve(parse_spec(f"{tmp_path}/{name}"))


def test_addresses_are_no_files():
    with pytest.raises(UserError, match="not read from addresses") as failure:
        resolve(parse_spec("https://huggingface.co/datasets/owner/name"))
    assert "OWNER/NAME" in failure.value.fix


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path):
    for name in ("a.jsonl", "sub/b.jsonl.lz4", "c.csv.bak", "_d.jsonl", "README.md", ".e.jsonl", "_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name)
    source = resolve(parse_spec(str(tmp_path)))
    assert [file.path.name for file in source.files] == ["a.jsonl"]
    unread = [str(tmp_path / name) for name in ("_d.jsonl", "c.csv.bak", "sub/b.jsonl.lz4")]
    assert unread_files([source]) == {"unread_files": unread}
    rows = {"rows": {"read": 1, "dropped": {}}}
    assert losses_in_words(rows | {"unread_files": unread[:1]}) == f"1 file may hold rows and is not read ({unread[0]})"
    assert losses_in_words(rows | {"unread_files": [*unread, "z"]}).startswith("4 files may hold rows and are not read")


def test_links_of_a_folder_that_are_not_followed_are_told(tmp_path):
    """Rows would be missing that whoever looks into the folder takes to be there."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "sub", elsewhere, data / "run/checkpoints/step-1"):
        folder.mkdir(parents=True)
    for path in (data / "a.jsonl", elsewhere / "b.jsonl", elsewhere / "dataset_info.json"):
        write_jsonl(path)
    (data / "run/model.safetensors").touch()
    for name, target in {"more": elsewhere, "sub/gone.jsonl": tmp_path / "nowhere", "same.jsonl": data / "a.jsonl",
                         "run/checkpoints/latest": data / "run/checkpoints/step-1"}.items():  # fmt: skip
        (data / name).symlink_to(target)
    (data / "state.json").symlink_to(data / "a.jsonl")
    (tmp_path / "link").symlink_to(data)
    for folder in (data, tmp_path / "link"):
        source = resolve(parse_spec(str(folder)))
        assert [file.path.name for file in source.files] == ["a.jsonl", "same.jsonl"]
        assert source.unread == tuple(str(folder / name) for name in ("more", "run", "sub/gone.jsonl"))


def test_a_file_that_no_split_of_a_folder_reads_is_told_once(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "more.zip"):
        write_jsonl(tmp_path / name)
    splits = [resolve(parse_spec(f"{tmp_path}@{split}")) for split in ("train", "test")]
    assert unread_files(splits) == {"unread_files": [str(tmp_path / "more.zip")]}


def test_files_of_no_split_are_told_where_a_split_is_read(tmp_path):
    for name in ("train/a.jsonl", "test/a.jsonl", "extra.jsonl", "more/part-0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name)
    for suffix, unread in (("", ["extra.jsonl", "more/part-0.jsonl"]), ("@train", ["extra.jsonl", "more/part-0.jsonl"]),
                           ("@test", [])):  # fmt: skip
        source = resolve(parse_spec(f"{tmp_path}{suffix}"))
        assert len(source.files) == 1
        assert source.unread == tuple(str(tmp_path / name) for name in unread)


def test_texts_beside_the_rows_of_a_folder_are_told(tmp_path):
    def names(folder, method):
        source = resolve(parse_spec(str(folder)), method)
        assert all(name in source.unread for name in map(str, folder.iterdir()) if "LICENSE" in name)
        return [file.path.name for file in source.files], len(source.unread)

    rows, texts = tmp_path / "rows", tmp_path / "texts"
    for folder, others in ((rows, ["a.jsonl"]), (texts, ["readmes.txt"])):
        folder.mkdir()
        for name in ("LICENSE.txt", "notes.txt", "README_de.txt", *others):
            (folder / name).write_text('{"text": "a"}\n')
    assert names(rows, "sft") == (["a.jsonl"], 3)
    assert names(rows, "pretrain") == (["a.jsonl", "notes.txt"], 2)
    assert names(texts, "sft") == names(texts, "pretrain") == (["notes.txt", "readmes.txt"], 2)
    assert resolve(parse_spec(str(rows / "LICENSE.txt"))).files[0].kind == "txt"  # named by itself


def test_many_texts_beside_rows_are_quickly_told(tmp_path):
    """As captions beside a list of pictures; to look for each among all would take the square of their number."""
    write_jsonl(tmp_path / "a.jsonl")
    for number in range(8000):
        (tmp_path / f"{number}.txt").touch()
    begun = time.monotonic()
    source = resolve(parse_spec(str(tmp_path)))
    assert (len(source.files), len(source.unread)) == (1, 8000)
    assert time.monotonic() - begun < 6


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_byte_order_marks_of_files_that_were_joined_are_no_text(tmp_path, name):
    """Each file that Windows writes may begin with one; within a line it is a character as any other."""
    texts = ["eins", "zw\ufeffei", "drei"]
    rows = [json.dumps({"text": text}, ensure_ascii=False) if name == "a.jsonl" else text for text in texts]
    (tmp_path / name).write_text("\ufeff{}\r\n{}\r\n\ufeff{}\r\n".format(*rows))
    file = as_data_file(tmp_path / name)
    (window,) = list_windows([file], [0], "line")
    for payloads in (read_rows(file), (row[1:] for row in read_window([file], window, "line"))):
        assert [parse_payload(payload) for _, payload in payloads] == [{"text": text} for text in texts]


@pytest.mark.parametrize("name", ["a.JSONL", "a.jl", "a.jsonlines.GZ", "a.ndjson.gz"])
def test_other_names_of_json_lines(tmp_path, name):
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.lower().endswith("gz") else rows)
    assert [row for _, row in read(tmp_path / name)] == ROWS


def test_a_missing_file_names_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(UserError) as failure:
        resolve(parse_spec(str(tmp_path / "trian.jsonl#10")))
    assert "trian.jsonl" in failure.value.where
    assert "train.jsonl" in failure.value.fix
    with pytest.raises(UserError, match="no such folder"):
        resolve(parse_spec(str(tmp_path / "nowhere" / "a.jsonl")))
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError, match="the link leads nowhere\n.*\n.*gone.jsonl"):
        resolve(parse_spec(str(tmp_path / "link.jsonl")))
    (tmp_path / "a.docx").touch()
    with pytest.raises(UserError, match="docx are not read"):
        resolve(parse_spec(str(tmp_path / "a.docx")))


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_rows_of_a_json_array_are_estimated_however_many_lines_it_has(tmp_path, indent):
    """What is taken for a handful of rows is tokenised on one core."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS * 100, indent=indent))
    assert content_hash([as_data_file(path)])[1] == 300
    write_jsonl(path, [{"messages": [{}, {}]}] * 7)
    assert content_hash([as_data_file(path)])[1] == 7


def test_the_content_decides_the_hash(tmp_path):
    def digest(name, rows=ROWS):
        write_jsonl(tmp_path / name, rows)
        return content_hash([as_data_file(tmp_path / name)])

    assert digest("a.jsonl") == digest("b.jsonl")
    assert digest("a.jsonl")[1] == 3
    assert digest("a.jsonl") != digest("a.jsonl", ROWS[:2])


# ---- what cannot be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x"', "invalid_json"),
        (b"[1, 2]", "wrong_type"),
        (b'"text"', "wrong_type"),
        (b'{"text": "\xff"}', "not_utf8"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"text": "a", "text": "b"}', "invalid_json"),
    ],
    ids=["broken", "array", "string", "latin-1", "deep", "twice"],
)
def test_a_bad_line_is_a_bad_row_at_its_line(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n" + b'{"text": "b"}\n')
    rows = list(read_rows(as_data_file(path)))
    assert [number for number, _ in rows] == [1, 3, 4]
    with pytest.raises(BadRow) as failure:
        parse_payload(rows[1][1])
    assert failure.value.reason == reason
    assert parse_payload(rows[2][1]) == {"text": "b"}


@pytest.mark.parametrize(
    ("name", "content", "line", "what"),
    [
        ("a.json", b'[{"text": "a"},\n{"text": "b"\n', 3, "not valid JSON"),
        ("a.json", b'[{"text": "a"}\n{"text": "b"}]', 2, "expected , or"),
        ("a.json", b'{\n "text": "a"\n}', 1, "no JSON array"),
        ("a.json", b"\n\n7", 1, "no JSON array"),
        ("a.json", b'[{"text":\n "\xff"}]', 2, "not UTF-8"),
        ("a.csv", b'text\nok\n"open\nquote', 3, "not valid CSV"),
        ("a.csv", b"text\nok\nb\xe4d\n", 3, "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n' + b"x" * (MAX_LINE + 1), 2, "64 MiB"),
    ],
)
def test_an_unreadable_file_names_the_line(tmp_path, name, content, line, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=what) as failure:
        read(path)
    assert failure.value.where == f"{path}:{line}"
    assert failure.value.fix


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst", "a.parquet.zst", "a.jsonl.bz2", "a.jsonl.xz"]
)
def test_a_foreign_or_truncated_file_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"this is something else")
    with pytest.raises(UserError) as failure:
        read(path)
    assert str(path) in failure.value.where


def test_a_key_that_a_row_gives_twice_is_told(tmp_path):
    """One of the two values would be lost without a word."""
    line = '{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    with pytest.raises(BadRow, match="the key 'content' is given twice"):
        parse_payload(line.encode())
    path = tmp_path / "a.json"
    path.write_text(f'[\n{{"text": "a"}},\n{line}]')
    with pytest.raises(UserError, match="the key 'content' is given twice") as failure:
        list(read_rows(as_data_file(path)))
    assert failure.value.where == f"{path}:3"


def test_a_csv_header_that_names_a_column_twice_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("instruction,output,output\na,b,c\n")
    with pytest.raises(UserError, match="'output' twice"):
        list(read_rows(as_data_file(path)))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused_in_every_type(tmp_path, kind):
    table, path = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match="names the column 'text' twice") as failure:
        read(path)
    assert failure.value.where == str(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_told_as_such(tmp_path, encoding):
    for name, text in (("a.txt", "Once\nmore\n"), ("a.jsonl", '{"text": "a"}\n')):
        (tmp_path / name).write_bytes(text.encode(encoding))
        with pytest.raises(BadRow, match="iconv -f UTF-16 -t UTF-8") as failure:
            read(tmp_path / name)
        assert failure.value.reason == "not_utf8"
    for name in ("a.json", "a.csv"):
        (tmp_path / name).write_bytes('[{"text": "a"}]\n'.encode(encoding))
        with pytest.raises(UserError) as error:
            read(tmp_path / name)
        assert "iconv" in str(error.value)
    with pytest.raises(UserError, match="iconv"):
        read(tmp_path / "a.txt", "document")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (gzip.compress(b'{"text": "a"}', mtime=0), "like a .gz file"),
        (b"PAR1\x15\x04\x15\x00", "like a .parquet file"),
        (b"[{}]", "must be named .json"),
        (b"{", "has to stand in one line"),
    ],
)
def test_a_file_of_another_type_is_told_as_such(line, hint):
    with pytest.raises(BadRow, match=hint):
        parse_payload(line)


def test_a_csv_row_with_another_number_of_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("instruction,output\na,b\nonly\nc,d\n")
    rows = list(read_rows(as_data_file(path)))
    assert rows[1][0] == 3
    assert rows[1][1].reason == "wrong_columns"
    assert rows[2] == (4, {"instruction": "c", "output": "d"})
