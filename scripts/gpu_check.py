"""Checks swiftlite on one CUDA GPU and measures it there: correctness, tests, then speed, MFU and peak memory.

    scripts/gpu_check.sh --markdown docs/performance.md

The models are random weights of well-known shapes, so nothing is downloaded. Each speed run is the command line
itself, `python -m swiftlite sft`, on rows of 4,096 tokens; its metrics.jsonl is read until enough steps are there, and
it is then ended, so that no checkpoint of a big model is written. `--tiny --device cpu` tries the script anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.gpu_ways import GLOBAL_BATCH, Shape, Way, shapes
from bench.tables import fill, has_place, markdown_table

ROOT = Path(__file__).resolve().parent.parent
TESTS = tuple(f"tests/test_{name}.py" for name in ("attention", "moments", "muon", "objectives", "parity", "run"))
MEASURED, SKIPPED = 5, 2  # steps; the first ones warm up the allocator and the kernels
HEADER = ("model", "training", "rows a forward", "tokens/s", "MFU", "peak GiB", "loss of steps", "result")
PARITY_HEADER = ("family", "precision", "documents", "loss differs by", "grad norm differs by", "result")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only together with --tiny")
    parser.add_argument("--tiny", action="store_true", help="one tiny model, short rows, few steps: tries the script")
    parser.add_argument("--no-tests", action="store_true", help="leave the test files out")
    parser.add_argument("--minutes", type=float, default=24, help="no new run is started after this time (24)")
    parser.add_argument("--work", type=Path, help="folder for models and data, 20 GB (a temporary one, removed)")
    parser.add_argument("--json", type=Path, help="file that takes all figures; rows that it has are not made again")
    parser.add_argument("--only", default="", metavar="WORDS", help="only rows of models whose name has these words")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the tables")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for --tiny only")
    if options.markdown and not has_place(options.markdown, "gpu_check"):
        parser.error(f"{options.markdown} has no place for the tables (docs/performance.md has one)")
    return options


def in_own_process(function, *arguments) -> object:
    """The result of a call in a new process, so that this one never holds memory of the GPU."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def device_facts(device: str) -> dict | None:
    """Name, memory and versions; None where there is no such device. Runs in a process of its own."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device == "cpu":
        return {"device": "CPU", "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), **versions}
    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    return {"device": torch.cuda.get_device_name(0), "memory": memory, **versions}


def parity(device: str) -> list[list[str]]:
    """Runs in a process of its own."""
    from bench.gpu_parity import compare_all, report

    return report(compare_all(device))


def environment(device: str) -> dict[str, str]:
    """This process's, with the checkout importable, no hub, and no GPU where the CPU was asked for."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return chosen | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def run_tests(device: str, timeout: float) -> str:
    """pytest's closing line for the test files that run whole steps; on a GPU machine these train on the GPU."""
    files = [name for name in TESTS if (ROOT / name).is_file()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *files]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(device), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {timeout:.0f} s"
    print(done.stdout[-6000:], done.stderr[-2000:])
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def write_model(shape: Shape, folder: str, device: str) -> int:
    """A folder with random bf16 weights of `shape` and the benchmark's tokenizer. Returns the number of parameters."""
    import torch
    from bench.workload import Words, train_tokenizer, write_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.family, **shape.sizes, max_position_embeddings=8192, rope_theta=500000.0, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")
    write_tokenizer(Path(folder), train_tokenizer(Words(1)))
    return sum(parameter.numel() for parameter in model.parameters())


def write_rows(file: Path, rows: int, length: int) -> None:
    """Chat rows that are a little longer than `length` tokens, so that truncation leaves exactly that many."""
    from bench.workload import Words

    words = Words(2)
    question, answer = words.pieces("?"), words.pieces(".")
    with file.open("w") as output:
        for _ in range(rows):
            messages = [
                {"role": "user", "content": "".join(next(question) for _ in range(12)).strip()},
                {"role": "assistant", "content": "".join(next(answer) for _ in range(length)).strip()},
            ]
            output.write(json.dumps({"messages": messages}) + "\n")


def read_metrics(file: Path) -> list[dict]:
    """The complete lines of metrics.jsonl so far."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def train(
    command: list[str], folder: Path, log: Path, steps: int, device: str, timeout: float
) -> tuple[list[dict], str]:
    """Run `command` until its metrics hold `steps` steps, then end it. Returns (rows, "ok" or what went wrong)."""
    until, metrics = time.monotonic() + timeout, folder / "metrics.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(device), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        while process.poll() is None and len(read_metrics(metrics)) < steps and time.monotonic() < until:
            time.sleep(0.2)
        ended = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows = read_metrics(metrics)
    if len(rows) >= steps:
        return rows, "ok"
    text = log.read_text()
    if "out of memory" in text:
        return rows, "out of memory"
    print(text[-3000:])
    return rows, f"exit code {ended}" if ended is not None else f"not finished after {timeout:.0f} s"


def own_command(way: Way, model: Path, data: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    return [
        sys.executable, "-m", "swiftlite", "sft", "--model", str(model), "--dataset", str(data),
        "--max-length", str(256 if options.tiny else 4096), "--micro-batch-size", str(way.rows),
        "--global-batch-size", str(way.step_rows), "--precision", "fp32" if options.device == "cpu" else "bf16",
        "--learning-rate", "1e-5", "--lr-scheduler", "constant", "--max-steps", "10000", "--save-steps", "10000",
        "--output-dir", str(folder), "--cache-dir", str(options.work / "cache"), *way.flags,
    ]  # fmt: skip


def trl_command(way: Way, model: Path, data: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    return [
        sys.executable, str(ROOT / "scripts" / "bench" / "gpu_trl.py"), "--model", str(model), "--data", str(data),
        "--output", str(folder), "--max-length", str(256 if options.tiny else 4096),
        "--micro-batch-size", str(way.rows), "--global-batch-size", str(way.step_rows), *way.flags,
    ]  # fmt: skip


def measure(shape: Shape, way: Way, model: Path, data: Path, options: argparse.Namespace) -> dict:
    """One row of the table: medians over the steps after the first ones."""
    folder = options.work / f"run-{shape.family}-{shape.ways.index(way)}"
    shutil.rmtree(folder, ignore_errors=True)
    measured, skipped = (3, 1) if options.tiny else (MEASURED, SKIPPED)
    command = (trl_command if way.by_trl else own_command)(way, model, data, folder, options)
    log = options.work / f"{folder.name}.log"
    rows, result = train(command, folder, log, skipped + measured, options.device, 120 if options.tiny else 300)
    shutil.rmtree(folder, ignore_errors=True)
    steady = rows[skipped:]
    mfu = [row["mfu"] for row in steady if row["mfu"] is not None]
    return {
        "model": shape.name, "training": way.name, "tuner": way.flags[1], "micro_batch": way.rows, "result": result,
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steady) if steady else None,
        "mfu": statistics.median(mfu) if mfu else None,
        "peak_memory_gib": max((row["peak_memory_gib"] for row in rows), default=None),
        "losses": [round(row["loss"], 3) for row in (rows[0], rows[-1])] if rows else [],
    }  # fmt: skip


def measure_all(
    options: argparse.Namespace, facts: dict, deadline: float, tell: Callable[[list[dict]], None]
) -> list[dict]:
    """Every shape in each of its ways; a shape's files are removed before the next one. tell: called after each row,
    with all that are there."""
    data = options.work / "rows.jsonl"
    write_rows(data, rows=32 if options.tiny else 256, length=256 if options.tiny else 4096)
    rows = known_rows(options.json)
    known = {(row["model"], row["training"]) for row in rows}
    for shape in shapes(options.tiny):
        ways = [way for way in shape.ways if (shape.name, way.name) not in known and options.only in shape.name]
        if not ways or time.monotonic() > deadline:
            continue
        model = options.work / "model"
        shutil.rmtree(model, ignore_errors=True)
        parameters = in_own_process(write_model, shape, str(model), options.device)
        for way in ways:
            if reason := left_out(way, parameters, facts, deadline):
                empty = {"model": shape.name, "training": way.name, "micro_batch": way.rows}
                rows.append({**empty, "result": f"left out: {reason}"})
            else:
                rows.append(measure(shape, way, model, data, options))
            print(f"{rows[-1]}", flush=True)
            tell(rows)
    return rows


def known_rows(file: Path | None) -> list[dict]:
    """Of runs of this script before that were good."""
    if file is None or not file.is_file():
        return []
    return [row for row in json.loads(file.read_text())["rows"] if row["result"] == "ok"]


def keep(file: Path | None, known: dict, rows: list[dict]) -> None:
    """What was measured so far, which a run that is cut short leaves behind."""
    if file is not None:
        file.write_text(json.dumps({**known, "rows": rows}, indent=1) + "\n")


def left_out(way: Way, parameters: int, facts: dict, deadline: float) -> str | None:
    """Why a run is not made."""
    needed = parameters * way.bytes
    if time.monotonic() > deadline:
        return "no time"
    if needed > facts["memory"]:
        return f"needs over {needed / 2**30:.0f} GiB"
    if missing := [name for name in way.packages if importlib.util.find_spec(name) is None]:
        return f"{missing[0]} is not installed"
    return None


def tell_mfu_of_trl(rows: list[dict]) -> None:
    """A token takes as many FLOPs there as in swiftlite's run of that model and tuner, which counts them."""
    counted = {(row["model"], row["tuner"]): row["mfu"] / row["tokens_per_second"] for row in rows if row.get("mfu")}
    for row in rows:
        share = counted.get((row["model"], row.get("tuner")))
        if share and row.get("tokens_per_second") and row["mfu"] is None:
            row["mfu"] = share * row["tokens_per_second"]


def cells(row: dict) -> list[str]:
    def number(key: str, form: str) -> str:
        return "-" if row.get(key) is None else format(row[key], form)

    losses = " to ".join(f"{loss:.2f}" for loss in row.get("losses", [])) or "-"
    return [
        row["model"], row["training"], str(row["micro_batch"]), number("tokens_per_second", ",.0f"),
        number("mfu", ".1%"), number("peak_memory_gib", ".1f"), losses, row["result"],
    ]  # fmt: skip


def summary(
    facts: dict, options: argparse.Namespace, rows: list[dict], differences: list[list[str]], tests: str
) -> str:
    """Both tables and what they were measured on, in Markdown."""
    length = 256 if options.tiny else 4096
    return "\n\n".join(
        [
            f"Measured on {datetime.date.today().isoformat()}: {facts['device']}, torch {facts['torch']}, transformers "
            f"{facts['transformers']}; random weights; rows of {length} tokens, {GLOBAL_BATCH} a step "
            "(with updates in the backward: those of one forward).",
            markdown_table(HEADER, [cells(row) for row in rows]),
            "Relative differences of swiftlite's loss and gradient norm from plain PyTorch in fp32:",
            markdown_table(PARITY_HEADER, differences),
            f"Tests: {tests}",
        ]
    )


def is_good(rows: list[dict], differences: list[list[str]], tests: str) -> bool:
    """Nothing wrong and nothing broken; what does not fit the memory or the time is no failure."""
    fits = all(row["result"] in ("ok", "out of memory") or row["result"].startswith("left out") for row in rows)
    return fits and all(row[-1] == "ok" for row in differences) and ("passed" in tests or tests == "left out")


def main() -> int:
    options = parse()
    start = time.monotonic()
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no torch: run this by the Python of swiftlite's environment", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed; started processes inherit it
    facts = in_own_process(device_facts, options.device)
    if facts is None:
        print("no CUDA GPU here: nothing was checked. (`--tiny --device cpu` tries the script itself.)")
        return 0
    print(f"{facts['device']}, {facts['memory'] / 2**30:.0f} GiB, torch {facts['torch']}", flush=True)
    differences = in_own_process(parity, options.device)
    print(markdown_table(PARITY_HEADER, differences), flush=True)
    tests = "left out" if options.no_tests else run_tests(options.device, timeout=480)
    print(f"tests: {tests}", flush=True)
    with contextlib.ExitStack() as stack:
        if options.work is None:
            options.work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swiftlite-gpu-")))
        options.work = options.work.absolute()
        options.work.mkdir(parents=True, exist_ok=True)
        known = {**facts, "parity": differences, "tests": tests}
        rows = measure_all(options, facts, start + options.minutes * 60, lambda rows: keep(options.json, known, rows))
    tell_mfu_of_trl(rows)
    text = summary(facts, options, rows, differences, tests)
    print(f"\n{text}\n\n{time.monotonic() - start:.0f} s in all")
    if options.markdown:
        fill(options.markdown, "gpu_check", text)
    return 0 if is_good(rows, differences, tests) else 1


if __name__ == "__main__":
    sys.exit(main())
