"""What a run leaves behind where time, numbers or the disk end it, and how it goes on from there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_parity import metrics, settings
from test_run import same_weights, train

from swiftlite.checkpoint import saver as saver_module
from swiftlite.checkpoint import space as space_module
from swiftlite.checkpoint.folder import check_folder, list_checkpoints
from swiftlite.checkpoint.shared import _reason, in_turn, nothing
from swiftlite.checkpoint.space import Space
from swiftlite.cli.errors import show_error
from swiftlite.config.types import seconds_of
from swiftlite.errors import RunError, UserError
from swiftlite.parallel.world import AnotherFailed
from swiftlite.training import learner as learner_module
from swiftlite.training import run as run_module
from swiftlite.training import setup
from swiftlite.training.guards.failures import LossSpike, NotFinite, OutOfMemory, SpikeWatch
from swiftlite.training.guards.stopping import stop_requests
from swiftlite.training.guards.watchdog import watchdog
from swiftlite.training.rollouts.rewards import Rollout, load_rewards, rewards_of
from swiftlite.training.step import DirectStep


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    return settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=6, save_steps=2)


def steps_of(output) -> list[int]:
    return [row["step"] for row in metrics(output)]


def test_time_is_up_after_a_step_and_the_run_goes_on_later(base, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr("swiftlite.training.run.time.monotonic", lambda: next(clock))
    with pytest.raises(SystemExit) as stopped:
        train(base, stop_after="1m30s", save_steps=100)
    assert stopped.value.code == 0
    monkeypatch.undo()
    (saved,) = list_checkpoints(tmp_path / "out")
    last = int(saved.name.removeprefix("step-"))
    assert 1 <= last < 6 and steps_of(tmp_path / "out") == list(range(1, last + 1))
    assert not (tmp_path / "out" / "model").exists()
    train(base, resume="auto")
    train(base, output_dir=str(tmp_path / "whole"))
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("out", "whole")]
    assert same_weights(*files)
    assert steps_of(tmp_path / "out") == steps_of(tmp_path / "whole")


def test_an_evaluation_is_given_up_where_the_run_is_asked_to_stop(base, tmp_path, monkeypatch, capsys):
    real, evaluated = DirectStep.evaluate, []

    def evaluate(self, *given):
        evaluated.append(given)
        if len(evaluated) == 1:
            signal.raise_signal(signal.SIGTERM)
        return real(self, *given)

    monkeypatch.setattr(DirectStep, "evaluate", evaluate)
    values = base | {"eval_fraction": 0.3, "eval_steps": 2, "save_steps": 100}
    with pytest.raises(SystemExit) as stopped:
        train(values)
    assert stopped.value.code == 143 and len(evaluated) == 1
    assert "step 2 is not evaluated: the run was asked to stop" in capsys.readouterr().out
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == ["step-00000002"]
    monkeypatch.undo()
    train(values, resume="auto")
    train(values, output_dir=str(tmp_path / "whole"))
    assert same_weights(*(tmp_path / name / "model" / "model.safetensors" for name in ("out", "whole")))
    losses = [{row["step"]: row.get("eval_loss") for row in metrics(tmp_path / name)} for name in ("out", "whole")]
    assert losses[0] == losses[1] | {2: None} and losses[1][2] is not None


@pytest.mark.parametrize("ends", ["raise KeyboardInterrupt", "raise SystemExit(143)"])
def test_a_function_that_ends_the_program_is_no_signal(tmp_path, ends):
    """Of several processes the others would wait for the one whose function does so."""
    (tmp_path / "ending.py").write_text(f"def ends(**others):\n    {ends}\n")
    rewards, answer = load_rewards([f"{tmp_path / 'ending.py'}:ends"]), Rollout("?", "x", [1], {}, "rows.jsonl:1")
    with stop_requests(None, 0.0), pytest.raises(RunError, match="the reward function ends failed: "):
        rewards_of(rewards, [answer], 9)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_run_at_once_with_the_code_of_the_first(monkeypatch, number, code):
    clock = iter([10.0, 12.0, 12.0])
    monkeypatch.setattr("swiftlite.training.guards.stopping.time.monotonic", lambda: next(clock))
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended, stop_requests(None, 0.0) as requested:
        signal.raise_signal(number)
        assert requested() == number
        signal.raise_signal(number)
    assert getattr(ended.value, "code", 130) == code


def test_numbers_that_are_not_finite_leave_a_checkpoint_of_the_step_before(base, tmp_path):
    with pytest.raises(NotFinite, match="is not finite"):
        train(base, learning_rate=1e30, warmup_ratio=0.0, save_steps=100, max_grad_norm=1.0)
    (saved,) = list_checkpoints(tmp_path / "out")
    assert check_folder(saved, deep=True) == []
    assert steps_of(tmp_path / "out")[-1] == int(saved.name.removeprefix("step-"))


@pytest.mark.parametrize("background", ["off", "on"])
def test_a_save_that_fails_ends_the_run_or_does_not(base, tmp_path, monkeypatch, background):
    base = base | {"async_save": background}
    real, failed = saver_module.write_together, []

    def full_once(mesh, final, *arguments, **more):
        if not failed:
            failed.append(final)
            raise RunError(f"{final.name} cannot be saved: the disk is full")
        real(mesh, final, *arguments, **more)

    monkeypatch.setattr(saver_module, "write_together", full_once)
    with pytest.raises(RunError, match="the disk is full"):
        train(base)
    assert not list_checkpoints(tmp_path / "out")
    failed.clear()
    train(base, output_dir=str(tmp_path / "on"), on_save_failure="continue", save_steps=2)
    assert [folder.name for folder in list_checkpoints(tmp_path / "on")] == ["step-00000006", "step-00000004"]
    assert (tmp_path / "on" / "model").is_dir()


def test_training_goes_on_while_a_checkpoint_is_written(base, tmp_path, monkeypatch):
    train(base)
    real, begun = saver_module.write_together, threading.Event()

    def slow(mesh, final, create, write, **more):
        if final.name == "step-00000002":
            begun.set()
            while len(steps_of(tmp_path / "aside")) < 3:  # step 3 is logged before step 2 is written
                time.sleep(0.01)
        real(mesh, final, create, write, **more)

    monkeypatch.setattr(saver_module, "write_together", slow)
    train(base, output_dir=str(tmp_path / "aside"), async_save="on", keep_checkpoints=9)
    assert begun.is_set()
    for name in ("model", "checkpoints/step-00000004", "checkpoints/step-00000006"):
        files = [tmp_path / run / name / "model.safetensors" for run in ("out", "aside")]
        assert same_weights(*files), name
    train(base, output_dir=str(tmp_path / "more"), resume=str(tmp_path / "aside" / "checkpoints" / "step-00000002"))
    assert same_weights(
        tmp_path / "more" / "model" / "model.safetensors", files[1].parents[2] / "model" / files[1].name
    )


def test_a_step_that_takes_too_long_leaves_its_stacks(base, tmp_path, monkeypatch):
    train(base)
    assert not (tmp_path / "out" / "stacks").exists()
    monkeypatch.setattr("swiftlite.training.guards.watchdog.SECONDS", 0.2)
    real = learner_module.set_rate

    def slow(*arguments):
        time.sleep(0.5)
        return real(*arguments)

    monkeypatch.setattr(learner_module, "set_rate", slow)
    train(base, output_dir=str(tmp_path / "slow"), max_steps=1)
    stacks = (tmp_path / "slow" / "stacks" / "rank-00000.txt").read_text()
    assert "in slow" in stacks and "in step" in stacks


def test_a_run_that_is_interrupted_leaves_no_empty_stacks(tmp_path):
    with pytest.raises(KeyboardInterrupt), watchdog(tmp_path / "stacks", 0):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_stacks_that_somebody_cleared_away_end_no_run(tmp_path):
    with watchdog(tmp_path / "stacks", 0):
        shutil.rmtree(tmp_path / "stacks")


def test_stacks_that_another_process_removes_meanwhile_are_made_again(tmp_path, monkeypatch):
    """Where nothing is left to train, some processes have ended when others begin."""
    real, removed = Path.open, []

    def late(path, *mode):
        if not removed:
            removed.append(path.parent.rmdir())
        return real(path, *mode)

    monkeypatch.setattr(Path, "open", late)
    with watchdog(tmp_path / "stacks", 3):
        assert removed and (tmp_path / "stacks" / "rank-00003.txt").is_file()
    assert not (tmp_path / "stacks").exists()


def test_the_disk_is_asked_before_the_first_step(base, tmp_path, monkeypatch):
    monkeypatch.setattr(space_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(UserError, match="MiB of disk") as error:
        train(base)
    assert "--keep-checkpoints" in error.value.fix
    assert not (tmp_path / "out").exists()


def test_the_worst_moment_has_one_checkpoint_more_than_are_kept(tmp_path):
    space = Space(checkpoint=100, result=10, saves=9, keep=2, kept=0)
    spare = space_module.SPARE
    assert space.needed(tmp_path) == {tmp_path / "checkpoints": 300, tmp_path: 10 + spare}
    assert Space(100, 10, saves=1, keep=2, kept=0).more == 1
    assert Space(100, 10, saves=9, keep=2, kept=2).more == 1  # resumed


@pytest.mark.parametrize("last_file", ["metrics.jsonl", "config.yaml", ".config.yaml.partial"])
def test_a_run_that_is_killed_while_it_opens_its_folder_can_go_on(base, tmp_path, monkeypatch, last_file):
    """The folder as it is right after each of its first files was written."""
    real, seen = os.replace, []

    class Killed(BaseException):
        pass

    def watch(*_arguments):
        names = {path.name for path in (tmp_path / "out").iterdir()} if (tmp_path / "out").is_dir() else set()
        if last_file in names:
            seen.append(names)
            shutil.copytree(tmp_path / "out", tmp_path / "then")
            raise Killed

    def replace_file(source, target):
        watch()
        real(source, target)
        watch()

    monkeypatch.setattr(os, "replace", replace_file)
    monkeypatch.setattr("swiftlite.training.run.Loop.run", watch)
    with pytest.raises(Killed):
        train(base)
    monkeypatch.undo()
    assert seen and ("config.yaml" in seen[0] or last_file.startswith("."))
    train(base, output_dir=str(tmp_path / "then"), resume="auto")
    assert (tmp_path / "then" / "model").is_dir()


@pytest.mark.parametrize("file", ["run.json", "audit.json"])
def test_a_run_that_cannot_write_one_of_its_first_files_can_go_on(base, tmp_path, monkeypatch, file):
    """The disk is full for a moment, which leaves nothing half-written and a folder that is known as a run's."""
    real, real_open = Path.write_text, Path.open

    def full(path):
        real_open(path, "wb").close()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def write(path, text, **more):
        return full(path) if file in path.name else real(path, text, **more)

    def opened(path, mode="r", *given, **more):
        return full(path) if file in path.name and "w" in mode else real_open(path, mode, *given, **more)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(RunError, match=f"{file} cannot be written: the disk is full"):
        train(base)
    monkeypatch.undo()
    assert {"config.yaml", "metrics.jsonl"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not list((tmp_path / "out").glob(f"*{file}*"))
    train(base, resume="auto", max_steps=1)
    assert (tmp_path / "out" / "model").is_dir()


def test_latest_and_best_are_links_that_can_be_resumed_from(base, tmp_path):
    values = base | {"eval_fraction": 0.2, "eval_steps": 1, "save_steps": 1, "learning_rate": 0.3, "max_steps": 4}
    train(values, keep_checkpoints=1)
    kept = tmp_path / "out" / "checkpoints"
    best = min(metrics(tmp_path / "out"), key=lambda row: row["eval_loss"])["step"]
    assert (kept / "latest").resolve().name == "step-00000004"
    assert (kept / "best").resolve().name == f"step-{best:08d}"
    train(values, output_dir=str(tmp_path / "more"), resume=str(kept / "latest"), max_steps=4)
    assert (tmp_path / "more" / "model").is_dir()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("3h55m", 14100), ("1d", 86400), ("2m5s", 125), ("1D 1H", 90000)]
)
def test_times_are_read(base, text, seconds):
    from swiftlite.config.resolve import resolve_config

    assert seconds_of(resolve_config("sft", **base, stop_after=text).stop_after) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "5x", "1m1h", "-3"])
def test_what_is_no_time_is_refused(base, text):
    from swiftlite.config.resolve import resolve_config

    with pytest.raises(UserError, match="3h55m"):
        resolve_config("sft", **base, stop_after=text)


@pytest.fixture
def one_long_row(base, write_rows, chat_rows):
    """Unpacked rows in their order, the last step's far longer than the others."""
    answer = {"role": "assistant", "content": "again and again " * 40}
    rows = [*chat_rows[:11], {"messages": [{"role": "user", "content": "repeat"}, answer]}]
    more = {"packing": False, "shuffle": False, "max_length": 512, "global_batch_size": 2, "micro_batch_size": 1}
    return base | more | {"dataset": [str(write_rows("long.jsonl", rows))], "save_steps": 100}


def short_of_memory(monkeypatch, too_much) -> list[tuple[int, int]]:
    """Let steps fail as if there were no memory. too_much: of step and longest micro-batch. Returns what was tried."""
    real, tried = DirectStep.train, []

    def train_step(self, step, batches, *arguments):
        tried.append((step, max(batch.tokens for batch in batches)))
        if too_much(*tried[-1]):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return real(self, step, batches, *arguments)

    monkeypatch.setattr(DirectStep, "train", train_step)
    return tried


def test_the_longest_rows_are_not_tried_where_memory_is_ample(one_long_row, monkeypatch):
    tried = short_of_memory(monkeypatch, lambda *_: False)
    train(one_long_row)
    assert [step for step, _ in tried] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(setup, "free_bytes", lambda device: 1)


def test_the_longest_rows_are_tried_first_and_change_nothing(
    little_memory, one_long_row, tmp_path, monkeypatch, capsys
):
    tried = short_of_memory(monkeypatch, lambda *_: False)
    train(one_long_row)
    longest = max(tokens for _, tokens in tried[1:])
    assert tried[0] == (0, longest) and [step for step, _ in tried[1:]] == [1, 2, 3, 4, 5, 6]
    assert f"the longest micro-batch, {longest:,} tokens, fits" in capsys.readouterr().out
    tried.clear()
    train(one_long_row, output_dir=str(tmp_path / "without"), warm_check=False)
    assert [step for step, _ in tried] == [1, 2, 3, 4, 5, 6]
    for file in ("model/model.safetensors", "checkpoints/step-00000006/resume/tensors.safetensors"):
        assert same_weights(tmp_path / "out" / file, tmp_path / "without" / file)
    tried.clear()
    train(one_long_row, output_dir=str(tmp_path / "short"), max_steps=3)
    assert max(tokens for _, tokens in tried) < longest, "the long row is not reached"


def test_rows_that_do_not_fit_memory_are_named_before_the_first_step(
    little_memory, one_long_row, tmp_path, monkeypatch
):
    short_of_memory(monkeypatch, lambda _, tokens: tokens > 150)
    with pytest.raises(OutOfMemory, match="in the check of the longest rows") as error:
        train(one_long_row)
    assert "long.jsonl:12" in error.value.where and "--activation-checkpointing full" in error.value.fix
    assert "--tuner lora" in error.value.fix
    assert not metrics(tmp_path / "out") and not list_checkpoints(tmp_path / "out")
    with pytest.raises(OutOfMemory) as error:
        train(one_long_row, from_scratch=True, output_dir=str(tmp_path / "scratch"))
    assert "--offload cpu" in error.value.fix and "lora" not in error.value.fix


def test_memory_that_runs_out_leaves_a_checkpoint_of_the_step_before(one_long_row, tmp_path, monkeypatch):
    short_of_memory(monkeypatch, lambda step, _: step == 4)
    with pytest.raises(OutOfMemory, match="in step 4"):
        train(one_long_row)
    (saved,) = list_checkpoints(tmp_path / "out")
    assert saved.name == "step-00000003" and check_folder(saved, deep=True) == []
    monkeypatch.undo()
    train(one_long_row, resume="auto")
    train(one_long_row, output_dir=str(tmp_path / "whole"))
    assert same_weights(*(tmp_path / name / "model" / "model.safetensors" for name in ("out", "whole")))


def test_a_loss_that_stays_up_ends_the_run_with_no_checkpoint_since(base, tmp_path, monkeypatch, capsys):
    real = DirectStep.train

    def train_step(self, step, *arguments):
        outcome = real(self, step, *arguments)
        return replace(outcome, loss=outcome.loss + 50) if step == 22 or step > 24 else outcome

    monkeypatch.setattr(DirectStep, "train", train_step)
    values = base | {"max_steps": 30, "save_steps": 1, "log_steps": 10}
    with pytest.raises(LossSpike, match="step 27 and of the 2 before it") as error:
        train(values)
    assert "rows.jsonl:" in error.value.where
    assert "step 22: loss" in capsys.readouterr().out
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == ["step-00000024", "step-00000023"]
    train(values, output_dir=str(tmp_path / "on"), on_loss_spike="warn")
    said = capsys.readouterr().out
    assert "step 27: loss" in said and "step 28: loss" not in said
    assert (tmp_path / "on" / "model").is_dir()


def test_a_spike_is_far_beyond_what_came_before():
    watch = SpikeWatch([])
    assert not any(watch.is_spike(loss) for loss in [9.0, *[2.0, 2.5] * 9])
    assert not watch.is_spike(60.0), "too few losses to compare with"
    watch = SpikeWatch([2.0, 2.5] * 10)
    assert not watch.is_spike(3.9) and watch.is_spike(11.0) and watch.count == 1
    assert not watch.is_spike(2.2) and watch.count == 0
    steady = SpikeWatch([0.001] * 30)
    assert not steady.is_spike(0.9) and steady.is_spike(4.0)


def test_a_folder_that_is_removed_while_the_run_works_is_made_again(base, tmp_path, monkeypatch, capsys):
    real = learner_module.set_rate
    steps = iter(range(1, 100))

    def remove_in_the_third(*arguments):
        if next(steps) == 3:
            shutil.rmtree(tmp_path / "out")
        return real(*arguments)

    monkeypatch.setattr(learner_module, "set_rate", remove_in_the_third)
    train(base)
    assert "the output folder was removed" in capsys.readouterr().out
    assert steps_of(tmp_path / "out") == [3, 4, 5, 6]
    assert {"config.yaml", "audit.json", "model"} <= {path.name for path in (tmp_path / "out").iterdir()}
    train(base, max_steps=8, resume="auto")
    assert steps_of(tmp_path / "out") == [3, 4, 5, 6, 7, 8]


def test_a_token_cache_that_is_removed_while_the_run_works_takes_nothing_from_it(base, tmp_path, monkeypatch):
    rows = Path(base["dataset"][0])
    rows.write_text(rows.read_text() + "no JSON\n")
    real = learner_module.set_rate

    def remove(*arguments):
        shutil.rmtree(base["cache_dir"], ignore_errors=True)
        return real(*arguments)

    monkeypatch.setattr(learner_module, "set_rate", remove)
    train(base, on_bad_row="skip")
    assert "no JSON" in (tmp_path / "out" / "rejected_rows.jsonl").read_text()
    assert (tmp_path / "out" / "model" / "config.json").is_file()


def test_a_model_folder_that_is_removed_while_the_run_works_takes_nothing_from_it(base, tmp_path, monkeypatch):
    folder, real = tmp_path / "moved", learner_module.set_rate
    shutil.copytree(base["model"], folder)
    base |= {"model": str(folder), "max_steps": 2}
    train(base, output_dir=str(tmp_path / "first"))  # from now on the rows are cached, and need no tokenizer

    def remove(*arguments):
        shutil.rmtree(folder, ignore_errors=True)
        return real(*arguments)

    monkeypatch.setattr(learner_module, "set_rate", remove)
    train(base)
    assert not folder.exists() and same_weights(
        *(tmp_path / name / "model" / "model.safetensors" for name in ("out", "first"))
    )
    assert (tmp_path / "out" / "model" / "tokenizer.json").is_file()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_two_runs_cannot_have_one_output_folder(base, tmp_path, monkeypatch, resume):
    """The second one begins while the first trains, or has looked at the folder before the first made it."""
    if resume == "auto":
        train(base)
    real, tried = run_module.Session.train, []

    def begin_another(self, began):
        if not tried:
            tried.append(self)
            more = {"resume": resume, "max_steps": 8}
            if resume == "auto":
                with pytest.raises(UserError, match="another run is writing into the output folder"):
                    train(base, **more)
            else:
                train(base, **more)
        real(self, began)

    monkeypatch.setattr(run_module.Session, "train", begin_another)
    if resume == "auto":
        train(base, resume="auto", max_steps=9)
    else:
        with pytest.raises(UserError, match="exists and is not empty"):
            train(base)
    assert steps_of(tmp_path / "out") == list(range(1, 10 if resume == "auto" else 9))


def test_a_run_goes_not_over_one_that_made_the_folder_meanwhile_and_has_ended(base, tmp_path, monkeypatch):
    real, tried = run_module.Session.train, []

    def run_another(self, began):
        if not tried:
            tried.append(self)
            train(base, resume="auto", max_steps=8)
        real(self, began)

    monkeypatch.setattr(run_module.Session, "train", run_another)
    with pytest.raises(UserError, match="exists and is not empty"):
        train(base, resume="auto")
    assert steps_of(tmp_path / "out") == list(range(1, 9))


def test_what_other_processes_of_a_run_have_put_into_its_folder_is_no_other_run(base, tmp_path, monkeypatch):
    """They write down where they are (stacks/), and may be quicker than the first one."""
    real = run_module.Session.train

    def train_later(self, began):
        (tmp_path / "out" / "stacks").mkdir(parents=True)
        (tmp_path / "out" / "stacks" / "rank-00001.txt").touch()
        real(self, began)

    monkeypatch.setattr(run_module.Session, "train", train_later)
    train(base)
    assert (tmp_path / "out" / "model").is_dir()


@pytest.mark.parametrize("text", ["", "template_date: [", None])
def test_a_spoilt_config_stops_no_run_that_goes_on(base, tmp_path, text):
    """A crash may leave it empty; the checkpoints are sound."""
    train(base, max_steps=2)
    file = tmp_path / "out" / "config.yaml"
    file.write_text(text or "\0\0")
    train(base, resume="auto")
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert "template_date" in file.read_text()


def fail_with(another):
    """What a process raises where it has done its part, and another one has met this."""
    told = _reason(another)
    in_turn(SimpleNamespace(any=lambda _: True, collect=lambda own: [told, own]), nothing)


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_all_processes_fail_for_the_reason_of_one_and_with_its_exit_code(kind):
    with pytest.raises(kind, match="the disk is small"):
        fail_with(kind("the disk is small", where="/", fix="free space"))


def test_an_error_names_the_process_that_met_it(monkeypatch, capsys):
    """Any other one may be the first to tell it."""
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for rank, error in ((0, RunError("it failed", where="here")), (1, RunError("it failed", where="here"))):
        with pytest.raises(RunError) as failure:
            if rank == 1:
                raise error
            fail_with(error)
        show_error(failure.value)
        assert f"where: here, rank {rank}\n" in capsys.readouterr().err


def test_what_is_no_error_of_ours_is_told_by_the_process_that_met_it():
    """Which may know more of it than its words, as of memory that is full."""
    with pytest.raises(AnotherFailed, match="another process failed: RuntimeError: out of memory"):
        fail_with(RuntimeError("out of memory"))
