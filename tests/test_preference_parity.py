"""Runs of dpo and kto against an independent plain-PyTorch loop: loss, gradient norm and metrics of the first steps.

The reference renders rows by hand-written rules, runs Hugging Face's own forward on one answer at a time with its whole
prompt, for the model and for a frozen copy of it, and steps a plain AdamW.
"""

import copy
import math

import pytest
import torch
from test_parity import metrics, planned_rows, render_chat, settings, train_alone
from torch.nn.functional import log_softmax, logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.config.resolve import resolve_config
from swiftlite.models.toys import toy_judged, toy_pairs

BETA = 0.1
ROWS = 24
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracy", "rewards/margin", "logps/chosen", "logps/rejected")


def answer_logp(model, answer):
    """(sum of log p of the trained tokens, how many these are). answer: (ids, trained)."""
    ids, trained = torch.tensor(answer[0]), torch.tensor(answer[1])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    each = log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
    return each[trained[1:]].sum(), int(trained[1:].sum())


def answer_logps(model, answers):
    """`[answers]`, and the counts of their tokens."""
    found = [answer_logp(model, answer) for answer in answers]
    return torch.stack([logp for logp, _ in found]), torch.tensor([count for _, count in found])


def plain_training(folder, steps, step_loss):
    """(loss, gradient norm, metrics) of each step. step_loss: (model, frozen copy, a step) -> (loss, metrics)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in steps:
        loss, found = step_loss(model, frozen, step)
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters() if p.grad is not None))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm, {name: float(value) for name, value in found.items()}))
    return curve


def sigmoid_of(w, r, ref_w, ref_r, n_w, n_r):
    return -logsigmoid(BETA * ((w - ref_w) - (r - ref_r)))


def ipo_of(w, r, ref_w, ref_r, n_w, n_r):
    return ((w - ref_w) / n_w - (r - ref_r) / n_r - 1 / (2 * BETA)) ** 2


def orpo_of(w, r, ref_w, ref_r, n_w, n_r):
    p_w, p_l = (w / n_w).exp(), (r / n_r).exp()
    ratio = torch.log((p_w / (1 - p_w)) / (p_l / (1 - p_l)))
    return -w / n_w - BETA * logsigmoid(ratio)


def sum_of(w, r, ref_w, ref_r, n_w, n_r):
    return 0.8 * sigmoid_of(w, r, ref_w, ref_r, n_w, n_r) - w / n_w


def pair_loss(per_pair, *, referenced):
    def loss(model, frozen, pairs):
        (w, n_w), (r, n_r) = (answer_logps(model, [pair[side] for pair in pairs]) for side in (0, 1))
        (ref_w, _), (ref_r, _) = (answer_logps(frozen, [pair[side] for pair in pairs]) for side in (0, 1))
        if referenced:
            reward_w, reward_r = BETA * (w - ref_w).detach(), BETA * (r - ref_r).detach()
        else:
            reward_w, reward_r = BETA * (w / n_w).detach(), BETA * (r / n_r).detach()
        ahead = reward_w - reward_r
        accuracy = (ahead > 0).double()
        found = [reward_w, reward_r, accuracy, ahead, w.detach(), r.detach()]
        means = {name: value.mean() for name, value in zip(REWARDS, found, strict=True)}
        return per_pair(w, r, ref_w, ref_r, n_w, n_r).mean(), means

    return loss


def check(rows, expected):
    """The rewards of the first step are 0 but for rounding, so they have an absolute tolerance."""
    assert len(rows) == len(expected) == 4
    for row, (loss, norm, found) in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for name, value in found.items():
            if math.isnan(value):  # a step of answers of one label
                assert row[name] is None
            elif name != "rewards/accuracy" or row["step"] > 1:
                assert row[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


PAIR_CASES = [
    (family, words, per_pair, referenced)
    for family in ("llama", "qwen3")
    for words, per_pair, referenced in (
        (["sigmoid"], sigmoid_of, True),
        (["ipo"], ipo_of, True),
        (["orpo"], orpo_of, False),
        (["sigmoid:0.8", "sft:1.0"], sum_of, True),
    )
] + [(family, ["sigmoid"], sigmoid_of, True) for family in ("llama-tied", "gemma2", "gpt2", "qwen3.5")]


@pytest.mark.parametrize(
    ("family", "words", "per_pair", "referenced"), PAIR_CASES, ids=[f"{f} {' '.join(w)}" for f, w, *_ in PAIR_CASES]
)
def test_dpo_equals_plain_pytorch(tmp_path, tiny_model, write_rows, family, words, per_pair, referenced):
    model, pairs = tiny_model(family), toy_pairs(ROWS)
    values = settings(tmp_path, model, write_rows("pairs.jsonl", pairs), loss=words, micro_batch_size=2)
    config = resolve_config("dpo", **values)
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def answers(row):
        return [render_chat(tokenizer, pairs[row]["prompt"] + pairs[row][side]) for side in ("chosen", "rejected")]

    steps = [[answers(row) for row in rows] for rows in planned_rows(config)]
    assert sum(len(step) for step in steps) > 4 * 4  # packs of several pairs
    check(metrics(tmp_path / "out"), plain_training(model, steps, pair_loss(per_pair, referenced=referenced)))


def split_row(tokenizer, row):
    """(prompt ids, answer ids, trained of the answer); the prompt ends where the answer begins."""
    ids, trained = render_chat(tokenizer, row["prompt"] + row["completion"])
    start = trained.index(True)
    return ids[:start], ids[start:], trained[start:]


def kto_loss(weights, points):
    """KTO on rows in the order of the step, each (prompt, answer, trained, wanted). points: takes z0 of each step."""

    def loss(model, frozen, rows):
        own = [(prompt + answer, [False] * len(prompt) + trained) for prompt, answer, trained, _ in rows]
        policy, _ = answer_logps(model, own)
        ratio = policy - answer_logps(frozen, own)[0]
        others = rows[1:] + rows[:1]
        mixed = [
            (prompt + answer, [False] * len(prompt) + trained)
            for (prompt, *_), (_, answer, trained, _) in zip(rows, others, strict=True)
        ]
        with torch.no_grad():
            z0 = (answer_logps(model, mixed)[0] - answer_logps(frozen, mixed)[0]).mean().clamp(min=0)
        points.append(z0.item())
        wanted = torch.tensor([row[3] for row in rows])
        value = 1 - torch.sigmoid(BETA * torch.where(wanted, ratio - z0, z0 - ratio))
        reward, policy = BETA * ratio.detach(), policy.detach()
        found = {
            "rewards/chosen": reward[wanted].mean(),
            "rewards/rejected": reward[~wanted].mean(),
            "rewards/margin": reward[wanted].mean() - reward[~wanted].mean(),
            "rewards/accuracy": torch.where(wanted, ratio > z0, ratio < z0).double().mean(),
            "logps/chosen": policy[wanted].mean(),
            "logps/rejected": policy[~wanted].mean(),
        }
        return (torch.where(wanted, *weights) * value).mean(), found

    return loss


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3.5"])
def test_kto_equals_plain_pytorch(tmp_path, tiny_model, write_rows, family):
    model, rows, weights = tiny_model(family), toy_judged(ROWS), (2.0, 1.0)
    values = settings(tmp_path, model, write_rows("judged.jsonl", rows), desirable_weight=2.0, micro_batch_size=2)
    config = resolve_config("kto", **values)
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [
        [(*split_row(tokenizer, rows[row]), rows[row]["label"]) for row in planned] for planned in planned_rows(config)
    ]
    assert max(len(prompt) for step in steps for prompt, *_ in step) < 80  # so that no mixed one is cut at 160
    points = []
    expected = plain_training(model, steps, kto_loss(weights, points))
    assert max(points) > 0.01
    check(metrics(tmp_path / "out"), expected)
