"""Whole runs against an independent plain-PyTorch training loop: loss and gradient norm of the first steps to 1e-5.

The reference shares nothing with swiftlite's training code: it renders rows by hand-written rules, runs Hugging Face's
own forward with eager attention, one document at a time, and steps a plain AdamW.
"""

import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.data.prepare import prepare_data
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.parallel.world import World
from swiftlite.training.run import run_training


def train_alone(config, drawn=False):
    """A run in this process. drawn: with loss.png, which takes as long as the few steps of a test's run, and which
    nothing else of a run depends on; test_run has it drawn for every method."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr("swiftlite.reporting.plots.write_loss_plot", lambda output: None)
        run_training(config, World(torch.device("cpu")), Layout())


FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "qwen3-moe", "gpt2"]
ALONE = ["qwen3.5", "mamba2", "falcon"]  # documents in rows of their own
STEPS = 4


def settings(tmp_path, model, data, **more):
    values = {
        "model": str(model),
        "dataset": [str(data)],
        "output_dir": str(tmp_path / "out"),
        "cache_dir": str(tmp_path / "cache"),
        "tuner": "full",
        "max_length": 160,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "weight_decay": 0.1,
        "max_steps": STEPS,
        "save_steps": 100,
        "precision": "fp32",
        "workers": 1,
    }
    return values | more


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def render_chat(tokenizer, messages):
    """(token ids, trained) of a ChatML conversation, by hand: answers and their <|im_end|> are trained."""
    ids, trained = [], []
    for message in messages:
        answer = message["role"] == "assistant"
        head = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False)["input_ids"]
        body = tokenizer(f"{message['content']}<|im_end|>", add_special_tokens=False)["input_ids"]
        tail = tokenizer("\n", add_special_tokens=False)["input_ids"]
        ids += head + body + tail
        trained += [False] * len(head) + [answer] * len(body) + [False] * len(tail)
    return ids, trained


def cross_entropies(logits, targets):
    """Summed over the targets that are not -100."""
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


def weighted_cross_entropies(logits, targets):
    """The same, each times the probability of its target."""
    places = (targets >= 0).nonzero().flatten()
    p = logits.softmax(-1)[places, targets[places]]
    return -(p.detach() * p.log()).sum()


def plain_adamw(parameters, learning_rate, decay):
    matrices, vectors = ([p for p in parameters if (p.ndim >= 2) == wanted] for wanted in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip


def plain_training(
    folder,
    steps,
    learning_rate=1e-3,
    decay=0.1,
    wrap=None,
    optimizers=None,
    summed=cross_entropies,
    embed=None,
    auto=None,
):
    """(loss, gradient norm) of each step; steps: lists of documents (ids, trained); wrap: puts adapters on the model;
    optimizers: made of it, AdamW by default; summed: the loss of a document; embed: gives embeddings `[1, T, width]`
    for (model, ids, step, place in the step), by default the model's own; auto: transformers' class, by default that of
    causal language models."""
    from transformers import AutoModelForCausalLM

    auto = auto or AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    model = wrap(model) if wrap else model
    made = optimizers(model) if optimizers else [plain_adamw([*model.parameters()], learning_rate, decay)]
    curve = []
    for step, documents in enumerate(steps, 1):
        count = sum(sum(trained[1:]) for _, trained in documents)
        total = torch.zeros(())
        for place, (ids, trained) in enumerate(documents):
            given = {"inputs_embeds": embed(model, ids, step, place)} if embed else {"input_ids": torch.tensor([ids])}
            logits = model(**given, use_cache=False).logits[0, :-1].float()
            targets = torch.tensor([i if t else -100 for i, t in zip(ids[1:], trained[1:], strict=True)])
            total = total + summed(logits, targets)
        loss = total / count
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters() if p.grad is not None))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
        model.zero_grad()
        curve.append((loss.item(), norm))
    return curve


def planned_rows(config):
    """The row numbers (from 0) of each step, read off the plan; contents are rendered again by hand."""
    prepared = prepare_data(config, lambda: load_tokenizer(config.model))
    assert prepared.audit["rows"]["truncated"] == 0
    for batch in prepared.train.steps():
        yield [int(sequence.where.rpartition(":")[2]) - 1 for pack in batch.packs for sequence in pack]


@pytest.mark.parametrize("family", FAMILIES + ALONE)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_sft_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, family, packing):
    model = tiny_model(family)
    config = resolve_config("sft", **settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), packing=packing))
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [[render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows] for rows in planned_rows(config)]
    check(metrics(tmp_path / "out"), plain_training(model, steps), steps)


@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_dynamic_fine_tuning_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, family):
    model, data = tiny_model(family), write_rows("rows.jsonl", chat_rows)
    config = resolve_config("sft", **settings(tmp_path, model, data), loss=["dft"])
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [[render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows] for rows in planned_rows(config)]
    check(metrics(tmp_path / "out"), plain_training(model, steps, summed=weighted_cross_entropies), steps)


@pytest.mark.parametrize("more", [{}, {"loss": ["dft"]}, {"packing": False, "micro_batch_size": 2}])
def test_token_accuracy_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, more):
    """Of a model that has learnt: in training before the update, in an evaluation after it, in `swiftlite eval`."""
    rows = write_rows("rows.jsonl", chat_rows[:6])
    values = settings(tmp_path, tiny_model("llama"), rows, max_steps=20, global_batch_size=6, learning_rate=1e-2)
    train_alone(resolve_config("sft", **values))
    learnt = str(tmp_path / "out" / "model")
    again = {"model": learnt, "output_dir": str(tmp_path / "again"), "max_steps": 1, "eval_steps": 1}
    train_alone(resolve_config("sft", **values | again | more, eval_dataset=[str(rows)]))
    (row,) = metrics(tmp_path / "again")
    for key, folder in (("token_accuracy", learnt), ("eval_token_accuracy", tmp_path / "again" / "model")):
        right, tokens = plain_accuracy(folder, chat_rows[:6])
        assert row[key] == pytest.approx(right / tokens, abs=1e-7) and 0.1 < row[key] < 1


def plain_accuracy(folder, rows):
    """(trained tokens that are the likeliest, trained tokens)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    right, tokens = 0, 0
    for row in rows:
        ids, trained = render_chat(tokenizer, row["messages"])
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0, :-1].argmax(-1)
        learnt = torch.tensor(trained[1:])
        right += (found == torch.tensor(ids[1:]))[learnt].sum().item()
        tokens += sum(trained[1:])
    return right, tokens


def test_dynamic_fine_tuning_is_evaluated_by_cross_entropy(tmp_path, tiny_model, write_rows, chat_rows):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), eval_fraction=0.25)
    values |= {"max_steps": 1, "learning_rate": 1e-12}
    rows = {}
    for loss in ("cross_entropy", "dft"):
        train_alone(resolve_config("sft", **values | {"loss": [loss], "output_dir": str(tmp_path / loss)}))
        (rows[loss],) = metrics(tmp_path / loss)
    assert rows["dft"]["eval_loss"] == pytest.approx(rows["cross_entropy"]["eval_loss"], rel=1e-6)
    assert rows["dft"]["loss"] < 0.1 * rows["cross_entropy"]["loss"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3-moe"])
def test_pretraining_equals_plain_pytorch(tmp_path, tiny_model, write_rows, family):
    model = tiny_model(family)
    texts = [{"text": f"Chapter {i}. Once upon a time there was a fox. " * (1 + i % 3)} for i in range(24)]
    config = resolve_config("pretrain", **settings(tmp_path, model, write_rows("text.jsonl", texts), max_length=200))
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def whole(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        return ids, [True] * len(ids)

    steps = [[whole(texts[row]["text"]) for row in rows] for rows in planned_rows(config)]
    check(metrics(tmp_path / "out"), plain_training(model, steps), steps)


def check(rows, expected, steps):
    assert len(rows) == len(expected) == STEPS
    for row, (loss, norm), documents in zip(rows, expected, steps, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4 if row["step"] > 2 else 1e-5)
        assert row["trained_tokens"] == sum(sum(trained[1:]) for _, trained in documents)
        assert row["tokens"] == sum(len(ids) for ids, _ in documents)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 4},
        {"micro_batch_size": 2, "activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
    ],
    ids=["micro 4", "micro 2, checkpointing", "selective checkpointing"],
)
def test_the_split_of_a_step_changes_nothing(tmp_path, tiny_model, write_rows, chat_rows, change):
    data = write_rows("rows.jsonl", chat_rows)
    train_alone(resolve_config("sft", **settings(tmp_path, tiny_model("qwen3"), data)))
    changed = settings(tmp_path, tiny_model("qwen3"), data, output_dir=str(tmp_path / "other")) | change
    train_alone(resolve_config("sft", **changed))
    for one, other in zip(metrics(tmp_path / "out"), metrics(tmp_path / "other"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activations_of_adapted_layers_are_recomputed(tmp_path, tiny_model, write_rows, chat_rows, checkpointing):
    base = settings(tmp_path, tiny_model("qwen3"), write_rows("rows.jsonl", chat_rows), tuner="lora")
    train_alone(resolve_config("sft", **base))
    changed = {"activation_checkpointing": checkpointing, "output_dir": str(tmp_path / "other")}
    train_alone(resolve_config("sft", **base | changed))
    for one, other in zip(metrics(tmp_path / "out"), metrics(tmp_path / "other"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 5e-3), ("fp16", 2e-3)])
def test_half_precision_stays_near_fp32(tmp_path, tiny_model, write_rows, chat_rows, precision, tolerance):
    data = write_rows("rows.jsonl", chat_rows)
    train_alone(resolve_config("sft", **settings(tmp_path, tiny_model("llama"), data)))
    half = settings(tmp_path, tiny_model("llama"), data, output_dir=str(tmp_path / "half"), precision=precision)
    train_alone(resolve_config("sft", **half))
    for exact, rounded in zip(metrics(tmp_path / "out"), metrics(tmp_path / "half"), strict=True):
        assert rounded["loss"] == pytest.approx(exact["loss"], rel=tolerance)
        assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=5e-2)
