"""What functions say of a model's answers to held-out prompts: while it trains by them, and of any model."""

import json
import resource
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_eval import evaluate
from test_grpo import FUNCTIONS, numbers, opened, plain_answer, sampled
from test_parity import metrics, settings, train_alone
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import run_swiftlite

from swiftlite.cli.app import main
from swiftlite.cli.eval import _tell
from swiftlite.cli.json_output import write_line
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.save import save_config
from swiftlite.config.validate import Given
from swiftlite.data.evaluation_prompts import prepare_run
from swiftlite.data.order import Sequence, StepBatch
from swiftlite.errors import RunError, UserError
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.reporting import page
from swiftlite.reporting.board import Board
from swiftlite.serving.evaluated import settle
from swiftlite.training.best import best_in_words, forget_other_losses
from swiftlite.training.evaluate import Evaluated
from swiftlite.training.evaluation import Evaluation
from swiftlite.training.progress import Progress
from swiftlite.training.rollouts.evaluator import AnswerEvaluator
from swiftlite.training.rollouts.policy_batches import PolicyBatches
from swiftlite.training.rollouts.rewards import Reward, Rollout
from swiftlite.training.rollouts.worker import RolloutGroup, RolloutWorker
from swiftlite.verification.cases import vowels

VOWELS = "swiftlite.verification.cases.vowels"


def likeliest(model, prompt, length, stops):
    """Token after token, each time by a pass over all of it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] not in stops):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def trained(tmp_path, tiny_model, write_rows, chat_rows):
    """Train with an evaluation and a checkpoint of each step: settings beside -> rows of metrics.jsonl."""

    def start(**more):
        values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), **more)
        held_out = {"eval_dataset": [str(write_rows("held.jsonl", chat_rows[:5]))], "learning_rate": 1e-2}
        every = {"eval_steps": 1, "save_steps": 1, "keep_checkpoints": 9, "max_steps": 4}
        train_alone(resolve_config("grpo", **values | held_out | every))
        return metrics(tmp_path / "out")

    return start


@pytest.mark.parametrize("more", [{}, {"eval_samples": 3, "temperature": 0.8}])
def test_evaluations_equal_plain_pytorch(tmp_path, trained, chat_rows, more):
    """In a run, and of what it has saved."""
    rows = trained(**more)
    for step in (1, 4):
        folder = tmp_path / "out" / "checkpoints" / f"step-0000000{step}"
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
        rewards, lengths = [], []
        for number, row in enumerate(chat_rows[:5]):
            prompt = opened(tokenizer, row["messages"][: 2 if number % 3 else 4])
            answers = [likeliest(model, prompt, 10, stops)]
            if more:
                drawn = [numbers(42, "evaluation", *prompt, place) for place in range(3)]
                answers = [plain_answer(model, prompt, each, stops, 0.8) for each in drawn]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            rewards.append(vowels([[{"content": text}] for text in texts]))
            lengths += map(len, answers)
        logged = rows[step - 1]
        wanted = {"reward": sum(map(sum, rewards)) / len(lengths), "answers/length": sum(lengths) / len(lengths)}
        wanted |= {"reward_best": sum(map(max, rewards)) / 5} if more else {}
        [found] = evaluate(model=str(folder), reward=[VOWELS], cache_dir=str(tmp_path / "cache"))
        for name, value in wanted.items():
            assert found.metrics[name] == logged[f"eval_{name}"] == pytest.approx(value, abs=1e-12)
        assert found.loss is None and found.counts == {"rows": 5, "tokens": found.counts["tokens"]}
        assert {f"eval_{name}" for name in found.metrics} == {name for name in logged if name.startswith("eval_")}


def test_the_best_has_the_highest_reward(tmp_path, trained):
    rows = trained(result="best", early_stopping_patience=9)
    rewards = {row["step"]: row["eval_reward"] for row in rows}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert len(set(rewards.values())) > 1 and min(rewards, key=rewards.get) != best
    [result] = (tmp_path / "out" / "model").glob("*.safetensors")
    saved = tmp_path / "out" / "checkpoints" / f"step-0000000{best}" / result.name
    assert result.read_bytes() == saved.read_bytes()
    said = json.loads((tmp_path / "out" / "run.json").read_text())["messages"]
    assert f"model/ is step {best}, which has the highest eval reward ({rewards[best]:.4g})" in [
        m["text"] for m in said
    ]


def test_several_processes_give_the_same_numbers_and_answers(tmp_path, trained):
    last, report, answers = trained()[-1], tmp_path / "report.json", tmp_path / "answers.jsonl"
    words = ["--json", report, "--cache-dir", tmp_path / "cache", "--answers", answers, "--parallel", "fsdp"]
    run_swiftlite(2, "eval", "--model", tmp_path / "out", "--reward", VOWELS, *words)
    [row] = json.loads(report.read_text())
    for name in ("reward", "rewards/vowels", "answers/length", "answers/cut"):
        assert row[name] == pytest.approx(last[f"eval_{name}"], rel=1e-9)
    told = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [each["where"].rpartition("/")[2] for each in told] == [f"held.jsonl:{line}" for line in range(1, 6)]
    given = [answer["reward"] for each in told for answer in each["answers"]]
    assert sum(given) / 5 == pytest.approx(row["reward"], rel=1e-12)


def test_a_model_that_was_trained_otherwise_is_evaluated_too(tmp_path, tiny_model, write_rows, chat_rows):
    """Whatever its run says of answers that are given."""
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), loss=["dft"], max_steps=1)
    train_alone(resolve_config("sft", **values | {"train_on": "last-answer", "overlong": "split"}))
    given = {"reward": [VOWELS], "max_new_tokens": 8, "cache_dir": str(tmp_path / "cache")}
    [run] = evaluate(model=str(tmp_path / "out"), **given)
    [alone] = evaluate(model=str(tmp_path / "out" / "model"), dataset=values["dataset"], max_length=160, **given)
    assert run.metrics["reward"] is not None and run.metrics["answers/length"] <= 8
    assert list(run.metrics.values()) == list(alone.metrics.values())


def with_long_ones(rows):
    """With rows in between that can be asked, but not learnt."""
    long = [{"role": "user", "content": "short?"}, {"role": "assistant", "content": "much too long " * 80}]
    return [row for pair in zip(rows, [{"messages": long}] * 20, strict=False) for row in pair]


def in_sft(tmp_path, tiny_model, write_rows, rows, **more):
    """Settings of a run that asks what it holds out."""
    data = write_rows("rows.jsonl", rows)
    judged = {"reward": [VOWELS], "max_new_tokens": 8, "eval_fraction": 0.3, "eval_steps": 1, "save_steps": 1}
    return settings(tmp_path, tiny_model("llama"), data, learning_rate=1e-2, max_steps=3, **judged) | more


def test_other_methods_have_what_they_hold_out_answered_beside_its_loss(tmp_path, tiny_model, write_rows, chat_rows):
    """And learn what they learn without; in several processes too."""
    given_rows = with_long_ones(chat_rows)
    values = in_sft(tmp_path, tiny_model, write_rows, given_rows, result="best", keep_checkpoints=9, overlong="drop")
    values["eval_samples"] = 3
    train_alone(resolve_config("sft", **values))
    rows, out = metrics(tmp_path / "out"), tmp_path / "out"
    places = [document.where for document in asked_of(values)]
    held = write_rows("held.jsonl", [given_rows[int(where.rpartition(":")[2]) - 1] for where in places])
    given = {"cache_dir": values["cache_dir"]}
    for step in (2, 3):
        folder = out / "checkpoints" / f"step-0000000{step}"
        [found] = evaluate(model=str(folder), reward=[VOWELS], dataset=[str(held)], **given)
        assert rows[step - 1]["eval_reward"] == found.metrics["reward"]
        assert rows[step - 1]["eval_answers/length"] == found.metrics["answers/length"]
    rewards = [row["eval_reward"] for row in rows]
    [result] = evaluate(model=str(out), reward=[VOWELS], **given)
    assert result.counts["rows"] == len(places) == 6 and result.metrics["reward"] == max(rewards)
    assert max(rewards) > min(rewards)
    _, recipe = settle({"model": Given(str(out), "--model", "flag")}, None)  # whose loss is evaluated
    assert not {"reward", "max_new_tokens", "eval_samples"} & recipe.entries.keys()
    texts = [message["text"] for message in json.loads((out / "run.json").read_text())["messages"]]
    assert any(f"which has the highest eval reward ({max(rewards):.4g})" in text for text in texts)
    assert json.loads((out / "audit.json").read_text())["questions"]["rows"]["used"] == len(places)
    plain = values | {"reward": [], "output_dir": str(tmp_path / "plain"), "result": "last"}
    train_alone(resolve_config("sft", **plain))
    learnt = [[row["loss"], row["eval_loss"], row["grad_norm"]] for row in rows]
    assert learnt == [[row["loss"], row["eval_loss"], row["grad_norm"]] for row in metrics(tmp_path / "plain")]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if not isinstance(value, list)]
    words += ["--dataset", *values["dataset"], "--reward", VOWELS, "--parallel", "fsdp"]
    run_swiftlite(2, "sft", *words, "--output-dir", tmp_path / "two")
    assert [row["eval_reward"] for row in metrics(tmp_path / "two")] == pytest.approx(rewards, rel=1e-9)


def asked_of(values, method="sft"):
    config = resolve_config(method, **values)
    prepared = prepare_run(config, lambda: load_tokenizer(config.model, trust_remote_code=False))
    assert (prepared.questions is None) == (not config.reward)
    return [one for batch in prepared.questions.steps() for pack in batch.packs for one in pack]


def test_the_rows_that_are_asked_are_those_that_are_held_out(tmp_path, tiny_model, write_rows, chat_rows):
    """Whatever is left out of one and not of the other."""
    values = in_sft(tmp_path, tiny_model, write_rows, with_long_ones(chat_rows), overlong="drop")
    config = resolve_config("sft", **values)
    prepared = prepare_run(config, lambda: load_tokenizer(config.model, trust_remote_code=False))
    learnt, held = (
        {one.where for batch in plan.steps() for pack in batch.packs for one in pack}
        for plan in (prepared.train, prepared.eval)
    )
    asked = {one.where for one in asked_of(values)}
    assert asked == held and not asked & learnt and len(asked) == 6
    assert prepared.audit["questions"]["rows"] == {"read": 6, "used": 6, "dropped": {}}


def test_the_summary_tells_that_nothing_was_rewarded(tmp_path, tiny_model, write_rows, chat_rows, capsys):
    (tmp_path / "judges.py").write_text("def silent(completions, **others):\n    return [None] * len(completions)\n")
    values = in_sft(tmp_path, tiny_model, write_rows, chat_rows, max_steps=1, reward=[f"{tmp_path}/judges.py:silent"])
    train_alone(resolve_config("sft", **values))
    assert "eval reward: none rewarded" in capsys.readouterr().out


def test_a_function_is_not_called_as_what_pairs_have(tmp_path, tiny_model, write_rows):
    """One of the two would be lost."""
    (tmp_path / "judges.py").write_text("def accuracy(completions, **others):\n    return [0.0] * len(completions)\n")
    pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(12)]
    values = in_sft(tmp_path, tiny_model, write_rows, pairs) | {"reward": [f"{tmp_path}/judges.py:accuracy"]}
    with pytest.raises(UserError, match="metrics have dpo's own numbers as rewards/accuracy"):
        train_alone(resolve_config("dpo", **values))


def test_rows_that_ask_nothing_are_learnt_and_counted(tmp_path, tiny_model, write_rows, chat_rows):
    """Wherever they stand; and those that are trained on with a weight are asked once."""
    silent = [
        {"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": f"{n}"}]} for n in "ab"
    ]
    values = in_sft(tmp_path, tiny_model, write_rows, silent + chat_rows[:8], eval_fraction=0.5)
    values["dataset"] = [f"{values['dataset'][0]}*2", str(write_rows("more.jsonl", chat_rows[8:12]))]
    apart = {"eval_fraction": 0.0, "eval_dataset": [str(write_rows("held.jsonl", silent + chat_rows[:4]))]}
    train_alone(resolve_config("sft", **values | apart | {"max_steps": 1}))
    [row], [found] = metrics(tmp_path / "out"), evaluate(model=str(tmp_path / "out"), reward=[VOWELS])
    assert row["eval_answers/length"] == found.metrics["answers/length"] and found.counts["rows"] == 4
    asked = [document.where for document in asked_of(values)]
    config = resolve_config("sft", **values)
    prepared = prepare_run(config, lambda: load_tokenizer(config.model, trust_remote_code=False))
    held = {one.where for batch in prepared.eval.steps() for pack in batch.packs for one in pack}
    quiet = {where for where in held if where.endswith(("/rows.jsonl:1", "/rows.jsonl:2"))}
    assert len(held) == 7 and quiet and sorted(asked) == sorted(held - quiet)
    rows = {"read": 7, "used": 7 - len(quiet), "dropped": {"no_prompt": len(quiet)}}
    assert prepared.audit["questions"]["rows"] == rows


def test_pairs_and_judged_answers_are_asked_too(tmp_path, tiny_model, write_rows):
    pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(12)]
    values = in_sft(tmp_path, tiny_model, write_rows, pairs) | {"reward": ["contains"], "max_steps": 1}
    train_alone(resolve_config("dpo", **values | {"reference": "model"}))
    [row] = metrics(tmp_path / "out")
    assert row["eval_loss"] > 0 and row["eval_rewards/contains"] == row["eval_reward"] == 0.0
    assert {"eval_rewards/accuracy", "eval_answers/length"} <= row.keys()


@pytest.mark.parametrize(
    ("more", "idle"),
    [
        ({"eval_fraction": None}, {"reward", "max_new_tokens", "eval_steps"}),
        ({"reward": []}, {"max_new_tokens"}),
        ({"samples": 4}, {"samples"}),
        ({}, set()),
    ],
)
def test_what_has_no_effect_where_nothing_is_asked(tmp_path, tiny_model, write_rows, chat_rows, more, idle):
    values = {"method": "sft", **in_sft(tmp_path, tiny_model, write_rows, chat_rows, **more)}
    given = {name: Given(value, name, "flag") for name, value in values.items() if value is not None}
    notes = [note for note in resolve(None, given).notes if "has no effect" in note]
    assert {note.partition(" ")[0] for note in notes} == idle


def test_a_memory_that_is_full_of_answers_is_told(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("swiftlite.training.rollouts.model_generator.sample", full)
    values = in_sft(tmp_path, tiny_model, write_rows, chat_rows)
    grpo = {"output_dir": str(tmp_path / "own"), "samples": 2}
    for method, more, doing in (("sft", {}, "the evaluation"), ("grpo", grpo, "the answers of step 1")):
        with pytest.raises(RunError, match=f"ran out of memory in {doing}") as told:
            train_alone(resolve_config(method, **values | more))
        assert told.value.where == "64 answers at a time, of up to 8 tokens" and "--answers-at-once" in told.value.fix


def test_a_dry_run_tells_what_is_asked(tmp_path, capsys, monkeypatch, tiny_model, write_rows, chat_rows):
    monkeypatch.setenv("COLUMNS", "200")
    values = in_sft(tmp_path, tiny_model, write_rows, chat_rows, eval_samples=2)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if not isinstance(value, list)]
    with pytest.raises(SystemExit):
        main(["sft", *words, "--dataset", *values["dataset"], "--reward", VOWELS, "--dry-run"])
    assert "held out, and 2 answers each, of up to 8 tokens, at temperature 1" in capsys.readouterr().out


def test_a_prompt_needs_room_before_its_answer(tmp_path, tiny_model, write_rows, chat_rows):
    values = in_sft(tmp_path, tiny_model, write_rows, chat_rows, max_new_tokens=160)
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        resolve_config("sft", **values)
    with pytest.raises(UserError, match="none of the rows that are held out can be asked"):
        asked_of(values | {"max_new_tokens": 150})


def test_an_answer_s_length_that_nobody_gave_gives_way(tmp_path, tiny_model, write_rows, chat_rows):
    values = in_sft(tmp_path, tiny_model, write_rows, chat_rows)
    del values["max_new_tokens"]
    assert resolve_config("sft", **values).max_new_tokens == values["max_length"] // 2
    assert resolve_config("sft", **values | {"reward": []}).max_new_tokens == 256  # nobody asks anything
    assert resolve_config("sft", **values | {"max_length": 300}).max_new_tokens == 256


@pytest.mark.parametrize("reward", [[], [VOWELS]])
def test_a_run_that_asked_nothing_says_nothing_of_answers(tmp_path, tiny_model, write_rows, chat_rows, reward):
    values = in_sft(tmp_path, tiny_model, write_rows, chat_rows, reward=reward, max_new_tokens=9)
    (tmp_path / "out" / "model").mkdir(parents=True)
    save_config(resolve_config("sft", **values), tmp_path / "out" / "config.yaml")
    shutil.copytree(values["model"], tmp_path / "out" / "model", dirs_exist_ok=True)
    given = {
        "model": Given(str(tmp_path / "out"), "--model", "flag"),
        "reward": Given([VOWELS], "--reward", "flag"),
    }
    settled, recipe = settle(given, None)
    kept = {"max_new_tokens", "eval_samples", "answers_at_once"} & recipe.entries.keys()
    assert kept == ({"max_new_tokens", "eval_samples", "answers_at_once"} if reward else set())


def test_functions_that_a_run_names_are_not_run_unasked(tmp_path, trained):
    trained(loss=["grpo"], beta=0.1, eval_samples=2)
    given = {"model": Given(str(tmp_path / "out" / "model"), "--model", "flag")}
    with pytest.raises(UserError, match="are not run unasked") as failure:
        settle(given, None)
    assert "--reward" in failure.value.fix
    _, recipe = settle(given | {"method": Given("sft", "--method", "flag")}, None)
    assert not {"loss", "beta", "reward", "eval_samples"} & recipe.entries.keys()
    saved = tmp_path / "out" / "config.yaml"
    saved.write_text(saved.read_text().replace(VOWELS, "contains*0.5"))  # which comes along, and is nobody else's code
    assert settle(given, None)[1].entries["reward"].value == ["contains*0.5"]
    settled, recipe = settle(given | {"reward": Given([VOWELS], "--reward", "flag")}, None)
    assert settled["method"].value == "grpo" and recipe.entries["eval_samples"].value == "2"
    assert not {"beta", "reward"} & recipe.entries.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--answers", "new.jsonl"], "no answers are given where no function rewards them"),
        (["--reward", "{}:right", "--answers", "rows.jsonl"], "the file exists"),
        (["--reward", "{}:right", "--answers", "-"], "answers are written to a file"),
        (["--reward", "{}:right", "--answers", "new.jsonl", "--json", "./new.jsonl"], "are for one file"),
        (["--reward", "{}:right", "--answers", "gone/new.jsonl"], "there is no such folder"),
        (["--reward", "{}:wrong"], "there is no function wrong"),
        (
            ["--reward", "{}:right", "--max-length", "200", "--max-new-tokens", "256"],
            "leaves no room for a prompt in --max-length 200\nwhere: --max-new-tokens, --max-length\n"
            "fix:   give --max-length 512, or --max-new-tokens 100\n",
        ),
    ],
)
def test_what_cannot_be_judged_is_told(tmp_path, capsys, monkeypatch, tiny_model, write_rows, chat_rows, words, said):
    (tmp_path / "beside.py").write_text("bonus = 0.25\n")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    write_rows("rows.jsonl", chat_rows)
    monkeypatch.chdir(tmp_path)
    words = [word.format("functions.py") for word in words]
    with pytest.raises(SystemExit) as stop:
        main(["eval", "--model", str(tiny_model("llama")), "--dataset", "rows.jsonl", "--cache-dir", "cache", *words])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_reward_model_gives_no_answers(tmp_path, tiny_model):
    """Although its weights may do where they are tied."""
    shutil.copytree(tiny_model("llama-tied"), tmp_path / "judge")
    config = tmp_path / "judge" / "config.json"
    config.write_text(config.read_text().replace("ForCausalLM", "ForSequenceClassification"))
    given = {"model": Given(str(tmp_path / "judge"), "--model", "flag"), "reward": Given([VOWELS], "--reward", "flag")}
    with pytest.raises(UserError, match="this is a reward model") as failure:
        settle(given, None)
    assert "grpo" in failure.value.fix


class Said(RolloutWorker):
    """Whose answers are known."""

    def __init__(self, rewards):
        """rewards: `[prompts][functions][answers]`."""
        self._rewards = [Reward(name, weight, print, name) for name, weight in (("one", 1.0), ("two", 0.5))]
        self._stops, self._known, self._generator, self._tools = [2], rewards, SimpleNamespace(pads=True), None

    def __call__(self, prompts, draw):
        answers = [Rollout("?", "x", ids, {}, "rows.jsonl:1") for ids in ([5, 6, 2], [5])]
        return [RolloutGroup(place, answers, self._known[place]) for place, _ in enumerate(prompts)]


def test_what_functions_print_is_no_part_of_the_json(tmp_path, capsys, tiny_model, write_rows, chat_rows):
    (tmp_path / "loud.py").write_text("print('once')\ndef said(**given):\n    print('said')\n    return [1.0]\n")
    words = ["--dataset", str(write_rows("rows.jsonl", chat_rows[:1])), "--cache-dir", str(tmp_path / "cache")]
    words += ["--reward", f"{tmp_path / 'loud.py'}:said", "--json", "-", "--max-new-tokens", "2", "--max-length", "160"]
    with pytest.raises(SystemExit) as stop:
        main(["eval", "--model", str(tiny_model("llama")), *words])
    told = capsys.readouterr()
    assert stop.value.code == 0 and json.loads(told.out)[0]["reward"] == 1.0
    assert told.err.splitlines().count("once") == told.err.splitlines().count("said") == 1


def test_a_line_of_answers_is_there_whole_or_not_at_all(tmp_path):
    """On a disk that is full after a part of it."""
    path, before = tmp_path / "answers.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_line({"text": "é"}, str(path), "--answers")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            write_line({"text": "x" * 80}, str(path), "--answers")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == '{"text": "é"}\n'


def examined(examiner, batch):
    return examiner.evaluate(batch, None, lambda *_: nullcontext(), "eval")


def test_what_no_function_says_counts_in_no_mean():
    nan, config = float("nan"), resolve_config("grpo", model="m", dataset=["d"], reward=["f"], eval_samples=2)
    batch = StepBatch(1, 0.0, [[Sequence([1], [False], "")], [Sequence([1], [False], "")]])
    examine = AnswerEvaluator(config, Said([[[1.0, nan], [2.0, nan]], [[nan, -3.0], [nan, nan]]]))
    found = examined(examine, batch) + examined(examine, batch)
    assert examine.results(found) == {
        "reward": -0.5, "reward_best": -0.5, "rewards/one": -1.0, "rewards/two": 2.0, "answers/length": 2.0,
        "answers/cut": 0.5, "answers/unrewarded": 0.5,
    }  # fmt: skip
    assert found.loss == 0.5  # the less, the better
    silent = AnswerEvaluator(config, Said([[[nan, nan], [nan, nan]]]))
    found = examined(silent, StepBatch(1, 0.0, batch.packs[:1]))
    assert silent.results(found)["reward"] is None and found.loss != found.loss  # no best one
    assert Evaluation().loss != Evaluation().loss


def no_others(_batch):
    return iter(())


@pytest.mark.parametrize("skips", [False, True])
def test_answers_without_an_end_are_learnt_or_not(skips):
    """Of two to a prompt one has none; of the third prompt neither is better."""
    cut = "skip" if skips else "learn"
    config = resolve_config("grpo", model="m", dataset=["d"], reward=["f"], minibatches=2, cut_answers=cut)
    nan = float("nan")
    batch = StepBatch(1, 0.0, [[Sequence(np.asarray([1]), np.asarray([False]), "")]] * 3)
    known = [[[1.0, 2.0], [nan, nan]], [[1.0, 0.0], [nan, nan]], [[1.0, 1.0], [nan, nan]]]
    minibatches = PolicyBatches(config, Said(known), [].append, no_others)(batch)
    learnt = [
        [document.input_ids.tolist() for pack in minibatch.packs for document in pack] for minibatch in minibatches
    ]
    assert learnt == [[[1, 5, 6, 2]] * 2] if skips else [[[1, 5, 6, 2, 1, 5]] * 2]
    assert (minibatches[0].policy.answers, minibatches[0].policy.tokens) == ((2, 6) if skips else (4, 8))


class SaidOf(Said):
    """What is said of answers to a prompt is known by its first token."""

    def __call__(self, prompts, draw):
        self.keys = [*getattr(self, "keys", []), [draw.key(prompt, place) for place, prompt in enumerate(prompts)]]
        self._known, known = [self._known[int(prompt.input_ids[0])] for prompt in prompts], self._known
        try:
            return super().__call__(prompts, draw)
        finally:
            self._known = known


@pytest.mark.parametrize(
    ("times", "asked", "learnt"), [(0, 3, [0]), (1, 5, [0, 4]), (2, 6, [0, 4, 5]), (9, 6, [0, 4, 5])]
)
def test_prompts_whose_answers_are_alike_are_asked_in_place_of(times, asked, learnt):
    nan, names = float("nan"), [0, 1, 2, 3, 4, 5]
    rewards = [[1.0, 2.0], [1.0, 1.0], [nan, nan], [0.0, 0.0], [3.0, 1.0], [1.0, 0.0]]
    documents = [Sequence(np.asarray([name, 1]), np.asarray([False, False]), "") for name in names]
    batch = StepBatch(7, 1.0, [[document] for document in documents[:3]])
    config = resolve_config("grpo", model="m", dataset=["d"], reward=["f"], max_resample_times=times, packing=False)
    ask = SaidOf([[each, [nan, nan]] for each in rewards])
    rollouts = PolicyBatches(config, ask, [].append, lambda _: iter(documents[3:]))
    (minibatch,) = rollouts(batch)
    assert [int(document.input_ids[0]) for pack in minibatch.packs for document in pack] == learnt
    assert minibatch.policy.answers == 6  # of as many prompts as the step has, whatever their answers teach
    assert [key for keys in ask.keys for key in keys] == [(config.seed, 7, place) for place in range(asked)]
    assert rollouts.told.get("answers/resampled", 0) == asked - 3
    assert rollouts.told["answers/equal"] == pytest.approx((asked - len(learnt)) / asked)


def test_a_reward_of_nothing_is_told_as_that(capsys):
    """It is not for want of rows; and the highest reward may be 0, which has no sign."""
    _tell(None, [Evaluated("rows.jsonl", {"rows": 3}, None, {"reward": None, "answers/unrewarded": 1.0})])
    assert ["reward", "none", "rewarded"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    config = resolve_config("grpo", model="m", dataset=["d"], reward=["f"])
    assert best_in_words(config, 0.0) == ("the highest eval reward", "0")


def test_other_rewards_are_no_measure_for_those_before():
    config = resolve_config("grpo", model="m", dataset=["d"], reward=["f"])
    judging = [(config, name, None) for name in ("reward", "eval_temperature", "max_new_tokens")]
    several = config.model_copy(update={"eval_samples": 2})
    others = [(several, "loss", -0.5), (config, "temperature", -0.5), (several, "temperature", None)]
    for config, changed, left in (*judging, *others):
        progress, told = Progress(best_loss=-0.5, best_step=2, best_step_loss=-0.5), []
        forget_other_losses(progress, config, {changed: "x"}, told.append)
        assert progress.best_loss == left and len(told) == (left is None)


def test_a_loss_of_rewards_that_are_no_longer_divided_is_no_spike_among_those_before():
    progress = Progress(recent_losses=[0.1] * 30, best_loss=-0.5)
    config = resolve_config("grpo", model="m", dataset=["d"], reward=["f"])
    forget_other_losses(progress, config, {"scale_rewards": "--scale-rewards group -> none"}, pytest.fail)
    assert not progress.recent_losses and progress.best_loss == -0.5


def test_what_is_told_of_evaluations_is_their_reward():
    rows = [{"step": step, "loss": 0.0, "reward": 0.1, "eval_reward": step / 10} for step in (1, 3, 2)]
    assert page.figures(rows, {})["best eval reward"] == "0.3000"
    board = Board(3, {}, rows=rows)
    assert board.evaluated["eval_reward"] == 0.2 and ("eval reward", "0.2000") in board._numbers()
