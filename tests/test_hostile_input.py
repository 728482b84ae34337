"""Files, names and folders that mean harm: each is refused with a clear error, or read without harm."""

import datetime
import errno
import gzip
import json
import os
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest
from test_safetensors_files import ENTRY, pack

from swiftlite.checkpoint import state as checkpoint_state
from swiftlite.checkpoint.folder import check_folder, newest_checkpoint
from swiftlite.checkpoint.state import read_trainer_state
from swiftlite.checkpoint.weights import TensorFolder
from swiftlite.cli.errors import show_error
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.save import dump_config
from swiftlite.data import windows
from swiftlite.data.build import build_entry
from swiftlite.data.prepare import prepare_data
from swiftlite.data.rows import readers
from swiftlite.data.rows.formats import FORMATS, read_row
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.rows.messages import MOST_MESSAGES
from swiftlite.data.rows.placeholders import Placeholders
from swiftlite.data.rows.readers import parse_payload, read_rows
from swiftlite.data.rows.sources import as_data_file, missing_file, parse_spec
from swiftlite.data.rows.sources import resolve as resolve_source
from swiftlite.data.tokens.tokenize import RawRow, RowTokenizer, TokenOptions
from swiftlite.errors import UserError
from swiftlite.models.load import check_model_path, hub_errors, load_config
from swiftlite.models.tokenizer import read_chat_template
from swiftlite.reporting import trackers
from swiftlite.serving.source import find_source
from swiftlite.training.output import OutputFolder
from swiftlite.training.progress import saved_progress
from swiftlite.untrusted import DEEPEST_JSON

SECRETS = ("https://user:secret@host/set", "hf_abcdefghijklmnopqrstuv", "https://host/set?token=secret")
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def rows_of(path, method="sft"):
    return list(read_rows(as_data_file(path)))


def prepared(tmp_path, tokenizer, path, method="sft"):
    """(meta, rejected rows) of a file as a run prepares it under --on-bad-row skip."""
    out = tmp_path / "out"
    out.mkdir()
    options = TokenOptions(method, 128, "truncate", "2026-01-01", {})
    meta = build_entry(
        out, resolve_source(parse_spec(str(path))), tokenizer, options,
        sample_by="line", seed=1, stop_at_bad_row=False, workers=1, expected_rows=1, progress=None,
    )  # fmt: skip
    return meta, [json.loads(line) for line in (out / "rejected.jsonl").read_text("utf-8").splitlines()]


# ---- row files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [DEEPEST_JSON + 20, 50_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_rows_are_bad_rows(depth, opening):
    with pytest.raises(BadRow, match="deep"):
        parse_payload(
            ('{"text": "x", "more": ' + opening * depth + "1" + {"[": "]"}.get(opening, "}") * depth + "}").encode()
        )


def test_many_brackets_that_are_not_deep_are_read():
    row = {"text": "[" * 500, "more": [[[1]]] * 500}
    assert parse_payload(json.dumps(row).encode()) == row


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'{"a":' * 50_000, "no JSON array"),
        ("b.json", b'[{"a":' + b"[" * 300 + b"]" * 300 + b"}]", "deep"),
        ("c.json", b'[{"text": "a"}] [{"text": "b"}]', "behind the JSON array"),
        ("d.json", b'[{"a": ' + b"9" * 5000 + b"}]", "not valid JSON"),
    ],
)
def test_json_files_that_mean_harm(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl"])
def test_what_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, name, suffix):
    monkeypatch.setattr(readers, "LARGEST_WHOLE", 1 << 20)
    monkeypatch.setattr(readers, "MAX_LINE", 1 << 20)
    content = b'[{"text": "' + b"x" * (4 << 20) + b'"}]'
    compress = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(compress[suffix](content))
    with pytest.raises(UserError, match="more than"):
        rows_of(path)


def test_a_csv_row_of_many_lines_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 1 << 16)
    (tmp_path / "a.csv").write_text("text,more\n" + "a,b\n" * 20_000 + ('"' + "x\n" * 1000 + '",') * 100 + "\n")
    with pytest.raises(UserError, match="the row has more than") as error:
        rows_of(tmp_path / "a.csv")
    assert int(error.value.where.rsplit(":", 1)[1]) > 20_000
    (tmp_path / "a.csv").write_text("text,more\n" + "a,b\n" * 20_000)
    assert len(rows_of(tmp_path / "a.csv")) == 20_000


@pytest.mark.parametrize("label", [10**400, -(10**400)])
def test_a_margin_beyond_every_float_is_a_bad_row(label):
    known = next(known for known in FORMATS if known.name == "preference")
    with pytest.raises(BadRow, match="margin"):
        read_row({"prompt": "a", "chosen": "b", "rejected": "c", "margin": label}, known)


def test_a_sharegpt_message_cannot_bring_a_second_content():
    known = next(known for known in FORMATS if known.name == "ShareGPT")
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "content": [1], "role": 5}]}
    with pytest.raises(BadRow):
        read_row(row, known)
    row["conversations"][1] = {"from": "gpt", "value": "b", "content": [1]}
    assert read_row(row, known).messages[1] == {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("held", ["{{bot_skill}}", "{{ BOT_SKILL }}", "{{bot_\u017fkill}}", "{{bot_s\u212a\u0130ll}}"])
def test_placeholders_have_letters_of_more_cases_than_two(held):
    assert Placeholders({"name": "Robo", "bot_skill": "\\1"}).fill([held, {"a": f"{held} {{{{x}}}}"}]) == [
        "\\1", {"a": "\\1 {{x}}"},
    ]  # fmt: skip


def test_a_conversation_has_a_largest_number_of_messages():
    known = next(known for known in FORMATS if known.name == "messages")
    with pytest.raises(BadRow, match="too_many_messages"):
        read_row({"messages": [USER, ANSWER] * (MOST_MESSAGES // 2 + 1)}, known)


@pytest.mark.parametrize(
    "row",
    [
        {"\ud800key": 1},
        {"messages": [{**USER, "name": "f\udc00"}, ANSWER]},
        {"messages": [USER, ANSWER], "tools": [{"name": "f", "description": "\ud8ff"}]},
        {"messages": [USER, {"role": "x" * 100_000, "content": "b"}]},
        {"k" * 100_000: 1},
    ],
    ids=["key", "name", "tool", "role", "long key"],
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_rejected_rows_can_be_written_and_told(tmp_path, tokenizer, row, kind):
    template = tokenizer.chat_template
    shown = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0]['name'] }}"
    tokenizer.chat_template = shown + template
    lines = [json.dumps({"messages": [USER, ANSWER]}), json.dumps(row)]
    path = tmp_path / f"rows.{kind}"
    path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    try:
        meta, rejected = prepared(tmp_path, tokenizer, path)
    finally:
        tokenizer.chat_template = template
    assert meta["counts"]["read"] == 2 and len(rejected) == sum(meta["dropped"].values()) >= 1
    assert all(len(row["detail"]) < 2000 for row in rejected)


def test_rejected_rows_are_written_one_at_a_time(tmp_path):
    class Rejected(list):
        def __iter__(self):
            return ({"row": "x" * 1000, "line": line} for line in range(20_000))

    config = resolve_config("sft", model="m", dataset=["d.jsonl"], output_dir=str(tmp_path))
    folder = OutputFolder(config, None, SimpleNamespace(audit={}, rejected=Rejected([1])), None)
    tracemalloc.start()
    folder.write_audit()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    lines = (tmp_path / "rejected_rows.jsonl").read_text().splitlines()
    assert peak < sum(map(len, lines)) / 16 and json.loads(lines[-1])["line"] == 19_999


# ---- columnar files -------------------------------------------------------------------------------------------------


def arrow_file(path, array):
    table = pa.table({"text": array})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("read", ["whole", "window"])
def test_arrow_offsets_that_point_anywhere_are_refused(tmp_path, read):
    path = arrow_file(tmp_path / "a.arrow", pa.array(["abc", "def"]))
    sound, spoilt = struct.pack("<iii", 0, 3, 6), struct.pack("<iii", 0, 1 << 20, 6)
    assert path.read_bytes().count(sound) == 1
    path.write_bytes(path.read_bytes().replace(sound, spoilt))
    file = as_data_file(path)
    with pytest.raises(UserError, match="not a sound arrow file"):
        if read == "whole":
            list(read_rows(file))
        for window in windows.list_windows([file], [0], "line"):
            list(windows.read_window([file], window, "line"))


def test_the_size_of_a_batch_is_not_asked_before_it_is_validated(tmp_path):
    path = arrow_file(tmp_path / "a.arrow", pa.array([[{"a": "abc"}], [{"a": "def"}]]))
    sound, spoilt = struct.pack("<iii", 0, 1, 2), struct.pack("<iii", 0, 1, 1 << 28)
    assert path.read_bytes().count(sound) == 1
    path.write_bytes(path.read_bytes().replace(sound, spoilt))
    with pytest.raises(UserError, match="not a sound arrow file"):
        rows_of(path)


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_batches_have_a_largest_size(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(readers, "LARGEST_BATCH", 1 << 20)
    path = arrow_file(tmp_path / f"a{suffix}", pa.array(["x" * (2 << 20)]))
    with pytest.raises(UserError, match="rows take more than"):
        rows_of(path)


def test_dates_that_python_lacks_are_a_clear_error(tmp_path):
    path = arrow_file(tmp_path / "a.parquet", pa.array([2**62], pa.timestamp("us")))
    with pytest.raises(UserError, match="not a sound parquet file"):
        rows_of(path)


def test_dates_of_rejected_rows_can_be_written(tokenizer):
    options = TokenOptions("pretrain", 128, "split", "2026-01-01", {})
    run = RowTokenizer(tokenizer, options, [as_data_file(Path("a.parquet"))])
    rejected = run([RawRow(0, 1, 0, "text", {"text": datetime.date(1970, 1, 1)})]).rejected
    assert "1970" in json.loads(json.dumps(rejected))[0]["row"]["text"]


# ---- names ----------------------------------------------------------------------------------------------------------

IMPOSSIBLE = {
    "user": "~nobody-here/x",
    "nul": "a\0b",
    "long": "x" * 5000,
    "half": "a\ud800b",
    "deep": "x/" * 2000 + "x",
}


@pytest.mark.parametrize("name", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_names_that_no_file_can_have(tmp_path, name):
    for setting in ("model", "tokenizer", "chat_template", "output_dir", "cache_dir", "resume"):
        with pytest.raises(UserError, match="no file or folder can have this name|is not UTF-8"):
            resolve_config("sft", **{"model": "m", "dataset": ["d.jsonl"], setting: name})
    for use in (check_model_path, read_chat_template, load_recipe, lambda name: find_source(name, None)):
        with pytest.raises(UserError):
            use(name)
    with pytest.raises(UserError):
        raise missing_file(parse_spec(f"./{name}.jsonl"))


def test_files_of_a_folder_may_have_names_that_are_no_utf8(tmp_path, tokenizer):
    """As archives of older systems have them. A bad row is told with its file, now and out of the cache."""
    for name, text in ((b"caf\xe9.jsonl", "{}\n"), (b"caf\xe9.jsonl.lz4", "")):
        with open(os.fsencode(tmp_path) + b"/" + name, "w") as file:
            file.write(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    model = tmp_path.parent / f"{tmp_path.name}-model"
    tokenizer.save_pretrained(model)
    config = resolve_config("sft", model=str(model), dataset=[str(tmp_path)], on_bad_row="skip", cache_dir=str(model))
    for _ in range(2):
        prepared = prepare_data(config, lambda: tokenizer)
        assert [row["file"] for row in prepared.rejected] == [f"{tmp_path}/caf\\xe9.jsonl"]
    assert prepared.audit["unread_files"] == [f"{tmp_path}/caf\\xe9.jsonl.lz4"]


def test_a_name_that_begins_as_a_home_folder_does_is_told_as_that(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("~nobody-here.jsonl", "./~nobody-here.jsonl"):
        with pytest.raises(UserError, match="no file or folder can have this name") as failure:
            resolve_config("sft", model="m", dataset=[name])
        assert failure.value.fix == "nobody has that home folder; of a file called so, give the whole path: /.../~NAME"
    (tmp_path / "~nobody-here.jsonl").write_text("")
    assert resolve_config("sft", model="m", dataset=[f"{tmp_path}/~nobody-here.jsonl"])


@pytest.mark.parametrize("name", ["modèles/llama", "my models/llama", "models\\llama/8b", "models/", "models/-a b"])
def test_a_folder_that_is_not_there_is_no_name_of_the_hub(name):
    with pytest.raises(UserError, match="neither a folder nor a hub id"):
        check_model_path(name)


def test_an_output_folder_leaves_room_for_the_files_in_it(tmp_path):
    deep = f"{tmp_path}/" + "x/" * ((4000 - len(str(tmp_path))) // 2)  # the folder could be made, and no checkpoint
    with pytest.raises(UserError, match="no file or folder can have this name"):
        resolve_config("sft", model="m", dataset=["d.jsonl"], output_dir=deep)


def test_what_may_not_be_read_is_told_as_that(tmp_path, model, monkeypatch, capsys):
    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    folder = str(model())
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError, match=r"config\.json cannot be read: Permission denied"):
        check_model_path(folder)
    with pytest.raises(PermissionError) as error:
        (tmp_path / "closed").open()
    assert show_error(error.value) == 2
    told = capsys.readouterr().err
    assert "cannot be used: Permission denied" in told and f"where: {tmp_path}/closed\n" in told


def test_a_part_of_a_data_folder_that_is_closed_is_not_left_out_in_silence(tmp_path, monkeypatch):
    for part in ("open", "closed", ".hidden"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.jsonl").write_text("{}\n")
    spec, opened = parse_spec(str(tmp_path)), []
    monkeypatch.setattr(os, "access", lambda path, _: opened.append(path) or path.name != ".hidden")
    assert len(resolve_source(spec, "sft").files) == 2 and tmp_path / "closed" in opened
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "closed")  # root may look into all
    with pytest.raises(UserError, match="cannot be looked into") as error:
        resolve_source(spec, "sft")
    assert error.value.where == str(tmp_path / "closed")


def test_what_is_no_name_is_not_held_to_be_one():
    given = {"new_tokens": ["~nobody-here"], "run_name": "~x", "target_modules": ["x|" * 300]}
    assert resolve_config("sft", model="m", dataset=["d.jsonl"], **given).new_tokens == ["~nobody-here"]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_neither_saved_nor_shown(tmp_path, capsys, secret):
    for setting in ("model", "dataset", "tokenizer", "output_dir", "cache_dir"):
        values = {"model": "m", "dataset": ["d.jsonl"], setting: [secret] if setting == "dataset" else secret}
        with pytest.raises(UserError, match="password or a token") as refused:
            resolve_config("sft", **values)
        assert secret not in str(refused.value)
    assert show_error(UserError(f"cannot get {secret}", where=secret)) == 2
    assert "secret" not in capsys.readouterr().err and "hf_abc" not in capsys.readouterr().err


def test_trackers_get_no_secrets(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setitem(trackers.OPENERS, "trackio", lambda *given: seen.update(given[-1]))
    trackers.open_trackers(["trackio"], tmp_path, "r", "i", 0, {"dataset": list(SECRETS), "model": SECRETS[0]})
    assert "secret" not in str(seen) and "hf_abc" not in str(seen)


def test_the_token_of_the_hub_is_in_no_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRETS[1])
    assert SECRETS[1] not in dump_config(resolve_config("sft", model="m", dataset=["d.jsonl"]))


def test_errors_cannot_write_to_the_terminal(capsys):
    show_error(UserError("the key \x1b[2J\x07 is bad", where="a\nb", fix="mend it"))
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown and "a\nb" in shown


def test_a_weight_has_a_largest_value():
    assert parse_spec("a.jsonl*10000").weight == 10_000
    with pytest.raises(UserError, match="at most 10,000"):
        parse_spec("a.jsonl*1e9")


# ---- data folders ---------------------------------------------------------------------------------------------------


def test_a_data_folder_cannot_lead_outside(tmp_path):
    outside = tmp_path / "secret.txt"
    outside.write_text("key")
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text('{"text": "a"}\n')
    assert len(resolve_source(parse_spec(str(data))).files) == 1
    with pytest.raises(UserError, match="leaves the folder"):
        resolve_source(parse_spec(f"{data}:.."))
    (data / "b.txt").symlink_to(outside)
    with pytest.raises(UserError, match="a link that leaves the data folder"):
        resolve_source(parse_spec(str(data)))


def test_a_pipe_is_no_data_set(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="no plain file") as told:
        resolve_source(parse_spec(str(tmp_path / "rows.jsonl")))
    assert "written to a file first" in told.value.fix


# ---- recipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        'model: "\\UFFFFFFFF"', "%YAML " + "9" * 5000 + ".1\n---\nmodel: x", "model: &a [*a]",
        "model: !!python/object/apply:os.system [x]", "[" * 600, "model: x\nmodel: y", "a: &a [x]\nb: &b [*a, *a]",
        "stop_after: " + "9" * 5000 + "d\nmodel: m", "seed: " + "9" * 5000,
    ],
)  # fmt: skip
def test_recipes_that_mean_harm(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError):
        resolve("sft", {}, load_recipe(str(tmp_path / "r.yaml")), env={})


def test_half_a_letter_is_no_value_of_a_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text('model: "\\ud800"')
    with pytest.raises(UserError, match="surrogate pair"):
        load_recipe(str(tmp_path / "r.yaml"))


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model, tmp_path):
    """A folder with the config of a tiny model, to be spoilt."""
    config = json.loads((tiny_model() / "config.json").read_text())

    def make(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return str(tmp_path)

    return make


def test_code_beside_a_model_is_run_only_when_asked(model, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    folder = model(model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    with pytest.raises(UserError, match="cannot be loaded") as refused:
        load_config(folder)
    assert not (tmp_path / "ran").exists() and "--trust-remote-code" in refused.value.fix
    with pytest.raises(UserError, match="cannot be loaded"):  # it is asked for, run, and holds no such class
        load_config(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_an_architecture_that_transformers_does_not_know_may_be_newer(model):
    with pytest.raises(UserError, match="does not recognize") as refused:
        load_config(model(model_type="of-next-year"))
    assert "pip install --upgrade transformers" in refused.value.fix


@pytest.mark.parametrize("metadata", [{"format": 1}, ["pt"], {"format": ["pt"]}])
def test_metadata_that_the_library_refuses_is_refused_before(tmp_path, metadata):
    (tmp_path / "model.safetensors").write_bytes(pack({"__metadata__": metadata, "a": ENTRY}, bytes(8)))
    with pytest.raises(UserError, match="__metadata__ is no mapping of texts"):
        TensorFolder(tmp_path)


def test_an_index_with_an_endless_name_is_a_short_error(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(UserError, match="is missing") as error:
        TensorFolder(tmp_path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("header", [{"\ud83d": ENTRY}, {"a": {**ENTRY, "more": float("nan")}}], ids=["half", "nan"])
def test_headers_that_only_the_library_refuses(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(pack(header, bytes(8)))
    with pytest.raises(UserError, match="model.safetensors is damaged or foreign"):
        TensorFolder(tmp_path).read(next(iter(header)))


@pytest.mark.parametrize("value", ["owner/kernel", {"": "owner/kernel@main"}])
@pytest.mark.parametrize("part", [False, True])
def test_a_config_cannot_ask_for_attention_of_the_hub(model, value, part):
    changes = {"text_config": {"_attn_implementation": value}} if part else {"attn_implementation": value}
    with pytest.raises(UserError, match="asks for code of the hub"):
        load_config(model(**changes))


def test_a_config_that_is_too_deep_or_too_large(model, tmp_path):
    folder = model()
    for text, said in (("[" * 50_000, "deep"), ('{"a": "' + "x" * (17 << 20) + '"}', "larger than 16 MiB")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=said):
            load_config(folder)
        assert resolve_config("sft", model=folder, dataset=["d.jsonl"]).model == folder


def test_errors_of_libraries_become_ours():
    with pytest.raises(UserError, match="the tokenizer cannot be loaded: no variant"), hub_errors("m", "tokenizer"):
        raise Exception("no variant")  # noqa: TRY002 - what tokenizers raises
    with pytest.raises(UserError) as caught, hub_errors("m", "config"):
        raise AttributeError("x" * 5000)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (2 << 20)])
def test_templates_are_text_of_some_size(tmp_path, content):
    (tmp_path / "t.jinja").write_bytes(content)
    with pytest.raises(UserError, match="the chat template"):
        read_chat_template(str(tmp_path / "t.jinja"))


def test_an_adapter_is_safetensors_of_its_own_folder(model, tmp_path):
    base, adapter = model(), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="adapter_model.safetensors is missing"):
        find_source(None, str(adapter))
    (tmp_path / "elsewhere").write_bytes(pack({"a": ENTRY}, bytes(8)))
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    for use in (lambda: find_source(None, str(adapter)), lambda: TensorFolder(adapter / "adapter_model.safetensors")):
        with pytest.raises(UserError, match="leaves the model folder"):
            use()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["x" * 5000, "a\0b", "\ud800", "/etc/passwd", "../a", "\x1b[2J"],
    ids=["long", "nul", "half", "root", "up", "esc"],
)
def test_manifests_cannot_name_what_is_no_file_of_the_folder(tmp_path, name):
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (tmp_path / "checkpoints" / "a").write_text("x")
    (folder / "manifest.json").write_text(json.dumps({"files": {name: {"size": 1, "sha256": "0"}}}))
    newest, lines = newest_checkpoint(tmp_path)
    assert newest is None and len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 300


def test_a_manifest_is_a_file_of_the_folder(tmp_path):
    (tmp_path / "outside.json").write_text(json.dumps({"files": {}}))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "manifest.json").symlink_to(tmp_path / "outside.json")
    assert check_folder(folder) == ["manifest.json is a link that leaves the folder"]
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert "missing" in check_folder(folder)[0]


PROGRESS = {"step": 3, "epoch": 0.5, "skipped_steps": [1], "loss_scale": {"value": 2.0}, "method": {"total": 0.0}}
SPOILT = {
    "deep": "[" * 50_000,
    "no data": {"format": 1, "progress": PROGRESS},
    "data is a list": {"format": 1, "data": [], "progress": PROGRESS},
    "progress is a list": {"format": 1, "data": "d", "progress": []},
    **{
        str(change): {"format": 1, "data": "d", "progress": PROGRESS | change}
        for change in (
            {"step": "3"}, {"step": -1}, {"more": 1}, {"skipped_steps": 5}, {"loss_scale": {"value": "x"}},
            {"loss_scale": {"more": 1}}, {"method": {"other": 1}}, {"method": {"total": "x"}}, {"best_step": [1]},
            {"best_step": 1},
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("state", SPOILT.values(), ids=SPOILT.keys())
def test_trainer_states_of_other_shapes_are_refused(tmp_path, state):
    (tmp_path / "trainer_state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    with pytest.raises(UserError, match="trainer_state.json"):
        saved_progress(read_trainer_state(tmp_path), tmp_path, {"total": 0.0})


def test_an_endless_format_is_a_short_error(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"format": "x" * 5000}))
    with pytest.raises(UserError, match="is of format") as error:
        read_trainer_state(tmp_path)
    assert len(str(error.value)) < 1000


def test_a_sound_trainer_state_is_taken(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"format": 1, "data": "d", "progress": PROGRESS}))
    progress = saved_progress(read_trainer_state(tmp_path), tmp_path, {"total": 1.0})
    assert (progress.step, progress.skipped_steps, progress.best_step) == (3, [1], None)


@pytest.mark.parametrize("names", [["w.step"], ["w.step", "w.exp_avg"]])
def test_resume_files_that_lack_a_tensor_are_refused(tmp_path, names):
    entries, at = {}, 0
    for name in names:
        shape = [] if name.endswith("step") else [2]
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + (8 if shape else 4)]}
    (tmp_path / "resume").mkdir()
    (tmp_path / checkpoint_state.TENSORS).write_bytes(pack(entries, bytes(at)))
    with pytest.raises(UserError, match="lacks w.exp_avg"):
        checkpoint_state.load_resume_state(tmp_path, {"w": (2,)}, [], None)


def test_the_step_of_an_optimizer_is_one_number(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    (tmp_path / "resume").mkdir()
    (tmp_path / checkpoint_state.TENSORS).write_bytes(pack({"w.step": entry}, bytes(8)))
    with pytest.raises(UserError, match="has shape"):
        checkpoint_state.load_resume_state(tmp_path, {"w": (2,)}, [], None)
