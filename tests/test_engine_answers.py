"""Answers that an engine beside a run gives: what is learnt from them, and engines that do not fit."""

import json
import shutil
from types import SimpleNamespace

import pytest
import requests
import torch
from stand_in_engine import StandIn, numbers, seed_of
from test_grpo import sampled
from test_parity import metrics, settings, train_alone
from test_verify import in_real_processes

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.errors import RunError, UserError
from swiftlite.models.load import load_config
from swiftlite.objectives.policy import Policy
from swiftlite.training.losses import PolicyLoss
from swiftlite.training.plan import outline_of
from swiftlite.training.rollouts import engine, model_generator
from swiftlite.verification.cases import FULL, SAMPLED, Subject

OWN = ("reward", "answers/length", "loss", "grad_norm", "entropy", "trained_tokens", "tokens")
AGAIN = {"minibatches": 2, "update_epochs": 2, "epsilon": 0.02}


@pytest.fixture
def beside(tiny_model):
    """An engine that serves a toy llama."""
    with StandIn(tiny_model("llama")) as stand_in:
        yield stand_in


@pytest.fixture
def drawn_alike(monkeypatch):
    """Let the model itself draw by the numbers of the engine."""
    monkeypatch.setattr(model_generator, "_uniform", lambda count, *key: numbers(seed_of(key[:-1]), key[-1], count))


def by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, **more):
    values = sampled(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows))
    return values | {"engine_url": [beside.url], "learning_rate": 1e-2} | more


@pytest.mark.parametrize(
    "more",
    [
        {"tuner": "full"},
        {"tuner": "lora", "beta": 0.1, "temperature": 0.7},
        {"tuner": "full", "share_prompt": False, "packing": False, "loss": ["grpo"], **AGAIN},
    ],
)
def test_a_run_learns_what_it_learns_from_answers_of_its_own(
    tmp_path, tiny_model, write_rows, chat_rows, beside, drawn_alike, more
):
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, **more)
    train_alone(resolve_config("grpo", **values))
    train_alone(resolve_config("grpo", **values | {"engine_url": [], "output_dir": str(tmp_path / "own")}))
    rows = metrics(tmp_path / "out")
    for row, own in zip(rows, metrics(tmp_path / "own"), strict=True):
        assert [row[name] for name in OWN] == pytest.approx([own[name] for name in OWN], rel=2e-5, abs=1e-6)
        assert abs(row["kl/engine"]) < 1e-6 and row["engine/capped"] == 0.0 and "kl/engine" not in own
    answers = [(tmp_path / name / "answers.jsonl").read_text() for name in ("out", "own")]
    assert answers[0] == answers[1]
    assert len(beside.taken) == len(set(beside.taken)) == len(rows)  # the weights of each step, once
    assert json.loads((tmp_path / "out" / "run.json").read_text())["facts"]["answers"] == f"by {beside.url}"
    assert not (tmp_path / "out" / "engine").exists() and len(beside.known) == (more["tuner"] == "lora")


def test_processes_hand_over_what_each_holds_of_the_weights(tmp_path, tiny_model):
    with StandIn(tmp_path / "model") as stand_in:
        ours = SAMPLED | {"engine_url": [stand_in.url]}
        subject = Subject("llama-tied", "full", FULL | ours | AGAIN | {"max_steps": 2}, "grpo")
        for verdict in in_real_processes(tmp_path, 2, ("fsdp full 2, offloaded", "pp 2", "cp 2"), subject):
            assert verdict.passed and verdict.difference is not None, verdict


@pytest.mark.parametrize(
    ("shift", "counts", "capped"), [(-0.15, 1.1618342, 0.0), (-0.15, 1.1, 1.0), (0.15, 0.8607080, 0.0)]
)
def test_a_token_counts_by_how_likely_the_engine_found_it(
    tmp_path, tiny_model, write_rows, chat_rows, beside, shift, counts, capped
):
    more = {"max_steps": 1, "engine_ratio_cap": 1.1 if capped else 2.0}
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, **more)
    train_alone(resolve_config("grpo", **values))
    beside.shift = shift
    train_alone(resolve_config("grpo", **values | {"output_dir": str(tmp_path / "shifted")}))
    (plain,), (row,) = metrics(tmp_path / "out"), metrics(tmp_path / "shifted")
    assert row["grad_norm"] == pytest.approx(counts * plain["grad_norm"], rel=1e-5)
    assert (row["kl/engine"], row["engine/capped"]) == (pytest.approx(shift, abs=1e-5), capped)


def test_a_token_counts_no_more_than_the_cap():
    policy = Policy("dapo", 0.0, 0.0, answers=1, tokens=2, longest=8, cap=2.0)
    weights, capped = policy.weights(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -3.0]))
    assert weights.tolist() == pytest.approx([1.6487213, 2.0]) and capped.tolist() == [0.0, 1.0]


def test_what_holds_to_the_reference_counts_once_whoever_drew():
    """Of answers that are no better than others nothing else is left."""
    answers = SimpleNamespace(tokens=torch.tensor([2]), margin=torch.zeros(1))
    now, reference, owner = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.zeros(2, dtype=torch.int64)
    found = []
    for drawn in (now, now - 0.5):
        batch = SimpleNamespace(
            completions=answers, owner=owner, sampled=None, drawn=drawn, reference=reference, context=None
        )
        loss, _ = PolicyLoss(Policy("dapo", 0.1, 0.0, answers=1, tokens=2, longest=8, cap=2.0))(now, batch)
        found.append(loss.item())
    d = (reference - now).double()
    assert found == [pytest.approx((0.1 * (d.exp() - d - 1)).sum().item() / 2)] * 2


def test_an_engine_with_other_weights_is_told(tmp_path, tiny_model, write_rows, chat_rows, beside):
    beside.shift = 0.3
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, save_steps=1)
    with pytest.raises(RunError, match="answers by other weights than the model's: they are 0.3 nats a token apart"):
        train_alone(resolve_config("grpo", **values))
    assert not [*(tmp_path / "out").glob("checkpoints/*")]


def test_an_engine_that_does_not_see_the_weights_is_told_of_them(
    tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch
):
    does = beside.does
    said = 404, {"error": "no adapter there"}
    monkeypatch.setattr(beside, "does", lambda path, body: said if body.get("lora_name") else does(path, body))
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, tuner="lora")
    with pytest.raises(RunError, match="404 .*no adapter there") as failure:
        train_alone(resolve_config("grpo", **values))
    assert "(--engine-folder)" in failure.value.fix and failure.value.where == f"{beside.url}/v1/load_lora_adapter"


def test_a_run_goes_on_when_its_engine_does(tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch):
    monkeypatch.setattr(engine, "AGAIN", 0)
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, save_steps=1, max_steps=3)
    train_alone(resolve_config("grpo", **values))
    beside.fails_after = 2 * len(beside.answered) // 3 + len(beside.answered)
    other = values | {"output_dir": str(tmp_path / "other")}
    with pytest.raises(RunError, match="does not do what it is asked for: 500") as failure:
        train_alone(resolve_config("grpo", **other))
    assert failure.value.where == f"{beside.url}/v1/completions"
    assert len(metrics(tmp_path / "other")) == 2
    beside.fails_after = None
    train_alone(resolve_config("grpo", **other | {"resume": "auto"}))
    rows, again = ([[row[name] for name in OWN] for row in metrics(tmp_path / out)] for out in ("out", "other"))
    assert again == rows


def test_the_next_step_is_answered_while_one_is_learnt(tmp_path, tiny_model, write_rows, chat_rows, beside):
    """By weights that are one step older, which evaluations between are not, and the loss knows of."""
    judged = {"eval_fraction": 0.2, "eval_steps": 1, "max_new_tokens": 8}
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, engine_ahead=True, **judged)
    train_alone(resolve_config("grpo", **values))
    seeds, order = {}, []
    for path, body in beside.asked:
        if path == "/collective_rpc" and "kwargs" in body:
            order.append("weights")
        elif path == "/v1/completions":
            step = (
                "evaluation"
                if body["temperature"] == 0
                else seeds.setdefault(body["seed"], len(seeds) // values["global_batch_size"] + 1)
            )
            order += [step] if order[-1] != step else []
    assert order == ["weights", 1, 2, "weights", "evaluation", 3, "weights", "evaluation", "weights", "evaluation"]
    rows = metrics(tmp_path / "out")
    assert abs(rows[0]["kl/engine"]) < 1e-6 and all(1e-4 < abs(row["kl/engine"]) < 0.2 for row in rows[1:])
    train_alone(resolve_config("grpo", **values | {"output_dir": str(tmp_path / "other")}))
    assert [[row[name] for name in OWN] for row in metrics(tmp_path / "other")] == [
        [row[n] for n in OWN] for row in rows
    ]


def test_a_failure_ahead_ends_the_step_that_asks_for_it(
    tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch
):
    monkeypatch.setattr(engine, "AGAIN", 0)
    beside.fails_after = 6
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, engine_ahead=True, save_steps=1)
    with pytest.raises(RunError, match="does not do what it is asked for: 500"):
        train_alone(resolve_config("grpo", **values))
    assert len(metrics(tmp_path / "out")) == 1
    beside.fails_after = None
    train_alone(resolve_config("grpo", **values | {"resume": "auto"}))
    assert len(metrics(tmp_path / "out")) == 3


def test_a_server_that_is_started_anew_between_steps_serves_on(
    tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch
):
    """It knows nothing of the adapter before."""
    does = beside.does

    def anew(path, body):
        if path == "/v1/load_lora_adapter" and body:
            beside.known.clear()
        return does(path, body)

    monkeypatch.setattr(beside, "does", anew)
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, tuner="lora")
    train_alone(resolve_config("grpo", **values))
    assert len(metrics(tmp_path / "out")) == len(beside.taken) == 3


def test_what_a_run_that_was_killed_has_left_is_removed(tmp_path, tiny_model, write_rows, chat_rows, beside):
    """And that of others is not."""
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=1)
    values["engine_folder"] = str(tmp_path / "memory")
    train_alone(resolve_config("grpo", **values))
    (name,), memory = beside.taken, tmp_path / "memory"
    left, others = memory / f"{name[:9]}dead-7", memory / "0123abcd-beef-7"
    assert memory.is_dir()
    for folder in (left, others):
        folder.mkdir()
    shutil.rmtree(tmp_path / "out")
    train_alone(resolve_config("grpo", **values))
    assert [*memory.iterdir()] == [others]


@pytest.mark.parametrize("more", [{}, {"engine_ahead": True}])
def test_nothing_of_the_weights_is_left_when_a_run_is_stopped(
    tmp_path, tiny_model, write_rows, chat_rows, beside, more
):
    """Whoever stops it keeps what it has raised until the process ends, and with it all that the run has made."""
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=9, stop_after="1s", **more)
    with pytest.raises(SystemExit) as stopped:
        train_alone(resolve_config("grpo", **values))
    assert stopped.value.code == 0 and 0 < len(metrics(tmp_path / "out")) < 9
    assert beside.taken and not (tmp_path / "out" / "engine").exists()


def test_evaluations_ask_the_engine_too(tmp_path, tiny_model, write_rows, chat_rows, beside):
    """Of sft as well; it takes the weights over once for an evaluation of several batches."""
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), tuner="full", max_steps=2)
    values |= {"reward": SAMPLED["reward"], "max_new_tokens": 8, "eval_fraction": 0.4, "eval_steps": 1}
    values |= {"answers_at_once": 1, "global_batch_size": 1, "learning_rate": 1e-2}
    train_alone(resolve_config("sft", **values))
    train_alone(resolve_config("sft", **values | {"engine_url": [beside.url], "output_dir": str(tmp_path / "by")}))
    named = ("eval_reward", "eval_answers/length", "eval_answers/cut", "eval_loss")
    own, by = (
        [[row[name] for name in named] for row in metrics(tmp_path / out) if "eval_reward" in row]
        for out in ("out", "by")
    )
    assert by == own and len(by) == len(beside.taken) == 2 < len(beside.answered)
    assert {body["temperature"] for body in beside.answered} == {0.0}


def test_several_engines_share_prompts_out(tmp_path, tiny_model, write_rows, chat_rows, beside):
    with StandIn(tiny_model("llama")) as second:
        values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=2)
        values["engine_url"] = [beside.url, f"{second.url}/v1/"]
        train_alone(resolve_config("grpo", **values))
        assert second.taken == beside.taken and len(beside.taken) == 2
        assert len(second.answered) == len(beside.answered) == values["global_batch_size"]


@pytest.mark.parametrize(
    ("engine_is", "more", "said"),
    [
        ({"longest": 100}, {}, "reads 100 tokens, fewer than --max-length 160"),
        ({"reloads": False}, {}, "takes no weights while it runs"),
        ({"adapters": False}, {"tuner": "lora"}, "takes no adapters while it runs"),
        ({"scaled": False}, {"temperature": 0.5}, "tells probabilities as they are without --temperature 0.5"),
    ],
)
def test_an_engine_that_does_not_fit_is_told_before_the_model_loads(
    tmp_path, tiny_model, write_rows, chat_rows, engine_is, more, said
):
    with StandIn(tiny_model("llama"), **engine_is) as stand_in:
        values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, stand_in, **more)
        with pytest.raises(UserError, match=said) as failure:
            train_alone(resolve_config("grpo", **values))
    assert failure.value.where == f"--engine-url {stand_in.url}" and "vllm serve" in failure.value.fix
    kind = "LORA_UPDATING=1" if "tuner" in more else "DEV_MODE=1"
    assert kind in failure.value.fix and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/v1/models", (200, {"data": [{"name": "base"}]}), "no engine answers there"),
        ("/v1/models", (200, {"data": [{"id": "base", "max_model_len": "long"}]}), "no engine answers there"),
        ("/v1/models", (401, {"error": "Unauthorized"}), "the engine asks for a key"),
        ("/collective_rpc", None, "no engine answers there"),
        ("/v1/completions", (200, "<html>a page</html>"), "no engine answers there"),
        ("/v1/completions", (200, {"choices": [{"logprobs": None}]}), "no engine answers there"),
        ("/v1/completions", (400, {"error": "out of its mind"}), "out of its mind"),
    ],
)
def test_what_is_no_engine_is_told_before_the_model_loads(
    tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch, path, answer, said
):
    """None: it hangs up."""
    does = beside.does
    monkeypatch.setattr(beside, "does", lambda asked, body: answer if asked == path else does(asked, body))
    config = resolve_config("grpo", **by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, temperature=0.5))
    with pytest.raises(UserError, match=said) as failure:
        engine.check_engines(config)
    assert failure.value.where == f"--engine-url {beside.url}"
    assert ("VLLM_API_KEY" if "key" in said else "vllm serve") in failure.value.fix


def test_an_address_that_leads_to_another_is_told(tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch):
    """Requests for answers would not get there."""
    found = requests.Session.get

    def moved(session, url, **more):
        response = found(session, url.replace("http://elsewhere:80", beside.url), **more)
        response.history = [response]
        return response

    monkeypatch.setattr(requests.Session, "get", moved)
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, engine_url=["http://elsewhere:80"])
    with pytest.raises(UserError, match="has moved") as failure:
        engine.check_engines(resolve_config("grpo", **values))
    assert failure.value.fix == f"write {beside.url}" and failure.value.where == "--engine-url http://elsewhere:80"


def test_an_address_where_nobody_answers_is_told(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    monkeypatch.setattr(engine, "AGAIN", 0)
    with StandIn(tiny_model("llama")) as gone:
        values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, gone)
    with pytest.raises(UserError, match="no engine answers there") as failure:
        train_alone(resolve_config("grpo", **values))
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in failure.value.fix
    with pytest.raises(UserError, match="is the address of a server"):
        resolve_config("grpo", **values | {"engine_url": ["localhost:8000"]})


@pytest.mark.parametrize(
    ("ranks", "said"), [({"r": 48}, "--max-lora-rank 64`"), ({"rank_pattern": {"q_proj": 128}}, "--max-lora-rank 128`")]
)
def test_a_server_has_room_for_the_adapter_that_goes_on(tmp_path, tiny_model, write_rows, chat_rows, ranks, said):
    """Which has a rank of its own."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 8, **ranks}))
    with StandIn(tiny_model("llama")) as gone:
        values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, gone, tuner="lora")
    config = resolve_config("grpo", **values | {"adapter": str(tmp_path / "adapter")})
    with pytest.raises(UserError, match="no engine answers") as failure:
        engine.check_engines(config)
    assert failure.value.fix.endswith(said)


def test_an_adapter_of_a_rank_that_no_server_takes_is_refused(tmp_path, tiny_model, write_rows, chat_rows, beside):
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, tuner="lora", lora_rank=513)
    with pytest.raises(UserError, match="of a rank above 512"):
        train_alone(resolve_config("grpo", **values))


def test_a_server_is_named_once(tmp_path, tiny_model, write_rows, chat_rows, beside):
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside)
    with pytest.raises(UserError, match="--engine-url names a server twice"):
        resolve_config("grpo", **values | {"engine_url": [beside.url, f"{beside.url}/v1/"]})


@pytest.mark.parametrize(
    ("more", "said"), [({"dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "whole modules")]
)
def test_an_adapter_that_engines_cannot_take_is_refused(
    tmp_path, tiny_model, write_rows, chat_rows, beside, more, said
):
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, tuner="lora", **more)
    with pytest.raises(UserError, match=f"vLLM takes no adapter with {said}"):
        train_alone(resolve_config("grpo", **values))


def test_tokens_that_the_server_has_no_rows_for_are_refused(tmp_path, tiny_model, write_rows, chat_rows, beside):
    """Those that find room among its rows are not."""
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=1)
    train_alone(resolve_config("grpo", **values | {"new_tokens": ["<one>"]}))
    many = [f"<{number}>" for number in range(400)]
    with pytest.raises(UserError, match="no weights of 8.. tokens into a model of 512"):
        train_alone(resolve_config("grpo", **values | {"new_tokens": many, "output_dir": str(tmp_path / "other")}))


def test_settings_of_an_engine_without_one_are_told(tmp_path, tiny_model, write_rows, chat_rows, beside):
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, engine_ratio_cap=3.0, answers_at_once=8)
    for urls, idle in (([], {"engine_ratio_cap"}), ([beside.url], {"answers_at_once"})):
        given = {"method": "grpo", **values, "engine_url": urls}
        notes = resolve(None, {name: Given(value, name, "flag") for name, value in given.items()}).notes
        assert {note.partition(" ")[0] for note in notes if "has no effect" in note} & {*given} >= idle


@pytest.mark.parametrize("more", [{"reward": ["contains"]}, {"eval_fraction": 0.2}])
def test_settings_of_an_engine_that_nothing_is_asked_are_told(tmp_path, tiny_model, write_rows, chat_rows, more):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), **more)
    given = {"method": "sft", **values, "engine_url": ["http://there:8000"], "engine_folder": "/there"}
    notes = resolve(None, {name: Given(value, name, "flag") for name, value in given.items()}).notes
    assert {note.partition(" ")[0] for note in notes if "has no effect" in note} >= {"engine_url", "engine_folder"}


def test_a_plan_counts_no_copy_where_an_engine_answers(tmp_path, tiny_model, write_rows, chat_rows, beside):
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, activation_checkpointing="none")
    config = resolve_config("grpo", **values)
    outline = outline_of(config, load_config(config.model), "cuda")
    plain = config.model_copy(update={"method": "sft"})
    for layout in (Layout(), Layout(dp_replicate=2)):
        assert outline.holds(config, layout, None).weights == outline.holds(plain, layout, None).weights


def _spoilt(change):
    """As `StandIn.does` of answers, of which each choice goes through `change`; None of it is left out."""

    def spoil(answer):
        changed = [change(choice) for choice in answer["choices"]]
        return answer | {"choices": [choice for choice in changed if choice is not None]}

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_spoilt(lambda one: one if one["index"] else None), "gives 3 answers where 4 were asked for"),
        (_spoilt(lambda one: one | {"token_ids": one["token_ids"][:1]}), "how likely it found each token"),
        (_spoilt(lambda one: one | {"logprobs": {"token_logprobs": [None] * len(one["token_ids"])}}), "how likely"),
        (
            _spoilt(lambda one: one | {"logprobs": {"token_logprobs": [float("nan")] * len(one["token_ids"])}}),
            "how lik",
        ),
        (_spoilt(lambda one: one | {"token_ids": [], "logprobs": {"token_logprobs": []}}), "ends an answer after 0"),
        (
            _spoilt(lambda one: one | {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}),
            "an answer after 1 tok",
        ),
        (_spoilt(lambda one: one | {"logprobs": None}), "does not tell the tokens of its answers"),
        (lambda answer: {"detail": "of something else"}, "does not tell the tokens of its answers"),
        (lambda answer: "<html>a page</html>", "does not tell the tokens of its answers"),
    ],
)
def test_answers_that_are_not_what_was_asked_for_are_told(
    tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch, spoil, said
):
    does = beside.does

    def spoilt(path, body):
        status, answer = does(path, body)
        return status, spoil(answer) if path == "/v1/completions" else answer

    monkeypatch.setattr(beside, "does", spoilt)
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=1)
    with pytest.raises(RunError, match=said) as failure:
        train_alone(resolve_config("grpo", **values))
    assert failure.value.where == f"{beside.url}/v1/completions"


def test_a_prompt_that_is_held_out_twice_is_asked_twice(tmp_path, tiny_model, write_rows, chat_rows, beside):
    """vLLM gives no two answers of the likeliest tokens to one request."""
    held_out = str(write_rows("held.jsonl", [chat_rows[0], chat_rows[0], chat_rows[1]]))
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=1, max_new_tokens=8)
    train_alone(resolve_config("grpo", **values | {"eval_dataset": [held_out], "eval_steps": 1}))
    assert [body["n"] for body in beside.answered if body["temperature"] == 0] == [1, 1, 1]


def test_keys_and_values_of_former_weights_are_dropped_or_the_run_ends(
    tmp_path, tiny_model, write_rows, chat_rows, beside, monkeypatch
):
    monkeypatch.setattr(engine, "BETWEEN_SECONDS", 0.0)
    does, said = beside.does, [{"success": False}, {"success": False}, {"success": True}]
    monkeypatch.setattr(
        beside, "does", lambda path, body: (200, said.pop(0)) if path == "/reset_prefix_cache" else does(path, body)
    )
    values = by_engine(tmp_path, tiny_model, write_rows, chat_rows, beside, max_steps=1)
    train_alone(resolve_config("grpo", **values))
    assert not said
    said += [{"success": False}] * 9
    with pytest.raises(RunError, match="it answers somebody else meanwhile"):
        train_alone(resolve_config("grpo", **values | {"output_dir": str(tmp_path / "other")}))
