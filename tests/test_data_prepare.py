"""From `--dataset` to steps: the cache, the audit, bad rows by policy, evaluation rows, and the choice of rows."""

import errno
import json
import multiprocessing
import os

import numpy as np
import pytest
from test_template import PLAIN

from swiftlite.config.resolve import resolve_config
from swiftlite.data import build, store
from swiftlite.data import prepare as prepare_module
from swiftlite.data.audit import losses_in_words
from swiftlite.data.prepare import prepare_data
from swiftlite.data.rows.content import content_hash
from swiftlite.data.rows.formats import MOST_COLUMNS
from swiftlite.errors import UserError


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A folder with a tokenizer, as a model's."""
    path = tmp_path / "model"
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.fixture
def prepare(folder, tmp_path, tokenizer):
    """A factory: options -> PreparedData; `prepare.loads` counts how often the tokenizer was needed."""

    def run(*dataset, method="sft", **options):
        config = resolve_config(
            method, model=str(folder), dataset=[str(name) for name in dataset], output_dir=str(tmp_path / "out"),
            **({"cache_dir": str(tmp_path / "cache"), "max_length": 256, "template_date": "2025-01-01"} | options),
        )  # fmt: skip

        def load():
            run.loads += 1
            return tokenizer

        return prepare_data(config, load)

    run.loads = 0
    return run


def seen(plan):
    return [s.where for batch in plan.steps() for pack in batch.packs for s in pack]


def lines(plan):
    return sorted(int(where.rsplit(":", 1)[1]) for where in seen(plan))


BAD = {"messages": [{"role": "user", "content": "and?"}]}


def test_steps_and_audit_agree(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    prepared = prepare(path)
    described = prepared.train.describe()
    assert lines(prepared.train) == list(range(1, 33))
    assert prepared.audit["rows"] == {
        "read": 32, "used": 32, "dropped": {}, "truncated": 0, "split": 0, "split_by_template": 0,
    }  # fmt: skip
    for key in ("tokens", "trained_tokens", "packs", "fill"):
        assert prepared.audit[key] == described[key] == prepared.audit["datasets"][str(path)][key]
    assert not prepared.rejected
    assert prepared.eval is None
    json.dumps(prepared.audit)


def test_the_second_run_needs_no_tokenizer_and_gives_the_same_steps(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    first = prepare(path)
    assert prepare.loads == 1
    again = prepare(path)
    assert prepare.loads == 1
    assert seen(again.train) == seen(first.train)
    assert again.fingerprint == first.fingerprint
    path.rename(path.with_name("b.jsonl"))  # the content counts, not the name; errors name the file as it is now
    moved = prepare(path.with_name("b.jsonl"))
    assert prepare.loads == 1
    assert seen(moved.train)[0].startswith(str(path.with_name("b.jsonl")))


def test_whatever_changes_tokens_changes_the_key(prepare, write_rows, chat_rows, folder):
    path = write_rows("a.jsonl", chat_rows)
    prepare(path)
    for change in ({"max_length": 128}, {"overlong": "drop"}, {"new_tokens": ["<x>"]}, {"chat_template": "chatml"},
                   {"system": "Be brief."}, {"system": "Be long."}, {"max_samples": 9}):  # fmt: skip
        before = prepare.loads
        prepare(path, **change)
        assert prepare.loads == before + 1, change
    before = prepare.loads
    prepare(path, template_date="2030-01-01")  # this template asks for no date
    prepare(path, seed=7, packing=False, shuffle=False, workers=3)
    assert prepare.loads == before
    prepare(path, new_tokens=["chatml"])  # which says another thing as a chat template
    (folder / "tokenization_own.py").write_text("BLANKS = 1")
    prepare(path)  # without it
    assert prepare.loads == before + 1
    prepare(path, trust_remote_code=True)
    (folder / "tokenization_own.py").write_text("BLANKS = 2")
    prepare(path, trust_remote_code=True)
    assert prepare.loads == (before := before + 3)
    (folder / "chat_template.jinja").write_text(
        "{{ strftime_now('%d') }}" + (folder / "chat_template.jinja").read_text()
    )
    prepare(path)
    prepare(path, template_date="2030-01-01")
    write_rows("a.jsonl", chat_rows[:-1])
    prepare(path)
    assert prepare.loads == before + 3


@pytest.mark.parametrize("name", ["sequences.arrow", "meta.json", "rejected.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_cache_entry_is_built_again(prepare, write_rows, chat_rows, tmp_path, name, damage):
    path = write_rows("a.jsonl", [*chat_rows, BAD])
    expected = seen(prepare(path, on_bad_row="skip").train)
    (entry,) = (p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())
    content = (entry / name).read_bytes()
    if damage == "gone":
        (entry / name).unlink()
    else:
        (entry / name).write_bytes(content[: len(content) // 2] + (b"x" * 40 if damage == "changed" else b""))
    assert seen(prepare(path, on_bad_row="skip").train) == expected
    assert prepare.loads == 2


@pytest.mark.parametrize("rows", [5, 40])
def test_a_file_that_changes_while_it_is_chosen_from_is_told(prepare, write_rows, chat_rows, monkeypatch, rows):
    def count_then_write(*given):
        chosen = choice(*given)
        write_rows("a.jsonl", (chat_rows * 2)[:rows])
        return chosen

    path, choice = write_rows("a.jsonl", chat_rows), build._choice
    monkeypatch.setattr(build, "_choice", count_then_write)
    with pytest.raises(UserError, match="has changed while its rows were read"):
        prepare(f"{path}#30")


def test_a_file_that_changes_while_it_is_read_is_not_cached_as_what_it_was(prepare, write_rows, chat_rows, monkeypatch):
    path = write_rows("a.jsonl", chat_rows)
    whole = path.read_bytes()

    def hash_then_write(files):
        found = content_hash(files)
        write_rows("a.jsonl", chat_rows[:5])
        return found

    monkeypatch.setattr(prepare_module, "content_hash", hash_then_write)
    with pytest.raises(UserError, match="has changed while its rows were read") as failure:
        prepare(path)
    assert failure.value.where == str(path)
    monkeypatch.undo()
    path.write_bytes(whole)
    assert prepare(path).audit["rows"]["read"] == len(chat_rows)


def test_an_error_leaves_no_half_entry(prepare, write_rows, chat_rows, tmp_path):
    path = write_rows("a.jsonl", [*chat_rows, BAD])
    with pytest.raises(UserError):
        prepare(path)
    assert [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()] == []


def test_a_cache_that_cannot_be_written(prepare, write_rows, chat_rows, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="token cache") as failure:
        prepare(write_rows("a.jsonl", chat_rows), cache_dir=str(tmp_path / "file"))
    assert failure.value.fix == "name another folder with --cache-dir"


def test_what_is_no_error_of_the_disk_is_not_put_down_to_the_cache(tmp_path):
    def build(_folder):
        raise OSError("a library was made for another torch")

    with pytest.raises(OSError, match="another torch"):
        store.load_or_build(tmp_path, "key", build)


def test_worker_processes_change_nothing(prepare, write_rows, chat_rows, monkeypatch, tmp_path):
    path = write_rows("a.jsonl", chat_rows * 12)
    alone = prepare(path, workers=1)
    monkeypatch.setattr(build, "POOL_FROM_ROWS", 10)
    monkeypatch.setattr(build, "CHUNK", 7)
    pooled = prepare(path, workers=2, cache_dir=str(tmp_path / "other"))
    assert prepare.loads == 2
    assert seen(pooled.train) == seen(alone.train)
    assert pooled.audit == alone.audit
    for rows, line in (([*chat_rows * 12, BAD, *chat_rows, BAD], 385), ([BAD, *chat_rows * 6, BAD], 1)):
        write_rows("a.jsonl", rows)
        with pytest.raises(UserError) as failure:
            prepare(path, workers=2)
        assert failure.value.where == f"{path}:{line}"  # the first in the file, not the first that was found


def _expect_error(make, results):
    try:
        make()
    except UserError as error:
        results.put(error.where)


def test_a_process_that_meets_a_bad_row_ends_with_its_workers(prepare, write_rows, chat_rows, monkeypatch):
    monkeypatch.setattr(build, "POOL_FROM_ROWS", 10)
    path = write_rows("a.jsonl", [*chat_rows * 48, BAD])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    for _ in range(4):  # the hang that this is about came every second time
        process = context.Process(target=_expect_error, args=(lambda: prepare(path, workers=2), results))
        process.start()
        assert results.get(timeout=60) == f"{path}:1537"
        process.join(timeout=20)
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == 0
    with pytest.raises(UserError):  # and the cache's lock is free again
        prepare(path, workers=1)


def _fill(make, barrier, results):
    barrier.wait()
    results.put(make())


def test_processes_that_start_together_prepare_once(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()

    def make():
        return seen(prepare(path).train)[:3], prepare.loads

    processes = [context.Process(target=_fill, args=(make, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(loads for _, loads in found) == 1
    assert all(rows == found[0][0] for rows, _ in found)


# ---- bad rows and bad files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        (b'{"messages": [', "invalid_json", "not valid JSON"),
        (b'["a"]', "wrong_type", "must be a JSON object"),
        (b'{"messages": "\xff"}', "not_utf8", "not UTF-8"),
        (json.dumps(BAD).encode(), "no_assistant_turn", "no assistant turn"),
        (b'{"messages": 5}', "wrong_type", "must be an array"),
        (b'{"other": 5}', "missing_key", "messages rows need messages"),
    ],
)
def test_a_bad_row_stops_with_its_true_line_or_is_skipped_and_counted(
    prepare, write_rows, chat_rows, line, reason, says
):
    path = write_rows("a.jsonl", chat_rows * 8)
    text = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*text[:150], b"\n", line + b"\n", *text[150:]]))
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match=says) as failure:
            prepare(path)
        assert failure.value.where == f"{path}:152"
        assert "--on-bad-row skip" in failure.value.fix
        prepared = prepare(path, on_bad_row="skip")
    assert prepared.audit["rows"]["dropped"] == {reason: 1}
    assert prepared.audit["rows"]["read"] == 257
    assert prepared.audit["rows"]["used"] == 256
    (row,) = prepared.rejected
    assert (row["file"], row["line"], row["reason"]) == (str(path), 152, reason)
    assert 152 not in lines(prepared.train)


def test_a_bad_row_is_told_with_the_file_of_this_run(prepare, write_rows, chat_rows):
    first, copy = (write_rows(name, [*chat_rows, BAD]) for name in ("a.jsonl", "b.jsonl"))
    prepare(first, on_bad_row="skip")
    (row,) = prepare(copy, on_bad_row="skip").rejected
    assert (row["file"], row["line"]) == (str(copy), len(chat_rows) + 1)
    with pytest.raises(UserError, match="no assistant turn") as failure:
        prepare(copy)
    assert failure.value.where == f"{copy}:{len(chat_rows) + 1}"


def test_what_is_lost_is_told_in_words(prepare, write_rows, chat_rows, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    assert losses_in_words(prepare(write_rows("a.jsonl", chat_rows)).audit) is None
    tools = {"tools": [{"name": "add"}]}  # which the template does not write
    path = write_rows("b.jsonl", [*chat_rows, BAD, chat_rows[0] | tools])
    prepared = prepare(path, on_bad_row="skip", max_length=24, eval_dataset=[str(path)])
    rows = prepared.audit["rows"]
    assert rows["read"] == 34 and rows["tools_left_out"] == 1 and rows["truncated"] > 0
    words = losses_in_words(prepared.audit)
    assert words.startswith("of 34 rows: ") and "no_assistant_turn 1" in words and "; of 34 evaluation rows" in words
    assert f"{rows['truncated']} truncated, 1 without their tools" in words


def test_columns_of_which_nothing_is_made_are_counted_and_told(prepare, write_rows, chat_rows):
    own_system = {"messages": [{"role": "system", "content": "Be kind"}, *chat_rows[1]["messages"]]}
    more = [
        chat_rows[0] | {"id": 7, "score": 0, "tags": [], "note": None},
        own_system | {"system": "Be brief", "id": 8},
    ]
    prepared = prepare(write_rows("a.jsonl", [*chat_rows, *more]))
    assert prepared.audit["rows"]["unused_columns"] == {"id": 2, "score": 1, "system": 1}
    repeated = "of 34 rows: 1 the same as one before; "  # with other columns, of which nothing is made
    assert losses_in_words(prepared.audit) == repeated + "columns not used: id, score, system"
    index = prepare(write_rows("i.jsonl", [*chat_rows, chat_rows[0] | {"": 1}]))  # as pandas writes it to csv
    assert losses_in_words(index.audit) == "of 33 rows: 1 the same as one before; columns not used: (unnamed)"
    rows = [{"question": "a", "reply": "b", "answer": "c", "kind": "d"}]  # reply is the answer; the other is left over
    mapped = prepare(write_rows("b.jsonl", rows), columns={"answer": "reply"})
    assert mapped.audit["rows"]["unused_columns"] == {"answer": 1, "kind": 1}
    many = prepare(write_rows("c.jsonl", [row | {f"key {i}": 1} for i, row in enumerate(chat_rows * 8)]))
    counts = many.audit["rows"]["unused_columns"]
    assert len(counts) == MOST_COLUMNS + 1 and sum(counts.values()) == 8 * len(chat_rows)


def test_names_that_no_file_can_hold_are_counted_as_they_can_be_written(prepare, write_rows, chat_rows):
    named = {"messages": [{"role": "user", "content": "a", "k\ud800": 1}, {"role": "assistant", "content": "b"}]}
    audit = prepare(write_rows("a.jsonl", [*chat_rows, named | {"\ud83d\x1b": 1}])).audit
    assert audit["rows"]["unused_columns"] == {"\\ud83d\\x1b": 1, "messages.k\\ud800": 1}
    json.dumps(audit, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize("mark", [{"train": True}, {"weight": 1}, {"loss": True}])
def test_a_mark_to_train_what_is_no_answer_is_counted(prepare, write_rows, chat_rows, mark):
    asked = {"role": "user", "content": "a"}
    rows = [{"messages": [asked | given, {"role": "assistant", "content": "b", "train": True}]} for given in ({}, mark)]
    left_out = {"messages": [asked | dict.fromkeys(mark, False), rows[0]["messages"][1]]}
    audit = prepare(write_rows("a.jsonl", [*chat_rows, *rows, left_out])).audit["rows"]
    assert audit["unused_columns"] == {f"messages.{next(iter(mark))}": 1}


def test_what_the_template_does_not_write_of_the_context_is_counted(prepare, write_rows, chat_rows, tokenizer):
    result = {"role": "tool", "content": '{"sum":\n "4 < 5"}', "tool_call_id": "a1"}
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}], "train": False}
    asked, answered = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4", "name": "ann"}
    path = write_rows("a.jsonl", [*chat_rows, {"messages": [asked, call, result, answered]}])
    written = prepare(path).audit["rows"]
    assert written["unused_columns"] == dict.fromkeys(("messages.tool_call_id", "messages.name"), 1)
    assert "messages_left_out" not in written
    whole = tokenizer.chat_template
    tokenizer.chat_template = whole.replace("message['content']", "message['content'] | tojson")
    assert "messages_left_out" not in prepare(path, max_length=255).audit["rows"]
    tokenizer.chat_template = whole.replace("message['content']", "(message['content'] if message['role'] != 'tool')")
    prepared = prepare(path, max_length=254)
    assert prepared.audit["rows"]["messages_left_out"] == 1
    assert "of 33 rows: 1 without some of their messages" in losses_in_words(prepared.audit)


def test_what_a_call_has_besides_name_and_arguments_is_counted_where_it_is_not_written(
    prepare, write_rows, tokenizer, monkeypatch, tmp_path
):
    call = {"function": {"name": "add", "arguments": {}, "confidence": 0.75}}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "tool_calls": [call]}]}
    named, plain = "{{ message.tool_calls[0].function.name if message.tool_calls }}<|im_end|>", tokenizer.chat_template
    for written, unused in ((named, {"messages.tool_calls.confidence": 1}),
                            (named.replace(".name", " | tojson"), None)):  # fmt: skip
        monkeypatch.setattr(tokenizer, "chat_template", plain.replace("<|im_end|>", written))
        prepared = prepare(write_rows("a.jsonl", [row]), cache_dir=str(tmp_path / str(unused)))
        assert prepared.audit["rows"].get("unused_columns") == unused


def test_a_key_that_the_template_reads_elsewhere_is_counted_where_it_is_not(
    prepare, write_rows, tokenizer, monkeypatch
):
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'tool' %}"
        "{{ message.name }}: {% endif %}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    asked, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}], "train": False}
    result = {"role": "tool", "content": "4", "name": "add"}
    used = prepare(write_rows("a.jsonl", [{"messages": [asked, call, result, answer]}])).audit["rows"]
    assert "messages.name" not in used.get("unused_columns", {})
    named = [{"messages": [asked | {"name": "ann"}, answer]}, {"messages": [asked, answer | {"name": "bob"}]}]
    assert prepare(write_rows("b.jsonl", named)).audit["rows"]["unused_columns"] == {"messages.name": 2}


@pytest.mark.parametrize(
    "following",
    [
        [{"role": "user", "content": "2 + 2?"}],
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5", "train": False}],
        [{"role": "user", "content": "hello"}],  # which stands elsewhere
    ],
)
def test_what_follows_the_last_answer_to_learn_is_counted(prepare, write_rows, following):
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
    whole = {"messages": row["messages"] + following}
    audit = prepare(write_rows("a.jsonl", [row, whole])).audit
    assert audit["rows"]["used"] == 2 and audit["rows"]["messages_left_out"] == 1


def test_keys_of_a_rejected_answer_are_looked_at_too(prepare, write_rows):
    answers = {"chosen": [{"role": "assistant", "content": "4"}], "rejected": [{"role": "assistant", "content": "5"}]}
    answers["rejected"][0]["mood"] = "bad"
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}]} | answers
    audit = prepare(write_rows("a.jsonl", [row]), method="dpo").audit
    assert audit["rows"]["unused_columns"] == {"messages.mood": 1}


def test_a_margin_is_for_reward_models(prepare, write_rows):
    rows = [{"prompt": "a", "question": "z", "chosen": "b", "rejected": "c", "margin": 1.0}]
    path = write_rows("a.jsonl", rows)
    assert prepare(path, method="dpo").audit["rows"]["unused_columns"] == {"question": 1, "margin": 1}
    assert prepare(path, method="rm").audit["rows"]["unused_columns"] == {"question": 1}


def test_nothing_left_shows_the_counts(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", [BAD] * 3 + [{"messages": [{"role": "assistant", "content": ""}]}])
    with pytest.raises(
        UserError, match="4 read, all dropped .no_assistant_turn 3, empty 1.; of the first: the conv"
    ) as failure:
        prepare(path, on_bad_row="skip")
    assert failure.value.where == f"--dataset {path}"
    assert failure.value.fix.startswith("mend the rows; for over_long and no_trained_token raise --max-length")
    with pytest.raises(UserError, match=r"1 read, all dropped \(over_long 1\)\n") as failure:
        prepare(write_rows("a.jsonl", chat_rows[:1]), overlong="drop", max_length=8)
    assert failure.value.fix.startswith("raise --max-length")
    with pytest.raises(UserError, match="no row format has these keys: foo"):
        prepare(write_rows("b.jsonl", [{"foo": 1}]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_an_empty_file(prepare, tmp_path, name):
    (tmp_path / name).write_text("\n" if name != "a.csv" else "instruction,output\n")
    with pytest.raises(UserError, match="holds no row"):
        prepare(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl", "holds no row"),
        ("a.jsonl@test", "neither splits nor subsets"),
        ("a.jsonl#many", "not a count"),
        ("a.jsonl#1@b", "in another order"),
        ("*.jsonl", "a pattern of 1 file"),
        ("none/a.jsonl", "no such folder"),
        ("nobody/no-such-data", "neither a file here"),
    ],
)
def test_an_error_names_the_flag_of_its_data_set(prepare, tmp_path, monkeypatch, write_rows, chat_rows, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    rows = write_rows("rows.ndjson", chat_rows)
    for sets, flag in (((name,), "--dataset"), ((rows,), "--eval-dataset")):
        with pytest.raises(UserError, match=said) as failure:
            prepare(*sets, eval_dataset=[name] if flag == "--eval-dataset" else [])
        assert f"{flag} {name}" in f"{failure.value.where} {failure.value.fix}"


def test_a_mapped_column_may_be_missing_in_some_rows_but_not_in_all(prepare, write_rows):
    rows = [{"question": "a", "answer": "b"}, {"question": "a", "answer": "b", "rules": "Be kind"}]
    assert prepare(write_rows("a.jsonl", rows), columns={"system": "rules"}).audit["rows"]["used"] == 2
    with pytest.raises(UserError, match="no column rules; it has question, answer"):
        prepare(write_rows("b.jsonl", rows[:1]), columns={"system": "rules"})
    with pytest.raises(UserError, match="no column reply; it has question, answer"):  # and no format without it
        prepare(write_rows("c.jsonl", rows[:1]), columns={"query": "question", "response": "reply"})


def test_a_mapping_may_be_meant_for_one_file_of_a_mixture(prepare, write_rows, chat_rows):
    chats = write_rows("a.jsonl", chat_rows)
    mapped = write_rows("b.jsonl", [{"ask": "a", "reply": "b"}] * 4)
    columns = {"instruction": "ask", "output": "reply"}
    assert prepare(chats, mapped, columns=columns).audit["rows"]["used"] == len(chat_rows) + 4
    with pytest.raises(UserError, match="no column ask, reply; it has messages") as failure:
        prepare(chats, columns=columns)
    assert failure.value.where == f"{chats}:1"


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_rows_without_a_mapped_column_keep_a_key_of_their_own(prepare, write_rows, method):
    mapped = [{"ask": f"mapped {i}", "question": "other", "answer": "b"} for i in range(3)]
    own = [{"question": f"own {i}", "answer": "b"} for i in range(3)]
    files = write_rows("a.jsonl", mapped), write_rows("b.jsonl", own)
    more = {"method": method} | ({"reward": ["contains"], "max_new_tokens": 8} if method == "grpo" else {})
    found = prepare(*files, columns={"question": "ask"}, **more)
    assert found.audit["rows"]["used"] == 6
    if method == "sft":
        assert found.audit["rows"]["unused_columns"] == {"question": 3}
        together = prepare(write_rows("c.jsonl", mapped + own), columns={"question": "ask"})
        assert together.audit["trained_tokens"] == found.audit["trained_tokens"]
        assert together.audit["tokens"] == found.audit["tokens"]
    with pytest.raises(UserError, match="no column asks; it has ask, question, answer"):  # not the other one in silence
        prepare(*files, columns={"question": "asks", "answer": "answer"}, **more)


def test_what_the_config_gets_wrong(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    with pytest.raises(UserError, match="no column dialog"):
        prepare(path, columns={"messages": "dialog"})
    with pytest.raises(UserError, match="named twice\n.*--eval-dataset"):
        prepare(path, eval_dataset=[str(path)] * 2)
    with pytest.raises(UserError, match="named twice"):
        prepare(path, path)
    with pytest.raises(UserError, match="pretrain reads `text` rows") as failure:
        prepare(path, method="pretrain")
    assert failure.value.where == f"{path}:1"


def test_a_model_without_chat_template(prepare, write_rows, chat_rows, tokenizer):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(UserError, match="no chat template"):
            prepare(write_rows("a.jsonl", chat_rows))
        rows = [{"prompt": "2 + 2 =", "completion": " 4"}]
        assert prepare(write_rows("b.jsonl", rows)).audit["rows"]["used"] == 1  # plain text needs none
    finally:
        tokenizer.chat_template = template


# ---- which rows -----------------------------------------------------------------------------------------------------


def test_count_is_a_seeded_choice(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    first, again, other = (lines(prepare(f"{path}#10", seed=seed).train) for seed in (1, 1, 2))
    assert len(first) == len(set(first)) == 10
    assert first == again != other
    assert first != list(range(1, 11))
    assert lines(prepare(f"{path}#500").train) == list(range(1, 33))


def test_a_count_for_all_is_that_of_each_set_without_one(prepare, write_rows, chat_rows):
    a, b, c = (str(write_rows(f"{name}.jsonl", chat_rows)) for name in "abc")
    own = prepare(f"{a}#10*2", f"{b}#4", eval_dataset=[f"{c}#10"])
    for_all = prepare(f"{a}*2", f"{b}#4", eval_dataset=[c], max_samples=10)
    assert seen(for_all.train) == seen(own.train) and seen(for_all.eval) == seen(own.eval)
    assert for_all.fingerprint == own.fingerprint and for_all.audit["rows"] == own.audit["rows"]
    assert for_all.audit["rows"]["read"] == 14 and for_all.audit["eval"]["rows"]["read"] == 10
    assert prepare.loads == 2  # one of 10 rows, one of 4: the cache knows them by what they hold


def test_rows_that_get_a_system_message_are_counted_and_told(prepare, write_rows, chat_rows):
    own = {"messages": [{"role": "system", "content": "Own."}, *chat_rows[0]["messages"]]}
    path = write_rows("a.jsonl", [*chat_rows, own, {"messages": own["messages"]}])
    prepared = prepare(path, system="Be brief.", eval_dataset=[str(write_rows("b.jsonl", chat_rows[:3]))])
    assert prepared.audit["rows"]["system_added"] == len(chat_rows)
    assert prepared.audit["eval"]["rows"]["system_added"] == 3
    assert f"{len(chat_rows)} with the message of --system" in losses_in_words(prepared.audit)
    assert "system_added" not in prepare(path).audit["rows"]


def test_placeholders_of_rows_are_filled_and_counted(prepare, write_rows):
    asked = {"role": "user", "content": "Is {{ NAME }} your name, or {{other}}?", "extra": ["{{name}}"]}
    row = {"messages": [asked, {"role": "assistant", "content": "{{name}} of {{AUTHOR}}."}]}
    plain = {"messages": [{"role": "user", "content": "Hi {name}"}, {"role": "assistant", "content": "{{ 7 }}"}]}
    text = json.dumps(row)
    for held, meant in (("{{ NAME }}", "Ro\\1"), ("{{name}}", "Ro\\1"), ("{{AUTHOR}}", "Us")):
        text = text.replace(held, json.dumps(meant)[1:-1])
    holding, path = write_rows("a.jsonl", [row, row, plain]), write_rows("b.jsonl", [*[json.loads(text)] * 2, plain])
    filled, written = prepare(holding, placeholders={"Name": "Ro\\1", "author": "Us"}), prepare(path)
    assert filled.fingerprint == written.fingerprint != prepare(holding).fingerprint
    assert filled.audit["rows"]["placeholders_filled"] == 2 and "placeholders_filled" not in written.audit["rows"]
    assert "placeholders_left" not in filled.audit["rows"]
    half = prepare(holding, placeholders={"name": "Robo"}).audit
    assert half["rows"]["placeholders_left"] == 2 and "2 with placeholders left" in losses_in_words(half)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_what_becomes_of_rows_is_told_of_those_that_are_used(prepare, write_rows, method):
    """Else more rows would have got a message than there are."""
    answer = {"completion": "I am {{name}}."} if method == "sft" else {"chosen": "{{name}}", "rejected": "Nobody"}
    row = {"prompt": [{"role": "user", "content": "Are you {{name}}?", "mood": "good"}], **answer, "note": "x"}
    long = row | {"prompt": [{"role": "user", "content": "{{name}} " * 300}]}
    bad = row | {"prompt": [{"role": "critic", "content": "{{name}}"}]}
    more = {"reward": ["exact_match"], "max_new_tokens": 16} if method == "grpo" else {}
    settings = {"overlong": "drop", "on_bad_row": "skip", "placeholders": {"name": "Robo"}, "system": "Be brief."}
    audit = prepare(write_rows("a.jsonl", [row, long, row, bad]), method=method, **settings, **more).audit["rows"]
    assert audit["used"] == 2 and audit["dropped"] == {"over_long": 1, "unknown_role": 1}
    assert audit["placeholders_filled"] == audit["system_added"] == 2
    if method != "grpo":  # whose columns are for the functions that reward answers
        assert audit["unused_columns"] == {"note": 2, "messages.mood": 2}


def test_mixing_by_weight(prepare, write_rows, chat_rows):
    a, b = write_rows("a.jsonl", chat_rows), write_rows("b.jsonl", chat_rows)
    prepared = prepare(f"{a}*2", f"{b}*0.5")
    rows = seen(prepared.train)
    assert sum(where.startswith(str(a)) for where in rows) == 64
    assert sum(where.startswith(str(b)) for where in rows) == 16
    assert prepared.audit["datasets"][f"{a}*2"]["rows"]["used"] == 32


def test_files_of_several_formats_mix(prepare, write_rows, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows("data/a.jsonl", [{"instruction": "Hi", "output": "Hello"}])
    write_rows("data/b.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}])
    (folder / "c.csv").write_text("question,answer\nHi,Hello\n")
    prepared = prepare(folder)
    assert sorted(seen(prepared.train)) == [f"{folder}/a.jsonl:1", f"{folder}/b.jsonl:1", f"{folder}/c.csv:2"]


def test_a_held_out_row_is_never_trained(prepare, write_rows, chat_rows):
    rows = chat_rows * 2
    rows[5] = {
        "text": None,
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ab " * 900}],
    }
    path = write_rows("a.jsonl", rows)
    prepared = prepare(path, eval_fraction=0.25, overlong="split")
    train, held_out = seen(prepared.train), seen(prepared.eval)
    assert set(train).isdisjoint(held_out)
    assert len(set(held_out)) == 16
    assert set(train) | set(held_out) == {f"{path}:{i + 1}" for i in range(64)}
    assert prepared.audit["rows"]["held_out"] == 16
    assert prepared.audit["rows"]["used"] == 48
    assert prepared.audit["eval"]["rows"]["used"] == 16
    assert seen(prepare(path, eval_fraction=0.25, overlong="split").eval) == held_out
    with pytest.raises(UserError, match="too few rows"):
        prepare(write_rows("b.jsonl", chat_rows[:1]), eval_fraction=0.5)


def test_an_evaluation_file_is_read_once_in_order(prepare, write_rows, chat_rows):
    train, held_out = write_rows("a.jsonl", chat_rows), write_rows("b.jsonl", chat_rows[:9])
    prepared = prepare(train, eval_dataset=[str(held_out)], packing=False, epochs=3)
    assert seen(prepared.eval) == [f"{held_out}:{i + 1}" for i in range(9)]
    assert prepared.audit["eval"]["rows"]["read"] == 9
    assert prepared.audit["rows"]["read"] == 32


def test_the_fingerprint_changes_with_the_steps(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    base = prepare(path).fingerprint
    for change in (
        {"seed": 5},
        {"packing": False},
        {"shuffle": False},
        {"global_batch_size": 2},
        {"eval_fraction": 0.5},
    ):
        assert prepare(path, **change).fingerprint != base, change
    assert prepare(path, epochs=9, micro_batch_size=2, learning_rate=0.1).fingerprint == base


def test_sequences_are_read_without_a_copy(prepare, write_rows, chat_rows):
    batch = next(prepare(write_rows("a.jsonl", chat_rows)).train.steps())
    ids = batch.packs[0][0].input_ids
    assert ids.dtype == np.int32
    assert not ids.flags.owndata
    assert not ids.flags.writeable  # a view into the mapped file


def test_a_missing_data_set_makes_no_files(prepare, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        prepare(tmp_path / "none.jsonl")
    assert not os.path.exists(tmp_path / "out")


def test_long_rows_go_to_the_tokenizer_a_few_at_a_time():
    """What it returns takes a hundred times the text: 128 books at once would fill the memory."""

    def sizes(payloads):
        rows = (build.RawRow(0, line, line, None, payload) for line, payload in enumerate(payloads))
        return [len(chunk) for chunk in build.chunks(rows)]

    book = b"x" * (build.CHUNK_BYTES // 2)
    assert sizes([b"{}"] * 300) == [128, 128, 44]
    assert sizes([book] * 5) == [2, 2, 1]
    assert sizes([b"{}", {"text": book.decode() * 3}, {"text": "short", "n": 1}]) == [2, 1]
    assert sizes([{"messages": [{"role": "user", "content": book.decode()}]}] * 5) == [2, 2, 1]


@pytest.mark.parametrize("again", ["#2", "*2"])
def test_rows_held_out_of_one_data_set_are_not_trained_through_another(prepare, write_rows, chat_rows, again):
    path = write_rows("a.jsonl", chat_rows)
    assert prepare(path, f"{path}{again}").eval is None
    with pytest.raises(UserError, match="two data sets share a file"):
        prepare(path, f"{path}{again}", eval_fraction=0.25)


def test_a_file_system_without_locks_keeps_a_cache(prepare, write_rows, chat_rows, monkeypatch):
    """As Lustre is, unless it is mounted with them."""

    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(store.fcntl, "flock", none)
    path = write_rows("rows.jsonl", chat_rows)
    assert prepare(path).fingerprint == prepare(path).fingerprint and prepare.loads == 1


# --- rows that are the same -----------------------------------------------------------------------------------------


def test_repeated_rows_are_told_and_left_out_if_wanted(prepare, write_rows, chat_rows):
    rows = [row | {"id": number} for number, row in enumerate(chat_rows)]  # of which nothing is made
    first, second = write_rows("a.jsonl", rows[:20] + rows[3:8]), write_rows("b.jsonl", rows[18:])
    told = prepare(first, second)
    assert told.audit["rows"]["repeated"] == 7 and told.audit["rows"]["used"] == len(rows) + 7
    assert [each["rows"].get("repeated") for each in told.audit["datasets"].values()] == [5, 2]
    assert "7 the same as one before" in losses_in_words(told.audit)
    left = prepare(first, second, deduplicate=True)
    assert sorted(seen(left.train)) == sorted(
        [f"{first}:{i}" for i in range(1, 21)] + [f"{second}:{i}" for i in range(3, len(rows) - 17)]
    )
    counts = left.audit["rows"]
    assert (counts["used"], counts["dropped"], "repeated" in counts) == (len(rows), {"repeated": 7}, False)
    assert "7 dropped (repeated 7)" in losses_in_words(left.audit)
    assert left.fingerprint != told.fingerprint and prepare.loads == 2  # of tokens nothing is made again


def test_what_is_learnt_of_a_row_tells_it_from_others(prepare, write_rows, chat_rows):
    silent = json.loads(json.dumps(chat_rows[0]))
    two = {"messages": silent["messages"] + silent["messages"]}
    silent["messages"] = [*two["messages"]]
    silent["messages"][-1] = silent["messages"][-1] | {"train": False}
    path = write_rows("a.jsonl", [two, silent, two])
    assert prepare(path).audit["rows"]["repeated"] == 1
    assert lines(prepare(path, deduplicate=True).train) == [1, 2]
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    other = pair | {"chosen": "c", "rejected": "b"}
    pairs = write_rows("p.jsonl", [pair, other, pair])
    assert lines(prepare(pairs, method="dpo", deduplicate=True).train) == [1, 2]
    judged = write_rows("j.jsonl", [{"prompt": "a", "completion": "b", "label": label} for label in (True, False) * 2])
    assert lines(prepare(judged, method="kto", deduplicate=True).train) == [1, 2]
    long = write_rows("t.jsonl", [{"text": text * 40} for text in ("a b c ", "a b d ", "a b c ")])
    assert set(lines(prepare(long, method="pretrain", max_length=32, deduplicate=True).train)) == {1, 2}


def test_rows_to_evaluate_that_are_trained_on_are_told_and_left_out_of_training(prepare, write_rows, chat_rows):
    path, other = write_rows("a.jsonl", chat_rows), write_rows("b.jsonl", chat_rows[:9])
    told = prepare(path, eval_dataset=[str(other)])
    assert told.audit["eval"]["rows"]["trained_on"] == 9
    assert "of 9 evaluation rows: 9 that are trained on as well" in losses_in_words(told.audit)
    left = prepare(path, eval_dataset=[str(other)], deduplicate=True)
    assert lines(left.train) == [*range(10, len(chat_rows) + 1)] and len(seen(left.eval)) == 9
    assert "trained_on" not in left.audit["eval"]["rows"] and left.audit["rows"]["dropped"] == {"repeated": 9}
    with pytest.raises(UserError, match="every row to train on is one of the evaluation's"):
        prepare(other, eval_dataset=[str(path)], deduplicate=True)
    both = prepare(
        other, write_rows("c.jsonl", [*chat_rows[9:], *chat_rows]), eval_dataset=[str(other)], deduplicate=True
    )
    assert len(seen(both.train)) == len(chat_rows) - 9  # of one data set no row is left
    assert [each["rows"]["used"] for each in both.audit["datasets"].values()] == [0, len(chat_rows) - 9]


def test_rows_are_held_out_of_what_is_left(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows * 2)
    told = prepare(path, eval_fraction=0.25)
    assert told.audit["eval"]["rows"]["trained_on"] > 0
    left = prepare(path, eval_fraction=0.25, deduplicate=True)
    train, held_out = set(lines(left.train)), set(lines(left.eval))
    assert train.isdisjoint(held_out) and train | held_out == set(range(1, len(chat_rows) + 1))
    assert "trained_on" not in left.audit["eval"]["rows"]


def test_a_stream_is_not_compared_with_itself(prepare, write_rows):
    path = write_rows("t.jsonl", [{"text": "a b c"}] * 3)
    with pytest.raises(UserError, match="--deduplicate compares rows with all others"):
        prepare(path, method="pretrain", streaming=True, max_steps=1, deduplicate=True)
