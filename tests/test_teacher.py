"""Knowledge distillation: runs with a teacher against plain PyTorch, and what cannot teach."""

import math

import pytest
import torch
from test_parity import check, metrics, plain_training, planned_rows, render_chat, settings, train_alone
from test_verify import ZERO_BUBBLE, in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.config.resolve import resolve_config
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.verification.cases import FULL, LORA, Subject


class Taught:
    """What `plain_training` calls for the embeddings and the loss of each document, with the whole distributions."""

    def __init__(self, teacher, weight, count):
        self._teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32, attn_implementation="eager")
        self._teacher.eval()
        self._weight, self._count = weight, count

    def embed(self, model, ids, _step, _place):
        self._ids = torch.tensor([ids])
        return model.get_input_embeddings()(self._ids)

    def summed(self, logits, targets):
        with torch.no_grad():
            theirs = self._teacher(input_ids=self._ids, use_cache=False).logits[0, :-1]
        likeliest, ids = theirs.topk(min(self._count, theirs.shape[-1]))
        p, own = likeliest.log_softmax(-1), logits.log_softmax(-1)
        kl = (p.exp() * (p - own.gather(-1, ids))).sum(-1)
        learnt = targets != -100
        text = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        return (1 - self._weight) * text + self._weight * kl[learnt].sum()


@pytest.mark.parametrize(
    ("family", "teacher", "more"),
    [
        ("llama-tied", "qwen3", {"teacher_tokens": 8, "micro_batch_size": 2}),
        ("gemma2", "gemma2", {"teacher_weight": 1.0, "seed": 3}),
        ("gpt2", "qwen3-moe", {"packing": False, "teacher_tokens": 100_000}),  # of which no vocabulary has so many
        ("qwen3.5", "llama", {"teacher_weight": 0.2}),  # documents in rows of their own
        ("llama", "mamba2", {"micro_batch_size": 4}),
    ],
)
def test_a_taught_run_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, family, teacher, more):
    model, data = tiny_model(family), write_rows("rows.jsonl", chat_rows)
    values = settings(tmp_path, model, data, teacher=str(tiny_model(teacher))) | more
    config = resolve_config("sft", **values)
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [[render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows] for rows in planned_rows(config)]
    plain = Taught(config.teacher, config.teacher_weight, config.teacher_tokens)
    rows = metrics(tmp_path / "out")
    check(rows, plain_training(model, steps, embed=plain.embed, summed=plain.summed), steps)
    for row in rows:
        parts = (1 - config.teacher_weight) * row["cross_entropy"] + config.teacher_weight * row["kl/teacher"]
        assert row["loss"] == pytest.approx(parts, rel=1e-5) and math.isfinite(row["kl/teacher"])


def larger_teacher(folder, family="gemma3"):
    """Of six layers, with rows behind those of the tokens, as models have whose vocabularies are filled up."""
    config = toy_config(family, 6)
    config.vocab_size += 40
    return str(write_toy(folder, config))


def test_two_processes_learn_the_same(tmp_path):
    flags = {"teacher": larger_teacher(tmp_path / "teacher"), "teacher_tokens": 20}
    both = Subject("llama-tied", "full", FULL | flags), Subject("llama-tied", "LoRA", LORA | flags)
    chosen = ("ddp 2", "fsdp full 2, recomputing", "fsdp full 2, offloaded", "tp 2", "pp 2", *ZERO_BUBBLE, "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *both):
        assert verdict.passed and verdict.difference is not None, verdict


def test_four_processes_learn_the_same(tmp_path):
    flags = {"teacher": larger_teacher(tmp_path / "teacher", "qwen3-moe"), "micro_batch_size": 1}
    chosen = ("hybrid 2x2", "tp 2 x pp 2", "tp 2 x cp 2", "pp 2 x cp 2")
    for verdict in in_real_processes(tmp_path, 4, chosen, Subject("llama", "full", FULL | flags)):
        assert verdict.passed and verdict.difference is not None, verdict
