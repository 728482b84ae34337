"""Rows on disk, curves, numbers as words, and the panel of a running training."""

import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from metric_rows import FACTS, row, steps
from rich.console import Console

from swiftlite.errors import RunError
from swiftlite.reporting.board import Board
from swiftlite.reporting.curves import Curve, series, smoothed
from swiftlite.reporting.display import LiveDisplay
from swiftlite.reporting.files import read_run_state, write_run_state, write_whole
from swiftlite.reporting.metrics import ANSWERS, MetricsFile
from swiftlite.reporting.words import braille, duration, plain, short, sparkline, spent
from swiftlite.untrusted import without_secrets


def drawn(board, width=100, height=40):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(board)
    return console.file.getvalue()


# --- metrics.jsonl


def test_a_row_is_on_disk_as_soon_as_it_is_logged_and_holds_no_nan(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.write(row(1, loss=float("nan"), grad_norm=float("inf")))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == row(1, loss=None, grad_norm=None)
    assert text.count("\n") == 1
    metrics.close()


def test_resume_drops_the_rows_that_are_trained_again(tmp_path):
    metrics = MetricsFile(tmp_path)
    for step in range(1, 8):
        metrics.write(row(step))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # a kill in the middle of a line
    resumed = MetricsFile(tmp_path, 5)
    assert [kept["step"] for kept in resumed.take_kept()] == [1, 2, 3, 4, 5]
    resumed.write(row(6))
    resumed.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "epoch": 0.0, "eval_loss": 6.5}) + "\n")
    MetricsFile(tmp_path, 5).close()
    assert steps(tmp_path) == [0]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    again = MetricsFile(tmp_path, 0)  # which evaluates again before its first step
    assert steps(tmp_path) == [] and again.damage is None  # what is not taken over is not told of
    again.close()


def test_former_answers_stay_on_disk_and_out_of_memory(tmp_path):
    (tmp_path / ANSWERS).write_text("".join(json.dumps({"step": step, "answers": ["a"]}) + "\n" for step in (1, 2, 3)))
    answers = MetricsFile(tmp_path, 2, ANSWERS)
    assert (tmp_path / ANSWERS).read_text().count("\n") == 2 and not answers.take_kept()
    answers.close()


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    good = json.dumps(row(1)).encode()
    lines = [good, b"{", b"[1]", b'{"step": "x"}', b'{"step": true}', b'{"step": -1}', b"\xff\xfe", b"[" * 100_000, b""]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert steps(tmp_path) == [1]


FULL = """
import sys
from pathlib import Path
from swiftlite.reporting.metrics import ANSWERS, MetricsFile
import resource
metrics = MetricsFile(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for step in range(1, 100):
    metrics.write({"step": step})
"""


def test_a_full_disk_while_logging_is_a_clear_error(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert "RunError: metrics.jsonl cannot be written: the disk is full" in done.stderr
    assert "--resume auto" in done.stderr
    assert steps(tmp_path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def fail(partial):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="page.html cannot be written: the disk is full"):
        write_whole(path, fail)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: fail(path))
    with pytest.raises(RunError, match="page.html cannot be written"):  # also where nothing can be removed either
        write_whole(path, fail)


def test_two_processes_may_write_one_file_at_a_time(tmp_path):
    path = tmp_path / "report.html"
    code = "import sys; from pathlib import Path; from swiftlite.reporting.files import write_whole\n"
    code += "write_whole(Path(sys.argv[1]), lambda partial: partial.write_text('theirs'))"

    def write(partial):
        partial.write_text("mine")
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        assert path.read_text() == "theirs"

    write_whole(path, write)
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


# --- curves and words


def test_the_moving_average_starts_at_the_first_value():
    assert smoothed([2.0]) == [2.0]
    assert smoothed([1.0, 1.0, 1.0]) == pytest.approx([1.0] * 3)
    assert smoothed([1.0, 2.0])[1] == pytest.approx((2 / 3 * 1 + 2) / (2 / 3 + 1))
    assert smoothed([1.0, 2.0] + [0.0] * 98)[1] == pytest.approx((0.9 * 1 + 2) / 1.9)  # a long run is smoothed more


def test_a_curve_stays_small_and_keeps_its_shape():
    curve = Curve()
    for value in range(100_000):
        curve.add(float(value))
    assert len(curve.values) <= 2048
    assert curve.values == sorted(curve.values)
    assert curve.values[0] < 200 and curve.values[-1] > 99_000


def test_series_take_numbers_only():
    rows = [{"step": 1, "x": 1}, {"step": 2, "x": None}, {"step": 3, "x": True}, {"step": 4}, {"step": 5, "x": 0.5}]
    assert series(rows, "x") == ([1, 5], [1, 0.5])


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (245, "4m 05s"), (11_220, "3h 07m"), (6 * 86_400 + 7_300, "6d 02h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_numbers_are_short():
    assert [short(1.23456), short(0.0), short(2e-5), short(None)] == ["1.2346", "0.0000", "2.0e-05", "not finite"]
    assert [spent(0.0002), spent(0.25), spent(12.3)] == ["<1 ms", "250 ms", "12.30 s"]


def test_small_charts():
    assert sparkline([0, 7], 10) == "▁█" and sparkline([3, 3], 10) == "▁▁" and sparkline([], 10) == ""
    assert len(sparkline(list(range(500)), 10)) == 10
    falling = braille([4, 3, 2, 1], 2, 1, 1, 4)
    assert falling == [[0x01 | 0x10, 0x04 | 0x80]]  # one dot lower from column to column
    assert braille([5.0], 1, 1, 5.0, 5.0) == [[0x01]]


def test_secrets_are_taken_out():
    text = "hf_abcdefghijklmnopqrst https://me:pw@host/x?token=abc&a=1 hf_hub"
    assert without_secrets(text) == "*** https://***host/x?***&a=1 hf_hub"


def test_a_secret_in_quotes_leaves_the_state_of_a_run_readable(tmp_path):
    text = 'cannot open "https://host/x?token=abc": gone'
    write_run_state(tmp_path, {"facts": {"data": text}, "messages": [{"step": 1, "text": text}]})
    told = 'cannot open "https://host/x?***": gone'
    assert read_run_state(tmp_path) == {"facts": {"data": told}, "messages": [{"step": 1, "text": told}]}


# --- the panel


@pytest.mark.parametrize("width", [30, 44, 60, 80, 100, 160])
@pytest.mark.parametrize("height", [10, 18, 24, 50])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_the_panel_fits_any_terminal(width, height, rows):
    board = Board(50, FACTS | {"method": "sft", "layout": "one process"})
    for step in range(1, rows + 1):
        board.add(row(step) | {"rewards/margin": 0.1, "logps/rejected": -140.0})
        board.say("saved a checkpoint with a rather long name that will not fit everywhere")
    lines = drawn(board, width, height).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert f"step {rows}/50" in "\n".join(lines)


def test_the_panel_shows_what_matters():
    now = iter(range(1000))
    board = Board(20, FACTS, clock=lambda: float(next(now)))
    assert "…" in drawn(board)
    for step in range(1, 11):
        board.add(row(step) | ({"eval_loss": 2.5} if step == 5 else {}))
    board.say("saved step-00000010")
    text = drawn(board)
    for piece in (
        "org/some-[bold]model[/]",
        "step 10/20",
        "50%",
        "epoch 1.00",
        "2.0000",
        "1.00e-04",
        "200",
        "1.25 GiB",
    ):
        assert piece in text
    assert re.search(r"eval loss +2\.5000", text) and "• saved step-00000010" in text
    assert "9s left" in text or "10s left" in text  # ten steps at a second each by this clock, less the time since


def test_numbers_that_are_not_finite_are_said_to_be_so():
    board = Board(5, FACTS)
    board.add(row(1, loss=None, grad_norm=None))
    text = drawn(board)
    assert re.search(r" loss +not finite", text) and re.search(r"grad norm +not finite", text)


def test_the_last_evaluation_counts_whatever_it_came_to():
    """Not the one before it, where that one alone is a number."""
    board = Board(5, FACTS)
    board.add(row(1, eval_loss=2.5))
    board.add(row(2, eval_loss=None))
    assert re.search(r"eval loss +not finite", drawn(board))
    board = Board(5, FACTS)
    board.add(row(1, reward=0.25, eval_reward=0.5))
    board.add(row(2, reward=None, eval_reward=None))  # no function rewards an answer
    text = drawn(board)
    assert re.search(r"eval reward +–", text) and re.search(r" reward +–", text) and "not finite" not in text


def test_rows_of_others_that_hold_no_numbers_do_not_end_a_run_that_goes_on():
    values = ("x", [1], True, 10**400, 1e200)
    rows = [{"step": 1, "loss": value, "eval_loss": value, "eval_rewards/margin": value} for value in values]
    board = Board(5, FACTS, 1, rows)
    assert board.first is None and board.evaluated == {"eval_loss": None, "eval_rewards/margin": None}
    assert "step 1/5" in drawn(board)


@pytest.mark.parametrize("first", [0, 30])
def test_the_panel_smooths_rows_that_are_steps_apart_as_the_page_does(first):
    rows = [row(step, loss=3.0 / step) for step in range(10, 101, 10)]
    kept = [known for known in rows if known["step"] <= first]
    board = Board(100, FACTS, first, kept)
    for known in rows[len(kept) :]:
        board.add(known)
    assert board.smooth == pytest.approx(smoothed([known["loss"] for known in rows])[-1])


def test_what_a_step_lacks_is_not_called_wrong_and_evaluations_stay():
    """A step of kto may have no rejected answer; a panel that changes its shape at each evaluation is hard to read."""
    board = Board(5, FACTS)
    board.add(row(1, loss=0.6931) | {"rewards/rejected": None, "eval_rewards/margin": 0.25, "eval_logps/chosen": -9.0})
    lines = drawn(board).splitlines()
    board.add(row(2, loss=0.6935) | {"rewards/rejected": 0.5})
    text = drawn(board)
    assert "not finite" not in "\n".join(lines) and len(text.splitlines()) == len(lines)
    assert re.search(r"eval margin +0\.250", text) and re.search(r"eval logp chosen +-9\.000", text)
    assert "0.6935 │" in text and "0.6931 │" in text  # not 0.69 at both ends


def test_an_evaluation_before_the_first_step_is_no_step_and_told_once():
    now = iter([0.0, *[600.0] * 2, *[601.0] * 9])
    board = Board(11, FACTS, clock=lambda: next(now))
    board.add({"step": 0, "epoch": 0.0, "eval_reward": 0.25, "eval_answers/cut": 0.5})
    assert re.search(r"eval reward +0\.2500", drawn(board))
    board.add(row(1, reward=0.75))
    text = drawn(board)
    assert "10s left" in text  # not ten times the ten minutes
    assert text.count("eval reward") == 1 and re.search(r"eval reward +0\.2500", text)


def test_long_names_are_told_apart():
    board = Board(5, FACTS)
    names = [*(f"loss/conversations-of-{year}" for year in (2023, 2024)), *(f"loss/data/{x}/rows.jsonl" for x in "xy")]
    board.add(row(1) | dict(zip(names, (1.25, 1.5, 1.75, 2.0), strict=True)))
    text = drawn(board)
    assert re.search(r"loss/conver…-of-2023 +1\.250", text) and re.search(r"loss/conver…-of-2024 +1\.500", text)
    assert re.search(r"loss/data/x/rows\.js… +1\.750", text) and re.search(r"loss/data/y/rows\.js… +2\.000", text)


def test_names_of_wide_letters_have_their_room():
    board = Board(5, FACTS)
    names = ["loss/对话数据集", *(f"loss/从互联网上收集的对话数据{year}" for year in (2023, 2024))]
    board.add(row(1) | dict(zip(names, (1.25, 1.5, 1.75), strict=True)))
    text = drawn(board)
    assert re.search(r"loss/对话数据集 +1\.250", text)
    assert re.search(r"loss/从互联…数据2023 +1\.500", text) and re.search(r"loss/从互联…数据2024 +1\.750", text)


def test_facts_that_a_narrow_panel_cuts_are_told_behind_it():
    console = Console(file=io.StringIO(), width=60, height=40, force_terminal=True, color_system=None)
    long = "36 rows, 3,548 tokens, 64 packs, 86.6% full of them"
    display = LiveDisplay(console)
    display.start(Board(3, {"model": "small", "data": long}))
    display.close()
    text = console.file.getvalue()
    assert text.count(f"• data: {long}") == 1 and "• model" not in text


@pytest.mark.parametrize("width", [60, 200])  # the panel has 120 columns of a wide terminal
def test_messages_that_the_panel_cuts_are_told_behind_it(width):
    console = Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)
    room = min(width, 120) - len("│  • " + "  │")
    messages = ["x" * room, "y" * (room + 1)]
    display, board = LiveDisplay(console), Board(3, {"model": "small"})
    display.start(board)
    for text in messages:
        board.say(text)
        display.message(text)
    display.close()
    panel, _, behind = console.file.getvalue().rpartition("╯")
    assert f"• {messages[0]} " in panel and f"• {messages[1]} " not in panel
    assert "x" not in behind and behind.count("y") == room + 1


def test_what_a_run_came_to_stands_out_in_its_summary():
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system="standard")
    LiveDisplay(console).summary({"loss": "3 → 2", "reward": "0 → 1", "time": "8s"})
    text = console.file.getvalue()
    assert "\x1b[1m3 → 2" in text and "\x1b[1m0 → 1" in text and "\x1b[1m8s" not in text


def test_rows_may_come_while_the_panel_is_drawn():
    board = Board(10_000, FACTS)
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    failed = []

    def draw():
        try:
            for _ in range(60):
                console.print(board)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    step = 0
    while thread.is_alive():
        step += 1
        board.add(row(step, loss=1.0))
        board.say(f"step {step}")
    thread.join()
    assert not failed and step > 60


# --- memory


GROWING = """
from swiftlite.reporting.memory import peak_memory_gib
before = peak_memory_gib()
block = b"x" * (300 << 20)
during = peak_memory_gib()
del block
print(before, during, peak_memory_gib())
"""


def test_peak_memory_is_this_process_s_and_does_not_fall():
    block = b"x" * (600 << 20)  # of the parent, which getrusage would count for the child
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, check=True)
    del block
    before, during, after = map(float, done.stdout.split())
    assert before < 0.2
    assert during - before == pytest.approx(300 / 1024, abs=0.05)
    assert after == pytest.approx(during, abs=0.02)


def test_keys_in_words_keep_the_names_of_functions():
    keys = ("eval_reward", "eval_rewards/last_number", "rewards/think_format")
    assert [plain(key) for key in keys] == ["eval reward", "eval rewards/last_number", "rewards/think_format"]
