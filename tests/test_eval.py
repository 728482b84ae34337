"""`swiftlite eval`: the loss that a run has logged, from what it has saved; and what has nothing to be evaluated."""

import io
import json
import math
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from test_launch import ENV, SWIFTLITE, ranks_of, run, wait_gone
from test_parity import metrics, render_chat, settings, train_alone
from worlds import run_swiftlite

from swiftlite.checkpoint.folder import list_checkpoints
from swiftlite.cli import console
from swiftlite.cli.app import main
from swiftlite.cli.eval import _of_the_weights, _table, _tell, choose_rows
from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.errors import RunError, UserError
from swiftlite.models.toys import toy_judged, toy_pairs, toy_rows
from swiftlite.parallel.world import World
from swiftlite.serving.evaluated import settle
from swiftlite.training import reference
from swiftlite.training.evaluate import Evaluated, run_evaluation
from swiftlite.training.step import DirectStep

ROWS = {"dpo": toy_pairs, "rm": toy_pairs, "kto": toy_judged}
RUNS = {
    "sft-full": ("sft", {"tuner": "full", "learning_rate": 1e-3}),
    "sft-new-tokens": ("sft", {"tuner": "full", "new_tokens": ["<fox>", "<hen>"]}),
    "sft-lora": ("sft", {"tuner": "lora", "modules_to_save": ["lm_head"], "new_tokens": ["<fox>"]}),
    "sft-freeze": ("sft", {"tuner": "freeze", "trainable_layers": 1}),
    "sft-noise": ("sft", {"tuner": "full", "neftune_noise_alpha": 5.0, "loss": ["dft"]}),
    "sft-micro-batches": ("sft", {"tuner": "full", "micro_batch_size": 2}),
    "sft-pure-bf16": ("sft", {"tuner": "full", "pure_bf16": True, "precision": "bf16"}),
    "sft-template": ("sft", {"tuner": "full", "chat_template": "chatml", "precision": "bf16"}),
    "dpo-full": ("dpo", {"tuner": "full"}),
    "dpo-precomputed": ("dpo", {"tuner": "full", "reference": "precompute"}),
    "dpo-running-mean": ("dpo", {"tuner": "lora", "loss": ["bco_pair"]}),
    "kto-full": ("kto", {"tuner": "full", "reference": "precompute"}),
    "rm-lora": ("rm", {"tuner": "lora"}),
}


@pytest.fixture
def train(tmp_path, tiny_model, write_rows, chat_rows):
    """Train a run of RUNS with evaluations: name -> its rows of metrics.jsonl."""

    def start(name, **more):
        method, values = RUNS[name]
        data = write_rows(f"{method}.jsonl", ROWS[method](24) if method in ROWS else chat_rows)
        held_out = {"eval_fraction": 0.3, "save_steps": 2, "eval_steps": 2, "learning_rate": 1e-2}
        values = settings(tmp_path, tiny_model("llama"), data, **(held_out | values | more))
        train_alone(resolve_config(method, **values))
        return metrics(tmp_path / "out")

    return start


def evaluate(**values):
    """What is found: one of a data set each, and of all."""
    given = {name: Given(value, f"--{name}", "flag") for name, value in values.items()}
    settled, recipe = settle(given, None)
    method = None if "method" in settled or recipe is not None else "sft"
    resolved, found = resolve(method, settled, recipe, needs_rows=False), []
    run_evaluation(choose_rows(resolved), World(torch.device("cpu")), Layout(), tell=found.extend)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_has_the_loss_that_its_run_has_logged(tmp_path, train, name):
    logged = {row["step"]: row for row in train(name) if "eval_loss" in row}
    out = tmp_path / "out"
    newer, older = list_checkpoints(out)
    assert logged.keys() == {2, 4} and logged[2]["eval_loss"] != logged[4]["eval_loss"]
    for folder, step in ((older, 2), (newer, 4), (out / "checkpoints" / "latest", 4), (out, 4)):
        [found] = evaluate(model=str(folder), cache_dir=str(tmp_path / "cache"))
        assert found.loss == logged[step]["eval_loss"]
        assert {f"eval_{key}": value for key, value in found.metrics.items()} == {
            key: value for key, value in logged[step].items() if key.startswith("eval_") and key != "eval_loss"
        }


def test_a_folder_that_is_called_all_is_no_sum_of_the_others(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    (tmp_path / "all").mkdir()
    write_rows("one.jsonl", chat_rows[:2])
    write_rows("all/two.jsonl", chat_rows[2:5])
    monkeypatch.chdir(tmp_path)
    found = evaluate(model=str(tiny_model("llama")), dataset=["one.jsonl", "all"], cache_dir=str(tmp_path / "cache"))
    assert [(one.data, one.counts["rows"]) for one in found] == [("one.jsonl", 2), ("all", 3), ("all", 5)]


def test_a_model_without_a_run_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, expected = tiny_model("qwen3"), {}
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    for name, rows in (("one.jsonl", chat_rows[:7]), ("two.jsonl", chat_rows[7:20])):
        total, count = 0.0, 0
        for row in rows:
            ids, trained = render_chat(tokenizer, row["messages"])
            with torch.no_grad():
                logprobs = plain(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            learnt = torch.tensor(trained[1:])
            total -= logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][learnt].sum().item()
            count += int(learnt.sum())
        expected[str(write_rows(name, rows))] = total, count
    found = evaluate(model=str(model), dataset=list(expected), cache_dir=str(tmp_path / "cache"))
    assert [one.data for one in found] == [*expected, "all"] and found[-1].counts["rows"] == 20
    for one, (total, count) in zip(
        found, [*expected.values(), map(sum, zip(*expected.values(), strict=True))], strict=True
    ):
        assert one.counts["trained_tokens"] == count
        assert one.loss == pytest.approx(total / count, rel=1e-5)


def test_rows_and_method_may_be_others_than_the_runs(tmp_path, train, write_rows, chat_rows):
    train("dpo-full")
    rows, cache = str(write_rows("chats.jsonl", chat_rows[:5])), str(tmp_path / "cache")
    [found] = evaluate(model=str(tmp_path / "out"), method="sft", dataset=[rows], cache_dir=cache)
    [alone] = evaluate(model=str(tmp_path / "out" / "model"), method="sft", dataset=[rows], cache_dir=cache)
    assert found.counts["rows"] == 5 and found.loss == alone.loss
    [found] = evaluate(model=str(tmp_path / "out"), dataset=[str(tmp_path / "dpo.jsonl")], cache_dir=cache)
    assert found.counts["pairs"] == 24


def test_an_adapter_is_compared_with_its_base(tmp_path, train):
    last = train("dpo-running-mean", loss=["sigmoid"])[-1]
    moved = tmp_path / "moved"
    (tmp_path / "out" / "model").rename(moved)  # it is no run's any more
    given = {"method": "dpo", "eval_fraction": 0.3, "max_length": 160, "cache_dir": str(tmp_path / "cache")}
    [found] = evaluate(adapter=str(moved), dataset=[str(tmp_path / "dpo.jsonl")], global_batch_size=4, **given)
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-6)


def test_a_reference_is_loaded_once_for_several_data_sets(tmp_path, train, write_rows, monkeypatch):
    train("dpo-full")
    other, seen = write_rows("other.jsonl", toy_pairs(6)), set()
    sums = reference.LiveReference.sums

    def noting(self, *arguments):
        seen.add(id(self._model))
        return sums(self, *arguments)

    monkeypatch.setattr(reference.LiveReference, "sums", noting)
    rows = [str(tmp_path / "dpo.jsonl"), str(other)]
    found = evaluate(model=str(tmp_path / "out"), dataset=rows, cache_dir=str(tmp_path / "cache"))
    assert len(found) == 3 and len(seen) == 1


def test_layouts_give_the_same_numbers(tmp_path, train):
    logged = train("dpo-full")[-1]
    for layout in (["--parallel", "fsdp"], ["--tp", "2"], ["--pp", "2"]):
        report = tmp_path / "report.json"
        words = ["--json", report, "--cache-dir", tmp_path / "cache", *layout]
        run_swiftlite(2, "eval", "--model", tmp_path / "out", *words)
        [row] = json.loads(report.read_text())
        for name in ("loss", "rewards/margin", "logps/chosen"):
            assert row[name] == pytest.approx(logged[f"eval_{name}"], rel=1e-5), layout


def test_the_command_tells_and_writes(tmp_path, tiny_model, write_rows, chat_rows):
    rows, report = write_rows("rows.jsonl", chat_rows[:6]), tmp_path / "found.json"
    words = ["--model", tiny_model("llama"), "--dataset", rows, "--json", report, "--cache-dir", tmp_path / "cache"]
    done = run(*SWIFTLITE, "eval", *words, "--learning-rate", "1", "--max-length", "160", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: --learning-rate has no effect: nothing is trained" in done.stdout
    [row] = json.loads(report.read_text())
    assert row["rows"] == 6 and row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert f"{row['loss']:.4f}" in done.stdout and "perplexity" in done.stdout
    assert not (tmp_path / "runs").exists()
    done = run(*SWIFTLITE, "eval", *words[:4], "--json", "-", "--max-length", "160", cwd=tmp_path)
    assert json.loads(done.stdout) == [row] and "perplexity" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no model is named"),
        (("--model", "MODEL"), "no rows are named"),
        (("--model", "MODEL", "--dataset", "ROWS", "--eval-dataset", "ROWS"), "both --dataset and --eval-dataset"),
        (("--model", "MODEL", "--dataset", "ROWS", "--resume", "auto"), "an evaluation resumes nothing"),
        (("--model", "MODEL", "--dataset", "ROWS", "--json", "nowhere/x.json"), "there is no such folder"),
        (("--model", "MODEL", "--dataset", "ROWS", "--learing-rate", "1"), "unknown flag --learing-rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_evaluated_is_told_at_once(capsys, tiny_model, write_rows, chat_rows, words, said):
    places = {"MODEL": str(tiny_model("llama")), "ROWS": str(write_rows("rows.jsonl", chat_rows[:2]))}
    with pytest.raises(SystemExit) as ended:
        main(["eval", *(places.get(word, word) for word in words)])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_has_nothing_to_compare_with_is_refused(tmp_path, tiny_model, write_rows):
    pairs = {"dataset": [str(write_rows("pairs.jsonl", toy_pairs(4)))], "cache_dir": str(tmp_path / "cache")}
    model, length = str(tiny_model("llama")), 160
    with pytest.raises(UserError, match="compares a model with what it began as"):
        evaluate(model=model, method="dpo", max_length=length, **pairs)
    assert evaluate(model=model, method="dpo", loss=["simpo"], max_length=length, **pairs)[0].loss > 0
    with pytest.raises(UserError, match="no score head"):
        evaluate(model=model, method="rm", max_length=length, **pairs)


def test_a_reward_model_is_known_as_one(tmp_path, train, write_rows):
    train("rm-lora", tuner="full")
    moved = tmp_path / "moved"
    (tmp_path / "out" / "model").rename(moved)
    pairs = str(write_rows("more.jsonl", toy_pairs(4)))
    [found] = evaluate(model=str(moved), dataset=[pairs], max_length=160, cache_dir=str(tmp_path / "cache"))
    assert found.counts["pairs"] == 4 and "rewards/accuracy" in found.metrics


@pytest.mark.parametrize("name", ["kto-full", "dpo-full", "sft-full"])
def test_several_data_sets_together_have_the_loss_of_the_run(tmp_path, train, write_rows, name):
    method, _ = RUNS[name]
    sets = [write_rows(f"{place}.jsonl", ROWS.get(method, toy_rows)(30)[place:]) for place in (9, 17)]
    logged = train(name, eval_fraction=0.0, eval_dataset=[str(path) for path in sets])[-1]
    *each, whole = evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert [one.data for one in each] == [str(path) for path in sets] and whole.data == "all"
    assert whole.loss == pytest.approx(logged["eval_loss"], rel=1e-6)
    assert whole.counts["rows"] == sum(one.counts["rows"] for one in each) == 34


def test_a_run_that_streamed_its_texts_is_evaluated(tmp_path, tiny_model, write_rows):
    texts = write_rows("texts.jsonl", [{"text": f"Chapter {i}. There was a fox. " * (1 + i % 3)} for i in range(20)])
    values = {"streaming": True, "eval_dataset": [str(texts)], "save_steps": 2, "eval_steps": 2}
    train_alone(resolve_config("pretrain", **settings(tmp_path, tiny_model("llama"), texts, **values)))
    [found] = evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert found.loss == metrics(tmp_path / "out")[-1]["eval_loss"]


def test_rows_of_flags_take_the_place_of_all_that_a_run_names(tmp_path, train, write_rows, chat_rows):
    train("sft-full")
    given = {"model": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    rows = str(write_rows("other.jsonl", chat_rows[:5]))
    config = tmp_path / "out" / "config.yaml"
    as_saved = config.read_text()
    config.write_text(as_saved.replace("max_samples: null", "max_samples: 3"))
    assert evaluate(**given, eval_dataset=[rows])[0].counts["rows"] == 5  # the run has an --eval-fraction
    text = as_saved.replace("eval_fraction: 0.3", "eval_fraction: 0.0")
    config.write_text(text.replace("eval_dataset: []", f"eval_dataset: [{rows}]"))
    assert evaluate(**given)[0].counts["rows"] == 5
    assert evaluate(**given, eval_fraction="0.5")[0].counts["rows"] == 16  # of the rows that it was trained on


def test_what_a_run_says_of_its_machine_is_not_taken_over(tmp_path, train):
    train("sft-full")
    config = tmp_path / "out" / "config.yaml"
    text = config.read_text().replace("trust_remote_code: false", "trust_remote_code: true")
    config.write_text(text.replace(f"cache_dir: {tmp_path}", f"cache_dir: {tmp_path}/nowhere"))
    settled, recipe = settle({"model": Given(str(tmp_path / "out"), "--model", "flag")}, None)
    found = resolve(None, settled, recipe, needs_rows=False).config
    assert not found.trust_remote_code and found.cache_dir is None and found.workers is None


def test_batch_sizes_give_way_to_processes_where_no_loss_depends_on_them(tmp_path, train):
    def resolved(nproc):
        given = {"model": Given(str(tmp_path / "out"), "--model", "flag")}
        settled, recipe = settle(given | {"nproc_per_node": Given(nproc, "--nproc-per-node", "flag")}, None)
        return resolve(None, settled, recipe, needs_rows=False, exact_batch=False)

    train("kto-full", micro_batch_size=2)
    kept = resolved(4)
    assert (kept.config.global_batch_size, kept.config.micro_batch_size) == (4, 1)
    assert "the recipe's micro_batch_size 2 gives way to the flags" in kept.notes
    with pytest.raises(UserError, match="--global-batch-size 4 is not a multiple"):
        resolved(3)  # the reference point of kto is of the rows of a step
    config = tmp_path / "out" / "config.yaml"
    config.write_text(config.read_text().replace("method: kto", "method: sft"))
    assert resolved(3).config.global_batch_size % 3 == 0


def test_what_files_do_not_hold_of_a_run_is_told(tmp_path, train, capsys):
    train("sft-full", save_dtype="bf16")
    evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert "the files hold the trained weights in bfloat16, the run had them in fp32" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out")
    train("dpo-running-mean")
    capsys.readouterr()
    evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert "note:" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    evaluate(model=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert "bco_pair takes the mean reward before as 0" in capsys.readouterr().out


def test_a_reference_that_is_gone_is_named_with_the_way_to_name_it_anew(tmp_path, train):
    logged, given = train("dpo-full")[-1], {"model": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    config = tmp_path / "out" / "config.yaml"
    text = config.read_text()
    model = next(line for line in text.splitlines() if line.startswith("model: "))
    config.write_text(text.replace(model, "model: /nowhere/model"))
    with pytest.raises(UserError, match="what it began as, which is not where it was") as told:
        evaluate(**given)
    assert "/nowhere/model" in told.value.where and "config.yaml" in told.value.fix
    config.write_text(text)
    assert evaluate(**given)[0].loss == logged["eval_loss"]


def test_new_tokens_are_those_of_the_weights_or_of_the_flag(tmp_path, train, tiny_model, write_rows, capsys):
    rows = train("sft-new-tokens")
    capsys.readouterr()
    words = ["--cache-dir", str(tmp_path / "cache"), "--new-tokens", "<fox>", "--json", str(tmp_path / "found.json")]
    assert _ended(["--model", str(tmp_path / "out"), *words]) == 0
    assert "--new-tokens has no effect: the weights have those" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())[0]["loss"] == rows[-1]["eval_loss"]
    fox = str(write_rows("fox.jsonl", [{"prompt": "<fox>", "completion": "<fox>"}]))
    given = {"model": str(tiny_model("llama")), "dataset": [fox], "cache_dir": str(tmp_path / "cache")}
    [plain], [grown] = evaluate(**given), evaluate(**given, new_tokens=["<fox>"])
    assert grown.counts["tokens"] < plain.counts["tokens"]


TRAINING = {
    "--streaming": [], "--shuffle": [], "--early-stopping-patience": ["3"], "--optimizer-in-backward": [],
    "--fp8": [], "--tuner": ["full"], "--max-restarts": ["2"], "--output-dir": ["out"], "--sync-every-microbatch": [],
}  # fmt: skip


def test_flags_of_training_ask_for_nothing_and_are_told(tmp_path, tiny_model, write_rows, chat_rows, capsys):
    rows = str(write_rows("rows.jsonl", chat_rows[:2]))
    words = ["--model", str(tiny_model("llama")), "--dataset", rows, "--dry-run"]
    assert _ended([*words, *(word for flag, value in TRAINING.items() for word in (flag, *value))]) == 0
    told = capsys.readouterr().out
    for flag in TRAINING:
        assert f"note: {flag} has no effect: nothing is trained" in told
    assert _ended([*words[:-1], "--loss", "dft"]) == 0
    assert "--loss has no effect: tokens are evaluated by their cross-entropy" in capsys.readouterr().out
    assert _ended([*words, "--reward", "contains", "--samples", "4", "--temperature", "0.7"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "--samples has no effect: nothing is trained; did you mean --eval-samples?" in told
    assert "--temperature has no effect: nothing is trained; did you mean --eval-temperature?" in told
    assert _ended([*words, "--max-steps", "many"]) == 2
    assert "max_steps is 'many', not a whole number" in capsys.readouterr().err


def test_a_dry_run_tells_of_an_evaluation_and_of_no_training(tiny_model, capsys):
    words = ["--model", str(tiny_model("llama")), "--max-new-tokens", "9", "--dry-run"]
    told = []
    for more in (
        ["--eval-dataset", "a b"],
        ["--dataset", "a", "--eval-fraction", "0.5", "--reward", "contains"],
        ["--dataset", "a", "--reward", "contains", "--eval-samples", "4"],
        [],
    ):
        assert _ended([*words, *more]) == 0
        told.append(" ".join(capsys.readouterr().out.split()))
    for text in told:
        assert "a step" not in text and "learning_rate" not in text and "global_batch_size" in text
    assert "evaluated a b together 8 packs of up to 512 tokens = 1 a forward pass x 8 one by one x" in told[0]
    drawn = "evaluated 0.5 of a together 64 prompts with 1 answer each, of up to 9 tokens, of the likeliest tokens each"
    assert drawn in told[1] and "64 prompts with 4 answers each, of up to 9 tokens, at temperature 1" in told[2]
    assert "evaluated no rows are named yet" in told[3]
    assert _ended([*words, "--dataset", "a", "a"]) == 2 and "named twice" in capsys.readouterr().err


def test_names_are_shown_as_they_are_and_no_data_set_counts_twice(tmp_path, tiny_model, write_rows, chat_rows, capsys):
    (tmp_path / "a[").mkdir()
    rows = write_rows("a[/b].jsonl", chat_rows[:2])
    words = ["--model", str(tiny_model("llama")), "--cache-dir", str(tmp_path / "cache"), "--dataset", str(rows)]
    assert _ended(words) == 0 and "a[/b].jsonl" in capsys.readouterr().out
    assert _ended([*words, str(rows)]) == 2 and "the data set is named twice" in capsys.readouterr().err


def test_flags_win_over_what_a_run_says_and_another_base_is_told(tmp_path, train, tiny_model):
    def resolved(**values):
        given = {name: Given(str(value), f"--{name}", "flag") for name, value in values.items()}
        settled, recipe = settle(given, None)
        return resolve(None, settled, recipe, needs_rows=False)

    train("sft-pure-bf16")
    assert not resolved(model=tmp_path / "out", precision="fp32").config.pure_bf16
    shutil.rmtree(tmp_path / "out")
    train("dpo-running-mean")
    assert not _of_the_weights(resolved(adapter=tmp_path / "out"))
    [told] = _of_the_weights(resolved(adapter=tmp_path / "out", model=tiny_model("mistral")))
    assert told.startswith("the adapter was trained on ")


def test_numbers_stand_in_one_line_in_a_narrow_terminal(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        console, "wide_console", lambda **_: Console(file=shown, width=40, soft_wrap=True, highlight=False)
    )
    sets = [Evaluated(f"{name}.jsonl", {"rows": 1234567}, 12.5, {"token_accuracy": 0.25}) for name in "abc"]
    _tell(None, sets[:1])
    assert shown.getvalue().count("perplexity") == 1
    _tell(None, sets)
    assert shown.getvalue().count("1,234,567") == 4 and shown.getvalue().count("perplexity") == 4
    assert max(map(len, shown.getvalue().splitlines())) <= 40


def test_means_of_no_rows_and_numbers_that_are_none_are_told_apart(tmp_path, capsys):
    report = tmp_path / "found.json"
    _tell(
        str(report), [Evaluated("a", {"desirable": 3}, math.nan, {"logps/rejected": None, "logps/chosen": -math.inf})]
    )
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    told = {name: words.strip() for name, words in lines}
    assert told["logps/rejected"] == "no rows" and told["logps/chosen"] == told["loss"] == "not finite"
    assert json.loads(report.read_text())[0]["loss"] is None


def test_a_full_memory_brings_no_advice_for_training(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DirectStep, "evaluate", full)
    with pytest.raises(RunError, match="ran out of memory in the evaluation") as told:
        rows = str(write_rows("rows.jsonl", chat_rows[:2]))
        evaluate(model=str(tiny_model("llama")), dataset=[rows], cache_dir=str(tmp_path / "cache"))
    assert "--max-length" in told.value.fix
    assert "--tuner" not in told.value.fix and "--activation-checkpointing" not in told.value.fix


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_several_processes_end_on_a_signal_with_a_word(tmp_path, tiny_model, write_rows, number):
    rows = write_rows("many.jsonl", toy_rows(6_000))
    words = ["--model", tiny_model("llama"), "--dataset", rows, "--cache-dir", tmp_path / "cache", "--json", "found"]
    command = [*SWIFTLITE, "eval", *map(str, words), "--nproc-per-node", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, cwd=tmp_path
    )
    assert any("loading the model" in line for line in process.stdout)
    ranks = ranks_of(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and len(ranks) == 2
    assert err.split() == ["interrupted" if number == signal.SIGINT else "terminated"]
    wait_gone(ranks)
    assert not (tmp_path / "found").exists()


def _ended(words):
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    return ended.value.code


TIMES = ("_per_second", "_seconds", "peak_memory_gib")


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_run_is_evaluated_before_its_first_step(tmp_path, tiny_model, write_rows, chat_rows, method, capsys):
    rows = toy_pairs(24) if method == "dpo" else chat_rows
    data, held_out = write_rows("rows.jsonl", rows[:16]), write_rows("held_out.jsonl", rows[16:])
    more = {"eval_dataset": [str(held_out)], "eval_steps": 2, "save_steps": 2, "max_steps": 2}
    values = settings(tmp_path, tiny_model("llama"), data, **more)
    train_alone(resolve_config(method, **values | {"output_dir": str(tmp_path / "plain")}))
    train_alone(resolve_config(method, **values, eval_on_start=True))
    train_alone(resolve_config(method, **values | {"max_steps": 3}, eval_on_start=True, resume="auto"))
    start, *others = metrics(tmp_path / "out")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 0/")]
    assert "not finite" not in line and "eval loss" in line
    assert {key for key in start if not key.startswith("eval_")} == {"step", "epoch"}
    assert (start["step"], start["epoch"], [row["step"] for row in others]) == (0, 0.0, [1, 2, 3])
    if method == "sft":
        [found] = evaluate(model=str(tiny_model("llama")), dataset=[str(held_out)], cache_dir=str(tmp_path / "cache"))
        assert start["eval_loss"] == pytest.approx(found.loss, rel=1e-6)
    else:
        assert start["eval_loss"] == pytest.approx(math.log(2), rel=1e-6)
    for row, same in zip(others, metrics(tmp_path / "plain"), strict=False):
        assert [row[key] for key in same if not key.endswith(TIMES)] == [
            same[key] for key in same if not key.endswith(TIMES)
        ]


def test_names_of_data_sets_are_no_markup(capsys):
    row = {"data": "both", "rows": 2, "loss": 0.5, "loss/[red] a": 0.25, "loss/x[/y": 0.75, "loss/[/b]": None}
    Console(width=100).print(_table([row]))
    shown = capsys.readouterr().out
    assert all(name in shown for name in row)
