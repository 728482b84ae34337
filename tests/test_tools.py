"""Answers that call tools: what is learnt of them, in every layout, and tools that fail or are none."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_in_engine import StandIn
from test_grpo import plain_logprobs
from test_parity import metrics, plain_adamw, planned_rows, settings, train_alone
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import run_swiftlite

from swiftlite.cli.app import main
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.data.prepare import Asked as Columns
from swiftlite.data.prepare import prepare_data
from swiftlite.data.tokens.own_tools import load_tools
from swiftlite.errors import RunError, UserError
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.toys import toy_tokenizer
from swiftlite.serving import load as loading
from swiftlite.training.rollouts.generator import Generation, Request
from swiftlite.training.rollouts.model_generator import _uniform
from swiftlite.training.rollouts.rewards import Rollout, check_columns, load_rewards, rewards_of
from swiftlite.training.rollouts.tools import Episode, build_tool_caller

TOOLS = '''
import asyncio
import signal

from swiftlite.ending import raise_signal

calls = []

def double(n: int) -> int:
    """Twice a number.

    Args:
        n: The number.
    """
    calls.append(n)
    return 2 * n

def fails(n: int) -> int:
    """Fails.

    Args:
        n: The number.
    """
    raise ValueError(f"not of {n}")

def quits() -> None:
    """Ends the program."""
    raise SystemExit(3)

def told(what: str = "all") -> dict:
    """Tells something.

    Args:
        what: Of it.
    """
    return {"what": what, "é": [1, None]}

def strange(kind: str) -> dict:
    """Says what is no text.

    Args:
        kind: What it says.
    """
    if kind == "unsayable":
        raise Unsayable()
    circle = []
    circle.append(circle)
    return {"keys": {(1, 2): 3}, "circle": circle, "large": 10**5000, "half": chr(0xD800), "object": Unsayable()}[kind]

class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("it says nothing")

async def ends() -> None:
    """Ends the program later."""
    raise SystemExit(3)

def empties(numbers: list[int]) -> int:
    """Counts, and throws away.

    Args:
        numbers: Of which it counts.
    """
    count = len(numbers)
    numbers.clear()
    return count

def silent() -> None:
    """Says nothing."""

started = asyncio.Semaphore(0)

async def meets(n: int) -> str:
    """Waits for the others.

    Args:
        n: Its number.
    """
    global waiting
    waiting += 1
    while waiting < 3:
        await asyncio.sleep(0.001)
    if n == 2:
        raise KeyError("two")
    return f"met {n}"

waiting = 0

class Counter:
    """Counts for one answer."""

    def reset(self, start=0, **others):
        self.count = start or 0

    def add(self, n: int) -> int:
        """Count on.

        Args:
            n: By how much.
        """
        self.count += n
        return self.count

    def _inner(self):
        pass

class Broken(Counter):
    def reset(self):
        pass

class Talkative(Counter):
    def reset(self, **others):
        return "Hello"

class Quitting(Counter):
    def reset(self, **others):
        raise SystemExit(3)

class Board:
    """Keeps what its row has, and changes it."""

    def reset(self, board, **others):
        self.board = board

    def put(self, n: int) -> list:
        """Put a number there.

        Args:
            n: The number.
        """
        self.board.append(n)
        return self.board

class Connects:
    async def ask(self, n: int) -> str:
        """Ask over a connection that is kept.

        Args:
            n: What is asked.
        """
        if not hasattr(self, "asked"):
            self.asked, self.answers = asyncio.Queue(), asyncio.Queue()
            self.served = asyncio.create_task(self._serve())
        await self.asked.put(n)
        return await asyncio.wait_for(self.answers.get(), 5)

    async def _serve(self):
        while True:
            await self.answers.put(f"{await self.asked.get()}!")

    async def linger(self, n: int) -> list:
        """Takes its time.

        Args:
            n: Its number.
        """
        if n < 0:
            raise_signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        calls.append(n)
        return calls

class Single:
    """Of which there is one at a time."""

    living = []

    def reset(self, **others):
        self.living.append(len(self.living))

    def __del__(self):
        self.living.pop()

    def others(self) -> int:
        """How many others there are."""
        return len(self.living) - 1

class Prints:
    def __init__(self):
        print("begun")

    def prints(self) -> None:
        """Prints."""
        print("called")

class Empty:
    pass

class Kinds:
    """Of methods."""

    @property
    def state(self):
        raise RuntimeError("it was asked for")

    @staticmethod
    def plain(n: int) -> int:
        """Plainly.

        Args:
            n: The number.
        """
        return n

    @classmethod
    def named(cls, n: int) -> str:
        """Of the class.

        Args:
            n: The number.
        """
        return f"{cls.__name__} {n}"

class Wanting(Counter):
    def __init__(self, place, **others):
        pass

def several(*numbers: int) -> int:
    """Some.

    Args:
        numbers: Some.
    """

def any_of(**numbers: int) -> int:
    """Some.

    Args:
        numbers: Some.
    """

def placed(n: int, /) -> int:
    """One.

    Args:
        n: The number.
    """

def one_by_one(n: int):
    """Some.

    Args:
        n: The number.
    """
    yield n

def undescribed(n):
    return n

def untyped(n):
    """It has no types.

    Args:
        n: The number.
    """

def right(completions, answer, **others):
    return [float(str(a) in c[-1]["content"]) for c, a in zip(completions, answer)]

def called(completions, **others):
    return [float(any("tool_calls" in message for message in c)) for c in completions]

def counted(completions, environments, **others):
    return [float(environment.count) for environment in environments]
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Twice a number.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "description": "The number."}},
            "required": ["n"],
        },
        "return": {"type": "integer"},
    },
}
ROOM = 120  # tokens of an answer with a call in it


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    return path


def question(n):
    return {"messages": [{"role": "user", "content": f"Twice {n}?"}], "answer": str(2 * n)}


@pytest.fixture(scope="module")
def caller(tmp_path_factory, tiny_model):
    """A toy that has learnt to call `double`, and questions."""
    folder = tmp_path_factory.mktemp("caller")
    rows = []
    for n in range(2, 10):
        call = {"type": "function", "function": {"name": "double", "arguments": {"n": n}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        heard = {"role": "tool", "name": "double", "content": str(2 * n)}
        told = {"role": "assistant", "content": f"It is {2 * n}."}
        rows.append({"messages": [*question(n)["messages"], said, heard, told], "tools": [SCHEMA]})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = settings(folder, tiny_model("llama"), data, max_length=512, max_steps=100, learning_rate=1e-2)
    train_alone(resolve_config("sft", **values | {"weight_decay": 0.0, "lr_scheduler": "cosine"}))
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps(question(n)) + "\n" for n in range(2, 10)))
    return SimpleNamespace(model=folder / "out" / "model", data=asked)


def learning(tmp_path, caller, tools, **more):
    values = settings(tmp_path, caller.model, caller.data, max_length=512, max_steps=2)
    values |= {"reward": [f"{tools}:right", f"{tools}:called*0.5"], "tools": [f"{tools}:double"], "samples": 4}
    return values | {"max_new_tokens": ROOM, "temperature": 0.8, "beta": 0.0, "learning_rate": 1e-4} | more


def behind(tokenizer, result):
    """What stands between a call and the next turn, by hand."""
    text = f"\n<|im_start|>tool\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def plain_turn(model, ids, numbers, stop, temperature):
    found = []
    for number in numbers:
        with torch.no_grad():
            logits = model(torch.tensor([ids + found]), use_cache=False).logits[0, -1].double()
        sums = (logits / temperature).softmax(-1).cumsum(-1)
        found.append(int((sums <= number * sums[-1]).sum()))
        if found[-1] == stop:
            break
    return found


def plain_result(name, arguments):
    def double(n):
        return str(2 * n)

    if name != "double":
        return json.dumps({"error": f"there is no tool {name}, but double"}, ensure_ascii=False)
    try:
        return double(**arguments)
    except TypeError as error:
        words = str(error).replace("plain_result.<locals>.", "")
        return json.dumps({"error": f"TypeError: {words}"}, ensure_ascii=False)


def plain_answer(model, tokenizer, prompt, key, rounds):
    """(ids, which of them the model drew, how often it called), of an answer that may double a number."""
    stop, ids, own, turn = tokenizer.convert_tokens_to_ids("<|im_end|>"), [], [], 0
    while True:
        numbers = _uniform(ROOM - len(ids), *key, *((turn, 0) if turn else ()))
        said = plain_turn(model, prompt + ids, numbers, stop, 0.8)
        ids, own = ids + said, own + [True] * len(said)
        text = tokenizer.decode(said)
        if said[-1] != stop or "</tool_call>" not in text or turn == rounds:
            return ids, own, turn
        try:
            call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
            result = plain_result(call["name"], call["arguments"])
        except (ValueError, KeyError, TypeError):
            return ids, own, turn
        heard = behind(tokenizer, result)[: ROOM - len(ids)]
        ids, own, turn = ids + heard, own + [False] * len(heard), turn + 1
        if len(ids) == ROOM:
            return ids, own, turn


@pytest.mark.parametrize(
    "more", [{"loss": ["dapo"]}, {"loss": ["grpo"], "share_prompt": False, "packing": False, "tool_rounds": 1}]
)
def test_a_run_equals_plain_pytorch(tmp_path, caller, tools, more):
    config = resolve_config("grpo", **learning(tmp_path, caller, tools, **more) | {"global_batch_size": 2})
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(caller.model)
    model = AutoModelForCausalLM.from_pretrained(caller.model, dtype=torch.float32, attn_implementation="eager")
    optimizer = plain_adamw([*model.parameters()], config.learning_rate, config.weight_decay)
    for step, (row, places) in enumerate(zip(metrics(tmp_path / "out"), planned_rows(config), strict=True), 1):
        groups, calls = [], 0
        for place, number in enumerate(places):
            asked, right = question(number + 2)["messages"], str(2 * (number + 2))
            prompt = tokenizer.apply_chat_template(
                asked, tools=[SCHEMA], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            answers = [
                plain_answer(model, tokenizer, prompt, (config.seed, step, place, i), config.tool_rounds)
                for i in range(4)
            ]
            calls += sum(turns for *_, turns in answers)
            last = [tokenizer.decode(ids).rpartition("assistant\n")[2] for ids, *_ in answers]
            rewards = [
                float(right in text) + 0.5 * (turns > 0) for text, (*_, turns) in zip(last, answers, strict=True)
            ]
            groups.append((prompt, answers, rewards))
        every = [answer for _, answers, _ in groups for answer in answers]
        tokens = sum(sum(own) for _, own, _ in every)
        total = torch.zeros(())
        for prompt, answers, rewards in groups:
            rewards = torch.tensor(rewards, dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for (ids, own, _), advantage in zip(answers, advantages.tolist(), strict=True):
                logprobs = plain_logprobs(model, prompt, ids, 0.8)[torch.tensor(own)]
                share = 1 / tokens if config.loss == ["dapo"] else 1 / (len(every) * sum(own))
                total = total - advantage * share * (logprobs - logprobs.detach()).exp().sum()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        model.zero_grad()
        assert row["answers/length"] == tokens / len(every)
        assert row["tools/calls"] >= calls / len(every) > 0.3
        assert row["reward"] == pytest.approx(np.mean([rewards for *_, rewards in groups]), abs=1e-12)
        # AdamW's first update is as large as the learning rate: what rounding makes of gradients of nearly 0 counts
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4 if step > 1 else 2e-5)
        trained = sum(sum(own) for _, answers, rewards in groups for _, own, _ in answers if len({*rewards}) > 1)
        assert row["trained_tokens"] <= trained <= tokens


def test_processes_learn_the_same(tmp_path, caller, tools):
    values = learning(tmp_path, caller, tools) | {"max_steps": 1}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", *_words(value))]
    run_swiftlite(1, "grpo", *words)
    kept = ("reward", "answers/length", "tools/calls", "tools/failed", "grad_norm", "trained_tokens")
    for layout in (("--parallel", "fsdp"), ("--context-parallel-size", "2")):
        two = tmp_path / layout[0]
        run_swiftlite(2, "grpo", *words, "--output-dir", two, *layout)
        for row, other in zip(metrics(tmp_path / "out"), metrics(two), strict=True):
            assert [other[name] for name in kept] == pytest.approx([row[name] for name in kept], rel=1e-4)
        assert (two / "answers.jsonl").read_text() == (tmp_path / "out" / "answers.jsonl").read_text()
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    called = [one["messages"] for row in answers for one in row["answers"] if "messages" in one]
    assert [message["role"] for message in called[0]][:2] == ["assistant", "tool"]
    assert all(turns[-1]["role"] == "assistant" for turns in called)


def _words(value):
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


def test_an_engine_answers_turn_by_turn(tmp_path, caller, tools):
    with StandIn(caller.model) as stand_in:
        values = learning(tmp_path, caller, tools, engine_url=[stand_in.url], engine_ahead=True, max_steps=3)
        train_alone(resolve_config("grpo", **values))
    for row in metrics(tmp_path / "out"):
        assert row["tools/calls"] > 0.5 and row["reward"] > 0.3
    assert abs(metrics(tmp_path / "out")[0]["kl/engine"]) < 1e-6


def test_held_out_prompts_call_tools_too(tmp_path, caller, tools):
    more = {"eval_dataset": [str(caller.data)], "eval_steps": 1, "max_steps": 1}
    train_alone(resolve_config("grpo", **learning(tmp_path, caller, tools, **more)))
    (row,) = [row for row in metrics(tmp_path / "out") if "eval_reward" in row]
    assert row["eval_tools/calls"] > 0.5 and row["eval_tools/failed"] is not None
    told = tmp_path / "answers.jsonl"
    words = ["eval", "--model", tmp_path / "out", "--dataset", caller.data, "--reward", f"{tools}:right"]
    words += ["--answers", told, "--json", tmp_path / "found.json"]
    (said,) = run_swiftlite(1, *words, "--tools", f"{tools}:double")
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["tools/calls"] > 0.5, said
    assert any("messages" in one for line in told.read_text().splitlines() for one in json.loads(line)["answers"])


# ---- conversations --------------------------------------------------------------------------------------------------


def toolbox(tools, *names, **more):
    values = {"model": "m", "dataset": ["rows.jsonl"], "reward": ["contains"], "output_dir": "out"}
    values |= {"tools": [f"{tools}:{name}" for name in names], "max_length": 600, "max_new_tokens": 200}
    config, tokenizer = resolve_config("grpo", **values | more), toy_tokenizer()
    return build_tool_caller(config, tokenizer, [tokenizer.eos_token_id]), tokenizer


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(box, tokenizer, *turns, most=200, columns=None):
    """The episode in which a model says these."""
    episode = Episode(Request([5, 6], ("key", 0), most), knows_tools=True)
    box.begin(episode, columns or {}, "rows.jsonl:1")
    for turn in turns:
        assert episode.is_open
        ids = tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"]
        episode.take(Generation(ids, [-1.0] * len(ids)))
        box.answer([episode])
    return episode


def results(episode):
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


def test_what_a_tool_says_is_none_of_the_models_own(tools):
    box, tokenizer = toolbox(tools, "double")
    episode = said(box, tokenizer, "Let me see.\n" + call("double", n=4), "It is 8.")
    first, last = (
        tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
        for text in ("Let me see.\n" + call("double", n=4), "It is 8.")
    )
    between = behind(tokenizer, 8)
    assert episode.ids == first + between + last
    assert episode.own == [True] * len(first) + [False] * len(between) + [True] * len(last)
    assert episode.logprobs == [-1.0 * own for own in episode.own] and not episode.is_open
    assert (episode.calls, episode.failed, episode.rounds) == (1, 0, 1)
    function = {"name": "double", "arguments": {"n": 4}}
    assert episode.messages == [
        {"role": "assistant", "content": "Let me see.\n", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "double", "content": "8"},
        {"role": "assistant", "content": "It is 8."},
    ]
    again = said(box, tokenizer, call("double", n=4))
    assert again.next() == Request([5, 6, *again.ids], ("key", 0, 1, 0), 200 - len(again.ids))


def test_a_tool_that_fails_tells_the_model(tools):
    box, tokenizer = toolbox(tools, "double", "fails", "quits")
    turns = [call("fails", n=1), call("quits"), call("double", m=1), call("other") + call("double", n=2), "No."]
    episode = said(box, tokenizer, *turns, most=900)
    errors = [json.loads(text).get("error", "") if text.startswith("{") else text for text in results(episode)]
    assert errors[:2] == ["ValueError: not of 1", "SystemExit: 3"] and errors[2].startswith("TypeError: double() got")
    assert errors[3:] == ["there is no tool other, but double, fails, quits", "4"]
    assert (episode.calls, episode.failed, episode.rounds) == (5, 4, 4)


def test_results_that_are_no_texts_tell_the_model(tools):
    box, tokenizer = toolbox(tools, "strange", "ends")
    turns = [call("strange", kind=kind) for kind in ("keys", "circle", "large", "object", "unsayable")]
    episode = said(box, tokenizer, *turns, call("ends"), call("strange", kind="half"), "Well.", most=1200)
    errors = [json.loads(text)["error"].partition(":")[0] for text in results(episode)[:-1]]
    assert errors == ["TypeError", "ValueError", "ValueError", "RuntimeError", "Unsayable", "SystemExit"]
    assert results(episode)[-1] == "?" and (episode.calls, episode.failed) == (7, 6)


def test_what_a_tool_does_to_its_arguments_is_not_what_the_model_said(tools):
    box, tokenizer = toolbox(tools, "empties")
    episode = said(box, tokenizer, call("empties", numbers=[1, 2]), "2", most=400)
    assert results(episode) == ["2"]
    assert episode.messages[0]["tool_calls"][0]["function"]["arguments"] == {"numbers": [1, 2]}


def test_results_are_texts(tools):
    box, tokenizer = toolbox(tools, "told", "silent")
    episode = said(box, tokenizer, call("told", what="x") + "\n" + call("silent"), "Well.", most=400)
    assert results(episode) == ['{"what": "x", "é": [1, null]}', "null"]


def test_asynchronous_tools_work_side_by_side(tools):
    """Those of all answers of a turn."""
    box, tokenizer = toolbox(tools, "meets", "double")
    episodes = []
    for text in (call("meets", n=1) + call("double", n=3), call("meets", n=2) + call("meets", n=3)):
        episode = Episode(Request([5], ("key", 0), 300), knows_tools=True)
        ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
        episode.take(Generation(ids))
        episodes.append(episode)
    box.answer(episodes)
    assert results(episodes[0]) == ["met 1", "6"]
    assert results(episodes[1]) == ['{"error": "KeyError: \'two\'"}', "met 3"]
    assert [episode.failed for episode in episodes] == [0, 1] and all(episode.is_open for episode in episodes)


def test_asynchronous_tools_keep_a_connection_from_turn_to_turn(tools):
    box, tokenizer = toolbox(tools, "Connects")
    episode = said(box, tokenizer, call("ask", n=1), call("ask", n=2), "Done.", most=400)
    assert results(episode) == ["1!", "2!"]
    serving = episode.environment.served
    assert not serving.done()
    box.close()
    assert serving.cancelled()


def test_asynchronous_tools_that_ctrl_c_breaks_off_do_not_go_on(tools):
    box, tokenizer = toolbox(tools, "Connects")
    load_tools([f"{tools}:double"])[0].function.__globals__["calls"].clear()
    with pytest.raises(KeyboardInterrupt):
        said(box, tokenizer, call("linger", n=1) + call("linger", n=-1), most=600)
    episode = said(box, tokenizer, call("linger", n=2), "Done.", most=600)
    assert results(episode) == ["[2]"]
    box.close()


def test_where_an_answer_ends(tools):
    """After its rounds; in the midst of a call, or of a result; with a call that is none."""
    box, tokenizer = toolbox(tools, "double", tool_rounds=2)
    episode = said(box, tokenizer, *[call("double", n=1)] * 3, most=400)
    assert (episode.rounds, episode.calls, len(results(episode)), episode.is_open) == (2, 2, 2, False)
    assert episode.messages[-1]["role"] == "assistant" and "tool_calls" in episode.messages[-1]
    broken = said(box, tokenizer, "Well: <tool_call>\n{oh}\n</tool_call>")
    assert (broken.calls, broken.failed, broken.is_open) == (1, 1, False)
    assert broken.messages == [{"role": "assistant", "content": "Well: <tool_call>\n{oh}\n</tool_call>"}]
    whole = tokenizer(call("double", n=1) + "<|im_end|>", add_special_tokens=False)["input_ids"]
    cut = said(box, tokenizer, call("double", n=1), most=len(whole) + 5)
    assert len(cut.ids) == len(whole) + 5 and cut.own[-5:] == [False] * 5 and not cut.is_open
    assert cut.messages[-1] == {"role": "assistant", "content": ""}
    full = said(box, tokenizer, call("double", n=1), most=len(whole))
    assert full.ids == whole and not full.is_open and full.messages[-1]["content"] == ""
    half = Episode(Request([5], ("key", 0), 9), knows_tools=True)
    half.take(Generation(whole[:-1]))
    box.answer([half])
    assert half.calls == 0 and not half.is_open


def test_a_class_has_an_object_for_each_answer(tools):
    box, tokenizer = toolbox(tools, "Counter")
    one = said(box, tokenizer, call("add", n=2), call("add", n=3), "5", columns={"start": 10, "other": 1}, most=400)
    other = said(box, tokenizer, call("add", n=1), "1", columns={"start": None})
    assert (results(one), results(other)) == (["12", "15"], ["1"])
    assert (one.environment.count, other.environment.count) == (15, 1)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Broken", "failed: TypeError"),
        ("Talkative", "gave str, and a prompt is what its row has"),
        ("Quitting", "failed: SystemExit: 3"),
    ],
)
def test_a_class_that_cannot_begin_ends_the_run(tools, name, wanted):
    box, _ = toolbox(tools, name)
    with pytest.raises(RunError, match=wanted) as failure:
        box.begin(Episode(Request([5], (), 9), knows_tools=True), {"start": 1}, "rows.jsonl:7")
    assert "rows.jsonl:7" in failure.value.where


def test_what_an_object_does_to_a_row_other_answers_do_not_see(tools):
    box, tokenizer = toolbox(tools, "Board")
    columns = {"board": [1]}
    first, second = (said(box, tokenizer, call("put", n=2), "Done.", columns=columns, most=400) for _ in range(2))
    assert results(first) == results(second) == ["[1, 2]"] and columns == {"board": [1]}


def test_methods_of_all_kinds_are_tools(tools):
    box, tokenizer = toolbox(tools, "Kinds")
    episode = said(box, tokenizer, call("plain", n=2) + call("named", n=3), "Well.", most=400)
    assert results(episode) == ["2", "Kinds 3"]
    schemas = [tool.schema["function"]["parameters"] for tool in load_tools([f"{tools}:Kinds"])]
    assert [schema["required"] for schema in schemas] == [["n"], ["n"]]


def test_functions_get_the_objects_of_a_class(tmp_path, caller, tools):
    """Which need not be anything that goes from process to process."""
    values = learning(tmp_path, caller, tools, reward=[f"{tools}:counted"], max_steps=1)
    train_alone(resolve_config("grpo", **values | {"tools": [f"{tools}:Counter"]}))
    assert metrics(tmp_path / "out")[0]["rewards/counted"] == 0.0


def test_objects_that_are_not_there_are_told_before_the_model_loads(tmp_path, caller, tools, monkeypatch):
    monkeypatch.setattr("swiftlite.training.run.build_trainee", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="counted asks for the objects of a class of tools, and there is none"):
        train_alone(resolve_config("grpo", **learning(tmp_path, caller, tools, reward=[f"{tools}:counted"])))


def test_a_column_of_their_name_is_that(tools):
    (reward,) = load_rewards([f"{tools}:counted"])
    check_columns([reward], Columns("rows.jsonl", ("environments",), answered=False))
    episode = Episode(Request([5], (), 9), knows_tools=True, environment=SimpleNamespace(count=1))
    columns = {"environments": SimpleNamespace(count=7)}
    answer = Rollout("x", "y", [5], columns, "rows.jsonl:1", episode=episode)
    assert rewards_of([reward], [answer], 9) == [[7.0]]
    assert rewards_of([reward], [replace(answer, columns={})], 9) == [[1.0]]


# ---- what tools are -------------------------------------------------------------------------------------------------


def test_tools_are_described_by_hints_and_docstrings(tools):
    found = load_tools([f"{tools}:double", f"{tools}:Counter"])
    assert [tool.name for tool in found] == ["double", "add"] and found[0].schema == SCHEMA
    assert found[1].schema["function"]["parameters"]["required"] == ["n"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["{}:nobody"], "there is no function nobody"),
        (["{}"], "names no function"),
        (["missing.py:f"], "there is no file missing.py"),
        (["no_such_package.f"], "cannot be imported"),
        (["{}:double", "{}:double"], "two of them are called double"),
        (["{}:Counter", "{}:Talkative"], "two of them are c"),
        (["{}:Empty"], "has no methods"),
        (["{}:undescribed"], "undescribed cannot be described"),
        (["{}:untyped"], "untyped cannot be described"),
        (["max"], "names no function"),
        (["builtins.max"], "max cannot be described"),
        (["{}:Wanting"], "the class Wanting asks for `place`"),
        (["{}:several"], r"the tool several takes `\*numbers: int`, which has no name"),
        (["{}:any_of"], r"the tool any_of takes `\*\*numbers: int`, which has no name"),
        (["{}:placed"], "the tool placed takes `n: int`, which has no name"),
        (["{}:one_by_one"], "one_by_one gives one thing after the other"),
    ],
)
def test_what_cannot_be_called_is_told(tools, names, wanted):
    with pytest.raises(UserError, match=wanted) as failure:
        load_tools([name.format(tools) for name in names])
    assert "--tools" in failure.value.where


def test_a_file_that_has_changed_is_read_anew(tmp_path):
    """By what rewards answers as well, for which it is the same."""
    path = tmp_path / "changing_tools.py"
    for said in ("first", "secondly"):
        path.write_text(f'calls = []\n\ndef say() -> str:\n    """Says it."""\n    return "{said}"\n')
        (tool,), (reward,) = load_tools([f"{path}:say"]), load_rewards([f"{path}:say"])
        assert tool.function() == said and tool.function is reward.function
        assert load_tools([f"{path}:say"])[0].function is tool.function


def test_spaces_of_a_call_are_those_that_the_model_wrote(tools):
    box, tokenizer = toolbox(tools, "told")
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    episode = said(box, tokenizer, call("told", what="a , b ."), "Well.", most=400)
    assert json.loads(results(episode)[0])["what"] == "a , b ."


def test_a_dry_run_looks_for_their_files(tmp_path, caller):
    words = ["grpo", "--dry-run", "--model", caller.model, "--dataset", caller.data, "--reward", "contains"]
    with pytest.raises(AssertionError, match="there is no file gone.py"):
        run_swiftlite(1, *words, "--tools", "gone.py:double")


def test_prompts_tell_of_tools(tmp_path, caller, tools, write_rows):
    """Beside those that rows have of their own."""
    own = [{"name": "other", "parameters": {}}, {"name": "double", "description": "Of the row.", "parameters": {}}]
    rows = [question(3), question(4) | {"tools": own}]
    values = learning(tmp_path, caller, tools, shuffle=False, max_new_tokens=9)
    values |= {"dataset": [str(write_rows("rows.jsonl", rows))], "global_batch_size": 2}
    config = resolve_config("grpo", **values)
    (batch, *_) = prepare_data(config, lambda: load_tokenizer(config.model)).train.steps()
    tokenizer = AutoTokenizer.from_pretrained(caller.model)
    texts = [tokenizer.decode(document.input_ids) for document in batch.documents]
    assert all('"name": "double"' in text and "Twice a number." in text for text in texts)
    assert ["other" in text for text in texts] == [False, True] and "Of the row." not in texts[1]


def test_a_template_without_calls_is_told_before_the_model_loads(tmp_path, caller, tools, monkeypatch):
    monkeypatch.setattr("swiftlite.training.run.build_trainee", lambda *_, **__: pytest.fail("it was loaded"))
    values = learning(tmp_path, caller, tools, chat_template="instruction")
    with pytest.raises(UserError, match="writes calls of tools in no form that can be read"):
        train_alone(resolve_config("grpo", **values))
    assert not (tmp_path / "out").exists()


def test_settings_around_tools(tmp_path, caller, tools, monkeypatch):
    def notes(method, **more):
        values = settings(tmp_path, caller.model, caller.data) | more
        given = {name: Given(value, f"--{name}", "flag") for name, value in values.items()}
        return " ".join(resolve(None, given | {"method": Given(method, "x", "flag")}).notes)

    assert "tools has no effect without --reward" in notes("sft", tools=[f"{tools}:double"], eval_fraction=0.5)
    assert "tool_rounds has no effect without --tools" in notes("grpo", reward=["contains"], tool_rounds=3)
    recipe = tools.parent / "recipe.yaml"
    recipe.write_text("method: grpo\nmodel: m\ndataset: rows.jsonl\nreward: contains\ntools: tools.py:double\n")
    monkeypatch.chdir(tmp_path)
    assert resolve(None, {}, recipe=load_recipe(str(recipe)), env={}).config.tools == [f"{tools}:double"]
    recipe.write_text("method: grpo\nmodel: m\nreward: contains\nmax_tool_calling_iterations: 3\n")
    assert load_recipe(str(recipe)).said("tool_rounds") == "3"


def test_a_dry_run_tells_what_may_be_called(caller, tools):
    words = ["grpo", "--model", caller.model, "--dataset", caller.data, "--reward", "contains", "--dry-run"]
    (said,) = run_swiftlite(1, *words, "--tools", f"{tools}:double", "--tool-rounds", "3")
    assert f"which may call {tools}:double up to 3 times" in " ".join(said.split())
    with pytest.raises(AssertionError, match="'double' names no function"):
        run_swiftlite(1, *words, "--tools", "double")


def test_a_conversation_calls_them(tmp_path, caller, tools):
    (said,) = run_swiftlite(1, "infer", "-m", caller.model, "--tools", f"{tools}:double", "-p", "Twice 4?")
    assert "(double says " in said and said.splitlines()[-1].startswith("It is ")
    words = ["infer", "-m", caller.model, "--input", caller.data, "--output", tmp_path / "said.jsonl"]
    run_swiftlite(1, *words, "--tools", f"{tools}:double")
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    called = [row["turns"] for row in rows if "turns" in row]
    assert len(called) > 4 and all(
        row["turns"][-1]["content"].strip() == row["response"] for row in rows if "turns" in row
    )
    for calling, heard, *_ in called:
        assert heard["content"] == str(2 * calling["tool_calls"][0]["function"]["arguments"]["n"])


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--tools", "{}:double", "{}:none"], "there is no function none"),
        (["--tools", "{}:double,{}:none"], "there is no function none"),
        (["--tools", "{}:double", "--chat-template", "none"], "there is no chat template"),
        (["--tools", "{}:double", "--chat-template", "instruction"], "in no form that can be read"),
        (["--tools", "{}:double", "--tool-rounds", "0"], "--tool-rounds is 0"),
        (["--tools", "double"], "names no function"),
    ],
)
def test_tools_of_a_conversation_are_checked_before_the_model_loads(caller, tools, more, wanted, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load_for_answers", lambda *_, **__: pytest.fail("it is loaded"))
    with pytest.raises(SystemExit) as end:
        main(["infer", "-m", str(caller.model), "-p", "x", *(word.replace("{}", str(tools)) for word in more)])
    assert end.value.code == 2 and wanted in capsys.readouterr().err


def test_what_a_run_names_is_not_run_unasked(tmp_path, caller, tools):
    train_alone(resolve_config("grpo", **learning(tmp_path, caller, tools, reward=["contains"], max_steps=1)))
    words = ["eval", "--model", tmp_path / "out", "--dataset", caller.data]
    for more in ([], ["--reward", "last_number"]):
        with pytest.raises(
            AssertionError, match="answers may call tools, and those that a run names are not run unasked"
        ):
            run_swiftlite(1, *words, *more)
    (said,) = run_swiftlite(1, *words, "--reward", "last_number", "--tools", "none")
    assert "tools/calls" not in said
    named = f"--tools {tools}:double makes them callable here too"
    silent = (["--tools", "none"], ["--tools", f"{tools}:double"], ["--chat-template", "none"])
    for more, told in ([], True), *((words, False) for words in silent):
        (said,) = run_swiftlite(1, "infer", "-m", tmp_path / "out", "-p", "Twice 4?", "--max-new-tokens", 4, *more)
        assert (named in said) == told and "has no effect" not in said
    (said,) = run_swiftlite(1, "infer", "-m", tmp_path / "out", "-p", "Hi", "--max-new-tokens", 1, "--tool-rounds", 3)
    assert "note: --tool-rounds has no effect without --tools" in said
