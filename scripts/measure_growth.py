"""How time and memory grow with the length of a sequence, with the rows of a data set and with a model's parameters.

    python scripts/measure_growth.py --markdown docs/performance.md

Every figure is of a `swiftlite` command (or, of rows, of the preparation of data alone) in a process of its own, on
random models and generated rows. What should grow in proportion is shown per unit, so that a column of equal numbers is
good news. Takes about 15 minutes on two cores; needs a quiet machine, since it looks at the clock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.campaign import machine
from bench.script import train_documents, write_text
from bench.tables import fill, has_place, markdown_table
from measure.resident import PeakGrowth

PLACE = "growth"
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
ROWS = (1_000, 10_000, 100_000, 1_000_000)
WIDTHS = (128, 256, 512, 1024)
STEP_TOKENS = 4096  # of a step where the width grows
MIB = 2**20


def shape(width: int, layers: int = 2):  # noqa: ANN201 - a config of transformers
    """A Llama with heads of 32."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, tie_word_embeddings=True,
        max_position_embeddings=max(LENGTHS), bos_token_id=0, eos_token_id=2,
    )  # fmt: skip


def fastest(metrics: list[dict[str, Any]]) -> float:
    """Seconds of the fastest step but the first, which also touches memory for the first time."""
    return min(row["step_seconds"] for row in metrics[1:])


def needed(config: Any, length: int) -> tuple[float, int]:
    """(FLOPs of a step over one document, as for MFU, parameters) of a model, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from swiftlite.models.tuners import count_parameters
    from swiftlite.training.flops import FlopCounter

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return FlopCounter(model).step([length]), count_parameters(model)[1]


def lengths_table(folder: Path) -> str:
    """A step over one document."""
    from swiftlite.models.toys import write_toy

    model, cells = write_toy(folder / "length", shape(128)), []
    for length in LENGTHS:
        write_text(folder / "text.jsonl", 3, 8 * length)
        metrics, _ = train_documents(folder, model, length, 2 if length > 16_384 else 3)
        seconds, peak = fastest(metrics), metrics[-1]["peak_memory_gib"] * 1024
        print(f"length {length:,}: {seconds:.2f} s, {peak:,.0f} MiB", flush=True)
        flops, _ = needed(shape(128), length)
        cells.append([f"{length:,}", f"{seconds:.2f}", f"{1e3 * seconds / (length / 1024):.0f}",
                      f"{flops / seconds / 1e9:.0f}", f"{peak:,.0f}"])  # fmt: skip
    header = ("tokens in the document", "s a step", "ms per 1,024 tokens", "GFLOP/s", "peak MiB")
    return markdown_table(header, cells)


def widths_table(folder: Path) -> str:
    """A step over 4,096 tokens."""
    from swiftlite.models.toys import write_toy
    from swiftlite.planning.footprint import TRAINED_BYTES

    write_text(folder / "text.jsonl", 5, 8 * STEP_TOKENS)
    cells = []
    for width in WIDTHS:
        model = write_toy(folder / f"width-{width}", shape(width, 8))
        metrics, _ = train_documents(folder, model, STEP_TOKENS, 4)
        flops, count = needed(shape(width, 8), STEP_TOKENS)
        seconds, peak = fastest(metrics), metrics[-1]["peak_memory_gib"] * 1024
        print(f"{count / 1e6:.1f} M parameters: {seconds:.2f} s, {peak:,.0f} MiB", flush=True)
        state = TRAINED_BYTES * count / MIB
        cells.append([f"{count / 1e6:.1f} M", f"{seconds:.2f}", f"{flops / seconds / 1e9:.0f}", f"{state:,.0f}",
                      f"{peak:,.0f}"])  # fmt: skip
    header = ("parameters", "s a step", "GFLOP/s", "weights, gradients, moments MiB", "peak MiB")
    return markdown_table(header, cells)


def prepare(folder: str, rows: str, results: Any) -> None:
    """In a new process: tokenise and pack, and once more with tokens from the cache."""
    from swiftlite.config.resolve import resolve_config
    from swiftlite.data.prepare import prepare_data
    from swiftlite.models.tokenizer import tokenizer_loader

    config = resolve_config(
        "sft", model=f"{folder}/model", dataset=[rows], max_length=1024, cache_dir=f"{folder}/cache", output_dir="o"
    )
    with PeakGrowth() as growth:
        started = time.perf_counter()
        prepare_data(config, tokenizer_loader(config))
        tokenised = time.perf_counter()
        prepared = prepare_data(config, tokenizer_loader(config))  # now its tokens are in the cache
        next(prepared.train.steps(0))
        packed = time.perf_counter()
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    results.put((tokenised - started, packed - tokenised, growth.bytes / MIB, worker, prepared.train.describe()))


def rows_table(folder: Path) -> str:
    """Chat rows of about 85 tokens."""
    from swiftlite.models.toys import toy_rows, write_toy

    write_toy(folder / "model", shape(128))
    lines, cells = [json.dumps(row) for row in toy_rows(1000)], []
    for count in ROWS:
        path = folder / f"rows-{count}.jsonl"
        with path.open("w") as file:
            for number in range(count):  # all different, so that nothing is found twice
                file.write(lines[number % 1000].replace('"content": "', f'"content": "{number} ', 1) + "\n")
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        process = context.Process(target=prepare, args=(str(folder), str(path), results))
        process.start()
        tokenising, packing, growth, worker, facts = results.get()
        process.join()
        path.unlink()
        print(f"{count:,} rows: {tokenising:.1f} s, again {packing:.2f} s, {growth:,.0f} MiB", flush=True)
        cells.append([f"{count:,}", f"{facts['tokens']:,}", f"{tokenising:.1f}", f"{1e6 * tokenising / count:,.0f}",
                      f"{packing:.2f}", f"{1 - facts['fill']:.2%}", f"{growth:,.0f}", f"{worker:,.0f}"])  # fmt: skip
    header = (
        "rows", "tokens", "s to prepare", "µs a row", "s from the cache", "empty", "growth MiB", "a worker's peak MiB"
    )  # fmt: skip
    about = "Growth: the most that the process's own memory, without pages of files, grew meanwhile."
    return f"{markdown_table(header, cells)}\n\n{about}"


PARTS = {"lengths": lengths_table, "rows": rows_table, "widths": widths_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="some of the tables")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked places take the tables")
    options = parser.parse_args()
    places = {name: f"{PLACE}-{name}" for name in options.only}
    if missing := [place for place in places.values() if options.markdown and not has_place(options.markdown, place)]:
        parser.error(f"{options.markdown} has no place for {', '.join(missing)}")
    facts = machine()
    about = f"{facts['cpu']}, {facts['cores']} cores, torch {version('torch')}, transformers {version('transformers')}."
    for name, place in places.items():
        with tempfile.TemporaryDirectory() as folder:
            text = f"{PARTS[name](Path(folder))}\n\n{about}"
        print(text)
        if options.markdown:
            fill(options.markdown, place, text)


if __name__ == "__main__":
    main()
