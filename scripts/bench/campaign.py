"""A benchmark from its command line to its table: options, environments, interleaved rounds, results."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.environments import ENVIRONMENTS, EnvironmentFailed, compile_package, make_environment, versions
from bench.measure import Run, measure, read_files
from bench.settings import Benchmark, Setting
from bench.tables import as_json, fill, goals, has_place, markdown, summarise, text_table
from swiftlite.models.processor import processor

CACHE = Path.home() / ".cache" / "swiftlite" / "bench"


def parse(
    benchmark: Benchmark, about: str | None, arguments: list[str] | None = None, *, steps: int = 25, skip: int = 2
) -> argparse.Namespace:
    """The options of a benchmark's script, whose docstring is `about`; arguments: sys.argv's by default; steps, skip:
    how many are measured and left out by default."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    tools = benchmark.tools
    parser.add_argument("--work", type=Path, default=CACHE, help="cache folder (%(default)s)")
    parser.add_argument("--swiftlite-python", type=Path, default=Path(sys.executable), help="Python that has swiftlite")
    parser.add_argument("--only", nargs="+", choices=tools, default=list(tools), metavar="TOOL", help=", ".join(tools))
    parser.add_argument("--rounds", type=int, default=1, help="how often every run is repeated, interleaved (1)")
    words = "measured steps; grouped samplers cycle in 25 (%(default)s)"
    parser.add_argument("--steps", type=int, default=steps, help=words)
    words = "first steps that are run but not measured (%(default)s)"
    parser.add_argument("--skip", type=int, default=skip, help=words)
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every tool (2)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a run is stopped (1800)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the model and the rows (1)")
    parser.add_argument("--json", type=Path, help=f"result file (WORK/{benchmark.name}.json)")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1 or options.skip < 1:
        parser.error("--rounds, --steps and --skip must be at least 1: a rate needs a step before it to start from")
    if options.markdown and not has_place(options.markdown, benchmark.name):
        parser.error(f"{options.markdown} has no place for the table (docs/performance.md has one)")
    return options


def steps_of(benchmark: Benchmark, setting: Setting, options: argparse.Namespace, mean_row: float) -> int:
    """Steps to run: packed settings take fewer, for about as many tokens (but not under 4 measured ones)."""
    if not setting.packed:
        return options.skip + options.steps
    alike = math.ceil(options.steps * mean_row / benchmark.pack_tokens)
    return options.skip + max(min(4, options.steps), alike)


def carry_out(
    benchmark: Benchmark,
    options: argparse.Namespace,
    workload: Any,
    prepare: Callable[[dict[str, Path]], None] = lambda pythons: None,
) -> int:
    """Make the environments, run everything, print and write the results: the script's exit code.

    workload: what the commands of `benchmark` take, with `folder` and `facts()`; prepare: what else has to be done with
    the tools' Pythons before the first run.
    """
    pythons, failures = _environments(benchmark, options)
    prepare(pythons)
    facts = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "threads": options.threads,
        "rounds": options.rounds, "steps": options.steps, "skip": options.skip, "seed": options.seed,
        "versions": {tool: versions(python) for tool, python in pythons.items()},
        "workload": workload.facts()["described"], "peers": sorted(set(benchmark.tools) & set(ENVIRONMENTS)),
    }  # fmt: skip
    runs = _run_all(benchmark, options, workload, pythons, failures)
    lines = summarise(benchmark, runs)
    result = options.json or options.work / f"{benchmark.name}.json"
    result.write_text(json.dumps(as_json(benchmark, lines, runs, facts), indent=1) + "\n")
    print(f"\n{text_table(benchmark, lines)}\n")
    print("\n".join(goals(benchmark, lines)))
    print(f"all figures: {result}")
    if options.markdown:
        fill(options.markdown, benchmark.name, markdown(benchmark, lines, facts))
    return 1 if any(run.failure for run in runs) else 0


def _environments(benchmark: Benchmark, options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """(the Python of each tool, why a tool cannot be measured)."""
    pythons, failures = {}, {}
    for tool in options.only:
        if tool == "swiftlite":
            pythons[tool] = options.swiftlite_python.absolute()  # not resolved: a virtual environment's is a link
            compile_package(pythons[tool], "swiftlite")
            continue
        try:
            pythons[tool] = make_environment(tool, (options.work / "envs").absolute())
        except EnvironmentFailed as problem:
            failures[tool] = str(problem)
    return pythons, failures


def machine() -> dict:
    """cpu: with its family, since processors of one name differ in what they can."""
    known = processor()
    family = f" (family {known['cpu family']})" if "cpu family" in known else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": known.get("model name", platform.machine()) + family, "cores": os.cpu_count(),
        "memory_gib": round(memory), "system": platform.platform(), "python": platform.python_version(),
    }  # fmt: skip


def _run_all(
    benchmark: Benchmark,
    options: argparse.Namespace,
    workload: Any,
    pythons: dict[str, Path],
    failures: dict[str, str],
) -> list[Run]:
    """Every setting of the chosen tools, round after round: there and back, for the machine's minutes differ."""
    runs = []
    facts = workload.facts()
    chosen = [setting for setting in benchmark.settings if setting.tool in options.only]
    for turn in range(1, options.rounds + 1):
        for setting in chosen if turn % 2 else reversed(chosen):
            name = f"{benchmark.name}-{setting.tool}-{setting.name}-{turn}".replace(" ", "_")
            folder = (options.work / "runs" / name).absolute()
            run = Run(tool=setting.tool, setting=setting.name, round=turn, log=str(folder / "log.txt"))
            runs.append(run)
            if setting.tool in failures:
                run.failure, run.log = failures[setting.tool], str(options.work / "envs" / f"{setting.tool}.log")
                continue
            steps = steps_of(benchmark, setting, options, facts["described"]["mean"])
            line = benchmark.command(setting, pythons[setting.tool], workload, folder, steps)
            read_files(pythons[setting.tool].parents[1] / "lib")
            measure(
                run, line, folder, steps=steps, skip=options.skip, threads=options.threads, timeout=options.timeout,
                mark=facts.get("mark"),
            )  # fmt: skip
            print(f"round {turn}: {setting.tool}, {setting.name}: {_describe(benchmark, run)}", flush=True)
    return runs


def _describe(benchmark: Benchmark, run: Run) -> str:
    if run.failure:
        return f"FAILED, {run.failure}: see {run.log}"
    tokens = run.tokens_of_steps or []
    return (
        f"{getattr(run, benchmark.rate):,.1f} {benchmark.unit}, start {run.start_seconds:.1f} s, "
        f"first step {run.first_step_seconds:.1f} s, {run.peak_rss_mib:,.0f} MiB, {run.wall_seconds:.0f} s in all, "
        f"others' cores {run.others_cores:.2f}, {run.threads} threads, tokens of the first steps {tokens[:3]}"
    )
