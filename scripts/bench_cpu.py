"""Measures swiftlite against TRL, LLaMA-Factory, ms-swift and LitGPT on one CPU machine, on the same tiny workload.

    python scripts/bench_cpu.py --rounds 3 --markdown docs/performance.md

Each peer gets a virtual environment of its own in the cache folder (made once: some gigabytes and minutes). The runs of
a round follow one another, tool by tool, and rounds repeat, every other one backwards, so that a slow minute of the
machine meets all of them. Tokens are counted by one rule for all (`bench/probe`): ids that enter the token embedding in
training mode and are not padding. A run that fails is shown as failed with its log. Leave the machine idle: "others'
cores" shows if it was not. Run it by the Python of an environment that has swiftlite.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.campaign import carry_out, parse
from bench.tools import SFT
from bench.workload import Workload, make_workload


def prepare_litgpt(workload: Workload, pythons: dict[str, Path]) -> None:
    """LitGPT's own checkpoint of the model, once."""
    if "litgpt" in pythons and not (workload.litgpt_model / "model_config.yaml").is_file():
        convert = Path(__file__).resolve().parent / "bench" / "convert_litgpt.py"
        subprocess.run([pythons["litgpt"], convert, workload.model, workload.litgpt_model], check=True)


def main() -> int:
    options = parse(SFT, __doc__)
    workload = make_workload((options.work / "workload").absolute(), options.seed)
    return carry_out(SFT, options, workload, lambda pythons: prepare_litgpt(workload, pythons))


if __name__ == "__main__":
    sys.exit(main())
