"""Where the time of a training step goes on a CPU, and what share of the machine's matrix product rate it reaches.

    python scripts/measure_step.py --markdown docs/performance.md

Trains the model and the rows of `bench_cpu.py` by swiftlite's own command with `--profile`, and multiplies square
matrices before and after it, on as many threads. Takes two minutes; needs a quiet machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from bench.campaign import CACHE, machine
from bench.script import run_script
from bench.tools import swiftlite
from bench.workload import Workload, make_workload

PLACE, STEPS, SIDE = "profile", 12, 2048
HALF = "oneDNN in bf16"
MULTIPLY = f"""
import json, time, torch
a = torch.randn({SIDE}, {SIDE})
half = a.bfloat16()
def rate(multiply):
    multiply(); best = 9e9
    for _ in range(9):
        begun = time.perf_counter(); multiply(); best = min(best, time.perf_counter() - begun)
    return 2 * {SIDE}**3 / best
by_onednn = lambda: torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], "")
rates = {{"MKL": rate(lambda: a @ a), "oneDNN": rate(by_onednn)}}
if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # one product takes a minute where it is not
    rates["{HALF}"] = rate(lambda: half @ half)
print(json.dumps(rates))
"""


def matrix_rates(environment: dict[str, str]) -> dict[str, float]:
    """FLOP/s of the fastest of some square products, in fp32 by either library and in bf16."""
    command = [sys.executable, "-c", MULTIPLY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def train(folder: Path, workload: Workload, environment: dict[str, str], *more: str) -> list[dict]:
    """The metrics of a run."""
    command = swiftlite("sft", Path(sys.executable), workload, folder, STEPS, "1e-4")
    subprocess.run([*command, *more], env=environment, check=True, cwd=folder)
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def product_flops(workload: Workload, row: dict) -> float:
    """Of the matrix products with weights that a step needs: 6 a weight and token, of the head's a trained token."""
    shape = json.loads((workload.model / "config.json").read_text())
    width, mlp, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    keys = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * width**2 + 2 * width * keys + 3 * width * mlp
    return 6 * (layers * layer * row["tokens"] + shape["vocab_size"] * width * row["trained_tokens"])


def measure(work: Path, threads: int) -> str:
    """Markdown."""
    workload = make_workload(work / "workload", 1)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as profiled:
        rates = [matrix_rates(environment)]
        rows = train(Path(folder), workload, environment)[1:]
        rates.append(matrix_rates(environment))
        train(Path(profiled), workload, environment, "--profile")
        table = (Path(profiled) / "out" / "profile" / "rank-00000.txt").read_text().rstrip()
    fastest = min(rows, key=lambda row: row["step_seconds"] / row["tokens"])
    reached = product_flops(workload, fastest) / fastest["step_seconds"]
    facts, highest = machine(), max(found[library] for found in rates for library in found if library != HALF)
    words = " and ".join(
        f"{rates[0][library] / 1e9:.0f} to {rates[1][library] / 1e9:.0f} GFLOP/s by {library}" for library in rates[0]
    )
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {threads} threads, torch {version('torch')}, on "
        f"{time.strftime('%Y-%m-%d')}. The machine multiplies {SIDE:,} x {SIDE:,} matrices at "
        f"{words} (before and after the run). The fastest of {STEPS - 1} steps, "
        f"{fastest['tokens'] / fastest['step_seconds']:,.0f} tokens/s, does its products with weights at "
        f"{reached / 1e9:.0f} GFLOP/s of the whole step's time: **{reached / highest:.0%}** of the highest "
        f"rate in fp32. Of a step under `--profile`:\n\n```text\n{table}\n```"
    )


OPTIONS = {
    "work": {"type": Path, "default": CACHE, "help": "cache folder of bench_cpu (%(default)s)"},
    "threads": {"type": int, "default": 2, "help": "OMP_NUM_THREADS (2)"},
}

if __name__ == "__main__":
    run_script(__doc__, PLACE, lambda options: measure(options.work, options.threads), **OPTIONS)
