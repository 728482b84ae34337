"""Measures swiftlite against TRL, LLaMA-Factory, ms-swift and LitGPT on one CPU machine, on the same tiny workload.

    python scripts/bench_cpu.py --rounds 3 --markdown docs/performance.md

Each peer gets a virtual environment of its own in the cache folder (made once: some gigabytes and minutes). The runs of
a round follow one another, tool by tool, and rounds repeat, so that a slow minute of the machine meets all of them.
Tokens are counted by one rule for all (`bench/probe`): ids that enter the token embedding in training mode and are not
padding. A run that fails is shown as failed with its log. Leave the machine idle: "others' cores" shows if it was not.
Run it by the Python of an environment that has swiftlite.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

from bench.environments import ENVIRONMENTS, EnvironmentFailed, make_environment, versions
from bench.measure import Run, measure
from bench.tables import as_json, fill, goals, has_place, markdown, summarise, text_table
from bench.tools import ACCUMULATION, MICRO_BATCH, SETTINGS, TOOLS, Setting, command
from bench.workload import MAX_LENGTH, Workload, make_workload


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    cache = Path.home() / ".cache" / "swiftlite" / "bench"
    parser.add_argument("--work", type=Path, default=cache, help="cache folder (%(default)s)")
    parser.add_argument("--swiftlite-python", type=Path, default=Path(sys.executable), help="Python that has swiftlite")
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--rounds", type=int, default=1, help="how often every run is repeated, interleaved (1)")
    parser.add_argument("--steps", type=int, default=25, help="measured steps; grouped samplers cycle in 25 (25)")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are run but not measured (2)")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every tool (2)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a run is stopped (1800)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the model and the rows (1)")
    parser.add_argument("--json", type=Path, help="result file (WORK/results.json)")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1 or options.skip < 1:
        parser.error("--rounds, --steps and --skip must be at least 1: a rate needs a step before it to start from")
    if options.markdown and not has_place(options.markdown, "bench_cpu"):
        parser.error(f"{options.markdown} has no place for the table (docs/performance.md has one)")
    return options


def steps_of(setting: Setting, options: argparse.Namespace, mean_row: float) -> int:
    """Steps to run: packed settings take fewer, for about as many tokens (but not under 4 measured ones)."""
    if not setting.packed:
        return options.skip + options.steps
    rows = MICRO_BATCH * ACCUMULATION
    alike = math.ceil(options.steps * rows * mean_row / (rows * MAX_LENGTH))
    return options.skip + max(min(4, options.steps), alike)


def prepare_tools(options: argparse.Namespace, workload: Workload) -> tuple[dict[str, Path], dict[str, str]]:
    """(the Python of each tool, why a tool cannot be measured)."""
    pythons, failures = {}, {}
    for tool in options.only:
        if tool == "swiftlite":
            pythons[tool] = options.swiftlite_python.absolute()  # not resolved: a virtual environment's is a link
            continue
        try:
            pythons[tool] = make_environment(tool, (options.work / "envs").absolute())
        except EnvironmentFailed as problem:
            failures[tool] = str(problem)
    if "litgpt" in pythons and not (workload.litgpt_model / "model_config.yaml").is_file():
        convert = Path(__file__).resolve().parent / "bench" / "convert_litgpt.py"
        subprocess.run([pythons["litgpt"], convert, workload.model, workload.litgpt_model], check=True)
    return pythons, failures


def machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "memory_gib": round(memory),
        "system": platform.platform(), "python": platform.python_version(),
    }  # fmt: skip


def run_all(
    options: argparse.Namespace, workload: Workload, pythons: dict[str, Path], failures: dict[str, str]
) -> list[Run]:
    """Every setting of the chosen tools, round after round."""
    runs = []
    mean_row = workload.facts()["described"]["mean"]
    chosen = [setting for setting in SETTINGS if setting.tool in options.only]
    for turn in range(1, options.rounds + 1):
        for setting in chosen:
            folder = (options.work / "runs" / f"{setting.tool}-{setting.name}-{turn}".replace(" ", "_")).absolute()
            run = Run(tool=setting.tool, setting=setting.name, round=turn, log=str(folder / "log.txt"))
            runs.append(run)
            if setting.tool in failures:
                run.failure, run.log = failures[setting.tool], str(options.work / "envs" / f"{setting.tool}.log")
                continue
            steps = steps_of(setting, options, mean_row)
            line = command(setting, pythons[setting.tool], workload, folder, steps)
            measure(run, line, folder, steps=steps, skip=options.skip, threads=options.threads, timeout=options.timeout)
            print(f"round {turn}: {setting.tool}, {setting.name}: {describe(run)}", flush=True)
    return runs


def describe(run: Run) -> str:
    if run.failure:
        return f"FAILED, {run.failure}: see {run.log}"
    tokens = run.tokens_of_steps or []
    return (
        f"{run.tokens_per_second:,.0f} tokens/s, first step {run.first_step_seconds:.1f} s, "
        f"{run.peak_rss_mib:,.0f} MiB, {run.wall_seconds:.0f} s in all, "
        f"others' cores {run.others_cores:.2f}, {run.threads} threads, tokens of the first steps {tokens[:3]}"
    )


def main() -> int:
    options = parse()
    workload = make_workload((options.work / "workload").absolute(), options.seed)
    pythons, failures = prepare_tools(options, workload)
    facts = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "threads": options.threads,
        "rounds": options.rounds, "steps": options.steps, "skip": options.skip, "seed": options.seed,
        "versions": {tool: versions(python) for tool, python in pythons.items()},
        "workload": workload.facts()["described"], "peers": sorted(ENVIRONMENTS),
    }  # fmt: skip
    runs = run_all(options, workload, pythons, failures)
    lines = summarise(runs)
    result = options.json or options.work / "results.json"
    result.write_text(json.dumps(as_json(lines, runs, facts), indent=1) + "\n")
    print(f"\n{text_table(lines)}\n")
    print("\n".join(goals(lines)))
    print(f"all figures: {result}")
    if options.markdown:
        fill(options.markdown, "bench_cpu", markdown(lines, facts))
    return 1 if any(run.failure for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
