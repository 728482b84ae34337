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
from dataclasses import dataclass
from pathlib import Path

from bench.tables import fill, has_place, markdown_table

ROOT = Path(__file__).resolve().parent.parent
TESTS = tuple(f"tests/test_{name}.py" for name in ("attention", "moments", "objectives", "parity", "run"))
GLOBAL_BATCH = 8  # rows a step
MEASURED, SKIPPED = 10, 3  # steps; the first ones warm up the allocator and the kernels
FULL_TUNING_BYTES = 18  # a parameter: fp32 weight, gradient and two moments, and the bf16 copy of autocast
LEAN_BYTES = 10  # bf16 weight and two moments
LIGER, TORCHAO = "liger_kernel", "torchao"
HEADER = ("model", "training", "rows a forward", "tokens/s", "MFU", "peak GiB", "loss of steps", "result")
PARITY_HEADER = ("family", "precision", "micro-batches", "loss differs by", "grad norm differs by", "result")


@dataclass(frozen=True)
class Way:
    """How a model is trained. rows: of a forward pass; step_rows: of a step; bytes: that a parameter takes at least;
    package: that it needs."""

    name: str
    flags: tuple[str, ...]
    rows: int = 4
    step_rows: int = GLOBAL_BATCH
    bytes: int = 2
    package: str | None = None


LORA, FULL, COMPILED = ("--tuner", "lora"), ("--tuner", "full"), ("--compile",)
FUSED = ("--kernels", "liger")
LEAN = (*FULL, "--pure-bf16", "--optimizer-in-backward", "--max-grad-norm", "0")
USUAL = (
    Way("lora", LORA),
    Way("full", FULL, bytes=FULL_TUNING_BYTES),
    Way("full, compiled", (*FULL, *COMPILED), bytes=FULL_TUNING_BYTES),
    Way("full, Liger", (*FULL, *FUSED), bytes=FULL_TUNING_BYTES, package=LIGER),
    Way("full, compiled, 8-bit floats", (*FULL, *COMPILED, "--fp8"), bytes=FULL_TUNING_BYTES, package=TORCHAO),
)
LARGE = (
    Way("lora", LORA),
    Way("lora, compiled", (*LORA, *COMPILED)),
    Way("lora, Liger", (*LORA, *FUSED), package=LIGER),
    Way("full, bf16 without masters, updates in the backward", LEAN, step_rows=4, bytes=LEAN_BYTES),
    Way("full", FULL, rows=1, bytes=FULL_TUNING_BYTES),
)
TINY = (
    Way("lora", LORA, rows=2),
    Way("full", FULL, rows=2, bytes=FULL_TUNING_BYTES),
    Way("full, updates in the backward", (*FULL, "--optimizer-in-backward", "--max-grad-norm", "0"), step_rows=4),
)


@dataclass(frozen=True)
class Shape:
    """A model shape and how it is trained."""

    name: str
    family: str
    sizes: dict
    ways: tuple[Way, ...]


def shapes(tiny: bool) -> list[Shape]:
    """0.5B, 1.7B and 8B, or one tiny stand-in."""
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True}  # fmt: skip
        return [Shape("tiny", "llama", sizes, TINY)]
    return [
        Shape("0.5B (Qwen2.5-0.5B)", "qwen2", {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        }, USUAL),
        Shape("1.7B (SmolLM2-1.7B)", "llama", {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 49152, "tie_word_embeddings": True,
        }, USUAL),
        Shape("8B (Llama-3.1-8B)", "llama", {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        }, LARGE),
    ]  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only together with --tiny")
    parser.add_argument("--tiny", action="store_true", help="one tiny model, short rows, few steps: tries the script")
    parser.add_argument("--no-tests", action="store_true", help="leave the test files out")
    parser.add_argument("--minutes", type=float, default=24, help="no new run is started after this time (24)")
    parser.add_argument("--work", type=Path, help="folder for models and data, 20 GB (a temporary one, removed)")
    parser.add_argument("--json", type=Path, help="file that takes all figures")
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


def measure(shape: Shape, way: Way, model: Path, data: Path, options: argparse.Namespace) -> dict:
    """One row of the table: medians over the steps after the first ones."""
    folder = options.work / f"run-{shape.family}-{shape.ways.index(way)}"
    shutil.rmtree(folder, ignore_errors=True)
    measured, skipped = (3, 1) if options.tiny else (MEASURED, SKIPPED)
    command = [
        sys.executable, "-m", "swiftlite", "sft", "--model", str(model), "--dataset", str(data),
        "--max-length", str(256 if options.tiny else 4096), "--micro-batch-size", str(way.rows),
        "--global-batch-size", str(way.step_rows), "--precision", "fp32" if options.device == "cpu" else "bf16",
        "--learning-rate", "1e-5", "--lr-scheduler", "constant", "--max-steps", "10000", "--save-steps", "10000",
        "--output-dir", str(folder), "--cache-dir", str(options.work / "cache"), *way.flags,
    ]  # fmt: skip
    log = options.work / f"{folder.name}.log"
    rows, result = train(command, folder, log, skipped + measured, options.device, 120 if options.tiny else 300)
    shutil.rmtree(folder, ignore_errors=True)
    steady = rows[skipped:]
    mfu = [row["mfu"] for row in steady if row["mfu"] is not None]
    return {
        "model": shape.name, "training": way.name, "micro_batch": way.rows, "result": result,
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steady) if steady else None,
        "mfu": statistics.median(mfu) if mfu else None,
        "peak_memory_gib": max((row["peak_memory_gib"] for row in rows), default=None),
        "losses": [round(row["loss"], 3) for row in (rows[0], rows[-1])] if rows else [],
    }  # fmt: skip


def measure_all(options: argparse.Namespace, facts: dict, deadline: float) -> list[dict]:
    """Every shape in each of its ways; a shape's files are removed before the next one."""
    data = options.work / "rows.jsonl"
    write_rows(data, rows=32 if options.tiny else 256, length=256 if options.tiny else 4096)
    rows = []
    for shape in shapes(options.tiny):
        model = options.work / "model"
        shutil.rmtree(model, ignore_errors=True)
        parameters = in_own_process(write_model, shape, str(model), options.device)
        for way in shape.ways:
            if reason := left_out(way, parameters, facts, deadline):
                empty = {"model": shape.name, "training": way.name, "micro_batch": way.rows}
                rows.append({**empty, "result": f"left out: {reason}"})
            else:
                rows.append(measure(shape, way, model, data, options))
            print(f"{rows[-1]}", flush=True)
    return rows


def left_out(way: Way, parameters: int, facts: dict, deadline: float) -> str | None:
    """Why a run is not made."""
    needed = parameters * way.bytes
    if time.monotonic() > deadline:
        return "no time"
    if needed > facts["memory"]:
        return f"needs over {needed / 2**30:.0f} GiB"
    if way.package is not None and importlib.util.find_spec(way.package) is None:
        return f"{way.package} is not installed"
    return None


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
            "(with updates in the backward: 4).",
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
        rows = measure_all(options, facts, start + options.minutes * 60)
    text = summary(facts, options, rows, differences, tests)
    print(f"\n{text}\n\n{time.monotonic() - start:.0f} s in all")
    if options.json:
        figures = {**facts, "parity": differences, "tests": tests, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.markdown:
        fill(options.markdown, "gpu_check", text)
    return 0 if is_good(rows, differences, tests) else 1


if __name__ == "__main__":
    sys.exit(main())
