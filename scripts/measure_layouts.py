"""Measures what layouts cost: bytes sent in a step, memory of each rank, seconds of loading and saving.

    python scripts/measure_layouts.py --communication --memory --disk --markdown docs/parallelism.md

Starts real processes on gloo, up to four. `--communication` counts at the collectives of a toy model, beside the
formulas of `swiftlite/planning/communication.py`. `--memory` and `--disk` also load a random model in the shape of
Qwen2.5-0.5B and write its checkpoints: about 12 GB of memory, 10 GB of disk below `--work` (removed afterwards) and a
quiet machine, since they look at the clock.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench.tables import fill, has_place, markdown_table

PARTS = ("communication", "memory", "disk")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help=f"measure {part}")
    parser.add_argument("--layouts", nargs="+", help="of --communication: only these, by name")
    parser.add_argument("--toy-only", action="store_true", help="of --memory: without the model of 0.5 B parameters")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure (the system's temporary folder)")
    parser.add_argument("--markdown", type=Path, help="file whose marked places take the tables")
    options = parser.parse_args(arguments)
    chosen = [part for part in PARTS if getattr(options, part)]
    if not chosen:
        parser.error("nothing to measure: give --communication, --memory or --disk")
    if options.markdown and not all(has_place(options.markdown, part) for part in chosen):
        parser.error(f"{options.markdown} has no place for each of {', '.join(chosen)}")
    return options


def communication(folder: Path, layouts: list[str] | None) -> str:
    from measure.traffic import CASES, LAYERS, MICRO_BATCHES, TOKENS, measure_traffic, table

    rows = measure_traffic(folder, max(CASES), layouts)
    facts = f"Toy models of {LAYERS} layers, {MICRO_BATCHES} micro-batches of {TOKENS} tokens on each data rank, fp32"
    where = f"the mean over {max(CASES)} ranks, torch {version('torch')}, gloo"
    return f"{facts} where not said otherwise; {where}.\n\n{markdown_table(*table(rows))}"


def memory(folder: Path, models: dict[str, Path]) -> str:
    from measure.storage import MEMORY, measure_storage, memory_table

    cells: list[list[str]] = []
    for name, model in models.items():
        header, more = memory_table(name, MEMORY, measure_storage(folder, model, MEMORY))
        cells += more
    facts = f"MiB of the rank that has most, AdamW, fp32 masters; torch {version('torch')}"
    return f"{facts}.\n\n{markdown_table(header, cells)}"


def disk(folder: Path, model: Path) -> str:
    from measure.storage import DISK, disk_table, measure_storage, plain_speed

    speed = plain_speed(folder, model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    table = disk_table(DISK, measure_storage(folder, model, DISK), size, speed)
    facts = f"A model in the shape of Qwen2.5-0.5B, {size / 1e9:.2f} GB in bf16, {os.cpu_count()} cores; loading is "
    return f"{facts}building, reading from the disk and converting to fp32.\n\n{markdown_table(*table)}"


def main() -> None:
    options = parse()
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        folder = Path(name)
        if options.communication:
            texts["communication"] = communication(folder, options.layouts)
        if options.memory or options.disk:
            from measure.storage import write_models

            models = write_models(folder, large=options.disk or not options.toy_only)
        if options.memory:
            texts["memory"] = memory(folder, {"toy": models["toy"]} if options.toy_only else models)
        if options.disk:
            texts["disk"] = disk(folder, models["0.5B"])
    for part, text in texts.items():
        print(text, end="\n\n")
        if options.markdown:
            fill(options.markdown, part, text)


if __name__ == "__main__":
    main()
