"""loss.png, report.html, `swiftlite report` and the picture of the terminal: from files alone, and safe to open."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from swiftlite.checkpoint.claim import Claim
from swiftlite.cli.report import register
from swiftlite.errors import UserError
from swiftlite.reporting.charts import LARGE, Line, chart, nice_ticks, tick_texts
from swiftlite.reporting.page import write_report_page
from swiftlite.reporting.plots import write_loss_plot

EVIL = "<script>alert('hf_abcdefghijklmnopqrst')</script>"


@pytest.fixture
def run(tmp_path):
    """A factory: a run folder with `steps` rows; extra: further keys of each row."""

    def make(steps=40, **extra):
        output = tmp_path / f"run {EVIL[:8]}"
        output.mkdir()
        rows = [
            {
                "step": step,
                "epoch": step / steps,
                "loss": None if step == 7 else 3 - step / steps,
                "learning_rate": 1e-4 * step,
                "grad_norm": 1.5,
                "tokens_per_second": 1000.0 + step,
                "step_seconds": 0.5,
                "data_seconds": 0.001,
                "peak_memory_gib": 1.5,
                "mfu": None,
                **({"eval_loss": 2.5} if step % 10 == 0 else {}),
                **extra,
            }
            for step in range(1, steps + 1)
        ]
        (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        state = {
            "swiftlite": "0.1.0",
            "state": f"failed at step {steps}: {EVIL}",
            "started": "2026-01-02T03:04:05+00:00",
            "seconds": 3700.0,
            "total_steps": 50,
            "facts": {"model": EVIL, "data": "3 rows"},
            "messages": [{"step": 3, "text": f"saved {EVIL}"}],
        }
        (output / "run.json").write_text(json.dumps(state))
        (output / "config.yaml").write_text(f"model: {EVIL}\n")
        numbers = {"tokens": 1200, "trained_tokens": 800, "packs": 4, "fill": 0.875}
        audit = {"rows": {"read": 10, "used": 7, "dropped": {EVIL: 3}, "truncated": 0}} | numbers
        audit["datasets"] = {EVIL: {"rows": {"read": 10, "used": 7, "dropped": {}, "truncated": 0}} | numbers}
        (output / "audit.json").write_text(json.dumps(audit))
        return output

    return make


class Tags(HTMLParser):
    """Collects tags with their attributes and checks that they nest."""

    VOID = ("meta", "line", "circle", "path", "rect")

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.text = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_offline_and_escaped(run):
    page = write_report_page(run(**{"<i>x/<b>y": 0.5, "<i>x/z": 0.5})).read_text()
    tags = Tags(page)
    names = {tag for tag, _ in tags.found}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    for _, attributes in tags.found:
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()
    assert "http://" not in page and "https://" not in page and "@import" not in page and "url(" not in page
    assert "<i>x" not in page and "<b>y" not in page
    assert "hf_abcdefghij" not in page
    text = " ".join(tags.text)
    assert "<script>alert('***')</script>" in text  # shown as text, without the token
    for piece in (
        "failed at step 40",
        "1h 01m",
        "40/50",
        "2.9750",
        "87.5%",
        "1.50 GiB",
        "3 rows",
    ):
        assert piece in text
    assert names >= {"svg", "table", "details"}


def test_the_page_s_curves_show_values_under_the_pointer(run):
    text = " ".join(Tags(write_report_page(run(**{"rewards/margin": 0.25, "rewards/accuracy": 0.5})).read_text()).text)
    assert "step 10: loss 2.7500, smoothed" in text and "eval loss 2.5000" in text
    assert "step 7: smoothed" not in text  # a step without a loss has no point
    for title in ("Loss per pair or answer", "Learning rate", "Seconds per step", "Rewards", "Accuracy"):
        assert title in text
    assert "FLOPs" not in text  # never known in this run


def test_the_loss_of_tokens_is_named_so(run):
    assert "Loss per trained token" in write_report_page(run()).read_text()


def test_losses_of_data_sets_have_a_chart_of_their_own(run):
    text = write_report_page(run(**{"loss/a": 2.5, "loss/accuracy": 2.0, "eval_loss/c": 3.0})).read_text()
    assert "Loss of each data set" in text and "Eval loss of each data set" in text and "Accuracy" not in text


def test_names_of_data_sets_are_no_formulas(run):
    output = run(**{r"loss/a$\frac$": 2.5, "loss/b": 2.0})
    assert r"a$\frac$" in write_report_page(output).read_text() and write_loss_plot(output).is_file()


def test_a_page_of_nothing_is_still_a_page(tmp_path):
    page = write_report_page(tmp_path).read_text()
    assert "No step is logged yet" in " ".join(Tags(page).text)
    for name in ("run.json", "audit.json"):
        (tmp_path / name).write_text('{"rows": 3, "facts": 4, "messages": 5, "state": 6, "datasets": [1]}')
    (tmp_path / "config.yaml").write_bytes(b"\xff")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    Tags(write_report_page(tmp_path).read_text())


def test_a_long_run_does_not_make_a_large_page(run):
    assert write_report_page(run(steps=20_000)).stat().st_size < 1_500_000


@pytest.mark.parametrize("extra", [{}, {"rewards/chosen": 0.1, "rewards/accuracy": 0.5, "logps/chosen": -90.0}])
def test_the_plot_is_a_picture(run, extra):
    path = write_loss_plot(run(**extra))
    assert path.name == "loss.png" and path.read_bytes().startswith(b"\x89PNG")
    width, height = (int.from_bytes(path.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1300, 728 + round(3 * 2.6 * 130) if extra else 728)
    assert not list(path.parent.glob(".*"))


def test_a_folder_s_name_may_be_of_any_script(run, recwarn):
    output = run()
    write_loss_plot(output.rename(output.with_name("实验")))
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_names_that_no_encoding_can_write_are_drawn(run, monkeypatch):
    output = run(**{"loss/\ud800": 2.0, "$\\frac$ \ud800/x": 1.0})
    output = output.rename(output.with_name(os.fsdecode(b"r\xff")))
    monkeypatch.chdir(output)
    result = command(".")
    assert result.exit_code == 0 and "<h1>r?</h1>" in (output / "report.html").read_text()


def test_data_sets_of_any_name_are_in_the_audit(run):
    output = run()
    audit = {"datasets": {name: {"rows": {"read": rows}} for name, rows in (("in all", 21), ("evaluation", 22))}}
    (output / "audit.json").write_text(json.dumps(audit | {"rows": {"read": 43}, "eval": {"rows": {"read": 24}}}))
    found = re.findall(r'<th>([^<]*)</th><td class="n">(\d+)</td>', write_report_page(output).read_text())
    assert found == [("in all", "43"), ("in all", "21"), ("evaluation", "22"), ("evaluation", "24")]


def test_no_plot_without_rows_and_one_for_a_single_row(tmp_path, run):
    assert write_loss_plot(tmp_path) is None
    assert write_loss_plot(run(steps=1)) is not None


def figure_of(output, monkeypatch):
    """What `loss.png` would be saved from."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **_: (drawn.append(figure), path.touch())
    )
    write_loss_plot(output)
    return drawn[0]


@pytest.mark.parametrize("loss", [2.5, -12345.0, 1.5e-7])
def test_no_word_is_cut_off_or_covers_another_curve(run, monkeypatch, loss):
    figure = figure_of(
        run(loss=loss, grad_norm=1e4 * loss, **{"logps/chosen": -1290.0, "rewards/margin": loss}), monkeypatch
    )
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert len(boxes) == 5
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_one_point_is_seen_and_a_long_name_leaves_the_curves_their_room(run, monkeypatch):
    output = run(steps=1, **{"eval_rewards/margin": 0.5})
    axes = figure_of(output.rename(output.with_name("n" * 250)), monkeypatch).axes
    assert all(any(line.get_marker() == "." for line in each.lines) for each in axes)
    assert len(axes[0].get_title(loc="left")) < 100


def test_drawing_needs_no_window_system(run):
    code = (
        "import sys; from pathlib import Path; from swiftlite.reporting.plots import write_loss_plot\n"
        "write_loss_plot(Path(sys.argv[1])); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run())], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]), (1.1, 3.4, [1, 2, 3, 4]), (5.0, 5.0, [4.5, 4.75, 5, 5.25, 5.5])],
)
def test_ticks_are_round(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_ticks_enclose_any_values():
    small, smallest = (0, 1e-30), (0, math.ulp(0.0))
    for low, high in ((-3.7, 1e9), (1e-12, 2e-12), (-1e-5, 1e-5), small, smallest, (1e300, 1e301), (-5, -5), (0, 0)):
        found = nice_ticks(low, high)
        assert 2 <= len(found) <= 8
        assert found[0] <= low + abs(low) * 1e-6 and found[-1] >= high - abs(high) * 1e-6
        assert len(tick_texts(found)) == len(found)


@pytest.mark.parametrize("loss", [0.5, 0.1, 6.270134449005127, 3.3333333333333335, 1e-7])
def test_losses_that_are_equal_but_for_rounding_are_drawn(loss):
    """A run of one step, or of a loss that stays: the moving average is an ulp beside it."""
    for other in (math.nextafter(loss, 9), loss * (1 + 1e-10)):
        assert len(nice_ticks(loss, other)) > 1
        assert "svg" in chart("Loss", [Line("loss", "raw", ([1], [loss])), Line("smoothed", "main", ([1], [other]))])


def test_tick_texts_share_one_form():
    assert tick_texts([0, 5e-5, 1e-4]) == ["0", "5e-5", "10e-5"]
    assert tick_texts([0.5, 1, 1.5]) == ["0.5", "1", "1.5"]
    assert tick_texts([10_000, 12_000]) == ["10,000", "12,000"]
    assert tick_texts([1_200_000, 1_250_000]) == ["1,200,000", "1,250,000"]


@pytest.mark.parametrize(
    ("low", "high"), [(10.1234561, 10.1234569), (1_234_567.1, 1_234_567.9), (5.00001e-5, 5.00003e-5)]
)
def test_ticks_of_values_that_hardly_differ_are_told_apart_and_have_room(low, high):
    ticks = nice_ticks(low, high)
    texts = tick_texts(ticks)
    assert len({*texts}) == len(texts)
    assert [float(text.replace(",", "")) for text in texts] == pytest.approx(ticks, rel=1e-12)
    svg = chart("t", [Line("a", "main", ([1, 2], [low, high]))])
    places = re.findall(r'<text x="(\d+)" y="[\d.]+" text-anchor="end">([^<]*)</text>', svg)
    assert len(places) == len(ticks) and all(int(x) >= 7 * len(text) for x, text in places)


def test_points_lie_where_they_belong():
    svg = chart("t", [Line("a", "main", ([1, 2, 3], [0.0, 5.0, 10.0]))], large=True)
    assert f'viewBox="0 0 {LARGE[0]} {LARGE[1]}"' in svg
    assert 'd="M58.0 294.0L583.0 152.0L1108.0 10.0"' in svg
    assert svg.count('class="band"') == 3
    assert chart("t", [Line("a", "main", ([], []))]) == ""


def command(*arguments):
    app = typer.Typer()
    app.callback()(lambda: None)  # keeps Typer from taking the only command for the whole program
    register(app)
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_draws_both_again(run):
    output = run()
    result = command(output)
    assert result.exit_code == 0
    assert result.output.splitlines() == [f"wrote {output / 'report.html'}", f"wrote {output / 'loss.png'}"]
    assert (output / "loss.png").is_file() and (output / "report.html").is_file()


def test_the_command_names_what_is_missing(tmp_path):
    result = command(tmp_path)
    assert isinstance(result.exception, UserError) and "metrics.jsonl" in result.exception.what
    assert command(tmp_path / "absent").exception.what == "there is no such folder"
    (tmp_path / "metrics.jsonl").write_text("")
    assert command(tmp_path / "metrics.jsonl").exception.what == "this is a file"
    assert "no step is logged yet" in command(tmp_path).output


def test_the_command_knows_where_home_is(run, monkeypatch):
    output = run()
    monkeypatch.setenv("HOME", str(output.parent))
    assert f"wrote {output / 'report.html'}\n" in command(f"~/{output.name}").output


def test_the_command_names_the_run_that_is_near(run, tmp_path):
    output = run()
    (output / "model").mkdir()
    inside = (output / "model", output / "metrics.jsonl", output / "checkpoints" / "step-1", output.parent)
    for folder in inside:
        assert command(folder).exception.fix.endswith(f", such as {output}")


def test_the_command_does_not_write_where_nothing_can_be_written(run, monkeypatch):
    output = run()
    monkeypatch.setattr("os.access", lambda _path, mode: mode != os.W_OK)  # the tests may run as root
    result = command(output)
    assert isinstance(result.exception, UserError) and result.exception.where == str(output)
    assert not (output / "loss.png").exists()
    monkeypatch.undo()
    (output / "report.html").mkdir()
    error = command(output).exception
    assert isinstance(error, UserError) and error.where == str(output / "report.html") and "--resume" not in error.fix


def test_a_run_that_was_killed_does_not_run_any_more(run):
    output = run()
    (output / "run.json").write_text('{"state": "running"}')
    with closing(Claim(output)) as claim:
        claim.take()
        assert command(output).exit_code == 0 and ">running</b>" in (output / "report.html").read_text()
    command(output)
    assert ">stopped without a word after step 40</b>" in (output / "report.html").read_text()


def test_values_of_others_that_are_no_numbers_are_not_drawn(run):
    output, digits = run(), "9" * 400
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1005, "loss": NaN}\n{"step": 1006, "loss": 1e400}\n')
        file.write(f'{{"step": 1007, "loss": 1e308, "mfu": {digits}}}\n{{"step": 1008, "loss": -1e308}}\n')
        file.write(f'{{"step": {digits}, "loss": 1}}\n')
    (output / "run.json").write_text('{"seconds": Infinity}')
    result = command(output)
    assert result.exit_code == 0 and "a line that holds no step" in result.stderr


def test_the_command_counts_the_lines_it_leaves_out(run):
    output = run()
    with (output / "metrics.jsonl").open("a") as file:
        file.write('null\n\n{"step": "x"}\n{"step": 5, "lo')
    result = command(output)
    assert result.exit_code == 0
    assert "left out of metrics.jsonl: 3 lines that hold no step" in result.stderr


def test_the_picture_of_the_terminal_is_drawn_from_a_run(run, tmp_path):
    output, picture = run(), tmp_path / "docs" / "run.svg"
    script = Path(__file__).parents[1] / "scripts" / "render_run_picture.py"
    subprocess.run([sys.executable, script, output, "--step", "30", "--output", picture], check=True)
    text = picture.read_text()
    assert text.startswith("<svg") and "step&#160;30/50" in text and "url(" not in text.replace("url(#", "")
    assert "<script" not in text and "saved" in text


def test_names_of_many_data_sets_do_not_cover_the_picture(run, monkeypatch):
    extra = {f"loss/{number:02}-{'of a kind ' * 20}": 2.0 + number for number in range(30)}
    figure = figure_of(run(**extra), monkeypatch)
    axes = figure.axes[-1]
    figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    assert len(axes.lines) == 31 and axes.get_legend().get_texts()[-1].get_text() == "23 more"
    assert legend.height < axes.get_window_extent().height and legend.width < axes.get_window_extent().width
