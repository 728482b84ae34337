"""Answers that are compared, as tokens, sequences on disk and micro-batches: each rule in a form that can fail."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_data_tokens import bos_tokenizer, run

from swiftlite.config.methods import pack_capacity
from swiftlite.config.resolve import resolve_config
from swiftlite.data.audit import imbalance_warning
from swiftlite.data.batches import collate, empty_micro_batch
from swiftlite.data.mismatched import MIXED, mismatched_packs
from swiftlite.data.order import Sequence
from swiftlite.data.prepare import prepare_data
from swiftlite.data.tokens.preference_tokens import Preference, fit, prompt_length
from swiftlite.data.tokens.tokenize import flags_of
from swiftlite.errors import UserError

PAIR = {"prompt": [{"role": "user", "content": "Who are you?"}], "chosen": "I am a small model.", "rejected": "No."}


def pair_of(batch):
    """(prompt, chosen, rejected) tokens as laid out, and their flags."""
    ((ids, runs, layout),) = zip(batch.ids, batch.runs, batch.preferences, strict=True)
    places = [layout.prompt, layout.prompt + layout.chosen]
    return np.split(ids, places), np.split(flags_of(runs, len(ids)), places)


def whole(tokenizer, answer):
    messages = [*PAIR["prompt"], {"role": "assistant", "content": answer}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]


def test_a_pair_is_the_prompt_once_and_both_answers_behind_its_last_token(tokenizer):
    (prompt, chosen, rejected), flags = pair_of(run(tokenizer, PAIR, "preference", method="dpo"))
    assert [*prompt, *chosen] == whole(tokenizer, PAIR["chosen"])
    assert [*prompt, *rejected] == whole(tokenizer, PAIR["rejected"])
    assert chosen[0] == rejected[0]  # the prompt's last token predicts the first one of each answer
    assert not flags[0].any()
    assert tokenizer.decode(chosen[flags[1]]) == "I am a small model.<|im_end|>"
    assert tokenizer.decode(rejected[flags[2]]) == "No.<|im_end|>"
    assert flags[1][:2].tolist() == flags[2][:2].tolist() == [False, True]


def test_without_sharing_a_pair_is_two_documents(tokenizer):
    (prompt, chosen, rejected), flags = pair_of(run(tokenizer, PAIR, "preference", method="dpo", share_prompt=False))
    assert len(prompt) == 0
    assert chosen.tolist() == whole(tokenizer, PAIR["chosen"])
    assert rejected.tolist() == whole(tokenizer, PAIR["rejected"])
    assert tokenizer.decode(rejected[flags[2]]) == "No.<|im_end|>"


def test_a_merge_at_the_seam_belongs_to_each_answer(tokenizer):
    """`Par` + `is` is one token: what is shared ends before it, and the answer trains it."""
    row = {"prompt": "The capital of France is Par", "chosen": "is.", "rejected": "k."}
    (prompt, chosen, rejected), flags = pair_of(run(tokenizer, row, "preference", method="dpo"))
    for answer, text, trained in ((chosen, "is.", flags[1]), (rejected, "k.", flags[2])):
        assert [*prompt, *answer] == [*tokenizer(row["prompt"] + text)["input_ids"], tokenizer.eos_token_id]
        assert trained.any()
    assert tokenizer.decode(chosen[flags[1]]) == " Paris.<|im_end|>"
    assert len(prompt) + 1 < len(tokenizer(row["prompt"])["input_ids"])


def test_prompt_length_ends_at_the_first_difference_and_the_first_trained_token():
    def tokens(ids, trained):
        return np.asarray(ids, dtype=np.int32), np.asarray(trained, dtype=np.bool_)

    assert prompt_length([tokens([1, 2, 3, 4], [0, 0, 0, 1]), tokens([1, 2, 3, 5], [0, 0, 0, 1])]) == 3
    assert prompt_length([tokens([1, 2, 3, 4], [0, 0, 1, 1]), tokens([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]) == 2
    assert prompt_length([tokens([1, 9, 3, 4], [0, 0, 0, 1]), tokens([1, 2, 3, 5], [0, 0, 0, 1])]) == 1
    assert prompt_length([tokens([7, 2], [0, 1]), tokens([8, 2], [0, 1])]) == 0


def test_an_empty_prompt_leaves_two_answers(tokenizer):
    row = {"prompt": "", "chosen": "Paris is", "rejected": "Rome is"}
    (prompt, chosen, rejected), flags = pair_of(run(tokenizer, row, "preference", method="dpo"))
    assert len(prompt) == 0
    assert not flags[1][0]
    assert not flags[2][0]
    assert flags[1][1:].all()


@pytest.mark.parametrize("share", [True, False])
def test_truncation_cuts_the_prompt_from_the_left_and_keeps_the_answers(tokenizer, share):
    row = PAIR | {"prompt": [{"role": "user", "content": "word " * 100 + "the end"}]}
    batch = run(tokenizer, row, "preference", method="dpo", max_length=40, share_prompt=share)
    (prompt, chosen, rejected), flags = pair_of(batch)
    assert tokenizer.decode(chosen[flags[1]]) == "I am a small model.<|im_end|>"
    assert tokenizer.decode(rejected[flags[2]]) == "No.<|im_end|>"
    assert len(prompt) + len(chosen) == 40  # the longest answer with what is left of the prompt
    left = [*prompt, *chosen[: int(flags[1].argmax())]]
    assert tokenizer.decode(left).endswith("the end<|im_end|>\n<|im_start|>assistant\n")
    assert [*prompt, *rejected[: int(flags[2].argmax())]] == left
    assert (batch.counts["truncated"], batch.counts["used"]) == (1, 1)


def test_an_answer_is_cut_only_where_it_alone_is_too_long_and_never_to_nothing(tokenizer):
    batch = run(tokenizer, PAIR | {"chosen": "word " * 100}, "preference", method="dpo", max_length=16)
    (prompt, chosen, rejected), flags = pair_of(batch)
    assert len(prompt) == 0
    assert len(chosen) == 16
    assert flags[1][1:].all()
    assert tokenizer.decode(rejected[flags[2]]) == "No.<|im_end|>"


def test_the_token_that_opens_a_text_outlives_the_cut():
    tokenizer = bos_tokenizer()
    row = {"prompt": "word " * 50, "chosen": " yes", "rejected": " no"}
    (prompt, chosen, _), _ = pair_of(run(tokenizer, row, "preference", method="dpo", max_length=16))
    assert prompt[0] == tokenizer.bos_token_id
    assert len(prompt) + len(chosen) == 16
    answers = [(np.arange(10), np.arange(10) > 7)]
    assert fit(answers, 8, 4, bos=0)[0][0][0].tolist() == [0, 7, 8, 9]
    assert fit(answers, 8, 4, bos=None)[0][0][0].tolist() == [6, 7, 8, 9]
    assert fit(answers, 8, 3, bos=0)[0][0][0].tolist() == [7, 8, 9]  # the last token of the prompt comes first


def test_other_policies_for_long_rows(tokenizer):
    row = PAIR | {"chosen": "word " * 100}
    assert run(tokenizer, row, "preference", method="dpo", max_length=32, overlong="drop").dropped == {"over_long": 1}
    with pytest.raises(UserError, match="--max-length is 32"):
        run(tokenizer, row, "preference", method="dpo", max_length=32, overlong="error")


def test_answers_that_are_equal_once_cut_are_counted(tokenizer):
    row = {"prompt": "a", "chosen": "word " * 50 + "x", "rejected": "word " * 50 + "y"}
    batch = run(tokenizer, row, "preference", method="dpo", max_length=16)
    assert batch.dropped == {"equal_completions": 1}
    assert not batch.ids


def test_kto_takes_a_pair_as_two_answers(tokenizer):
    batch = run(tokenizer, PAIR, "preference", method="kto")
    assert [layout.desirable for layout in batch.preferences] == [True, False]
    assert [ids.tolist() for ids in batch.ids] == [whole(tokenizer, PAIR[key]) for key in ("chosen", "rejected")]
    for ids, runs, layout in zip(batch.ids, batch.runs, batch.preferences, strict=True):
        assert not layout.is_pair
        assert flags_of(runs, len(ids)).argmax() == layout.prompt
    assert len(set(batch.rows)) == 1


def test_bad_rows_are_listed(tokenizer):
    batch = run(tokenizer, PAIR | {"rejected": PAIR["chosen"]}, "preference", method="dpo")
    assert batch.dropped == {"equal_completions": 1}
    assert batch.rejected[0]["reason"] == "equal_completions"


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def pair_sequence(prompt, chosen, rejected, *, margin=0.0, identity=(0, 0), share=True, start=10):
    """A pair by hand; `prompt` tokens with the last one, completions counted without it."""
    ids = np.arange(start, start + prompt)
    one, other = np.r_[ids, np.arange(100, 100 + chosen)], np.r_[ids, np.arange(200, 200 + rejected)]
    shared = prompt - 1 if share else 0
    row = np.r_[one, other[shared:]].astype(np.int32)
    trained = row >= 100
    return Sequence(row, trained, "a:1", Preference(shared, len(one) - shared, margin=margin), identity)


def test_a_pair_in_a_micro_batch():
    batch = collate([[pair_sequence(3, 2, 1, margin=0.5, identity=(1, 7))]])
    assert batch.input_ids.tolist() == [[10, 11, 12, 100, 101, 12, 200]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert batch.labels.tolist() == [[-100, -100, 100, 101, -100, 200, -100]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert batch.key_index.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6]
    assert batch.key_cu_seqlens.tolist() == [0, 2, 7, 11]
    assert batch.max_document == 5
    assert batch.owner.tolist() == [0, 0, 1]
    answers = batch.completions
    assert (answers.pair.tolist(), answers.chosen.tolist()) == ([0, 0], [True, False])
    assert (answers.tokens.tolist(), answers.last.tolist()) == ([2, 1], [4, 6])
    assert (answers.margin.tolist(), answers.identity.tolist()) == ([0.5, 0.5], [[1, 7], [1, 7]])
    types = {str(x.dtype) for x in (batch.key_index, batch.owner, answers.pair, answers.tokens, answers.last)}
    assert types == {"torch.int64"}
    assert str(batch.key_cu_seqlens.dtype) == "torch.int32"


def test_pairs_with_and_without_a_shared_prompt_agree_on_every_completion():
    sizes = [(4, 3, 2), (1, 2, 2), (6, 1, 5)]
    together, apart = (
        collate([[pair_sequence(*size, share=share, identity=(0, i)) for i, size in enumerate(sizes)]])
        for share in (True, False)
    )
    assert apart.key_index is None
    assert apart.tokens - together.tokens == sum(prompt - 1 for prompt, _, _ in sizes)
    assert together.max_document == apart.max_document == 11
    for name in ("pair", "chosen", "tokens", "identity"):
        assert torch.equal(getattr(together.completions, name), getattr(apart.completions, name))
    learnt = [batch.labels[0] != -100 for batch in (together, apart)]
    for name in ("labels", "position_ids", "input_ids"):
        assert torch.equal(getattr(together, name)[0][learnt[0]], getattr(apart, name)[0][learnt[1]])
    assert torch.equal(together.owner, apart.owner)
    ends = [batch.input_ids[0][batch.completions.last].tolist() for batch in (together, apart)]
    assert ends[0] == ends[1] == [102, 201, 101, 201, 100, 204]


def judged(ids, prompt, desirable, identity=(0, 0)):
    ids = np.asarray(ids, dtype=np.int32)
    return Sequence(ids, np.arange(len(ids)) >= prompt, "a:1", Preference(prompt, desirable=desirable), identity)


def test_single_answers_are_plain_documents():
    batch = collate([[judged([1, 2, 3, 4], 2, True)], [judged([5, 6], 1, False, (0, 9))]])
    assert batch.key_index is None
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.owner.tolist() == [0, 0, 1]
    assert batch.completions.pair.tolist() == [0, 1]
    assert batch.completions.chosen.tolist() == [True, False]
    assert batch.completions.identity.tolist() == [[0, 0], [0, 9]]


def test_an_empty_micro_batch_holds_no_answer():
    batch = empty_micro_batch()
    assert len(batch.completions) == len(batch.owner) == 0
    assert batch.completions.chosen.dtype == torch.bool


def test_plain_documents_carry_nothing_new():
    batch = collate([[replace(judged([1, 2, 3], 1, True), preference=None)]])
    assert (batch.key_index, batch.key_cu_seqlens, batch.owner, batch.completions) == (None, None, None, None)


def test_everything_moves_with_the_micro_batch():
    moved = collate([[pair_sequence(3, 2, 1)]]).to(torch.device("meta"))
    tensors = [x for x in [*vars(moved).values(), *vars(moved.completions).values()] if isinstance(x, torch.Tensor)]
    assert len(tensors) == 14
    assert {x.device.type for x in tensors} == {"meta"}


def test_padding_extends_the_keys_too():
    batch = collate([[pair_sequence(3, 2, 1)]])
    padded = batch.padded([2, 1])
    assert padded.cu_seqlens.tolist() == [0, 2, 5, 7, 9, 10]
    assert padded.key_cu_seqlens.tolist() == [0, 2, 7, 11, 13, 14]
    assert padded.key_index.tolist() == [*batch.key_index.tolist(), 7, 8, 9]
    assert padded.position_ids[0, 7:].tolist() == [0, 1, 0]
    assert (padded.labels[0, 7:] == -100).all()
    assert (padded.tokens, padded.trained_tokens) == (7, 3)
    assert batch.padded([]) is batch


# ---- mismatched answers ----------------------------------------------------------------------------------------------


def test_each_prompt_gets_the_answer_of_the_next_row():
    rows = [judged([1, 1, 7], 2, True, (0, 0)), judged([2, 8, 8], 1, False, (0, 1)), judged([3, 3, 3, 9], 3, True)]
    found = {s.input_ids[0]: s for pack in mismatched_packs([rows[:1], rows[1:]], 16, None) for s in pack}
    assert {start: s.input_ids.tolist() for start, s in found.items()} == {1: [1, 1, 8, 8], 2: [2, 9], 3: [3, 3, 3, 7]}
    assert found[1].trained.tolist() == [False, False, True, True]
    assert (found[1].preference, found[1].identity) == (Preference(2, desirable=False), (MIXED, 0))
    divided = mismatched_packs([[row] for row in rows], 16, None)  # however the step is packed
    assert sorted(s.input_ids.tolist() for pack in divided for s in pack) == sorted(
        s.input_ids.tolist() for s in found.values()
    )
    collate(divided)


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [("aabbc", "bbcca"), ("abba", "baab"), ("aab", "bba"), ("aba", "bab"), ("aaa", "aaa"), ("ab", "ba")],
)
def test_no_prompt_gets_an_answer_to_itself(prompts, answers):
    """Letters: of prompts, and of those whose answer each gets; where all are one, the next row's."""
    rows = [judged([ord(letter), 10 + place], 1, True, (0, 0)) for place, letter in enumerate(prompts)]
    mixed = [sequence for pack in mismatched_packs([rows], 64, None) for sequence in pack]
    mixed.sort(key=lambda sequence: sequence.identity)
    assert [sequence.identity for sequence in mixed] == [(MIXED, place) for place in range(len(rows))]
    assert [prompts[sequence.input_ids[1] - 10] for sequence in mixed] == list(answers)
    if len(set(prompts)) == 1:
        assert all(sequence.input_ids[1] - 10 != place for place, sequence in enumerate(mixed))


def test_mismatched_answers_fit_into_the_length():
    rows = [judged([0, *[1] * 9, 7], 10, True), judged([2, *[8] * 9], 1, False)]
    packs = mismatched_packs([rows], 11, bos=0)
    assert all(sum(len(s.input_ids) for s in pack) <= 11 for pack in packs)
    cut = next(s for pack in packs for s in pack if s.input_ids[-1] == 8)
    assert cut.input_ids.tolist() == [0, 1, *[8] * 9]
    assert cut.trained.sum() == 9


def test_a_step_of_one_row_has_no_mismatched_answer():
    assert mismatched_packs([[judged([1, 2], 1, True)]], 8, None) == []


# ---- from files to steps ---------------------------------------------------------------------------------------------


@pytest.fixture
def prepare(tmp_path, tokenizer):
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')

    def run(path, method="dpo", **options):
        settings = {"max_length": 96, "template_date": "2025-01-01", "cache_dir": str(tmp_path / "cache")} | options
        config = resolve_config(
            method, model=str(folder), dataset=[str(path)], output_dir=str(tmp_path / "out"), **settings
        )
        run.loads += 1

        def load():
            run.made += 1
            return tokenizer

        return prepare_data(config, load)

    run.loads = run.made = 0
    return run


def pair_rows(count):
    return [
        {"prompt": [{"role": "user", "content": f"What is {i} plus {i}?"}], "chosen": f"It is {2 * i}.",
         "rejected": "I am a fox. " * (i % 4 + 1), "margin": i / 2}
        for i in range(count)
    ]  # fmt: skip


def test_pairs_reach_their_steps(prepare, write_rows):
    path = write_rows("a.jsonl", [*pair_rows(20), PAIR | {"rejected": PAIR["chosen"]}])
    prepared = prepare(path, on_bad_row="skip")
    assert prepared.audit["pairs"] == 20
    assert prepared.audit["rows"]["dropped"] == {"equal_completions": 1}
    assert prepared.audit["datasets"][str(path)]["pairs"] == 20
    sequences = [s for step in prepared.train.steps() for pack in step.packs for s in pack]
    assert sorted(s.identity for s in sequences) == [(0, i) for i in range(20)]
    for s in sequences:
        assert s.preference.is_pair
        assert s.preference.margin == s.identity[1] / 2
    assert any(len(s.input_ids) > s.preference.prompt + s.preference.chosen for s in sequences)
    batch = collate([step.packs[0] for step in prepared.train.steps()])
    assert len(batch.completions) == 2 * sum(len(step.packs[0]) for step in prepared.train.steps())


def test_sharing_is_part_of_the_cache_key_and_of_the_lengths(prepare, write_rows):
    path = write_rows("a.jsonl", pair_rows(8))
    shared, again, apart = prepare(path), prepare(path), prepare(path, share_prompt=False)
    assert prepare.made == 2
    assert shared.fingerprint == again.fingerprint != apart.fingerprint
    prompts = [s.preference.prompt for step in shared.train.steps() for pack in step.packs for s in pack]
    assert apart.train.describe()["tokens"] - shared.train.describe()["tokens"] == sum(prompts)
    assert apart.audit["trained_tokens"] == shared.audit["trained_tokens"]


def test_a_pack_holds_a_pair_of_two_longest_sequences(prepare, write_rows):
    rows = [PAIR | {"chosen": "word " * 200, "rejected": "other " * 200}]
    for share in (True, False):
        prepared = prepare(write_rows("a.jsonl", rows), share_prompt=share, max_length=32)
        ((sequence,),) = next(prepared.train.steps()).packs
        assert (
            len(sequence.input_ids)
            == 64
            == pack_capacity(resolve_config("dpo", model="m", dataset=["d"], max_length=32))
        )


def test_labels_are_counted_and_their_imbalance_told(prepare, write_rows):
    rows = [{"prompt": "a", "completion": f" b{i}", "label": i % 4 == 0} for i in range(20)]
    prepared = prepare(write_rows("a.jsonl", rows), "kto")
    assert (prepared.audit["desirable"], prepared.audit["undesirable"]) == (5, 15)
    assert "pairs" not in prepared.audit
    warning = imbalance_warning(prepared.audit, 1.0, 1.0)
    assert "5 answers are desirable, 15 undesirable" in warning
    assert "give desirable ones a weight from 3 to 4" in warning
    assert imbalance_warning(prepared.audit, 3.5, 1.0) is None
    assert "give undesirable ones a weight from 1.5 to 2" in imbalance_warning(
        {"desirable": 20, "undesirable": 10}, 1.0, 1.0
    )
    assert imbalance_warning({"desirable": 4, "undesirable": 3}, 1.0, 1.0) is None
    assert "one kind" in imbalance_warning({"desirable": 4, "undesirable": 0}, 1.0, 1.0)
    assert imbalance_warning({"pairs": 3}, 1.0, 1.0) is None
    layouts = [s.preference for step in prepared.train.steps() for pack in step.packs for s in pack]
    assert sum(layout.desirable for layout in layouts) == 5


def test_the_weights_that_are_told_are_in_balance():
    for desirable in range(1, 60):
        for undesirable in range(1, 60):
            audit = {"desirable": desirable, "undesirable": undesirable}
            warning = imbalance_warning(audit, 1.0, 1.0)
            if warning is None:
                assert 0.99 < desirable / undesirable < 1.35
                continue
            kind, low, high = re.fullmatch(r".* give (\w+) ones a weight from (\S+) to (\S+)", warning).groups()
            assert float(low) >= 0.99
            for weight in (float(low), float(high)):
                weights = (weight, 1.0) if kind == "desirable" else (1.0, weight)
                assert imbalance_warning(audit, *weights) is None


def test_rows_of_another_method_stop_before_training(prepare, write_rows, chat_rows):
    path = write_rows("a.jsonl", chat_rows)
    with pytest.raises(UserError, match="these are messages rows") as failure:
        prepare(path)
    assert failure.value.where == f"{path}:1"
    with pytest.raises(UserError, match="--overlong split would tear"):
        prepare(path, overlong="split")


def test_the_parquet_of_a_public_set_reads_like_its_json(prepare, tmp_path, write_rows):
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pylist([json.loads(json.dumps(row)) for row in pair_rows(4)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    files = tmp_path / "a.parquet", write_rows("a.jsonl", pair_rows(4))
    assert len({json.dumps(prepare(path).train.describe()) for path in files}) == 1
