"""`swiftlite inspect`: trained tokens stand out, and every number of the audit is shown."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from test_encode import MADE

from swiftlite.cli.app import main
from swiftlite.cli.inspect import audit_table, bracketed, coloured, histogram, inspect, pieces, show_rows
from swiftlite.config.resolve import resolve
from swiftlite.config.validate import Given
from swiftlite.data.order import Sequence
from swiftlite.data.tokens.preference_tokens import Preference


@pytest.fixture
def sequence(tokenizer):
    ids = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHällo ☃<|im_end|>\n")["input_ids"]
    trained = np.zeros(len(ids), dtype=np.bool_)
    start = len(tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    trained[start:-1] = True
    return Sequence(np.asarray(ids, dtype=np.int32), trained, "a.jsonl:3")


def shown(tokenizer, sequence, *, terminal, no_color=False, system="standard"):
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=100, no_color=no_color,
        color_system=system if terminal else None,
    )  # fmt: skip
    show_rows(console, tokenizer, [sequence])
    return console.file.getvalue()


def test_trained_tokens_are_bracketed_where_there_is_no_terminal(tokenizer, sequence):
    text = bracketed(tokenizer, sequence).plain
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hällo ☃<|im_end|>⟧\n"
    page = shown(tokenizer, sequence, terminal=False)
    assert "\x1b[" not in page
    assert "a.jsonl:3" in page
    assert f"{len(sequence.input_ids)} tokens, {sequence.trained.sum()} trained" in page


def test_what_a_terminal_would_obey_is_shown(tokenizer):
    ids = tokenizer("a\x1b[2J \x9b2J \u202eb\n")["input_ids"]
    row = Sequence(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_), "a.jsonl:1")
    assert bracketed(tokenizer, row).plain == "⟦a␛[2J \\x9b2J \\u202eb\n⟧"


def test_trained_tokens_are_coloured_in_a_terminal(tokenizer, sequence):
    text = coloured(tokenizer, sequence)
    green = "".join(text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    assert green == "Hällo ☃<|im_end|>"
    assert "\x1b[1;32m" in shown(tokenizer, sequence, terminal=True)


@pytest.mark.parametrize("without", [{"no_color": True}, {"system": None}], ids=["NO_COLOR", "TERM=dumb"])
def test_trained_tokens_are_bracketed_in_a_terminal_without_colours(tokenizer, sequence, without):
    page = shown(tokenizer, sequence, terminal=True, **without)
    assert "⟦Hällo ☃<|im_end|>⟧" in page and "⟦trained⟧" in page


@pytest.fixture
def pair(tokenizer):
    """(with a shared prompt, without)"""
    prompt, chosen, rejected = (tokenizer(text)["input_ids"] for text in ("Who are you?", " Paris", " a fox"))
    shared, n = [*prompt, *chosen, prompt[-1], *rejected], len(prompt)
    apart = [*prompt, *chosen, *prompt, *rejected]
    layouts = Preference(n - 1, 1 + len(chosen)), Preference(0, n + len(chosen))
    flags = [0] * n + [1] * len(chosen)
    trained = [*flags, 0, *[1] * len(rejected)], [*flags, *[0] * n, *[1] * len(rejected)]
    return [
        Sequence(np.asarray(ids, dtype=np.int32), np.asarray(flags, dtype=np.bool_), "a.jsonl:3", layout)
        for ids, flags, layout in zip((shared, apart), trained, layouts, strict=True)
    ]


def test_a_pair_shows_its_prompt_once_and_both_answers(tokenizer, pair):
    page = shown(tokenizer, pair[0], terminal=False)
    assert "prompt:\nWho are you?\nchosen:\n⟦ Paris⟧\nrejected:\n⟦ a fox⟧\n" in page
    page = shown(tokenizer, pair[1], terminal=False)
    assert "chosen:\nWho are you?⟦ Paris⟧\nrejected:\nWho are you?⟦ a fox⟧\n" in page


def test_chosen_and_rejected_have_their_colours(tokenizer, pair):
    page = shown(tokenizer, pair[0], terminal=True)
    chosen, rejected = page.split("chosen:")[1].split("rejected:")
    assert "\x1b[1;32m" in chosen
    assert "\x1b[1;31m" not in chosen
    assert "\x1b[1;31m" in rejected
    assert "\x1b[1;32m" not in rejected
    assert "rejected or undesirable" in page


@pytest.mark.parametrize("desirable", [True, False])
def test_a_single_answer_shows_its_label(tokenizer, sequence, desirable):
    judged = replace(sequence, preference=Preference(8, desirable=desirable))
    assert f"\n{'desirable' if desirable else 'undesirable'}:\n" in shown(tokenizer, judged, terminal=False)
    assert ("\x1b[1;31m" in shown(tokenizer, judged, terminal=True).split("desirable:")[1]) == (not desirable)


def test_a_character_in_several_tokens_is_shown_whole(tokenizer, sequence):
    assert "".join(piece for piece, _ in pieces(tokenizer, sequence)).count("☃") == 1
    long = Sequence(np.tile(sequence.input_ids, 60), np.tile(sequence.trained, 60), "a:1")
    assert "more tokens" in bracketed(tokenizer, long).plain


@pytest.mark.parametrize("kind", MADE)
def test_the_pieces_of_a_row_are_its_text(kind):
    """A token by itself is without its blank to SentencePiece's tokenizers: words would be glued together."""
    tokenizer = MADE[kind]
    ids = tokenizer("Hello you don't 12 <|im_end|> Hello  you")["input_ids"]
    row = Sequence(np.asarray(ids, dtype=np.int32), np.arange(len(ids)) % 3 > 0, "a.jsonl:1")
    assert "".join(piece for piece, _ in pieces(tokenizer, row)) == tokenizer.decode(ids)


def test_a_character_of_which_a_part_is_trained_is_not_shown_as_trained(tokenizer):
    ids = tokenizer("a☃b")["input_ids"]
    row = Sequence(np.asarray(ids, dtype=np.int32), np.arange(len(ids)) > 1, "a.jsonl:1")
    assert len(ids) == 5 and "".join(piece for piece, _ in pieces(tokenizer, row)).replace("\ufffd", "") == "ab"


def test_the_audit_table_shows_every_reason():
    rows = {"read": 9, "used": 5, "dropped": {"empty": 3, "over_long": 1}, "truncated": 2}
    rows["unused_columns"] = {"[red]\x1b[2J": 6}
    numbers = {"tokens": 1234, "trained_tokens": 567, "packs": 8, "fill": 0.9876}
    console = Console(file=io.StringIO(), width=100)
    console.print(audit_table({"rows": rows, **numbers, "datasets": {"a": {"rows": rows, **numbers}}}))
    page = console.file.getvalue()
    for expected in ("dropped: empty", "dropped: over_long", "truncated", "1,234", "567", "98.8%"):
        assert expected in page
    assert r"unused column: [red]\x1b[2J" in page  # a name that somebody else chose


def test_names_of_many_data_sets_are_whole_in_a_narrow_terminal():
    section = {"rows": {"read": 9, "used": 5}, "tokens": 1234, "trained_tokens": 567, "packs": 8, "fill": 0.9876}
    names = [f"rows_of_kind_{number}.jsonl" for number in range(5)]
    console = Console(file=io.StringIO(), width=80)
    console.print(audit_table(section | {"datasets": dict.fromkeys(names, section)}))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    heading = [line.split("┃")[1:-1] for line in lines if line.startswith("┃")]
    assert ["".join(parts).replace(" ", "") for parts in zip(*heading, strict=True)][2:] == names


def test_data_sets_of_one_file_name_and_of_odd_names_are_told_apart():
    def section(rows):
        return {"rows": {"read": rows, "used": rows}, "tokens": 1, "trained_tokens": 1, "packs": 1, "fill": 0.5}

    names = ["a/rows.jsonl", "b/rows.jsonl", "all", "evaluation", "[red]\x1b[2J"]
    datasets = {name: section(number) for number, name in enumerate(names, 11)}
    console = Console(file=io.StringIO(), width=160)
    console.print(audit_table(section(99) | {"datasets": datasets, "eval": section(5)}))
    lines = console.file.getvalue().splitlines()
    cells = [[cell.strip() for cell in re.split("[┃│]", line)[2:-1]] for line in lines if line[0] in "┃│"]
    assert cells[0] == ["all", *names[:-1], r"[red]\x1b[2J", "evaluation"]
    assert cells[1] == ["99", "11", "12", "13", "14", "15", "5"]


def test_histogram_bars_add_up():
    lines = histogram("tokens", np.asarray([1] * 5 + [10] * 3 + [100])).splitlines()
    assert lines[0] == "tokens: 1 to 100, half of them up to 1"
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines[1:]) == 9
    assert histogram("tokens", np.asarray([7, 7])).splitlines()[1].split()[:3] == ["7", "to", "7"]
    narrow = histogram("tokens", np.asarray([1] * 5000 + [10]), width=60).splitlines()
    assert max(map(len, narrow)) <= 60 and narrow[1].endswith(" 5,000")
    assert histogram("tokens", np.asarray([7, 7]), "#").isascii()  # for streams that know nothing else


def test_the_command(tmp_path, tokenizer, write_rows, chat_rows, capsys):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = write_rows("a.jsonl", [*chat_rows, {"messages": [{"role": "user", "content": "x"}]}])
    values = {
        "method": "sft", "model": str(tmp_path / "model"), "dataset": [str(path)], "max_length": 128,
        "cache_dir": str(tmp_path / "cache"), "on_bad_row": "skip",
    }  # fmt: skip
    inspect(resolve(None, {name: Given(value, name, "flag") for name, value in values.items()}), rows=2)
    page = capsys.readouterr().out
    assert f"{path}:1:" in page
    assert f"{path}:2:" in page
    assert f"{path}:3:" not in page
    for expected in ("⟦It is 1.<|im_end|>⟧", "⟦I am a small model.<|im_end|>⟧", "⟦It is 3. Really.<|im_end|>⟧"):
        assert expected in page
    for expected in ("no_assistant_turn", "tokens of a row", "packs:", "% full", "steps: ", " in all"):
        assert expected in page


def test_prompts_are_shown_without_what_rewards_answers(tmp_path, tokenizer, write_rows, capsys):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = write_rows("a.jsonl", [{"question": "Who?", "answer": "I"}])
    words = ["--method", "grpo", "--model", tmp_path / "model", "--dataset", path, "--cache-dir", tmp_path / "cache"]
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *map(str, words)])
    assert stop.value.code in (0, None)
    said = capsys.readouterr().out
    assert "Who?" in said and "rows: 1;" in said


def test_the_command_on_pairs_and_labels(tmp_path, tokenizer, write_rows, capsys):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    pairs = [{"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": " a fox"} for i in range(9)]
    labels = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}", "label": i < 7} for i in range(9)]
    pages = {}
    for method, rows in (("dpo", pairs), ("rm", pairs), ("kto", labels)):
        values = {
            "method": method, "model": str(tmp_path / "model"), "dataset": [str(write_rows("a.jsonl", rows))],
            "max_length": 128, "cache_dir": str(tmp_path / "cache"),
        }  # fmt: skip
        inspect(resolve(None, {name: Given(value, name, "flag") for name, value in values.items()}), rows=2)
        pages[method] = capsys.readouterr().out
    for method in ("dpo", "rm"):
        assert "chosen:\n⟦ 1<|im_end|>⟧\nrejected:\n⟦ a fox<|im_end|>⟧" in pages[method]
        assert "packs: 1 of up to 256 tokens" in pages[method]
        assert "warning" not in pages[method]
    assert "desirable:\n0 + 1 =⟦ 1<|im_end|>⟧" in pages["kto"]
    assert "warning: 7 answers are desirable, 2 undesirable" in pages["kto"]
    for page, words in ((pages["dpo"], ["pairs", "9"]), (pages["kto"], ["undesirable", "2"])):
        assert any(
            [cell.strip(" │┃") for cell in line.split("│") if cell.strip()] == words for line in page.splitlines()
        )
