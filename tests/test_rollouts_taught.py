"""On-policy distillation: a teacher that says how likely it finds what the model itself has sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_grpo import AGAIN, SAMPLES, numbers, opened, plain_answer, sampled
from test_parity import metrics, plain_adamw, planned_rows, train_alone
from test_teacher import larger_teacher
from test_verify import in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.config.methods import teacher_share
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.verification.cases import FULL, SAMPLED, Subject, vowels


def plain_loss(model, teacher, groups, weight, temperature):
    """(loss, KL a token) of groups of (prompt, answers, rewards or None)."""
    tokens = sum(len(answer) for _, answers, _ in groups for answer in answers)
    total, apart = torch.zeros(()), 0.0
    for prompt, answers, rewards in groups:
        of = torch.zeros(len(answers), dtype=torch.float64) if rewards is None else torch.tensor(rewards).double()
        advantages = torch.zeros_like(of) if rewards is None else (of - of.mean()) / (of.std() + 1e-4)
        for answer, advantage in zip(answers, advantages.tolist(), strict=True):
            ids, places = torch.tensor([prompt + answer]), torch.tensor(answer)[:, None]
            own, theirs = (
                (of(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature)
                .log_softmax(-1)
                .gather(-1, places)[:, 0]
                for of in (model, teacher)
            )
            ahead = (theirs - own).detach()
            apart -= ahead.sum().item()
            total = (
                total - (((1 - weight) * advantage + weight * ahead) * own.exp() / own.exp().detach()).sum() / tokens
            )
    return total, apart / tokens


@pytest.mark.parametrize(
    ("rewarded", "more"),
    [(True, {"teacher_weight": 0.3, "temperature": 0.8}), (False, {"samples": 1}), (False, {"tuner": "lora"})],
)
def test_a_run_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, rewarded, more):
    folder, data, teacher = tiny_model("llama-tied"), write_rows("rows.jsonl", chat_rows), tiny_model("qwen3")
    values = sampled(tmp_path, folder, data, teacher=str(teacher), **more)
    config = resolve_config("grpo", **values | ({} if rewarded else {"reward": []}))
    train_alone(config)
    rows = metrics(tmp_path / "out")
    assert ("reward" in rows[0]) == rewarded
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    model, wise = (AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32) for of in (folder, teacher))
    optimizer = plain_adamw([*model.parameters()], config.learning_rate, config.weight_decay)
    steps = list(zip(rows, planned_rows(config), strict=True))
    for step, (row, places) in enumerate(steps[: 1 if config.tuner == "lora" else None], 1):
        groups = []
        for place, number in enumerate(places):
            prompt = opened(tokenizer, chat_rows[number]["messages"][: 2 if number % 3 else 4])
            drawn = [numbers(config.seed, step, place, i) for i in range(config.samples)]
            answers = [plain_answer(model, prompt, each, stops, config.temperature) for each in drawn]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            groups.append((prompt, answers, vowels([[{"content": text}] for text in texts]) if rewarded else None))
        loss, apart = plain_loss(model, wise, groups, teacher_share(config), config.temperature)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        model.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert row["kl/teacher"] == pytest.approx(apart, rel=1e-5, abs=2e-6)  # of numbers around 6, in fp32
        if config.tuner == "full":
            assert row["grad_norm"] == pytest.approx(norm, rel=1e-4 if step > 2 else 2e-5)


def test_the_model_comes_closer_to_its_teacher(tmp_path, tiny_model, write_rows, chat_rows):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), reward=[], max_steps=25)
    values |= {"teacher": str(tiny_model("qwen3")), "learning_rate": 3e-3, "samples": 8}
    train_alone(resolve_config("grpo", **values))
    apart = [row["kl/teacher"] for row in metrics(tmp_path / "out")]
    assert np.mean(apart[-3:]) < 0.8 * np.mean(apart[:3]) and SAMPLES < 8


def test_a_model_that_is_its_own_teacher_differs_in_nothing(tmp_path, tiny_model, write_rows, chat_rows):
    model = str(tiny_model("gemma2"))
    values = sampled(tmp_path, model, write_rows("rows.jsonl", chat_rows), teacher=model, reward=[], max_steps=1)
    train_alone(resolve_config("grpo", **values))
    (row,) = metrics(tmp_path / "out")
    assert abs(row["loss"]) < 1e-6 and abs(row["kl/teacher"]) < 1e-6 and row["grad_norm"] < 1e-4


def test_two_processes_learn_the_same(tmp_path):
    flags = SAMPLED | {"teacher": larger_teacher(tmp_path / "teacher"), "beta": 0.0}
    chosen = ("fsdp full 2", "tp 2", "pp 2", "cp 2")
    once = Subject("llama-tied", "taught", FULL | flags, "grpo")
    again = replace(once, name="again", flags=once.flags | AGAIN | {"minibatches": 8})  # of a prompt each
    for verdict in in_real_processes(tmp_path, 2, chosen, once, again):
        assert verdict.passed and verdict.difference is not None, verdict


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"beta": 0.1}, "--teacher draws it away"),
        ({"reward": [], "eval_fraction": 0.1}, "evaluations are of rewards"),
        ({"samples": 1}, "of one answer to a prompt"),
        ({"reward": [], "teacher": None}, "nothing says how grpo rewards answers"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, flags, wanted):
    with pytest.raises(UserError, match=wanted):
        resolve_config("grpo", **sampled(tmp_path, "model", "rows.jsonl") | {"teacher": "x"} | flags)


def test_settings_without_effect_are_told(tmp_path):
    given = sampled(tmp_path, "model", "rows.jsonl") | {"teacher": "x", "teacher_tokens": 9, "teacher_weight": 0.9}
    given = {name: Given(value, f"--{name}", "flag") for name, value in given.items() if name != "reward"}
    notes = " ".join(resolve("grpo", given, None, env={}).notes)
    assert "teacher_tokens has no effect with grpo" in notes
    assert "teacher_weight has no effect without --reward" in notes
