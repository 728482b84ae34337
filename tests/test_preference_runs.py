"""Whole runs of dpo and kto: what must not change the curve, resume bit for bit, the reference's values on disk."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.numpy import load_file, save_file
from test_parity import metrics, settings, train_alone
from test_run import same_weights

from swiftlite.checkpoint.folder import list_checkpoints
from swiftlite.checkpoint.state import read_trainer_state
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import RunError, UserError
from swiftlite.models.toys import toy_judged, toy_pairs
from swiftlite.training import reference, setup, setup_method
from swiftlite.training import run as run_module
from swiftlite.training.precision import resolve_precision
from swiftlite.training.step import DirectStep

CPU = torch.device("cpu")


@pytest.fixture
def start(tmp_path, tiny_model, write_rows):
    """Train: (output folder, method, settings) -> metrics.jsonl. All runs of a test share a cache."""
    write_rows("dpo.jsonl", toy_pairs(24))
    write_rows("kto.jsonl", toy_judged(24))

    def train(out="out", method="dpo", **more):
        values = settings(tmp_path, tiny_model("llama"), tmp_path / f"{method}.jsonl", max_length=128)
        train_alone(resolve_config(method, **(values | {"output_dir": str(tmp_path / out)} | more)))
        return metrics(tmp_path / out)

    return train


@pytest.fixture
def scored(monkeypatch):
    """The micro-batches that were scored without gradient, one entry a call."""
    calls, score = [], DirectStep.score

    def counting(self, batches):
        calls.append(len(batches))
        return score(self, batches)

    monkeypatch.setattr(DirectStep, "score", counting)
    return calls


def check_same_curve(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
        for name in ("rewards/chosen", "logps/rejected"):
            assert other[name] == pytest.approx(row[name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"share_prompt": False}, {"micro_batch_size": 4}, {"reference": "model"}, {"activation_checkpointing": "full"}],
    ids=["prompt twice", "micro 4", "second model", "checkpointing"],
)
def test_what_must_not_change_the_curve_of_pairs(start, change):
    # not packed: a prompt that comes twice makes longer sequences, and so other packs and steps
    check_same_curve(start(packing=False), start("other", packing=False, **change))


def test_a_second_model_is_divided_as_the_first(start, monkeypatch):
    """Beside which less memory is free: asked again, it might be divided otherwise, or wait on the host."""
    choices, choose = [], setup.choose
    monkeypatch.setattr(setup, "choose", lambda *given: choices.append(choose(*given)) or choices[-1])
    built, build = [], run_module.build_trainee
    monkeypatch.setattr(run_module, "build_trainee", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
    start(reference="model", max_steps=1)
    assert len(choices) == 1 and [trainee.choice for trainee in built] == 2 * choices


@pytest.mark.parametrize("change", [{"micro_batch_size": 4}, {"reference": "model"}], ids=["micro 4", "second model"])
def test_what_must_not_change_the_curve_of_single_answers(start, change):
    check_same_curve(start(method="kto"), start("other", "kto", **change))


def test_packing_changes_nothing_where_a_step_has_all_rows(start):
    check_same_curve(start(global_batch_size=24), start("other", global_batch_size=24, packing=False))


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("other", ["precompute", "model"])
def test_adapters_switched_off_are_the_reference(start, scored, method, other):
    more = {"tuner": "lora", "lora_dropout": 0.2}
    live = start(method=method, **more)
    check_same_curve(live, start("other", method, reference=other, **more))
    assert scored


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("dpo", {"tuner": "full"}),
        ("dpo", {"tuner": "full", "reference": "precompute"}),
        ("dpo", {"tuner": "full", "loss": ["bco_pair"]}),
        ("dpo", {"tuner": "lora", "lora_dropout": 0.3}),
        ("dpo", {"tuner": "lora", "reference": "precompute"}),
        ("kto", {"tuner": "full"}),
        ("kto", {"tuner": "full", "reference": "precompute"}),
        ("kto", {"tuner": "lora"}),
    ],
    ids=["full", "precomputed", "bco_pair", "lora", "lora, precomputed", "kto", "kto, precomputed", "kto, lora"],
)
@pytest.mark.parametrize("forgets", [False, True], ids=["", "reference lost"])
def test_resume_continues_bit_for_bit(start, tmp_path, method, more, forgets):
    more |= {"save_steps": 2, "keep_checkpoints": 9}
    out, again = tmp_path / "out", tmp_path / "again"
    rows = start(method=method, **more)
    shutil.copytree(out, again)
    newest, older = list_checkpoints(again)
    shutil.rmtree(newest)
    shutil.rmtree(again / "model")
    if forgets:
        shutil.rmtree(tmp_path / "cache" / "reference", ignore_errors=True)
    if method == "dpo":
        assert read_trainer_state(older)["progress"]["method"]["pairs"] > 0
    for row, resumed in zip(rows, start("again", method, resume="auto", **more), strict=True):
        for name in ("step", "loss", "grad_norm", "rewards/chosen", "rewards/margin"):
            assert resumed[name] == row[name], name
    file = "adapter_model.safetensors" if more["tuner"] == "lora" else "model.safetensors"
    assert same_weights(out / "model" / file, again / "model" / file)


@pytest.mark.parametrize(("loss", "goes_on"), [("sigmoid", False), ("simpo", True)])
def test_a_reference_that_is_gone_is_told_before_anything_is_loaded(start, tmp_path, monkeypatch, loss, goes_on):
    more = {"tuner": "lora", "loss": [loss], "save_steps": 1}
    start("first", max_steps=1, **more)
    adapter = tmp_path / "first" / "model"
    more |= {"adapter": str(adapter)}
    start(max_steps=1, **more)
    shutil.rmtree(adapter)
    if goes_on:
        assert len(start(max_steps=2, resume="auto", **more)) == 2
        return
    monkeypatch.setattr(run_module, "prepare_run", lambda *_: pytest.fail("went on"))
    with pytest.raises(UserError, match="no adapter_config.json in the adapter folder"):
        start(max_steps=2, resume="auto", **more)


def test_evaluations_of_another_loss_are_no_measure(start, tmp_path, capsys):
    more = {"eval_fraction": 0.25, "eval_steps": 1, "save_steps": 1, "keep_checkpoints": 9, "lr_scheduler": "constant"}
    start(max_steps=2, loss=["sigmoid:1"], **more)
    rows = start(max_steps=4, loss=["sigmoid:9"], resume="auto", **more)
    said = capsys.readouterr().out
    assert "the best evaluation so far is none any more: it had --loss sigmoid:1 -> sigmoid:9" in said
    best = min(rows[2:], key=lambda row: row["eval_loss"])
    assert best["eval_loss"] > 2 * rows[1]["eval_loss"]
    assert (tmp_path / "out" / "checkpoints" / "best").resolve().name == f"step-{best['step']:08d}"


def table_files(tmp_path):
    return sorted((tmp_path / "cache" / "reference").glob("*/*.safetensors"))


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_pass_that_was_interrupted_goes_on(start, tmp_path, monkeypatch, scored, method):
    more = {"global_batch_size": 2, "reference": "precompute"}
    whole = start("whole", method, **more)
    calls = len(scored)
    shutil.rmtree(tmp_path / "cache" / "reference")
    monkeypatch.setattr(reference, "STEPS_A_FILE", 1)
    counting = DirectStep.score

    def failing(self, batches):
        if len(scored) == calls + 2:
            raise KeyboardInterrupt
        return counting(self, batches)

    monkeypatch.setattr(DirectStep, "score", failing)
    with pytest.raises(KeyboardInterrupt):
        start("cut", method, **more)
    kept = table_files(tmp_path)
    assert len(kept) == 2
    before = [file.read_bytes() for file in kept]
    monkeypatch.setattr(DirectStep, "score", counting)
    rows = start("on", method, **more)
    assert len(scored) == 2 * calls  # nothing is scored twice
    assert [file.read_bytes() for file in kept] == before
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]


def test_values_are_kept_for_runs_that_would_find_the_same(start, tmp_path, scored):
    start("first", reference="precompute")
    assert scored
    scored.clear()
    start("second", reference="precompute", beta=0.5, loss=["ipo"], learning_rate=1e-4, micro_batch_size=2)
    assert not scored
    (tmp_path / "dpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy_pairs(23)))
    start("third", reference="precompute")
    assert scored
    assert len({file.parent for file in table_files(tmp_path)}) == 2


def test_values_in_a_file_that_a_crash_has_cut_off_are_found_again(start, tmp_path, scored):
    whole = start("first", reference="precompute")
    [file] = table_files(tmp_path)
    calls = len(scored)
    file.write_bytes(file.read_bytes()[:100])
    again = start("second", reference="precompute")
    assert len(scored) == 2 * calls and [row["loss"] for row in again] == [row["loss"] for row in whole]
    start("third", reference="precompute")
    assert len(scored) == 2 * calls


def test_values_of_other_weights_are_not_taken(start, tmp_path, tiny_model, scored):
    start("first", reference="precompute")
    scored.clear()
    start("second", reference="precompute", model=str(tmp_path / "first" / "model"))
    assert scored
    assert metrics(tmp_path / "second")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_runs_that_score_the_same_reference_at_once_keep_the_values_of_both(tmp_path, monkeypatch):
    mine, theirs = {(0, -1, 0, 1): (-1.0, -2.0)}, {(0, -1, 0, 2): (-3.0, -4.0)}
    replace = Path.replace

    def while_another_run_is_as_far(partial, final):
        monkeypatch.setattr(Path, "replace", replace)
        reference._write(tmp_path, theirs)
        return replace(partial, final)

    monkeypatch.setattr(Path, "replace", while_another_run_is_as_far)
    reference._write(tmp_path, mine)
    found = {}
    for file in tmp_path.iterdir():
        found |= reference._read(file)
    assert found == mine | theirs


@pytest.mark.parametrize(("method", "loss"), [("dpo", "0.69"), ("kto", "0.5")])
def test_a_wrong_value_stops_the_run_at_its_first_step(start, tmp_path, method, loss):
    start("first", method, reference="precompute")
    (file,) = table_files(tmp_path)
    held = load_file(file)
    held["values"][:, 0] += 4.0
    save_file(held, file)
    with pytest.raises(RunError, match=f"first step's loss is .* but {loss}"):
        start("second", method, reference="precompute")
    assert not list_checkpoints(tmp_path / "second")


@pytest.mark.parametrize(
    ("more", "copies"),
    [
        ({}, True),
        ({"max_steps": None}, True),
        ({"max_steps": None, "epochs": 1.5}, False),
        ({"max_steps": None, "dataset": ["{}*2"]}, False),
        ({"eval_fraction": 0.25}, False),
        ({"free": 100_000}, False),
    ],
    ids=["part of an epoch", "an epoch", "rows again", "rows twice", "evaluation", "little memory"],
)
def test_a_copy_is_the_reference_where_it_costs_little(start, tmp_path, monkeypatch, more, copies):
    more = {"max_steps": 2, "global_batch_size": 2, "packing": False} | more
    if free := more.pop("free", None):
        monkeypatch.setattr(setup, "free_bytes", lambda device: free)
    if "dataset" in more:
        more["dataset"] = [more["dataset"][0].format(tmp_path / "dpo.jsonl")]
    kept = start(**more)
    assert bool(table_files(tmp_path)) is not copies
    other = "precompute" if copies else "model"
    assert [row["loss"] for row in start("other", reference=other, **more)] == pytest.approx(
        [row["loss"] for row in kept], rel=1e-6
    )


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_evaluation_tells_loss_and_accuracy(start, method):
    rows = start(method=method, eval_fraction=0.25, eval_steps=2)
    evaluated = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [2, 4]
    for row in evaluated:
        assert 0 <= row["eval_rewards/accuracy"] <= 1
        assert row["eval_loss"] > 0 and row["eval_rewards/margin"] is not None


def test_the_reference_of_an_adapter_that_is_trained_on_is_this_adapter(start, tmp_path):
    first = start("first", tuner="lora", learning_rate=1e-2)
    assert abs(first[-1]["rewards/margin"]) > 0.05
    more = {"tuner": "lora", "adapter": str(tmp_path / "first" / "model"), "learning_rate": 1e-2}
    rows = start("on", **more)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["logps/chosen"] != pytest.approx(first[0]["logps/chosen"], rel=1e-3)
    check_same_curve(rows, start("second model", reference="model", **more))


def test_an_adapter_with_dropout_is_trained_on(start, tmp_path):
    start("first", tuner="lora", lora_dropout=0.3, learning_rate=1e-2)
    more = {"tuner": "lora", "adapter": str(tmp_path / "first" / "model")}
    assert start("on", **more)[0]["loss"] != pytest.approx(math.log(2), abs=1e-3)  # dropout moves it


def test_labels_out_of_balance_are_told(start, tmp_path, capsys):
    rows = toy_judged(24)
    (tmp_path / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12] + rows[1::2]))
    start(method="kto", max_steps=1)
    assert "warning: 6 answers are desirable, 18 undesirable" in capsys.readouterr().out
    start("weighed", method="kto", max_steps=1, desirable_weight=3.5)
    assert "undesirable: for balance" not in capsys.readouterr().out


def test_values_are_kept_under_all_that_changes_them(tmp_path, tiny_model):
    def key(**more):
        config = resolve_config("dpo", **settings(tmp_path, tiny_model("llama"), "rows", precision="bf16", **more))
        chosen = resolve_precision("bf16", CPU, fp8=config.fp8)
        trainee = SimpleNamespace(precision=chosen, kernels=config.kernels, mesh=SimpleNamespace(device=CPU))
        prepared = SimpleNamespace(fingerprint="rows")
        return setup_method._key(SimpleNamespace(config=config, trainee=trainee, prepared=prepared))

    changes = {"fp8": "rowwise"}, {"kernels": "liger"}, {"compile": True}, {"revision": "other"}, {"loss": ["ipo"]}
    keys = [key(**change) for change in ({}, *changes)]
    assert len(set(keys[:4])) == 4 and set(keys[4:]) == {keys[0]}
