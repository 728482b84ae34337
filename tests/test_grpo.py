"""Learning from a model's own answers: runs against plain PyTorch, layouts, rewards, and what cannot be answered."""

import hashlib
import importlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_parity import metrics, plain_adamw, planned_rows, render_chat, settings, train_alone
from test_template import PLAIN
from test_verify import in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import run_ranks

from swiftlite.config.layout import Layout
from swiftlite.config.losses import clip_range
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.save import save_config
from swiftlite.config.validate import Given
from swiftlite.data.order import Sequence as Document
from swiftlite.data.prepare import Asked, prepare_data
from swiftlite.errors import RunError, UserError
from swiftlite.models.load import load_config
from swiftlite.models.sampling import answering, sample
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.parallel import world
from swiftlite.parallel.mesh import Patient, build_mesh
from swiftlite.planning.devices import find_device
from swiftlite.planning.memory import cache_bytes_per_token
from swiftlite.reporting import page
from swiftlite.reporting.board import Board
from swiftlite.reporting.curves import curve_of
from swiftlite.training.guards.failures import NotFinite
from swiftlite.training.plan import Fleet, outline_of, settle
from swiftlite.training.rollouts.generator import Generation
from swiftlite.training.rollouts.rewards import Reward, Rollout, check_columns, load_rewards, rewards_of
from swiftlite.training.rollouts.worker import RolloutWorker, SamplingOptions
from swiftlite.training.step import DirectStep
from swiftlite.verification.cases import FULL, LORA, SAMPLED, Subject, vowels

SAMPLES, LONGEST = 4, 10
AGAIN = {"minibatches": 2, "update_epochs": 2, "epsilon": 0.02, "max_steps": 2}


def sampled(tmp_path, model, data, **more):
    values = settings(tmp_path, model, data, **SAMPLED)
    return values | {"samples": SAMPLES, "max_new_tokens": LONGEST, "beta": 0.0, "max_steps": 3} | more


def resolved_of(tmp_path, model, **more):
    values = {"method": "grpo", **sampled(tmp_path, model, "rows.jsonl", **more)}
    return resolve(None, {name: Given(value, name, "flag") for name, value in values.items()})


def numbers(*key):
    """Between 0 and 1, one for each token of an answer."""
    digest = hashlib.blake2b("/".join(map(str, ("answers", *key))).encode(), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(LONGEST)
    return (raw >> np.uint64(11)) / 2**53


def plain_answer(model, prompt, drawn, stops, temperature):
    """Token after token, each time by a pass over all of it."""
    ids = list(prompt)
    for number in drawn:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        sums = (logits / temperature).softmax(-1).cumsum(-1)
        ids.append(int((sums <= number * sums[-1]).sum()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def opened(tokenizer, messages):
    """The ids of a ChatML conversation up to its last answer, by hand, and the opening of the answer."""
    ids, _ = render_chat(tokenizer, messages[:-1])
    return ids + tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]


def plain_logprobs(model, prompt, answer, temperature):
    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def plain_surrogate(kind, own, before, advantage, low, high):
    """(loss of each token, how many are beyond the bounds)."""
    ratio = (own - before).exp()
    if kind == "cispo":
        return -advantage * ratio.detach().clamp(max=1 + high) * own, (ratio > 1 + high).sum().item()
    if kind == "gspo":
        ratio = (own - before).mean().exp().expand(len(own))
    free, bounded = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(free, bounded), (bounded < free).sum().item()


def plain_loss(model, reference, groups, kind, config, before):
    """(loss, part of the tokens that are beyond the bounds). groups: of (prompt, answers, rewards); before: log p of
    each answer when it was drawn, by its group and place."""
    tokens = sum(len(answer) for _, answers, _ in groups for answer in answers)
    count = sum(len(answers) for _, answers, _ in groups)
    bounds = config.epsilon or 0.2, config.epsilon_high or config.epsilon or 0.2
    total, beyond = torch.zeros(()), 0
    for (prompt, answers, rewards), then in zip(groups, before, strict=True):
        rewards = torch.tensor(rewards, dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for answer, advantage, drawn in zip(answers, advantages.tolist(), then, strict=True):
            own, theirs = (plain_logprobs(of, prompt, answer, config.temperature) for of in (model, reference))
            kl = (theirs.detach() - own).exp() - (theirs.detach() - own) - 1
            each, out = plain_surrogate(kind, own, drawn, advantage, *bounds)
            alike = {"grpo": count * len(answer), "gspo": count * len(answer), "dr_grpo": count * LONGEST}
            total, beyond = total + (each + config.beta * kl).sum() / alike.get(kind, tokens), beyond + out
    return total, beyond / tokens


def plain_updates(model, reference, optimizer, groups, kind, config):
    """(loss, gradient norm, part of the tokens beyond the bounds) of each update of a step."""
    with torch.no_grad():
        before = [[plain_logprobs(model, p, each, config.temperature) for each in answers] for p, answers, _ in groups]
    parts = np.array_split(np.arange(len(groups)), config.minibatches)
    for part in parts * config.update_epochs:
        some, then = ([of[i] for i in part] for of in (groups, before))
        loss, beyond = plain_loss(model, reference, some, kind, config, then)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        model.zero_grad()
        yield loss.item(), norm, beyond


@pytest.mark.parametrize(
    ("family", "kind", "more"),
    [
        ("llama-tied", "dapo", {}),
        ("gemma2", "grpo", {"beta": 0.3, "temperature": 0.7, "micro_batch_size": 2}),  # logits with a soft cap
        ("qwen3-moe", "dr_grpo", {"packing": False, "answers_at_once": 3, "share_prompt": False}),
        ("qwen3.5", "dapo", {"beta": 0.1}),  # documents in rows of their own
        ("llama-tied", "dapo", AGAIN | {"epsilon_high": 0.03}),
        ("llama-tied", "grpo", {"minibatches": 3, "beta": 0.1, "temperature": 0.8}),  # 2, 1 and 1 prompts
        ("llama-tied", "gspo", AGAIN | {"epsilon": 0.06, "update_epochs": 3, "minibatches": 1}),
        ("llama-tied", "cispo", AGAIN | {"epsilon_high": 0.02}),
    ],
)
def test_a_run_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, family, kind, more):
    folder, data = tiny_model(family), write_rows("rows.jsonl", chat_rows)
    config = resolve_config("grpo", **sampled(tmp_path, folder, data, loss=[kind], **more))
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    model, reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager") for _ in "12"
    )
    optimizer = plain_adamw([*model.parameters()], config.learning_rate, config.weight_decay)
    for step, (row, places) in enumerate(zip(metrics(tmp_path / "out"), planned_rows(config), strict=True), 1):
        groups = []
        for place, number in enumerate(places):
            prompt = opened(tokenizer, chat_rows[number]["messages"][: 2 if number % 3 else 4])
            drawn = [numbers(config.seed, step, place, i) for i in range(SAMPLES)]
            answers = [plain_answer(model, prompt, each, stops, config.temperature) for each in drawn]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            groups.append((prompt, answers, vowels([[{"content": text}] for text in texts])))
        found = list(plain_updates(model, reference, optimizer, groups, kind, config))
        loss, norm, beyond = map(np.mean, zip(*found, strict=True))
        tokens = sum(len(answer) for _, answers, _ in groups for answer in answers)
        assert row["reward"] == pytest.approx(np.mean([rewards for *_, rewards in groups]), abs=1e-12)
        assert row["answers/length"] == tokens / (len(groups) * SAMPLES)
        assert row["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4 if step > 2 else 2e-5)
        assert row.get("clipped", 0.0) == pytest.approx(beyond, abs=1e-9)
        again = config.minibatches * config.update_epochs > 1
        assert ("clipped" in row) == again and row["trained_tokens"] == tokens * config.update_epochs
    assert config.epsilon is None or 0.05 < row["clipped"] < 0.5


def test_two_processes_learn_the_same(tmp_path, functions):
    chosen = ("ddp 2", "fsdp full 2, offloaded", "tp 2", "pp 2", "cp 2")
    resampled = {"reward": [f"{functions}:sometimes"], "max_resample_times": 2}
    once = Subject("llama-tied", "full", FULL | SAMPLED | resampled, "grpo")
    again = replace(once, name="gspo", flags=FULL | SAMPLED | AGAIN | {"loss": ["gspo"], "update_epochs": 3})
    for verdict in in_real_processes(tmp_path, 2, chosen, once, again):
        assert verdict.passed and verdict.difference is not None, verdict


def test_four_processes_learn_the_same(tmp_path):
    chosen, lora = ("hybrid 2x2", "tp 2 x pp 2", "pp 2 x cp 2"), LORA | SAMPLED | AGAIN
    for verdict in in_real_processes(tmp_path, 4, chosen, Subject("llama", "LoRA", lora, "grpo")):
        assert verdict.passed and verdict.difference is not None, verdict


def test_a_run_goes_on_bit_for_bit(tmp_path, tiny_model, write_rows, chat_rows, functions):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), save_steps=1, tuner="lora")
    values |= {"beta": 0.1, "max_steps": 4, "lora_dropout": 0.2, "learning_rate": 1e-2, "keep_checkpoints": 9}
    values |= {"minibatches": 2, "update_epochs": 2, "max_resample_times": 2, "reward": [f"{functions}:sometimes"]}
    train_alone(resolve_config("grpo", **values))
    answers = (tmp_path / "out" / "answers.jsonl").read_text()
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000002"
    train_alone(resolve_config("grpo", **values | {"output_dir": str(tmp_path / "again"), "resume": str(checkpoint)}))
    kept = ("step", "loss", "reward", "grad_norm", "kl/reference", "entropy", "clipped", "answers/resampled")
    first, again = ([[row[name] for name in kept] for row in metrics(tmp_path / name)] for name in ("out", "again"))
    assert again == first[2:] and all(row[-1] > 0 for row in first)
    assert (tmp_path / "again" / "answers.jsonl").read_text().splitlines() == answers.splitlines()[2:]
    for newer in (3, 4):
        shutil.rmtree(checkpoint.with_name(f"step-0000000{newer}"))
    train_alone(resolve_config("grpo", **values | {"resume": "auto"}))
    assert (tmp_path / "out" / "answers.jsonl").read_text() == answers  # those of steps that came again are not twice


def test_weights_of_half_a_step_are_not_saved(tmp_path, tiny_model, write_rows, chat_rows):
    """The first of the second step's updates is sound, and spoils what the second gets."""
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=1, save_steps=1)
    values["minibatches"] = 2
    train_alone(resolve_config("grpo", **values))
    again = {"output_dir": str(tmp_path / "again"), "resume": str(tmp_path / "out"), "max_steps": 3}
    with pytest.raises(NotFinite, match="of step 2 is not finite"):
        train_alone(resolve_config("grpo", **values | again | {"learning_rate": 1e30, "save_steps": 100}))
    assert not [*(tmp_path / "again").glob("checkpoints/*")]


def test_a_reference_that_is_gone_is_told_before_rows_are_read(tmp_path, tiny_model, write_rows, chat_rows):
    """The adapter that a run went on from: its checkpoints have another."""
    data = write_rows("rows.jsonl", chat_rows)
    values = sampled(tmp_path, tiny_model("llama"), data, save_steps=1, beta=0.1, max_steps=1, tuner="lora")
    train_alone(resolve_config("grpo", **values))
    adapter = (tmp_path / "out" / "model").rename(tmp_path / "adapter")
    values |= {"adapter": str(adapter), "output_dir": str(tmp_path / "on")}
    train_alone(resolve_config("grpo", **values))
    shutil.rmtree(adapter)
    data.unlink()
    with pytest.raises(UserError, match="no adapter_config.json in the adapter folder"):
        train_alone(resolve_config("grpo", **values | {"max_steps": 2, "resume": "auto"}))


def test_answers_become_better(tmp_path, tiny_model, write_rows, chat_rows):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=20, samples=8)
    train_alone(resolve_config("grpo", **values | {"learning_rate": 3e-3}))
    rewards = [row["reward"] for row in metrics(tmp_path / "out")]
    assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5])


def test_a_prompt_is_trained_once_for_its_answers(tmp_path, tiny_model, write_rows, chat_rows):
    values = sampled(tmp_path, tiny_model("gemma3"), write_rows("rows.jsonl", chat_rows), beta=0.1)  # sliding windows
    rows = []
    for name, more in (("shared", {}), ("apart", {"share_prompt": False}), ("parted", {"max_length": 130})):
        train_alone(resolve_config("grpo", **values | more | {"output_dir": str(tmp_path / name)}))
        rows.append(metrics(tmp_path / name))
    shared, apart, parted = rows  # whose packs hold fewer answers, and whose prompts are therefore fewer
    for one, other in zip(shared, apart, strict=True):
        assert other["reward"] == one["reward"] and other["trained_tokens"] == one["trained_tokens"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert one["tokens"] < 0.6 * other["tokens"]
    assert shared[0]["tokens"] < parted[0]["tokens"]


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_an_answer_does_not_depend_on_those_beside_it(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    drawn = torch.rand(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    prompts = [[5, 6, 7], [9] * 11, [9] * 11, [4], [5, 6, 7], [5, 6, 7], list(range(20, 26))]
    settings_before = model.generation_config
    with answering(model, switch=False):
        together = sample(model, prompts, drawn, stops=[2])
        alone = [sample(model, [prompt], drawn[i : i + 1], stops=[2])[0] for i, prompt in enumerate(prompts)]
    assert together == alone and together[0] != together[4] != together[5]
    assert model.generation_config is settings_before


def test_answers_are_drawn_from_the_models_distribution(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()
    even = (torch.arange(4000, dtype=torch.float64)[:, None] + 0.5) / 4000
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 6]])).logits[0, -1].double().softmax(-1)
    with answering(model, switch=False):
        tokens = torch.tensor(sample(model, [[5, 6]] * 4000, even, stops=[]))[:, 0]
    found = tokens.bincount(minlength=len(wanted)) / 4000
    assert (found - wanted).abs().max() < 1 / 4000


def test_what_stands_behind_the_end_is_no_answer(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()
    drawn = torch.rand(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with answering(model, switch=False):
        free, _ = sample(model, [[5], [6]], drawn, stops=[])
        stopped, _ = sample(model, [[5], [6]], drawn, stops=[free[4]])
    assert stopped == free[: free.index(free[4]) + 1]


# ---- rewards --------------------------------------------------------------------------------------------------------

FUNCTIONS = '''
from beside import bonus
from swiftlite.verification.cases import vowels

def right(prompts, completions, answer, **others):
    """As TRL's functions are."""
    return [float(c[0]["content"] == a) + bonus for c, a in zip(completions, answer)]

def sometimes(prompts, completions, **others):
    """Of half of the prompts no answer is better than another."""
    pairs = zip(prompts, vowels(completions), strict=True)
    return [found * (len(prompt[-1]["content"]) % 2) for prompt, found in pairs]

def nothing(completions, **others):
    return [None for _ in completions]

def few(completions, **others):
    return [1.0]

def placed(completions, /, **others):
    return [1.0 for _ in completions]

class Kind:
    pass

def own(completions, completion, **others):
    return [1.0 for _ in completions]

def broken(completions):
    return [1.0 for _ in completions]

async def later(completions, **others):
    return []

def cancelled(completions, **others):
    import asyncio
    raise asyncio.CancelledError

def quits(completions, **others):
    raise SystemExit(0)

def nan(completions, **others):
    return [float("nan") for _ in completions]

def infinite(completions, **others):
    return [float("inf") for _ in completions]

def vast(completions, **others):
    return [10**400 for _ in completions]

def unordered(completions, **others):
    return {float(place) for place, _ in enumerate(completions)}

def digits(completions, **others):
    return "10"

def words(completions, **others):
    return ["1.5" for _ in completions]

def tables(completions, **others):
    return [[1.0, 2.0] for _ in completions]

def changes(completion_ids, completions, **others):
    for ids, said in zip(completion_ids, completions):
        ids.clear()
        said.clear()
    return [1.0 for _ in completions]

def unsettles(completions, **others):
    import os, random, signal, numpy, torch
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.chdir("/")
    return vowels(completions)

def halves(completion_ids, **others):
    """Of every other answer nothing is said."""
    return [place if place % 2 else None for place, _ in enumerate(completion_ids)]

number = 3
'''


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "beside.py").write_text("bonus = 0.25\n")
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def said(text, **columns):
    return Rollout([{"role": "user", "content": "?"}], text, [1, 2], columns, "rows.jsonl:1")


def test_functions_get_what_trl_gives_them(functions):
    answers = [said("4", answer="4"), said("5", answer="4"), said("x", other=1)]
    right, nothing = load_rewards([f"{functions}:right*0.5", f"{functions}:nothing"])
    assert (right.name, right.weight, nothing.weight) == ("right", 0.5, 1.0)
    found = rewards_of([right, nothing], answers, 9)
    assert found[0] == [1.25, 0.25, 0.25] and all(map(math.isnan, found[1]))
    assert rewards_of([right], [], 9) == [[]]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("gone.py:right", "there is no file gone.py"),
        ("{}:wrong", "there is no function wrong"),
        ("{}:number", "there is no function number"),
        ("{}:later", "asynchronous"),
        ("{}:Kind", "Kind is a class"),
        ("{}:right*much", "'much' is no weight"),
        ("right", "'right' names no function"),
        ("no_such_package.rewards.right", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_no_function_is_told(functions, word, wanted):
    with pytest.raises(UserError, match=wanted.replace(".", r"\.")):
        load_rewards([word.format(functions)])


@pytest.mark.parametrize(
    ("code", "wanted"), [("1 / 0", "ZeroDivisionError"), ("def right(", "SyntaxError"), ("exit(0)", "SystemExit")]
)
def test_a_file_that_fails_is_told(tmp_path, code, wanted):
    (tmp_path / "bad.py").write_text(f"{code}\n")
    with pytest.raises(UserError, match=f"cannot be imported: {wanted}"):
        load_rewards([f"{tmp_path / 'bad.py'}:right"])


@pytest.mark.parametrize("code", [143, 129])
def test_a_file_with_a_signal_is_not_at_fault(tmp_path, code):
    (tmp_path / "slow.py").write_text(f"from swiftlite.ending import raise_signal\nraise_signal({code - 128})\n")
    with pytest.raises(SystemExit):
        load_rewards([f"{tmp_path / 'slow.py'}:right"])


def test_a_file_that_goes_elsewhere_takes_nobody_along(tmp_path):
    (tmp_path / "goes.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\ndef right(**others): ...\n")
    here = Path.cwd()
    load_rewards([f"{tmp_path / 'goes.py'}:right"])
    assert Path.cwd() == here


def test_a_file_is_run_once(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\ndef a(**o): ...\ndef b(**o): ...\n")
    load_rewards([f"{path}:a", f"{path}:b*2"])
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize(("end", "status"), [("return [1.0]", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_process_that_a_function_forks_is_no_second_run(tmp_path, end, status):
    """Nor does it hang, which it did in the joins of threads that are not in it."""
    lines = "if child := os.fork():", "    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]", end
    (tmp_path / "forks.py").write_text("import os\ndef forks(**others):\n" + "".join(f"    {line}\n" for line in lines))
    code = f"""
from swiftlite.training.rollouts.rewards import Rollout, load_rewards, rewards_of
print(rewards_of(load_rewards(["{tmp_path / "forks.py"}:forks"]), [Rollout("?", "x", [1], {{}}, "rows.jsonl:1")], 9))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"[[{float(status)}]]\n" and ("Traceback" in done.stderr) == (status > 0)


def test_functions_of_a_file_work_in_processes_that_are_spawned(tmp_path):
    lines = "import multiprocessing", "def half(text): return len(text) / 2", "def pooled(completions, **others):"
    lines += (
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:",
        "        return pool.map(half, completions)",
    )
    (tmp_path / "pooling.py").write_text("\n".join(lines))
    lines = "from swiftlite.training.rollouts.rewards import *", "if __name__ == '__main__':"
    lines += (f"    rewards = load_rewards(['{tmp_path}/pooling.py:pooled'])",)
    lines += ("    print(rewards_of(rewards, [Rollout('?', 'x', [1], {}, 'rows.jsonl:1')], 9))",)
    (tmp_path / "asks.py").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, tmp_path / "asks.py"], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[[0.5]]\n", done.stderr[-500:]


@pytest.mark.parametrize("name", ["json", "a.b", "__main__", "taken"])
def test_a_file_may_be_called_as_another_module(tmp_path, monkeypatch, name):
    """Of the library, or one that was imported from another folder."""
    monkeypatch.setitem(sys.modules, "taken", importlib.import_module("importlib"))
    (tmp_path / f"{name}.py").write_text("def right(**others): return [7.0]\n")
    (found,) = load_rewards([f"{tmp_path / name}.py:right"])
    assert rewards_of([found], [said("4")], 9) == [[7.0]]


def test_functions_do_not_change_what_others_get(functions):
    answers = [said("4", answer="4"), said("5", answer="4")]
    found = rewards_of(load_rewards([f"{functions}:changes", f"{functions}:right"]), answers, 9)
    assert found[1] == [1.25, 0.25] and [answer.ids for answer in answers] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("few", "returned 1 numbers for 2 answers"),
        ("broken", "broken failed: TypeError"),
        ("cancelled", "cancelled failed: CancelledError"),
        ("quits", "quits failed: SystemExit"),
        ("nan", "nan returned nan"),
        ("infinite", "infinite returned inf"),
        ("vast", "vast returned 1000"),
        ("unordered", "unordered returned set"),
        ("digits", "digits returned str"),
        ("words", "words returned '1.5'"),
        ("tables", "tables returned \\[1.0, 2.0\\]"),
    ],
)
def test_a_function_that_fails_is_told(functions, name, wanted):
    with pytest.raises(RunError, match=wanted) as failure:
        rewards_of(load_rewards([f"{functions}:{name}"]), [said("4", answer="4"), said("5", answer="4")], 9)
    assert failure.value.where.endswith("for answers to rows.jsonl:1 and others")
    assert "rewards.py" not in failure.value.where


@pytest.mark.parametrize(
    ("name", "columns", "problem", "fix"),
    [
        ("right", ("level", "question"), "right asks for `answer`, which is no column", "they have level, question"),
        ("right", (), "asks for `answer`", "they have none"),
        ("own", ("answer",), "asks for `completion`", "what rows have as completion is not handed on"),
        ("broken", ("answer",), "does not take answer, completion_ids, prompts", r"add \*\*others"),
        ("placed", (), "placed takes `completions` by its place alone", "leave out the /"),
        ("right", ("answer",), None, None),
        ("nothing", (), None, None),
    ],
)
def test_what_functions_ask_for_is_known_before_training(functions, name, columns, problem, fix):
    rewards = load_rewards([f"{functions}:{name}"])
    if problem is None:
        check_columns(rewards, Asked("--dataset rows.jsonl", columns, False))
        return
    with pytest.raises(UserError, match=problem) as failure:
        check_columns(rewards, Asked("--dataset rows.jsonl", columns, False))
    assert failure.value.where == f"--reward {functions}:{name}, --dataset rows.jsonl"
    assert re.search(fix, failure.value.fix)


def test_a_run_whose_rows_lack_a_column_does_not_begin(tmp_path, tiny_model, write_rows, chat_rows, functions):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    with pytest.raises(UserError, match="asks for `answer`"):
        train_alone(resolve_config("grpo", **values | {"reward": [f"{functions}:right"]}))


def test_held_out_rows_that_lack_one_are_told_before_training(tmp_path, tiny_model, write_rows, functions):
    """Not when the first evaluation is due."""
    answered = write_rows("rows.jsonl", [{"question": f"{number}?", "answer": "a"} for number in range(9)])
    held_out = write_rows("held.jsonl", [{"question": "a?"}])
    values = sampled(tmp_path, tiny_model("llama"), answered, eval_dataset=[str(held_out)])
    for reward, problem in (f"{functions}:right", "asks for `answer`"), ("contains", "and no row has one"):
        with pytest.raises(UserError, match=problem) as failure:
            train_alone(resolve_config("grpo", **values | {"reward": [reward]}))
        assert failure.value.where == f"--reward {reward}, --eval-dataset {held_out}"


def test_processes_wait_for_the_functions_of_another(tiny_model):
    """Longer than they do in a collective of training."""
    assert run_ranks(2, asks_slowly, tiny_model("llama")) == [[2.0, 2.0, 2.0]] * 2


def asks_slowly(rank: int, model) -> list[float]:
    def slow(completion_ids, **_others):
        time.sleep(7 * rank)
        return [float(len(ids)) for ids in completion_ids]

    world.PATIENCE = timedelta(seconds=5)
    asked = json.dumps({"prompt": "?", "expected": None, "columns": {}})
    prompts = [Document(np.asarray([1]), np.asarray([False]), "", asked=asked)] * 3
    answerer = SimpleNamespace(
        pads=True, ready=nullcontext, generate=lambda asked, *_: [Generation([5, 2])] * len(asked)
    )
    config = resolve_config("grpo", model="m", dataset=["d"], reward=["f"])
    with world.joined() as ours:
        together = Patient(build_mesh(Layout(dp_replicate=2), ours.device))
        rewards = [Reward("slow", 1.0, slow, "slow")]
        ask = RolloutWorker(config, answerer, load_tokenizer(str(model)), rewards, [], together, [2])
        return [*ask.totals(ask(prompts, SamplingOptions(1, 1.0, lambda _, place: (place,))))[:, 0]]


def test_a_step_without_better_answers_is_skipped_and_counted(tmp_path, tiny_model, write_rows, chat_rows, functions):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    values |= {"reward": [f"{functions}:nothing"], "max_steps": 2, "minibatches": 2, "update_epochs": 2}
    train_alone(resolve_config("grpo", **values))
    messages = [one["text"] for one in json.loads((tmp_path / "out" / "run.json").read_text())["messages"]]
    told = [text for text in messages if "skipped: each prompt's answers have the same reward" in text]
    assert [text.partition(":")[0] for text in told] == ["step 1 skipped", "step 2 skipped"]
    row = metrics(tmp_path / "out")[0]
    assert (row["answers/equal"], row["answers/unrewarded"], row["grad_norm"]) == (1.0, 1.0, 0.0)
    assert (row["reward"], row["reward_std"], row["rewards/nothing"], row["entropy"]) == (None, None, None, None)


def test_a_step_of_which_updates_are_skipped_counts_once(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    train, updates = DirectStep.train, []

    def spoilt(self, step, batches, step_loss, scale, count, update=0):
        updates.append((step, update))
        outcome = train(self, step, batches, step_loss, scale, count, update)
        return replace(outcome, loss=math.nan) if update else outcome

    monkeypatch.setattr(DirectStep, "train", spoilt)
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), on_nonfinite="skip", **AGAIN)
    train_alone(resolve_config("grpo", **values))
    assert updates == [(step, update) for step in (1, 2) for update in range(4)]
    said = [message["text"] for message in json.loads((tmp_path / "out" / "run.json").read_text())["messages"]]
    assert "update 3 of step 2 skipped: loss is not finite (2 so far)" in said
    assert "note: steps that were skipped: 2" in said
    assert all(row["loss"] is not None for row in metrics(tmp_path / "out"))


def test_a_loss_that_jumps_is_one_of_steps_not_of_updates(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    """The first update of a step has a loss of about 0 whatever the later ones have."""
    train = DirectStep.train

    def spoilt(self, step, batches, step_loss, scale, count, update=0):
        outcome = train(self, step, batches, step_loss, scale, count, update)
        return replace(outcome, loss=50.0 if step > 20 and update else 0.0)

    monkeypatch.setattr(DirectStep, "train", spoilt)
    small = {"max_new_tokens": 6, "update_epochs": 3, "max_steps": 24}
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), **small)
    with pytest.raises(RunError, match="the loss of step 23 and of the 2 before it"):
        train_alone(resolve_config("grpo", **values))


def test_what_a_function_sets_for_all_does_not_change_the_run(tmp_path, tiny_model, write_rows, chat_rows, functions):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=2, tuner="lora")
    values |= {"lora_dropout": 0.2}
    here, answer, threads = Path.cwd(), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    train_alone(resolve_config("grpo", **values))
    more = {"reward": [f"{functions}:unsettles"], "output_dir": str(tmp_path / "other")}
    train_alone(resolve_config("grpo", **values | more))
    first, other = ([(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / name)] for name in ("out", "other"))
    assert first == other
    assert Path.cwd() == here and signal.getsignal(signal.SIGTERM) is answer and torch.get_num_threads() == threads


def test_an_answer_without_a_reward_is_compared_with_nothing(tmp_path, tiny_model, write_rows, chat_rows, functions):
    """As in TRL: it has no advantage, and the others' mean is without it."""
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), samples=5, max_new_tokens=1)
    values |= {"reward": [f"{functions}:halves"], "max_steps": 1, "global_batch_size": 1}
    train_alone(resolve_config("grpo", **values))
    (row,) = metrics(tmp_path / "out")
    told = json.loads((tmp_path / "out" / "answers.jsonl").read_text())
    assert [answer["reward"] for answer in told["answers"]] == [None, 1.0, None, 3.0, None]
    assert (row["reward"], row["reward_std"], row["trained_tokens"]) == (2.0, 1.0, 2)
    assert (row["answers/unrewarded"], row["answers/equal"]) == (0.6, 0.0)


# ---- prompts --------------------------------------------------------------------------------------------------------


def prepared(tmp_path, write_rows, tiny_model, rows, template=None, **more):
    data, tokenizer = write_rows("rows.jsonl", rows), load_tokenizer(str(tiny_model("llama")))
    tokenizer.chat_template = template or tokenizer.chat_template
    config = resolve_config("grpo", **sampled(tmp_path, tiny_model("llama"), data, **more))
    return prepare_data(config, lambda: tokenizer), tokenizer


def test_rows_become_prompts(tmp_path, write_rows, tiny_model):
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}], "answer": 7},
        {"prompt": "Hello"},
        {"question": "Who?", "answer": "I", "level": {"deep": [1]}},
        {"prompt": "Once", "completion": " upon a time"},
    ]
    found, tokenizer = prepared(tmp_path, write_rows, tiny_model, rows, shuffle=False, global_batch_size=4)
    (batch, *_) = found.train.steps()
    asked = [document for pack in batch.packs for document in pack]
    texts = [tokenizer.decode(document.input_ids) for document in asked]
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    assert texts == [opening("Hi"), opening("Hello"), opening("Who?"), "Once"]
    records = [json.loads(document.asked) for document in asked]
    assert [record["prompt"] for record in records[::3]] == [[{"role": "user", "content": "Hi"}], "Once"]
    assert records[0]["columns"] == rows[0] and records[2]["columns"] == rows[2] and records[1]["columns"] == {}
    assert not any(document.trained.any() for document in asked)


def test_questions_of_two_answers_are_those_that_are_trained(tmp_path, write_rows, tiny_model):
    """As text where all is text, and where answers are whole conversations, or texts, what both begin with."""
    user, good, bad = ({"role": role, "content": text} for role, text in (("user", "Hi"), *2 * [("assistant", "x")]))
    rows = [
        {"prompt": "Once", "chosen": " upon a time", "rejected": " more"},
        {"prompt": [user], "chosen": "x", "rejected": "y"},
        {"chosen": [user, good], "rejected": [user, bad | {"content": "y"}]},
        {"chosen": "Human: Hi Bot: Hello", "rejected": "Human: Hi Bot: No"},
        {"prompt": "Equal", "chosen": "x", "rejected": "x"},  # which asks nevertheless
    ]
    found, tokenizer = prepared(tmp_path, write_rows, tiny_model, rows, shuffle=False, global_batch_size=5)
    (batch, *_) = found.train.steps()
    asked = [document for pack in batch.packs for document in pack]
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    texts = ["Once", opening("Hi"), opening("Hi"), "Human: Hi Bot:", opening("Equal")]
    assert [tokenizer.decode(document.input_ids) for document in asked] == texts
    answers = [" upon a time", "x", "x", " Hello", "x"]
    assert [json.loads(document.asked)["expected"] for document in asked] == answers
    with pytest.raises(UserError, match="chosen and rejected do not answer the same prompt"):
        other = [user | {"content": "Ho"}, bad]
        prepared(tmp_path, write_rows, tiny_model, [{"chosen": [user, good], "rejected": other}])


def test_what_is_not_asked_as_the_row_has_it_is_counted(tmp_path, write_rows, tiny_model):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    rows = [
        {"question": "Who is {{name}}?"},
        {"question": "By {{author}}", "tools": tools},  # of which the template knows nothing
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"prompt": "Once", "completion": " upon"},
    ]
    more = {"placeholders": {"name": "Robo"}, "system": "Be kind."}
    found, _ = prepared(tmp_path, write_rows, tiny_model, rows, template=PLAIN, **more)
    counts = {"placeholders_filled": 1, "placeholders_left": 1, "tools_left_out": 1, "system_added": 3}
    assert {name: found.audit["rows"].get(name) for name in counts} == counts
    tokenizer = load_tokenizer(str(tiny_model("llama")))
    tokenizer.chat_template = None
    config = resolve_config("grpo", **sampled(tmp_path, tiny_model("llama"), tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[3]) + "\n")
    assert prepare_data(config, lambda: tokenizer).audit["rows"]["asked_plainly"] == 1


def test_rows_without_a_known_key_are_told_of_columns(tmp_path, write_rows, tiny_model):
    with pytest.raises(UserError, match="no row format fits these keys: problem, solution") as failure:
        prepared(tmp_path, write_rows, tiny_model, [{"problem": "1 + 1", "solution": "2"}])
    assert "--columns KEY=COLUMN" in failure.value.fix


def test_functions_get_the_columns_of_all_rows(tmp_path, write_rows, tiny_model, functions):
    """Also in a step none of whose rows has one."""
    rows = [{"prompt": "Hello"}, {"prompt": "Hi", "answer": "4"}]
    found, tokenizer = prepared(tmp_path, write_rows, tiny_model, rows, shuffle=False, global_batch_size=1)
    assert found.columns == ("answer",)
    (batch, *_) = found.train.steps()
    prompts = [document for pack in batch.packs for document in pack]
    config = resolve_config("grpo", **sampled(tmp_path, tiny_model("llama"), "rows.jsonl", samples=2))
    together = Patient(build_mesh(Layout(), torch.device("cpu")))
    generator = SimpleNamespace(ready=nullcontext, generate=lambda asked, _: [Generation([5, 2]), Generation([6, 7])])
    ask = RolloutWorker(
        config, generator, tokenizer, load_rewards([f"{functions}:right"]), found.columns, together, [2]
    )
    (group,) = ask(prompts, SamplingOptions(2, 1.0, lambda *_: ()))
    assert group.rewards == [[0.25, 0.25]] and [answer.columns for answer in group.answers] == [{"answer": None}] * 2


def test_what_cannot_be_asked_is_told_or_counted(tmp_path, write_rows, tiny_model):
    rows = [{"prompt": "Hello"}, {"messages": [{"role": "assistant", "content": "x"}]}, {"prompt": "Long " * 300}]
    with pytest.raises(UserError, match="the row has no question") as failure:
        prepared(tmp_path, write_rows, tiny_model, rows)
    assert failure.value.where.endswith("rows.jsonl:2")
    rows += [{"prompt": "Hello", "completions": "lost"}, {"prompt": "Hello", "answer": "\ud800"}]
    found, _ = prepared(tmp_path, write_rows, tiny_model, rows, on_bad_row="skip")
    assert found.audit["rows"]["dropped"] == {"no_question": 1, "over_long": 1, "taken_name": 1, "not_utf8": 1}
    with pytest.raises(UserError, match=r"the prompt has [\d,]+ tokens, and beside --max-new-tokens 150 are left"):
        prepared(tmp_path, write_rows, tiny_model, rows[:3:2], overlong="error")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"reward": []}, "nothing says how grpo rewards answers"),
        ({"max_new_tokens": 160}, "leaves no room for a prompt"),
        ({"eval_samples": 2, "eval_temperature": 0}, "are all the same"),
        ({"overlong": "truncate"}, "would make another question of a prompt"),
        ({"reference": "precompute"}, "has none then"),
        ({"neftune_noise_alpha": 5}, "compares answers of several lengths"),
        ({"loss": ["sigmoid"]}, "unknown loss `sigmoid`"),
        ({"minibatches": 5}, "--minibatches 5 divides the prompts of a step, of which there are 4"),
        ({"loss": ["gspo"], "teacher": "teacher"}, "gspo counts an answer's tokens alike"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, flags, wanted):
    with pytest.raises(UserError, match=wanted):
        resolve_config("grpo", **sampled(tmp_path, "model", "rows.jsonl") | flags)


def test_bounds_of_several_updates(tmp_path):
    """By default the papers'."""

    def bounds(**more):
        return clip_range(resolved_of(tmp_path, "model", update_epochs=2, **more).config)

    assert bounds() == (0.2, 0.2)
    assert bounds(epsilon=0.1) == (0.1, 0.1)
    assert bounds(epsilon=0.1, epsilon_high=0.28) == (0.1, 0.28)
    assert bounds(loss=["gspo"]) == (3e-4, 4e-4)
    assert bounds(loss=["cispo"], epsilon=0.1) == (math.inf, 5.0)
    for more, note in (
        ({"update_epochs": 2, "loss": ["cispo"]}, "epsilon has no effect with --loss cispo"),
        ({}, "epsilon has no effect where a step has one update"),
    ):
        assert any(told.startswith(note) for told in resolved_of(tmp_path, "model", epsilon=0.1, **more).notes)


def test_more_updates_take_more_time(tmp_path, tiny_model):
    def seconds(**more):
        resolved = resolved_of(tmp_path, tiny_model("llama"), **more)
        outline = outline_of(resolved.config, load_config(resolved.config.model), "cuda")
        return settle(resolved, outline, Fleet(find_device("h200"), 1, 1)).pace.compute

    once = seconds()
    assert seconds(minibatches=2) / once < 1.5 < seconds(update_epochs=2) / once


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("steps_per_generation 4", "`minibatches` for the updates"),
        ("generation_max_length 64", "`max_new_tokens` for the tokens that an answer may have"),
        ("importance_sampling_level sequence", "loss: gspo"),
        ("importance_sampling_level token", None),
        ("generation_batch_size 32", "global_batch_size"),
        ("use_bias_correction_kl true", "a term of the loss"),
        ("dynamic_sample true", "write `max_resample_times: 3`"),
        ("external_plugins plugin.py", "FILE.py:NAME"),
        ("reward_model_path judge", "reward: FOLDER"),
        ("soft_cache_length 8", "write `reward: soft_overlong`"),
        ("repetition_n_grams 3", "write `reward: repetition`"),
        ("use_bias_correction_kl false", None),
        ("steps_per_generation 1", None),
        ("advantage_estimator grpo", None),
        ("multi_objective_aggregation sum_then_normalize", None),
        ("sleep_level 1", None),
    ],
)
def test_settings_of_other_tools(tmp_path, words, wanted):
    """wanted: of what is to be done instead; None where they change nothing."""
    name, value = words.split()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"method: grpo\nmodel: m\ndataset: rows.jsonl\nreward: f.py:f\n{name}: {value}\n")
    if wanted is None:
        assert f"{name} has no effect" in " ".join(load_recipe(str(recipe)).notes)
        return
    with pytest.raises(UserError, match=name) as failure:
        load_recipe(str(recipe))
    assert wanted in failure.value.fix


# ---- around a run ---------------------------------------------------------------------------------------------------


def test_a_recipe_finds_functions_beside_itself(tmp_path, tiny_model, write_rows, chat_rows, functions, monkeypatch):
    """And the saved settings name them from any folder."""
    lines = {"method": "grpo", "reward": "functions.py:right*2", "model": str(tiny_model("llama")), "max_steps": 1}
    lines |= {"dataset": str(write_rows("rows.jsonl", chat_rows)), "output_dir": str(tmp_path / "out"), "samples": 2}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    monkeypatch.chdir(tmp_path.parent)
    config = resolve(None, {}, recipe=load_recipe(str(recipe)), env={}).config
    assert load_rewards(config.reward)[0].weight == 2
    monkeypatch.chdir(tmp_path)
    save_config(config.model_copy(update={"reward": ["functions.py:right"]}), tmp_path / "config.yaml")
    saved = load_recipe(str(tmp_path / "config.yaml")).entries["reward"].value
    assert saved == [f"{functions}:right"]


def test_what_is_told_of_a_run_is_its_reward():
    rows = [{"step": step, "loss": 0.0, "reward": step / 10, "answers/length": 9.0} for step in (1, 2, 3)]
    board = Board(3, {}, rows=rows)
    assert curve_of(rows)[0] == board.curve == "reward" and (board.first, board.last) == (0.1, 0.3)
    figures = page.figures(rows, {})
    assert (figures["first reward"], figures["last reward"]) == ("0.1000", "0.3000")
    assert curve_of([{"step": 1, "loss": 2.0}])[0] == "loss"


def test_a_plan_counts_who_answers(tmp_path, tiny_model):
    """A copy where the model is divided, the reference, and what answers take while they are drawn."""
    many = {"answers_at_once": 10_000, "samples": 2_500}
    given = sampled(tmp_path, tiny_model("llama"), "rows.jsonl", precision="bf16", **many)
    config = resolve_config("grpo", **given | {"activation_checkpointing": "none"})
    outline = outline_of(config, load_config(config.model), "cuda")
    alone, two = Layout(), Layout(dp_replicate=2)
    plain = config.model_copy(update={"method": "sft"})
    copy = (outline.trained + outline.frozen) * 2
    held, without = (outline.holds(each, two, None) for each in (config, plain))
    assert held.weights - without.weights == pytest.approx(copy)
    examined = plain.model_copy(update={"eval_fraction": 0.1})  # which has its held-out rows answered
    assert outline.holds(examined, two, None).weights - without.weights == pytest.approx(copy)
    kv = 10_000 * config.max_length * cache_bytes_per_token(outline.model_config, torch.bfloat16)
    assert outline.holds(config, alone, None).activations > kv > without.activations
    assert held.activations - kv / 2 < 0.2 * kv  # each of two draws half of the step's answers, and no more
    tied = config.model_copy(update={"beta": 0.1})
    assert outline.holds(tied, alone, None).weights == pytest.approx(2 * outline.holds(config, alone, None).weights)
