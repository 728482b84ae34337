"""Reward models that judge answers in the place of functions."""

import json
import shutil

import pytest
import torch
from test_eval import evaluate
from test_grpo import sampled
from test_parity import metrics, settings, train_alone
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from swiftlite.config.layout import Layout
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve_config
from swiftlite.config.save import save_config
from swiftlite.errors import UserError
from swiftlite.models.load import load_config
from swiftlite.models.toys import toy_pairs
from swiftlite.training.plan import outline_of
from swiftlite.training.rollouts.rewards import Reward, Rollout, load_rewards, parse_reward, rewards_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def judge_of(tmp_path_factory, tiny_model):
    """Train a reward model with a tuner: its output folder, and the pairs that it has learnt from."""
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in toy_pairs(10)))
    made = {}

    def train(tuner):
        if tuner not in made:
            folder = tmp_path_factory.mktemp(tuner)
            values = settings(folder, tiny_model("qwen3"), pairs, tuner=tuner, learning_rate=1e-2, max_steps=2)
            train_alone(resolve_config("rm", **values))
            made[tuner] = folder / "out"
        return made[tuner], pairs

    return train


def loaded(word, **more):
    """The reward that a word of `--reward` names, ready to be called."""
    values = {"model": "m", "dataset": ["d"], "precision": "fp32", "answers_at_once": 4} | more
    config = resolve_config("grpo", reward=[str(word)], **values)
    (reward,) = load_rewards(config.reward)
    reward.model.load(config, CPU, alone=True)
    return reward


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_scores_are_those_that_the_model_was_trained_with(tmp_path, judge_of, tuner):
    """Of answers of several lengths at a time, and with the names that its run gave it."""
    run, pairs = judge_of(tuner)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    reward, (found,) = loaded(run), evaluate(model=str(run), dataset=[str(pairs)], cache_dir=str(tmp_path / "cache"))
    prompts = [row["prompt"] for row in rows]
    for name in ("chosen", "rejected"):
        scores = reward.function(prompts=prompts, completions=[row[name] for row in rows], where=None)
        assert len(set(scores)) > 5 and sum(scores) / len(scores) == pytest.approx(
            found.metrics[f"rewards/{name}"], rel=1e-5
        )
    assert reward.name == run.name and loaded(f"{run / 'model'}*0.5").weight == 0.5


def test_a_run_and_an_evaluation_are_judged_by_it(tmp_path, judge_of, tiny_model, write_rows, chat_rows):
    """As transformers scores the same conversations one by one."""
    run, _ = judge_of("full")
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=2, samples=3)
    values |= {"reward": [f"{run}*2"], "eval_dataset": [str(write_rows("held.jsonl", chat_rows[:4]))], "eval_steps": 2}
    train_alone(resolve_config("grpo", **values | {"precision": "fp32"}))
    model = AutoModelForSequenceClassification.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines():
        told = json.loads(line)
        for answer in told["answers"]:
            said = [*told["prompt"], {"role": "assistant", "content": answer["text"]}]
            ids = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True)["input_ids"]
            with torch.no_grad():
                score = model(ids).logits.item()
            assert answer["reward"] == pytest.approx(2 * score, rel=1e-4)
    last = metrics(tmp_path / "out")[-1]
    assert last[f"rewards/{run.name}"] == pytest.approx(last["reward"] / 2)
    given = {"reward": [f"{run}*2"], "cache_dir": str(tmp_path / "cache"), "precision": "fp32"}
    [found] = evaluate(model=str(tmp_path / "out"), **given)
    assert found.metrics["reward"] == pytest.approx(last["eval_reward"], rel=1e-6)


def test_an_answer_that_its_template_cannot_write_has_no_score(judge_of):
    run, _ = judge_of("full")
    reward = loaded(run)
    question = [{"role": "user", "content": "Who?"}]
    reward.model._tokenize._tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] | replace('x', '') }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    answers = [[{"role": "assistant", "content": text}] for text in ("hello", "x")]
    hello, lost = reward.function(prompts=[question] * 2, completions=answers)
    assert isinstance(hello, float) and lost is None
    text = reward.function(prompts=["Once upon"], completions=[" a time"])
    assert isinstance(text[0], float)  # of a prompt without a chat


def test_an_answer_that_is_longer_than_its_positions_has_no_score(judge_of):
    """Learnt ones have none there, on a GPU that ends the process."""
    reward = loaded(judge_of("full")[0])
    reward.model._config.max_position_embeddings = 30
    question = [{"role": "user", "content": "Who?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("hello", "hello " * 30)]
    hello, lost = reward.function(prompts=[question] * 2, completions=answers)
    assert isinstance(hello, float) and lost is None


def test_one_with_too_few_positions_is_told_once(tmp_path, judge_of, tiny_model, write_rows, chat_rows, capsys):
    """Before answers are found to be without a reward."""
    judge = shutil.copytree(judge_of("full")[0] / "model", tmp_path / "short")
    settled = json.loads((judge / "config.json").read_text()) | {"max_position_embeddings": 8}
    (judge / "config.json").write_text(json.dumps(settled))
    rows = write_rows("rows.jsonl", chat_rows[:4])
    values = sampled(tmp_path, tiny_model("llama"), rows, max_steps=1, samples=2, reward=[str(judge)])
    train_alone(resolve_config("grpo", **values))
    more = {name: values[name] for name in ("max_length", "max_new_tokens", "cache_dir")}
    [found] = evaluate(model=str(tiny_model("llama")), dataset=[str(rows)], reward=[str(judge)], **more)
    assert found.metrics["answers/unrewarded"] == 1
    said = f"note: the reward model short has 8 positions, fewer than --max-length {values['max_length']}: an answer"
    assert capsys.readouterr().out.count(said) == 2


def test_it_sees_the_tools_of_a_row(tmp_path, judge_of):
    """As it does where it is trained, and beside them those that answers may call."""
    run, _ = judge_of("full")
    reward = loaded(run)
    reward.model._tokenize._tokenizer.chat_template = (
        "{% for tool in tools or [] %}tool {{ tool['function']['name'] }}\n{% endfor %}"
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    asked = {
        "prompts": [[{"role": "user", "content": "Who?"}]],
        "completions": [[{"role": "assistant", "content": "x"}]],
    }
    tool = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
    without, nothing = reward.function(**asked), reward.function(**asked, tools=[None])
    assert without == nothing != reward.function(**asked, functions=[[tool]])
    assert reward.function(**asked, functions=[[tool]]) == reward.function(
        **asked, tools=[[{"type": "function", "function": tool}]]
    )
    path = tmp_path / "tools.py"
    path.write_text('def add() -> int:\n    """adds"""\n')
    called = loaded(run, tools=[f"{path}:add"], max_new_tokens=9)
    called.model._tokenize._tokenizer.chat_template = reward.model._tokenize._tokenizer.chat_template
    assert (
        called.function(**asked) == called.function(**asked, tools=[[tool]]) == reward.function(**asked, tools=[[tool]])
    )


def test_one_without_a_chat_template_says_so(judge_of):
    run, _ = judge_of("full")
    judge = loaded(run).model
    judge._has_template = False
    reward = Reward("judge", 1.0, judge, "judge", judge)
    with pytest.raises(UserError, match="the reward model has no chat template") as failure:
        rewards_of([reward], [Rollout([{"role": "user", "content": "?"}], "x", [1], {}, "rows.jsonl:1")], 9)
    assert failure.value.where == str(run / "model") and "chat_template.jinja" in failure.value.fix
    ((score,),) = rewards_of([reward], [Rollout("Once upon", " a time", [1], {}, "rows.jsonl:1")], 9)
    assert isinstance(score, float)


def test_what_is_no_reward_model_is_told(tmp_path, tiny_model):
    with pytest.raises(UserError, match="of the reward model: it gives no score") as failure:
        load_rewards([str(tiny_model("llama"))])
    assert "swiftlite rm" in failure.value.fix and "--reward" in failure.value.where
    with pytest.raises(UserError, match="of the reward model: the folder holds neither") as failure:
        load_rewards([str(tmp_path)])
    assert failure.value.where == f"--reward {tmp_path}"
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/gone/base"}')
    with pytest.raises(UserError, match="base model is not where it was: /gone/base") as failure:
        load_rewards([str(tmp_path)])
    assert f"swiftlite export --model BASE --adapter {tmp_path} --output-dir FOLDER" in failure.value.fix
    for word in ("beside/functions.py", "*2"):
        with pytest.raises(UserError, match="names no function"):
            load_rewards([word])
    named = parse_reward("someone/Judge-7B*0.1")
    assert (named.place, named.name, named.weight, named.kind) == ("someone/Judge-7B", "Judge-7B", 0.1, "model")


def test_a_misspelt_folder_is_no_name_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "runs" / "judge-lora").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, meant in ("runs/judge-lor", "did you mean runs/judge-lora?"), ("runs/x", "check the path"):
        with pytest.raises(UserError, match="of the reward model") as failure:
            load_rewards([name])
        assert failure.value.fix.startswith(f"there is no folder {name}, ") and failure.value.fix.endswith(meant)


def test_two_of_one_name_are_told_apart_by_a_link(tmp_path, judge_of):
    run, _ = judge_of("full")
    (tmp_path / "out").symlink_to(run)
    (tmp_path / "other").symlink_to(run)
    with pytest.raises(UserError, match="two of them are called out") as failure:
        load_rewards([str(run), str(tmp_path / "out")])
    assert "ln -s" in failure.value.fix and "rename" not in failure.value.fix
    with pytest.raises(UserError, match="two of them are called contains") as failure:
        load_rewards(["contains", "contains*2"])
    assert failure.value.fix == "metrics are called so: name it once, or rename one of two functions"
    assert [reward.name for reward in load_rewards([str(run), str(tmp_path / "other")])] == ["out", "other"]


def test_a_saved_run_finds_its_reward_model_from_anywhere(tmp_path, judge_of, monkeypatch):
    run, _ = judge_of("full")
    monkeypatch.chdir(run.parent)
    config = resolve_config("grpo", model="m", dataset=["d"], reward=[f"{run.name}*2"])
    save_config(config, tmp_path / "config.yaml")
    assert load_recipe(str(tmp_path / "config.yaml")).entries["reward"].value == [f"{run}*2"]


def test_a_plan_counts_it_in_each_process(tmp_path, judge_of, tiny_model):
    run, _ = judge_of("lora")
    given = sampled(tmp_path, tiny_model("llama"), "rows.jsonl", precision="fp32")
    held = []
    for more in ({}, {"reward": [str(run)]}):
        config = resolve_config("grpo", **given | more | {"activation_checkpointing": "none"})
        outline = outline_of(config, load_config(config.model), "cpu")
        held.append([outline.holds(config, layout, None).weights for layout in (Layout(), Layout(dp_shard=2))])
    config = resolve_config("grpo", **given | {"reward": [str(tiny_model("llama"))]})
    with pytest.raises(UserError, match="it gives no score") as failure:
        outline_of(config, load_config(config.model), "cpu").holds(config, Layout(), None)
    assert failure.value.where == f"--reward {tiny_model('llama')}"
    base = sum(
        p.numel()
        for p in AutoModelForSequenceClassification.from_config(load_config(str(tiny_model("qwen3")))).parameters()
    )
    for without, judged in zip(*held, strict=True):
        assert judged - without == pytest.approx(4 * base, rel=0.01)
