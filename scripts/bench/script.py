"""What scripts with one table have in common: their command line, and documents of known length to train on."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.tables import fill, has_place

WORDS = ("fox", "dog", "Paris", "Rome", "two", "answer", "model", "time", "def", "return")


def run_script(
    about: str | None, place: str, measure: Callable[[argparse.Namespace], str], **options: dict[str, Any]
) -> None:
    """Print what `measure` makes of the options, Markdown, and put it where `--markdown` says.

    about: the script's docstring; place: the name of the marked place; options: further ones, as argparse wants them.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, words in options.items():
        parser.add_argument(f"--{name}", **words)
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    given = parser.parse_args()
    if given.markdown and not has_place(given.markdown, place):
        parser.error(f"{given.markdown} has no place for the table")
    text = measure(given)
    print(text)
    if given.markdown:
        fill(given.markdown, place, text)


def write_text(path: Path, rows: int, letters: int) -> None:
    """Rows of one document each."""
    numbers = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            text = " ".join(numbers.choices(WORDS, k=letters // 4))
            file.write(json.dumps({"text": text}) + "\n")


def train_documents(
    folder: Path, model: Path, length: int, steps: int, *flags: object, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """(the metrics, rank 0's table of `--profile`) of a run over the documents of `folder / text.jsonl`.

    length: tokens of each, which the rest of a longer one is cut off for; flags: come last, so they win.
    """
    output = folder / "run"
    command = [
        sys.executable, "-m", "swiftlite", "pretrain", "--model", model, "--dataset", folder / "text.jsonl",
        "--tuner", "full", "--precision", "fp32", "--max-length", length, "--overlong", "truncate",
        "--global-batch-size", 1, "--micro-batch-size", 1, "--max-steps", steps, "--output-dir", output,
        "--cache-dir", folder / "cache", "--activation-checkpointing", "none", "--no-warm-check", *flags,
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    if any(row["tokens"] % length for row in metrics):
        raise SystemExit(f"a document is not {length} tokens long: {metrics}")
    table = output / "profile" / "rank-00000.txt"
    profile = table.read_text() if table.is_file() else ""
    shutil.rmtree(output)
    return metrics, profile
