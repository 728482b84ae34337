"""`swiftlite report` of several runs: figures, settings that differ and curves, side by side."""

import json

import pytest
from metric_rows import row
from test_reporting_page import command

from swiftlite.errors import UserError
from swiftlite.reporting.comparison import read_runs, unequal_settings
from swiftlite.reporting.page import COLOURS


@pytest.fixture
def run(tmp_path):
    """A factory of run folders; settings: of config.yaml; extra: further keys of each row."""

    def make(name, settings, steps=4, **extra):
        output = tmp_path / name
        output.mkdir(parents=True)
        rows = (row(step, **extra) for step in range(1, steps + 1))
        (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
        (output / "run.json").write_text(json.dumps({"state": "finished", "seconds": 65.0, "total_steps": 4}))
        (output / "config.yaml").write_text(json.dumps({"output_dir": name, "model": "m", **settings}))
        return output

    return make


def test_figures_settings_and_curves_of_two_runs_lie_side_by_side(run, tmp_path):
    first = run("slow", {"learning_rate": 1e-5, "compile": False, "dataset": ["a", "b"]}, eval_loss=2.0)
    second = run("fast", {"learning_rate": 1e-4, "compile": True, "dataset": ["a", "b"]}, 3, grad_norm=0.5)
    page = tmp_path / "both.html"
    done = command(first, second, "--output", page)
    assert done.exit_code == 0 and done.output.endswith(f"wrote {page}\n")
    lines = [line.split() for line in done.output.splitlines()]
    for line in (
        ["slow", "fast"],
        ["steps", "4/4", "3/4"],
        ["learning_rate", "1e-05", "0.0001"],
        ["compile", "off", "on"],
    ):
        assert line in lines
    text = page.read_text()
    assert "Evaluation loss" in text and "step 2: slow 1.5000, fast 0.5000" in text  # the norms, in one chart
    assert "<td>1e-05</td><td>0.0001</td>" in text and "dataset" not in text and "output_dir" not in text
    assert not (first / "report.html").exists()


def test_a_loss_and_a_reward_are_on_no_common_scale(run, tmp_path):
    page = tmp_path / "both.html"
    assert command(run("sft", {}), run("own", {}, reward=0.25), "--output", page).exit_code == 0
    text = page.read_text()
    assert "Loss per trained token, smoothed" in text and "Reward per answer, smoothed" in text
    assert "step 2: 2.8400" in text and "step 2: 0.2500" in text


def test_a_run_without_a_step_yet_has_no_part_in_the_title(run, tmp_path):
    page = tmp_path / "both.html"
    done = command(run("none", {}, 0), run("pairs", {}, **{"rewards/margin": 0.25}), "--output", page)
    assert done.exit_code == 0 and "<h2>Loss per pair or answer, smoothed<" in page.read_text()


def test_a_table_in_a_file_holds_names_and_paths_whole(run, tmp_path):
    settings = {"gradient_accumulation_steps": 8, "dataset": [f"{tmp_path}/{'rows' * 20}.jsonl"]}
    done = command(run("a", {"model": "m"}), run("b", settings), run("c", settings), "--output", tmp_path / "p.html")
    assert settings["dataset"][0] in done.output and "gradient_accumulation_steps" in done.output


@pytest.mark.parametrize(("width", "together"), [(30, 1), (50, 2), (100, 4)])
def test_no_number_is_broken_in_a_narrow_terminal(run, tmp_path, monkeypatch, width, together):
    monkeypatch.setattr("swiftlite.cli.console.WIDTH", width)
    runs = [run(f"number {n}", {"learning_rate": n, "dataset": [str(n) * 90]}) for n in range(4)]
    output = command(*runs, "--output", tmp_path / "p.html").output
    told = [line.split() for line in output.splitlines() if line.split()[:1] in (["steps"], ["learning_rate"])]
    parts = ["0123"[first : first + together] for first in range(0, 4, together)]
    assert told == [line for part in parts for line in (["steps", *["4/4"] * len(part)], ["learning_rate", *part])]


def test_values_of_older_versions_and_missing_files_are_blank(run):
    runs = run("a", {"x": 1}), run("b", {}), run("c", {"x": True})
    (runs[1] / "config.yaml").unlink()
    assert unequal_settings(read_runs(runs, [False] * 3)) == {"x": ["1", "", "on"]}
    (runs[2] / "config.yaml").write_text("[")
    assert unequal_settings(read_runs(runs, [False] * 3)) == {}


def test_what_files_say_is_neither_markup_nor_terminal_codes(run, tmp_path, monkeypatch):
    first, second = run("a", {"x": "<b>\x1b[31m"}), run("b", {"x": "hf_abcdefghijklmnopqrst"})
    monkeypatch.chdir(tmp_path)
    done = command(first, second)
    page = (tmp_path / "comparison.html").read_text()
    for text in (page, done.output):
        assert "\x1b" not in text and "hf_abcdef" not in text
    assert "<td>&lt;b&gt;" in page


def test_runs_of_one_name_are_told_apart_by_their_paths(run):
    folders = run("x/out", {}), run("y/out", {})
    assert [found.name for found in read_runs(folders, [False, False])] == [str(folder) for folder in folders]


def test_no_other_file_is_written_over(run, tmp_path):
    first, second, page = run("a", {}), run("b", {}), tmp_path / "page.html"
    page.write_text("mine")
    error = command(first, second, "-o", page).exception
    assert isinstance(error, UserError) and error.where == str(page) and page.read_text() == "mine"
    page.unlink()
    assert [command(first, second, "-o", page).exit_code for _ in range(2)] == [0, 0]
    assert "--output" in command(first, second, "-o", tmp_path / "no" / "page.html").exception.fix
    assert command(first, second, "-o", tmp_path).exception.what == "a folder lies there"
    assert "report.html" in command(first, "-o", page).exception.fix
    assert command(first, tmp_path / "absent").exception.what == "there is no such folder"
    assert "at most" in command(*[first] * (COLOURS + 1)).exception.fix
