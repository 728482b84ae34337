"""Tokens and their trained flags: the rules of loss masking, each in a form that fails when it is broken."""

import json

import numpy as np
import pytest
from test_template import MISTRAL_SYSTEM, TWO_TURNS

from swiftlite.data.rows.sources import DataFile
from swiftlite.data.tokens.encode import overlaps
from swiftlite.data.tokens.tokenize import RawRow, RowTokenizer, TokenOptions, flags_of, runs_of
from swiftlite.errors import UserError
from swiftlite.models.toys import toy_tokenizer

NO_END = (
    "{% for m in messages %}{{ '\n### ' + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n### assistant: ' }}{% endif %}"
)


def run(tokenizer, row, form, **options):
    chosen = dict(method="sft", max_length=512, overlong="truncate", template_date="2025-01-01", columns={}) | options
    files = [DataFile("data.jsonl", "jsonl")]
    raw = [RawRow(0, 7, 0, form, json.dumps(row).encode())]
    return RowTokenizer(tokenizer, TokenOptions(**chosen), files)(raw)


def only(batch):
    assert len(batch.ids) == 1, (batch.dropped, batch.rejected)
    return batch.ids[0], flags_of(batch.runs[0], len(batch.ids[0]))


def chat_row(*texts):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


def bos_tokenizer():
    """A tokenizer that puts `<s>` in front of plain text by itself, as Llama's does."""
    from tokenizers import processors

    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_the_answer_and_its_end_are_trained_and_nothing_else(tokenizer):
    ids, trained = only(run(tokenizer, chat_row("Who are you?", "I am small."), "messages"))
    assert tokenizer.decode(ids[trained]) == "I am small.<|im_end|>"
    assert tokenizer.decode(ids[~trained]).endswith(
        "<|im_start|>assistant\n\n"
    )  # header, and the template's line break


def test_the_last_answer_alone_or_all_of_the_text_is_learnt(tokenizer):
    row = chat_row("One?", "First.", "Two?", "Second.")
    ids, trained = only(run(tokenizer, row, "messages", train_on="last-answer"))
    assert tokenizer.decode(ids[trained]) == "Second.<|im_end|>"
    whole, trained = only(run(tokenizer, row, "messages", train_on="all"))
    assert whole.tolist() == ids.tolist() and not trained[0]
    end = tokenizer.decode(whole).index("Second.<|im_end|>") + len("Second.<|im_end|>")
    assert tokenizer.decode(whole[:1]) + tokenizer.decode(whole[trained]) == tokenizer.decode(whole)[:end]
    ids, trained = only(run(tokenizer, {"prompt": "a b", "completion": " c"}, "prompt and completion", train_on="all"))
    assert trained[1:].all()


def test_all_of_a_conversation_is_one_sequence_where_the_template_rewrites_history():
    """As Mistral's: by its answers it is two, and the first of them would be learnt twice."""
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = MISTRAL_SYSTEM
    row = {"messages": [{"role": "system", "content": "Be short."}, *chat_row(*TWO_TURNS)["messages"]]}
    assert len(run(tokenizer, row, "messages").ids) == 2
    ids, trained = only(run(tokenizer, row, "messages", train_on="all"))
    assert trained[1:].all() and tokenizer.decode(ids) == (
        "<s>[INST] Who are you?[/INST] I am small.<|im_end|>[INST] Be short.\n\nAnd now?[/INST] Now I answer.<|im_end|>"
    )


@pytest.mark.parametrize("said", ["messages", json.dumps])
def test_a_message_that_is_not_to_be_learnt_is_no_part_of_all(tokenizer, said):
    row = chat_row("One?", "First.", "Two?", "Second.")
    row["messages"][1]["train"] = False
    if said is json.dumps:
        row["messages"] = said(row["messages"])
    batch = run(tokenizer, row, "messages", train_on="all")
    assert batch.dropped == {"marked_message": 1} and "messages[1]" in batch.rejected[0]["detail"]
    ids, trained = only(run(tokenizer, row, "messages", train_on="last-answer"))
    assert tokenizer.decode(ids[trained]) == "Second.<|im_end|>"


def test_pad_equal_to_eos_does_not_lose_the_end_of_turn():
    tokenizer = toy_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    ids, trained = only(run(tokenizer, chat_row("Hi", "Hello"), "messages"))
    assert tokenizer.pad_token_id in ids[trained]


def test_the_whole_is_tokenised_once(tokenizer):
    """`Par` + `is` merges to one token in the whole; apart it would be two that the model never sees at inference."""
    ids, trained = only(run(tokenizer, {"prompt": "The capital of France is Par", "completion": "is."},
                            "prompt and completion"))  # fmt: skip
    whole = tokenizer("The capital of France is Paris.", add_special_tokens=False)["input_ids"]
    apart = sum(
        (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("The capital of France is Par", "is.")), []
    )
    assert whole != apart
    assert ids.tolist() == [*whole, tokenizer.eos_token_id]
    assert tokenizer.decode(ids[trained]) == " Paris.<|im_end|>"  # a token that shares a character with it is trained


def test_text_and_completions_get_one_trained_eos(tokenizer):
    for row, form in (({"text": "Once upon"}, "text"), ({"prompt": "a", "completion": " b"}, "prompt and completion")):
        ids, trained = only(run(tokenizer, row, form))
        assert ids[-1] == tokenizer.eos_token_id
        assert trained[-1]
        assert ids.tolist().count(tokenizer.eos_token_id) == 1
    ids, _ = only(run(tokenizer, {"text": "Once upon<|im_end|>"}, "text"))
    assert ids.tolist().count(tokenizer.eos_token_id) == 1


def test_the_eos_of_the_tokenizer_itself_is_trained_and_not_doubled():
    from tokenizers import processors

    tokenizer = toy_tokenizer()
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", pair="$A $B", special_tokens=[("<|im_end|>", eos)]
    )
    ids, trained = only(run(tokenizer, {"prompt": "2 + 2 =", "completion": " 4"}, "prompt and completion"))
    assert ids.tolist().count(eos) == 1
    assert tokenizer.decode(ids[trained]) == " 4<|im_end|>"


def test_a_tokenizer_without_eos_is_refused(tokenizer):
    bare = toy_tokenizer()
    bare.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        run(bare, {"text": "Once"}, "text")


def test_no_double_bos():
    tokenizer = bos_tokenizer()
    bos = tokenizer.bos_token_id
    for text in ("Once upon", "<s>Once upon"):
        ids, trained = only(run(tokenizer, {"text": text}, "text"))
        assert ids[:2].tolist().count(bos) == 1
        assert not trained[0]
    tokenizer.chat_template = "{{ bos_token }}" + toy_tokenizer().chat_template
    ids, _ = only(run(tokenizer, chat_row("Hi", "Hello"), "messages"))
    assert ids.tolist().count(bos) == 1


def test_a_template_without_end_token_gets_eos_at_the_last_answer():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = NO_END
    ids, trained = only(run(tokenizer, chat_row("a", "One.", "b", "Two."), "messages"))
    assert ids[-1] == tokenizer.eos_token_id
    assert trained[-1]
    assert tokenizer.decode(ids[trained]) == "One.Two.<|im_end|>"


def test_the_first_token_is_never_trained(tokenizer):
    _, trained = only(run(tokenizer, {"prompt": "", "completion": "Paris is"}, "prompt and completion"))
    assert not trained[0]
    assert trained[1:].all()


def test_truncation_is_counted_and_a_row_without_answer_left_is_dropped(tokenizer):
    long_answer = run(tokenizer, chat_row("Hi", "word " * 300), "messages", max_length=32)
    ids, trained = only(long_answer)
    assert len(ids) == 32
    assert trained[-1]
    assert (long_answer.counts["truncated"], long_answer.counts["used"]) == (1, 1)
    long_question = run(tokenizer, chat_row("word " * 300, "Hi"), "messages", max_length=32)
    assert not long_question.ids
    assert long_question.dropped == {"no_trained_token": 1}
    assert long_question.counts["used"] == 0


def test_overlong_drop_and_error(tokenizer):
    row = chat_row("Hi", "word " * 300)
    assert run(tokenizer, row, "messages", max_length=32, overlong="drop").dropped == {"over_long": 1}
    with pytest.raises(UserError, match="--max-length is 32") as failure:
        run(tokenizer, row, "messages", max_length=32, overlong="error")
    assert failure.value.where == "data.jsonl:7"


def test_overlong_split_trains_every_token_exactly_once(tokenizer):
    text = "Once upon a time there was a fox who jumped over a lazy dog. " * 9
    whole, _ = only(run(tokenizer, {"text": text}, "text"))
    parts = run(tokenizer, {"text": text}, "text", max_length=32, overlong="split")
    assert parts.counts["split"] == 1
    assert len(parts.ids) > 3
    assert {row for row in parts.rows} == {(0, 0, 7)}
    targets = [ids[flags_of(runs, len(ids))] for ids, runs in zip(parts.ids, parts.runs, strict=True)]
    assert np.concatenate(targets).tolist() == whole[1:].tolist()
    assert all(len(ids) <= 32 for ids in parts.ids)


def test_split_drops_windows_without_an_answer(tokenizer):
    parts = run(tokenizer, chat_row("word " * 100, "Hello"), "messages", max_length=32, overlong="split")
    assert len(parts.ids) == 1
    assert tokenizer.decode(parts.ids[0][flags_of(parts.runs[0], len(parts.ids[0]))]) == "Hello<|im_end|>"


def test_bad_rows_carry_line_reason_and_content(tokenizer):
    batch = run(tokenizer, {"messages": [{"role": "user", "content": "Hi"}]}, "messages")
    assert batch.dropped == {"no_assistant_turn": 1}
    (row,) = batch.rejected
    assert (row["file"], row["line"], row["reason"]) == ("data.jsonl", 7, "no_assistant_turn")
    assert json.loads(row["row"]) == {"messages": [{"role": "user", "content": "Hi"}]}
    assert run(tokenizer, {"foo": 1}, None).dropped == {"unknown_format": 1}


def test_a_slow_tokenizer_is_refused_by_name():
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(UserError, match="SlowTokenizer"):
        RowTokenizer(SlowTokenizer(), None, [])


@pytest.mark.parametrize(
    ("offsets", "spans", "expected"),
    [
        ([(0, 2), (2, 4), (4, 6)], [(2, 4)], [0, 1, 0]),
        ([(0, 3), (3, 6)], [(2, 4)], [1, 1]),  # a token over the seam
        ([(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)], [0, 1, 1, 0]),  # one character in two tokens
        ([(0, 0), (0, 3), (3, 5)], [(3, 5)], [0, 0, 1]),  # a word mark at the start
        ([(0, 2), (2, 2), (2, 4)], [(2, 4)], [0, 1, 1]),  # a word mark in front of the answer
        ([(0, 2), (3, 3), (3, 5)], [(3, 5)], [0, 0, 1]),  # trimmed white space before the answer
        ([(0, 2), (3, 3), (3, 5)], [(2, 5)], [0, 1, 1]),  # trimmed white space that opens the answer
        ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 2), (4, 6)], [1, 0, 1, 0]),
    ],
)
def test_overlaps(offsets, spans, expected):
    assert overlaps(np.asarray(offsets), spans).tolist() == [bool(flag) for flag in expected]


def test_runs_are_the_inverse_of_flags():
    for flags in ([], [True], [False, True, True, False, True], [True, True]):
        array = np.asarray(flags, dtype=np.bool_)
        assert flags_of(runs_of(array), len(array)).tolist() == flags
