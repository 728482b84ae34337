"""How long training stands still for a checkpoint, beside a plain copy of the same bytes.

    python scripts/measure_saves.py --markdown docs/reliability.md

Trains a random model in the shape of SmolLM2-135M in fp32 (0.5 GB of weights, 1.1 GB of moments) on rows of a toy, and
saves it three times: once with the training standing still (`--async-save off`), once beside it (`on`), each in a new
process. Needs 6 GB of memory, 8 GB of disk below `--work`, and a quiet machine, since it looks at the clock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.campaign import machine
from bench.tables import fill, has_place, markdown_table

PLACE = "saves"
STEPS, EVERY = 45, 15


@dataclass(frozen=True)
class Saves:
    """Of one run. still: seconds that each checkpoint but the last held the training up; written: seconds until each of
    these was complete; quiet, beside: median seconds of a step without and with a checkpoint being written; resume:
    seconds from the start of a resumed run to its first step; peak: GiB of the process.
    """

    still: list[float]
    written: list[float]
    quiet: float
    beside: float | None
    resume: float
    peak: float
    bytes: int


def shape():  # noqa: ANN201 - a config of transformers
    """SmolLM2-135M (https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json)."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def train(folder: Path, mode: str, results: Any) -> None:
    """In a new process: a run, then the beginning of a resumed one."""
    import torch
    from measure.storage import drop_from_cache

    from swiftlite.parallel.world import World
    from swiftlite.reporting.memory import peak_memory_gib
    from swiftlite.training import run
    from swiftlite.verification.run import Recorder, resolve_in_world

    still: list[float] = []
    begun: list[float] = []
    complete: list[float] = []
    entered: list[float] = []

    class Timed(run.Session):
        def train(self, began: float) -> None:
            entered.append(time.monotonic() - began)
            super().train(began)

        def save_checkpoint(self, *, last: bool) -> None:
            begun.append(time.perf_counter())
            super().save_checkpoint(last=last)
            still.append(time.perf_counter() - begun[-1])

    class Timer(Recorder):
        def log(self, row: dict[str, Any]) -> None:
            super().log(row | {"while saving": len(begun) > len(complete)})

        def message(self, text: str) -> None:
            if text.startswith("saved"):
                complete.append(time.perf_counter())

    run.Session = Timed
    flags = {
        "model": str(folder / "model"), "dataset": [str(folder / "rows.jsonl")], "output_dir": str(folder / mode),
        "tuner": "full", "precision": "fp32", "max_length": 128, "global_batch_size": 1, "max_steps": STEPS,
        "save_steps": EVERY, "async_save": mode, "cache_dir": str(folder / "cache"), "workers": 1,
    }  # fmt: skip
    timer, cpu = Timer(), torch.device("cpu")
    resolved = resolve_in_world("sft", flags, 1)
    run.run_training(resolved.config, World(cpu), resolved.layout, timer)
    newest = max((folder / mode / "checkpoints").glob("step-*"))
    drop_from_cache(newest)
    shutil.rmtree(folder / mode / "model")
    resumed = resolve_in_world("sft", flags | {"resume": "auto"}, 1)
    run.run_training(resumed.config, World(cpu), resumed.layout, Recorder())
    seconds = {flag: [r["step_seconds"] for r in timer.rows[1:] if r["while saving"] == flag] for flag in (False, True)}
    results.put(
        Saves(
            still=still[:-1],
            written=[end - start for start, end in zip(begun, complete, strict=True)][:-1],
            quiet=statistics.median(seconds[False]),
            beside=statistics.median(seconds[True]) if seconds[True] else None,
            resume=entered[1],
            peak=peak_memory_gib(),
            bytes=sum(path.stat().st_size for path in newest.iterdir() if path.is_file()),
        )
    )


def plain_copy(source: Path, target: Path) -> float:
    """Seconds of copying a folder and bringing the copy to the disk."""
    started = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return time.perf_counter() - started


def measure(folder: Path) -> str:
    """Markdown."""
    from swiftlite.models.toys import toy_rows, write_toy

    write_toy(folder / "model", shape())
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy_rows(64)))
    context, found, copies = multiprocessing.get_context("spawn"), {}, []
    for mode in ("off", "on"):
        results = context.Queue()
        process = context.Process(target=train, args=(folder, mode, results))
        process.start()
        found[mode] = results.get()
        process.join()
        for number in range(2):
            copies.append(plain_copy(max((folder / mode / "checkpoints").glob("step-*")), folder / f"copy-{number}"))
            shutil.rmtree(folder / f"copy-{number}")
        shutil.rmtree(folder / mode)
    copy, size = statistics.median(copies), found["off"].bytes
    header = (
        "`--async-save`", "training stands still", "of a plain copy", "complete after", "MB/s", "a step meanwhile",
        "resumed after", "peak memory",
    )  # fmt: skip
    cells = []
    for mode, saves in found.items():
        still, written = max(saves.still), max(saves.written)
        slower = "-" if saves.beside is None else f"{saves.beside / saves.quiet:.2f} x"
        cells.append([
            mode, f"{still:.2f} s", f"{still / copy:.2f} x", f"{written:.1f} s", f"{size / written / 1e6:,.0f}", slower,
            f"{saves.resume:.1f} s", f"{saves.peak:.2f} GiB",
        ])  # fmt: skip
    facts = machine()
    about = (
        f"A checkpoint of {size / 1e9:.2f} GB; a plain copy of it takes {copy:.1f} s ({min(copies):.1f} to "
        f"{max(copies):.1f}), {size / copy / 1e6:,.0f} MB/s. The slower of two checkpoints each; a step takes "
        f"{found['off'].quiet:.2f} s. {facts['cpu']}, {facts['cores']} cores, torch {version('torch')}."
    )
    return f"{about}\n\n{markdown_table(header, cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder on the disk to measure (the system's temporary folder)")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    options = parser.parse_args()
    if options.markdown and not has_place(options.markdown, PLACE):
        parser.error(f"{options.markdown} has no place for the table")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        text = measure(Path(folder))
    print(text)
    if options.markdown:
        fill(options.markdown, PLACE, text)


if __name__ == "__main__":
    main()
