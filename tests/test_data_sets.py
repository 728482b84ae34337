"""What is told of each of several data sets: losses and rewards in training and evaluations, and what they are called.

That they are the same in every layout is for `test_verify`, whose rows are of two data sets.
"""

import pytest
import torch
from test_grpo import sampled
from test_parity import metrics, render_chat, settings, train_alone
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.config.resolve import resolve_config
from swiftlite.data.prepare import prepare_data
from swiftlite.data.rows.sources import names_of_sets
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.toys import toy_judged, toy_pairs


@pytest.fixture
def two(tmp_path, tiny_model, write_rows, chat_rows):
    """Settings of a run on two data sets, and on two more that are evaluated."""
    names = [write_rows(f"{name}.jsonl", chat_rows[part]) for name, part in PARTS.items()]
    more = {"dataset": list(map(str, names[:2])), "eval_dataset": list(map(str, names[2:])), "max_steps": 2}
    return settings(tmp_path, tiny_model("llama"), "", **more, eval_steps=1)


PARTS = {"sums": slice(0, 12), "chats": slice(12, 20), "one": slice(20, 29), "other": slice(29, 32)}


def plain_losses(model, chat_rows, rows):
    """(summed cross-entropy, trained tokens) of some rows by the model as it is in its files."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    total, tokens = 0.0, 0
    for row in rows:
        ids, trained = render_chat(tokenizer, chat_rows[row]["messages"])
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total += losses[torch.tensor(trained[1:])].sum().item()
        tokens += sum(trained[1:])
    return total, tokens


def rows_of_step(config, step):
    """name -> numbers of the rows of `chat_rows` in a step."""
    plan = prepare_data(config, lambda: load_tokenizer(config.model)).train
    batch = list(plan.steps())[step - 1]
    found = {name: [] for name in batch.data_sets}
    for document in (document for pack in batch.packs for document in pack):
        name = batch.data_sets[document.data_set]
        found[name].append(PARTS[name].start + int(document.where.rpartition(":")[2]) - 1)
    return found


@pytest.mark.parametrize("more", [{}, {"packing": False, "micro_batch_size": 2}])
def test_losses_of_data_sets_equal_plain_pytorch(two, tmp_path, chat_rows, more):
    config = resolve_config("sft", **two | more)
    train_alone(config)
    first, second = metrics(tmp_path / "out")
    known = {name: plain_losses(two["model"], chat_rows, rows) for name, rows in rows_of_step(config, 1).items()}
    for name, (total, tokens) in known.items():
        assert first[f"loss/{name}"] == pytest.approx(total / tokens, rel=1e-5)
    assert first["trained_tokens"] == sum(tokens for _, tokens in known.values())
    assert first["loss/sums"] != pytest.approx(first["loss/chats"], rel=1e-4)
    held_out = {
        name: plain_losses(tmp_path / "out" / "model", chat_rows, range(32)[PARTS[name]]) for name in ("one", "other")
    }
    for name, (total, tokens) in held_out.items():
        assert second[f"eval_loss/{name}"] == pytest.approx(total / tokens, rel=1e-5)
    total, tokens = map(sum, zip(*held_out.values(), strict=True))
    assert second["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_nothing_more_is_told_of_a_single_one(two, tmp_path):
    train_alone(resolve_config("sft", **two | {"dataset": two["dataset"][:1], "eval_dataset": two["eval_dataset"][:1]}))
    assert not [key for key in metrics(tmp_path / "out")[0] if "/" in key]


def test_a_step_without_rows_of_a_data_set_has_no_loss_of_it(two, tmp_path):
    train_alone(
        resolve_config("sft", **two | {"packing": False, "global_batch_size": 1, "shuffle": False, "max_steps": 1})
    )
    (row,) = metrics(tmp_path / "out")
    assert row["loss/sums"] == pytest.approx(row["loss"], rel=1e-6) and row["loss/chats"] is None


@pytest.mark.parametrize("more", [{"loss": ["dft"]}, {"teacher": "llama-tied", "teacher_tokens": 8}])
def test_the_loss_of_a_data_set_is_the_part_of_the_loss_that_is_its(two, tmp_path, tiny_model, more):
    """Whatever the loss is, and through the loss of either alone: the same rows in the same step."""
    if "teacher" in more:
        more = more | {"teacher": str(tiny_model(more["teacher"]))}
    whole = {"packing": False, "global_batch_size": 12, "shuffle": False, "max_steps": 1, "eval_dataset": []}
    alone = {}
    for name, part in zip(("sums", "chats"), two["dataset"], strict=True):
        out = tmp_path / name
        train_alone(resolve_config("sft", **two | whole | more | {"dataset": [part], "output_dir": str(out)}))
        (alone[name],) = metrics(out)
    train_alone(resolve_config("sft", **two | whole | more | {"global_batch_size": 20}))
    (row,) = metrics(tmp_path / "out")
    tokens = {name: one["trained_tokens"] for name, one in alone.items()}
    for name, one in alone.items():
        assert row[f"loss/{name}"] == pytest.approx(one["loss"], rel=1e-5)
    assert row["loss"] == pytest.approx(
        sum(row[f"loss/{n}"] * tokens[n] for n in tokens) / sum(tokens.values()), rel=1e-5
    )
    if "teacher" in more:
        kl = sum(alone[name]["kl/teacher"] * count for name, count in tokens.items())
        assert row["kl/teacher"] == pytest.approx(kl / sum(tokens.values()), rel=1e-4)


@pytest.mark.parametrize(("method", "more"), [("dpo", {"loss": ["simpo"]}), ("rm", {}), ("kto", {})])
def test_losses_of_data_sets_of_compared_answers(two, tmp_path, write_rows, method, more):
    """Their mean is the loss; where no row depends on the others of its step each is that of its data set alone."""
    rows = toy_judged(20) if method == "kto" else toy_pairs(20)
    names = [str(write_rows(f"{name}.jsonl", rows[part])) for name, part in (("a", slice(13)), ("b", slice(13, 20)))]
    more = two | more | {"dataset": names, "eval_dataset": names, "shuffle": False, "packing": False}
    train_alone(resolve_config(method, **more | {"global_batch_size": 20, "max_steps": 2}))
    first, second = metrics(tmp_path / "out")
    for row, start in ((first, ""), (second, ""), (second, "eval_")):
        mean = (13 * row[f"{start}loss/a"] + 7 * row[f"{start}loss/b"]) / 20
        assert row[f"{start}loss"] == pytest.approx(mean, rel=1e-6)
    assert second["loss/a"] != pytest.approx(second["loss/b"], rel=1e-5)
    if method == "dpo":
        alone = {"dataset": names[:1], "eval_dataset": [], "max_steps": 1, "global_batch_size": 13}
        train_alone(resolve_config(method, **more | alone | {"output_dir": str(tmp_path / "alone")}))
        assert metrics(tmp_path / "alone")[0]["loss"] == pytest.approx(first["loss/a"], rel=1e-6)


def test_streamed_text_has_its_data_sets(two, tmp_path, write_rows):
    """Windows of one file after the other, so that most steps are of one data set."""
    texts = [write_rows(f"{name}.jsonl", [{"text": f"{name} {i}. " * 9} for i in range(40)]) for name in ("a", "b")]
    more = {"dataset": list(map(str, texts)), "eval_dataset": [], "streaming": True, "max_length": 64, "max_steps": 5}
    train_alone(resolve_config("pretrain", **two | more | {"global_batch_size": 16}))
    rows = metrics(tmp_path / "out")
    assert {(row["loss/a"] is None, row["loss/b"] is None) for row in rows} == {
        (True, False),
        (False, True),
        (False, False),
    }
    for row in rows:
        losses = [row["loss/a"], row["loss/b"]]
        assert None not in losses or row["loss"] == pytest.approx(next(filter(None, losses)), rel=1e-6)


def test_rewards_of_data_sets(two, tmp_path):
    """Of what is learnt, and of what is evaluated: that of the data set alone."""
    mixed = {"dataset": two["dataset"], "eval_dataset": two["eval_dataset"], "eval_steps": 1, "max_steps": 1}
    mixed = sampled(tmp_path, two["model"], "", **mixed, global_batch_size=20, shuffle=False)
    train_alone(resolve_config("grpo", **mixed))
    (row,) = metrics(tmp_path / "out")
    assert row["reward"] == pytest.approx((12 * row["reward/sums"] + 8 * row["reward/chats"]) / 20, rel=1e-6)
    assert row["eval_reward"] == pytest.approx(
        (9 * row["eval_reward/one"] + 3 * row["eval_reward/other"]) / 12, rel=1e-6
    )
    alone = {"output_dir": str(tmp_path / "alone"), "eval_dataset": two["eval_dataset"][:1]}
    train_alone(resolve_config("grpo", **mixed | alone))
    (same,) = metrics(tmp_path / "alone")
    assert same["eval_reward"] == row["eval_reward/one"] != row["eval_reward/other"]
    alone = {"output_dir": str(tmp_path / "first"), "dataset": two["dataset"][:1], "global_batch_size": 12}
    train_alone(resolve_config("grpo", **mixed | alone))
    (first,) = metrics(tmp_path / "first")
    assert first["reward"] == row["reward/sums"] != row["reward/chats"]


def test_names_of_data_sets(tmp_path):
    names = names_of_sets
    assert names(["a.jsonl"]) == ()
    assert names(["data/a.jsonl*2", "org/b:en@train#50", "c.jsonl.gz"]) == ("a", "b:en@train", "c")
    assert names(["x/rows.jsonl", "y/rows.jsonl#7", "z.csv"]) == ("x/rows.jsonl", "y/rows.jsonl#7", "z")
    assert names(["org/v1.5", "org/v2.0"]) == ("v1.5", "v2.0")


def test_names_that_others_have_or_a_terminal_would_obey(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_of_sets([".", "b.jsonl"]) == (".", "b")
    assert names_of_sets(["a.jsonl", "x/a.jsonl", "y/a.jsonl.jsonl"]) == ("a.jsonl", "x/a.jsonl", "y/a.jsonl.jsonl")
    assert names_of_sets(["a\n\x1b[2J.jsonl", "ä \\n.jsonl"]) == ("a\\n\\x1b[2J", "ä \\n")
