"""A run through the reporter: with and without a terminal, resumed, stopped, failed, and told to trackers."""

import io
import json
import math
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from metric_rows import FACTS, row, steps

from swiftlite.errors import RunError, UserError
from swiftlite.reporting.display import PlainDisplay, open_display
from swiftlite.reporting.files import read_run_state, write_run_state
from swiftlite.reporting.run import RunReporter
from swiftlite.reporting.trackers import open_trackers


def config(**changes):
    values = {"report_to": [], "run_name": None, "method": "sft", "tuner": "full"} | changes
    return SimpleNamespace(**values, model_dump=lambda mode: {"model": "m", "learning_rate": 1e-4})


def test_a_run_without_a_terminal_is_plain_lines(tmp_path):
    stream = io.StringIO()
    with RunReporter(config(), tmp_path, stream) as reporter:
        with reporter.phase("preparing data", total=10) as update:
            update(5)
            update(10, 10)
        reporter.start(12, FACTS)
        for step in range(1, 13):
            reporter.log(row(step) | ({"eval_loss": 2.25, "rewards/margin": 0.5} if step == 12 else {}))
        reporter.message("saved step-00000012")
        reporter.finish(tmp_path / "model")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("preparing data: done in ")
    assert lines[1] == "model:  org/some-[bold]model[/]"
    logged = [line for line in lines if line.startswith("step ")]
    assert len(logged) == 12
    assert logged[0].startswith("step  1/12  epoch 0.10  loss   2.9000  grad   1.500  lr 1.00e-04")
    assert len({line.index("loss") for line in logged}) == 1
    assert "eval loss 2.2500" in logged[-1] and "rewards/margin 0.5000" in logged[-1]
    assert "\x1b" not in stream.getvalue()
    text = "\n".join(lines[-6:])
    assert "2.9000 → 1.8000" in text and f"swiftlite infer --model {tmp_path / 'model'}" in text
    state = read_run_state(tmp_path)
    assert state["state"] == "finished" and state["messages"] == [{"step": 12, "text": "saved step-00000012"}]


def test_what_is_no_number_is_not_shown_as_one(tmp_path):
    stream = io.StringIO()
    with RunReporter(config(), tmp_path, stream) as reporter:
        reporter.start(1, FACTS)
        reporter.log(row(1) | {"kl/teacher": math.nan, "eval_kl/teacher": math.nan})
        drawn = dict(reporter._running.board._numbers())
    assert "nan" not in stream.getvalue() and "kl/teacher" not in stream.getvalue()
    assert drawn["kl/teacher"] == drawn["eval kl/teacher"] == "–"


@pytest.mark.parametrize(("key", "words"), [("loss", "not finite"), ("reward", "none rewarded")])
def test_the_last_evaluation_is_told_also_where_it_has_no_number(tmp_path, key, words):
    stream = io.StringIO()
    with RunReporter(config(), tmp_path, stream) as reporter:
        reporter.start(2, FACTS)
        for step, value in enumerate((2.5, math.nan), 1):
            reporter.log(row(step, **{key: 0.5, f"eval_{key}": value}))
        reporter.finish(tmp_path / "model")
    lines = stream.getvalue().splitlines()
    logged = [line for line in lines if line.startswith("step ")]
    assert logged[0].endswith(f"eval {key} 2.5000") and logged[1].endswith(f"eval {key} {words}")
    assert [line.split(":")[1].strip() for line in lines if line.startswith(f"eval {key}:")] == [words]


def test_a_long_phase_speaks_up_in_a_log(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with PlainDisplay(stream).phase("Tokenising") as update:
        for done in range(0, 30_000, 1000):
            now[0] += 1.0
            update(done, 30_000)
    assert stream.getvalue().splitlines() == [
        "Tokenising: 9,000 of 30,000, 10s",
        "Tokenising: 19,000 of 30,000, 20s",
        "Tokenising: 29,000 of 30,000, 30s",
        "Tokenising: done in 30.0 s",
    ]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RunError("the loss of step 2 is not finite"), "failed at step 2 of 9: the loss of step 2 is not finite"),
        (SystemExit(143), "stopped at step 2 of 9"),
        (KeyboardInterrupt(), "stopped at step 2 of 9"),
    ],
)
def test_the_end_of_a_run_is_written_down(tmp_path, error, state):
    with pytest.raises(type(error)), RunReporter(config(), tmp_path, io.StringIO()) as reporter:
        reporter.start(9, FACTS)
        reporter.log(row(1))
        reporter.log(row(2))
        raise error
    assert read_run_state(tmp_path)["state"] == state
    assert steps(tmp_path) == [1, 2]


def test_curves_that_cannot_be_drawn_do_not_make_a_finished_run_a_failure(tmp_path, monkeypatch):
    def broken(output):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("swiftlite.reporting.page.write_report_page", broken)
    stream = io.StringIO()
    with RunReporter(config(), tmp_path, stream) as reporter:
        reporter.start(1, FACTS)
        reporter.log(row(1))
        reporter.finish(tmp_path / "my model")
    said = "warning: the curves and report.html cannot be drawn: ZeroDivisionError: float division by zero"
    assert said in stream.getvalue().splitlines()
    assert f"swiftlite infer --model '{tmp_path / 'my model'}'" in stream.getvalue()
    state = read_run_state(tmp_path)
    assert state["state"] == "finished" and state["messages"] == [{"step": 1, "text": said}]


@pytest.mark.parametrize(
    ("asked", "words"), [({}, None), ({"dora": True}, "DoRA"), ({"new_tokens": ["<a>"]}, "new tokens")]
)
def test_an_adapter_that_engines_refuse_is_to_be_merged_first(tmp_path, asked, words):
    adapter, stream = {"tuner": "lora", "dora": False, "modules_to_save": [], "new_tokens": []}, io.StringIO()
    with RunReporter(config(**(adapter | asked)), tmp_path, stream) as reporter:
        reporter.start(1, FACTS)
        reporter.log(row(1))
        reporter.finish(tmp_path / "model")
    if not words:
        assert f"serve it: swiftlite serve --model {tmp_path / 'model'}\n" in stream.getvalue()
    else:
        assert f"swiftlite export --model {tmp_path / 'model'} " in stream.getvalue()
        assert f"engines take no adapter with {words}" in stream.getvalue()


def test_a_full_disk_at_the_end_is_told_as_one(tmp_path, monkeypatch):
    def full(output):
        raise RunError("report.html cannot be written: the disk is full")

    monkeypatch.setattr("swiftlite.reporting.page.write_report_page", full)
    with pytest.raises(RunError, match="disk is full"), RunReporter(config(), tmp_path, io.StringIO()) as reporter:
        reporter.start(1, FACTS)
        reporter.finish(tmp_path / "model")


def test_a_run_whose_end_cannot_be_written_has_failed(tmp_path, monkeypatch):
    real = write_run_state

    def full(output, state):
        if state["state"] == "finished":
            raise RunError("run.json cannot be written: the disk is full")
        real(output, state)

    monkeypatch.setattr("swiftlite.reporting.run.write_run_state", full)
    with pytest.raises(RunError, match="disk is full"), RunReporter(config(), tmp_path, io.StringIO()) as reporter:
        reporter.start(1, FACTS)
        reporter.log(row(1))
        reporter.finish(tmp_path / "model")
    assert read_run_state(tmp_path)["state"] == "failed at step 1 of 1: run.json cannot be written: the disk is full"


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    states = []
    for start, stop in ((0, 6), (4, 8)):
        stream = io.StringIO()
        with RunReporter(config(), tmp_path, stream) as reporter:
            reporter.start(8, FACTS, start_step=start)
            for step in range(start + 1, stop + 1):
                reporter.log(row(step))
                reporter.message(f"saved {step}")
            if stop == 8:
                reporter.finish(tmp_path / "model")
        states.append(read_run_state(tmp_path))
    assert steps(tmp_path) == list(range(1, 9))
    assert "2.9000 → 2.2000" in stream.getvalue()  # from the first loss of the whole run
    before, after = states
    assert (after["id"], after["started"]) == (before["id"], before["started"])
    assert [message["step"] for message in after["messages"]] == list(range(1, 9))


def test_a_run_that_is_killed_leaves_its_messages_and_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftlite.reporting.run.SECONDS_TO_KEEP", 0.0)
    with RunReporter(config(), tmp_path, io.StringIO()) as reporter:
        reporter.start(8, FACTS)
        reporter.message("saved 1")
        said = read_run_state(tmp_path)
        time.sleep(0.2)
        reporter.log(row(1))
        logged = read_run_state(tmp_path)
    assert (said["state"], [message["text"] for message in said["messages"]]) == ("running", ["saved 1"])
    assert logged["seconds"] >= 0.2 > said["seconds"]


def test_a_damaged_run_state_is_no_obstacle(tmp_path):
    (tmp_path / "run.json").write_text('{"id": 3, "seconds": "x", "messages": [1, {"step": "a"}, {"step": 1}]}')
    with RunReporter(config(), tmp_path, io.StringIO()) as reporter:
        reporter.start(8, FACTS, start_step=2)
    assert read_run_state(tmp_path)["messages"] == [{"step": 1}]


def test_lines_that_are_no_rows_are_told_when_a_run_goes_on(tmp_path):
    good = json.dumps(row(1)) + "\n"
    (tmp_path / "metrics.jsonl").write_text(good + "{}\n" + good[:9])
    with RunReporter(config(), tmp_path, stream := io.StringIO()) as reporter:
        reporter.start(8, FACTS, start_step=2)
    assert steps(tmp_path) == [1]
    assert "left out of metrics.jsonl: 2 lines that hold no step" in stream.getvalue()


def test_no_reader_no_unicode_and_odd_names_do_not_end_a_run(tmp_path):
    class Gone(io.StringIO):
        encoding = "ascii"

        def write(self, text):
            text.encode("ascii")
            raise BrokenPipeError

    with RunReporter(config(), tmp_path, Gone()) as reporter:
        reporter.start(2, {"model": "modèle\udcff\x1b[2J"})
        reporter.log(row(1))
        reporter.log(row(2))
        reporter.finish(tmp_path / "model")
    assert steps(tmp_path) == [1, 2]
    assert read_run_state(tmp_path)["facts"] == {"model": "modèle��[2J"}


IN_TERMINAL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_reporting_run import FACTS, config, row
from swiftlite.reporting.run import RunReporter
with RunReporter(config(), Path(sys.argv[1])) as reporter:
    with reporter.phase("preparing data") as update:
        update(3, 10)
    reporter.start(5, FACTS)
    reporter.log(row(1))
    print("a warning of some library")
    reporter.message("stopped by a signal " + "x" * 200)
    if sys.argv[3] == "fail":
        raise RuntimeError("boom")
    reporter.finish(Path("runs/x/model"))
"""


def in_terminal(tmp_path, *arguments, term="xterm-256color"):
    """What a program writes to a terminal of 100 x 40."""
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": term, "COLUMNS": "100", "LINES": "40", "PYTHONIOENCODING": "utf-8"}
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", IN_TERMINAL, str(tmp_path), here, *arguments]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    text = b""
    while True:
        try:
            text += os.read(leader, 65_536)
        except OSError:  # the terminal is closed when its last program has ended
            break
    os.close(leader)
    return process.wait(), text.decode()


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_the_terminal_is_given_back(tmp_path, how):
    code, text = in_terminal(tmp_path, how)
    assert "✓ " in text and "preparing data" in text
    assert "╭─" in text and "step 1/5" in text and "a warning of some library" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor is hidden and shown again
    assert text.replace("\r\n", "").count("x" * 50) > 1  # the long message is repeated below the panel
    if how == "fail":
        assert code == 1 and text.index("Traceback") > text.rindex("step 1/5")
    else:
        assert code == 0 and "swiftlite infer --model runs/x/model" in text and "done" in text


def test_a_terminal_that_cannot_draw_gets_plain_lines(tmp_path):
    code, text = in_terminal(tmp_path, "finish", term="dumb")
    assert code == 0 and "\x1b" not in text and "step 1/5" in text


def test_the_display_follows_the_stream():
    assert isinstance(open_display(io.StringIO()), PlainDisplay)


# --- trackers


def test_a_missing_tracker_is_found_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "wandb_missing").mkdir()  # a run folder, not a package
    with pytest.raises(UserError, match="needs the package wandb_missing") as caught:
        RunReporter(config(report_to=["wandb_missing"]), tmp_path / "out", io.StringIO())
    assert "pip install 'swiftlite[wandb_missing]'" in caught.value.fix
    assert not (tmp_path / "out").exists()


FAKE = """
import os
calls = []
def init(**settings):
    calls.append(("init", settings))
    os.makedirs(settings["dir"] + "/wandb/run", exist_ok=True)
    if settings["name"] == "refused":
        raise RuntimeError("No API key hf_abcdefghijklmnopqrst\\nmore")
def log(numbers, step):
    if step == 3:
        raise ConnectionError("gone")
    calls.append(("log", numbers, step))
def finish(**how):
    calls.append(("finish", how))
    raise ConnectionError("gone")
"""


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def test_a_tracker_gets_the_numbers_and_cannot_end_the_run(tmp_path, fake_wandb):
    output, stream = tmp_path / "out", io.StringIO()
    with RunReporter(config(report_to=["wandb"], run_name="mine"), output, stream) as reporter:
        reporter.start(4, FACTS)
        for step in range(1, 5):
            reporter.log(row(step))
        reporter.finish(output / "model")
    import wandb

    kinds = [call[0] for call in wandb.calls]
    assert kinds == ["init", "log", "log"]  # it failed at step 3 and was left out
    settings = wandb.calls[0][1]
    assert settings["name"] == "mine" and settings["id"] == read_run_state(output)["id"]
    assert settings["project"] == "swiftlite"
    assert wandb.calls[1][2] == 1 and wandb.calls[1][1]["loss"] == pytest.approx(2.9)
    assert "mfu" not in wandb.calls[1][1] and "step" not in wandb.calls[1][1]
    assert "warning: wandb failed and is left out from here on: gone" in stream.getvalue()
    assert steps(output) == [1, 2, 3, 4]


def test_a_tracker_that_does_not_start_leaves_nothing(tmp_path, fake_wandb):
    output = tmp_path / "out"
    reporter = RunReporter(config(report_to=["wandb"], run_name="refused"), output, io.StringIO())
    with pytest.raises(UserError, match=r"wandb does not start: No API key \*\*\*\n") as caught, reporter:
        reporter.start(4, FACTS)
    assert "wandb login" in caught.value.fix
    assert not output.exists()  # or it would be refused as one that holds something else than a run
    (output / "wandb").mkdir(parents=True)
    with pytest.raises(UserError), reporter:
        reporter.start(4, FACTS, start_step=2)
    assert [entry.name for entry in output.iterdir()] == ["wandb"]  # of the run that was to go on


@pytest.mark.parametrize(
    ("error", "how"), [(None, {}), (RunError("no"), {"exit_code": 1}), (SystemExit(143), {"exit_code": 1})]
)
def test_a_tracker_knows_how_the_run_ended(tmp_path, fake_wandb, monkeypatch, error, how):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    with (
        suppress(RunError, SystemExit),
        RunReporter(config(report_to=["wandb"]), tmp_path, stream := io.StringIO()) as reporter,
    ):
        reporter.start(4, FACTS)
        if error:
            raise error
        reporter.finish(tmp_path / "model")
    import wandb

    assert wandb.calls[0][1]["project"] == "theirs" and wandb.calls[-1] == ("finish", how)
    assert "warning: wandb may lack the last steps: gone" in stream.getvalue().splitlines()


FAKE_MLFLOW = """
import types
experiments, runs = {}, {}
class MlflowClient:
    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=experiments[name]) if name in experiments else None
    def create_experiment(self, name):
        experiments[name] = str(len(experiments))
        return experiments[name]
    def search_runs(self, experiment_ids, filter_string, max_results):
        tag, _, value = filter_string.removeprefix("tags.").partition(" = ")
        found = [key for key, run in runs.items() if run["tags"].get(tag) == value.strip("'")]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=key)) for key in found]
    def create_run(self, experiment, run_name, tags):
        key = f"r{len(runs)}"
        runs[key] = {"in": experiment, "name": run_name, "tags": tags, "params": {}, "rows": {}, "status": "RUNNING"}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=key))
    def update_run(self, key, status):
        runs[key]["status"] = status
    def set_terminated(self, key, status):
        runs[key]["status"] = status
    def log_batch(self, key, metrics=(), params=()):
        assert len(params) <= 100 and not {one.key for one in params} & runs[key]["params"].keys()
        runs[key]["params"].update({one.key: one.value for one in params})
        for one in metrics:
            runs[key]["rows"].setdefault(one.step, {})[one.key] = one.value
        if any(one.step == 7 for one in metrics):
            raise ConnectionError("gone")
"""
FAKE_ENTITIES = """
from collections import namedtuple
Metric, Param = namedtuple("Metric", "key value timestamp step"), namedtuple("Param", "key value")
"""


@pytest.fixture
def fake_mlflow(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "mlflow"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE_MLFLOW)
    (folder / "entities.py").write_text(FAKE_ENTITIES)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in ("mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("mlflow", "mlflow.entities"):
        sys.modules.pop(name, None)


def test_a_continued_run_is_one_of_mlflow(tmp_path, fake_mlflow, monkeypatch):
    for start, stop, error, status in ((0, 4, RunError("no"), "FAILED"), (3, 6, None, "FINISHED")):
        with (
            suppress(RunError),
            RunReporter(config(report_to=["mlflow"], run_name="mine"), tmp_path / "out", io.StringIO()) as reporter,
        ):
            reporter.start(6, FACTS, start_step=start)
            for step in range(start + 1, stop + 1):
                reporter.log(row(step) | {"eval_loss/a*2.jsonl": 1.5})
            if error:
                raise error
            reporter.finish(tmp_path / "out" / "model")
        import mlflow

        (run,) = mlflow.runs.values()
        assert run["status"] == status
    assert run["name"] == "mine" and mlflow.experiments == {"swiftlite": run["in"]}
    assert sorted(run["rows"]) == [1, 2, 3, 4, 5, 6]
    assert run["rows"][6]["loss"] == pytest.approx(row(6)["loss"]) and run["rows"][6]["eval_loss/a_2.jsonl"] == 1.5
    assert run["params"] == {"model": "m", "learning_rate": "0.0001"}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    stream = io.StringIO()
    with RunReporter(config(report_to=["mlflow"]), tmp_path / "other", stream) as reporter:
        reporter.start(9, FACTS)
        for step in range(1, 10):
            reporter.log(row(step))
        reporter.finish(tmp_path / "other" / "model")
    assert "theirs" in mlflow.experiments and len(mlflow.runs) == 2
    assert ": gone" in next(line for line in stream.getvalue().splitlines() if line.startswith("warning: mlflow "))
    settings = {f"key{number}": "x" * 7000 for number in range(250)}
    (tracker,) = open_trackers(["mlflow"], tmp_path, "r", "id", 0, settings).values()
    tracker.close("ended by a signal")
    *_, last = mlflow.runs.values()
    assert last["status"] == "KILLED" and last["params"] == {key: "x" * 6000 for key in settings}


def test_tensorboard_holds_the_rows_once(tmp_path):
    pytest.importorskip("tensorboard")
    for start, stop in ((0, 6), (4, 8)):
        with RunReporter(config(report_to=["tensorboard"]), tmp_path, io.StringIO()) as reporter:
            reporter.start(8, FACTS, start_step=start)
            for step in range(start + 1, stop + 1):
                reporter.log(row(step) | {"rewards/margin": 0.5})
        time.sleep(1.1)  # event files are ordered by whole seconds in their names
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert events.Scalars("train/loss")[0].value == pytest.approx(2.9)
    assert events.Tags()["scalars"].count("rewards/margin") == 1


# --- speed


def test_a_row_costs_the_loop_next_to_nothing(tmp_path):
    with RunReporter(config(), tmp_path, io.StringIO()) as reporter:
        reporter.start(2000, FACTS)
        began = time.thread_time()
        for step in range(1, 501):
            reporter.log(row(step))
        logged = time.thread_time()
        for step in range(1, 501):
            json.dumps(row(step))
        written = time.thread_time()
        assert (logged - began) / (written - logged) < 100  # of what writing a row as JSON costs; measured: 5
