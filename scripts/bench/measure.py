"""Runs one command under the probe and turns its log into figures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.workload import PAD_ID, VOCABULARY

PROBE = Path(__file__).resolve().parent / "probe"
POLL_SECONDS = 0.25
MIB = 2**20
READ_BYTES = 4 * MIB


@dataclass
class Run:
    """One measured run. Rates are of the steps after the skipped ones; `failure` is None where it did all its steps."""

    tool: str
    setting: str
    round: int
    log: str
    failure: str | None = None
    steps_per_second: float | None = None
    pairs_per_second: float | None = None
    tokens_per_second: float | None = None
    padding: float | None = None
    start_seconds: float | None = None
    first_step_seconds: float | None = None
    wall_seconds: float | None = None
    peak_rss_mib: float | None = None
    steps: int = 0
    tokens_of_steps: list[int] | None = None
    threads: int | None = None
    others_cores: float | None = None


def busy_seconds() -> float:
    """CPU seconds that all cores of the machine have spent on anything since it started."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:]]
    user, nice, system, _, _, interrupts, soft, steal = fields[:8]
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def run_environment(folder: Path, threads: int, mark: int | None) -> dict[str, str]:
    """The same for all: thread count, no hub, caches of this run's own so that nothing is tokenised beforehand.

    mark: a token id to be counted beside all others.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"}
    }
    return environment | {
        "PYTHONPATH": str(PROBE), "BENCH_LOG": str(folder / "steps.jsonl"), "BENCH_PAD_ID": str(PAD_ID),
        "BENCH_VOCABULARY": str(VOCABULARY), "BENCH_MARK_ID": "" if mark is None else str(mark),
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "MODELSCOPE_CACHE": str(folder / "modelscope"),
    }  # fmt: skip


def run_command(
    command: list[str], folder: Path, threads: int, timeout: float, mark: int | None = None
) -> tuple[int | None, float, float, float]:
    """Run `command`, its output in `folder/log.txt`.

    Returns (exit code or None where the time limit was reached, time of the start, seconds, cores that others used).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as output:
        output.write(" ".join(command) + "\n\n")
        output.flush()
        busy, start = busy_seconds(), time.time()
        process = subprocess.Popen(
            command, cwd=folder, env=run_environment(folder, threads, mark), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        finished, status, usage = 0, 0, None
        while not finished and time.time() < start + timeout:
            finished, status, usage = os.wait4(process.pid, os.WNOHANG)
            time.sleep(0 if finished else POLL_SECONDS)
        if not finished:
            os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
    seconds = time.time() - start
    process.returncode = os.waitstatus_to_exitcode(status)  # it is reaped: Popen must not wait for it again
    others = max(0.0, busy_seconds() - busy - usage.ru_utime - usage.ru_stime) / seconds
    return (process.returncode if finished else None), start, seconds, others


def read_files(folder: Path) -> int:
    """Read every file below a folder once, so that the next command finds them in memory: a system that drops files
    nobody has read for a minute would have the first of a tool's runs alone wait for the disk. Returns bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while part := file.read(READ_BYTES):
                    total += len(part)
    return total


def measure(
    run: Run,
    command: list[str],
    folder: Path,
    *,
    steps: int,
    skip: int,
    threads: int,
    timeout: float,
    mark: int | None = None,
) -> Run:
    """Fill in `run` from one run of `command` in `folder` (emptied first), which should take `steps` steps.

    mark: the token that each of a pair's two answers has once.
    """
    shutil.rmtree(folder, ignore_errors=True)
    code, start, run.wall_seconds, run.others_cores = run_command(command, folder, threads, timeout, mark)
    log = folder / "steps.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    evaluate(run, rows, start=start, skip=skip)
    if code is None:
        run.failure = f"stopped after {timeout:.0f} s"
    elif code != 0:
        run.failure = f"exit code {code}"
    elif run.steps != steps:
        run.failure = f"{run.steps} optimizer steps instead of {steps}"
    shutil.rmtree(folder / "out", ignore_errors=True)
    return run


def evaluate(run: Run, rows: list[dict], *, start: float, skip: int) -> None:
    """Figures from the probe's rows. start: when the command was started (seconds since the epoch)."""
    steps = [row for row in rows if row["kind"] == "step"]
    run.steps = len(steps)
    if not steps:
        return
    run.start_seconds = steps[0]["began"] - start
    run.first_step_seconds = steps[0]["time"] - start
    run.peak_rss_mib = max(row["rss"] for row in rows) / MIB
    run.threads = steps[0]["threads"]
    run.tokens_of_steps = [row["real"] for row in steps]
    measured = steps[skip:]
    if skip < 1 or not measured:
        return
    real, padding = sum(row["real"] for row in measured), sum(row["padding"] for row in measured)
    seconds = measured[-1]["time"] - steps[skip - 1]["time"]
    run.steps_per_second = len(measured) / seconds
    run.tokens_per_second = real / seconds
    run.pairs_per_second = sum(row["marked"] for row in measured) / 2 / seconds
    run.padding = padding / (real + padding)


def median(runs: list[Run], field: str) -> float | None:
    """Median of a figure over the runs that have it."""
    values = [value for run in runs if (value := vars(run)[field]) is not None]
    return statistics.median(values) if values else None
