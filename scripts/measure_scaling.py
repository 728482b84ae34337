"""How the cost of a token grows with the processes that share a step, each on a core of its own.

    python scripts/measure_scaling.py --markdown docs/performance.md

The same global step in each layout, by the `swiftlite` command with one thread a process, and in turn, so that all
see the same machine. The ideal is a core's time divided by the processes, as long as there are cores for them. The
shares of communication and of waiting are those of the main thread's time in steps 3 and 4, by `--profile`; "hidden" is
how much of the time in which messages were under way the process computed. Takes a quarter of an hour on two cores;
needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.campaign import machine
from bench.script import run_script, train_documents, write_text
from bench.tables import markdown_table

from swiftlite.training.profiler import MEANWHILE

PLACE, STEPS, ROUNDS = "scaling", 6, 2
LENGTH, ROWS = 512, 8  # tokens of a document, documents of a step
CASES = (
    ("one process", 1, ()),
    ("ddp 2", 2, ("--parallel", "ddp")),
    ("fsdp full 2", 2, ("--sharding", "full")),
    ("tp 2", 2, ("--tp", "2")),
    ("pp 2", 2, ("--pp", "2")),
    ("cp 2", 2, ("--cp", "2")),
    ("ddp 4", 4, ("--parallel", "ddp")),
    ("fsdp full 4", 4, ("--sharding", "full")),
    ("fsdp 2 x pp 2", 4, ("--pp", "2", "--sharding", "full")),
    ("cp 2, 4 documents a row", 2, ("--cp", "2", "--micro-batch-size", "4")),
)


def make_model(folder: Path) -> Path:
    """A Llama of 20 M parameters, the least whose products are no trifle beside a message."""
    from transformers import LlamaConfig

    from swiftlite.models.toys import write_toy

    config = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=6, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return write_toy(folder / "model", config)


def train(folder: Path, processes: int, *flags: str) -> tuple[float, str]:
    """(seconds of the median step but for the first two, the profile's table of rank 0 where it was asked for)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    step = ("--global-batch-size", ROWS, "--nproc-per-node", processes, *flags)
    metrics, table = train_documents(folder, folder / "model", LENGTH, STEPS, *step, environment=environment)
    return median(row["step_seconds"] for row in metrics[2:]), table


def share_of(kind: str, table: str) -> str:
    """Of a line such as `communication   12.3   4.5%`; nothing where the kind is not in the table."""
    line = next((line for line in table.splitlines() if line.startswith(kind)), None)
    return line.split()[-1] if line else "-"


def measure(_: argparse.Namespace) -> str:
    """Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_in(Path(folder))


def measure_in(folder: Path) -> str:
    """Markdown."""
    make_model(folder)
    write_text(folder / "text.jsonl", STEPS * ROWS, 8 * LENGTH)
    seconds: dict[str, list[float]] = {name: [] for name, *_ in CASES}
    for number in range(ROUNDS):
        for name, processes, flags in CASES:
            seconds[name].append(train(folder, processes, *flags)[0])
            print(f"round {number + 1}: {name}: {seconds[name][-1]:.2f} s", flush=True)
    cores, facts = os.cpu_count() or 1, machine()
    alone, cells = median(seconds[CASES[0][0]]), []
    for name, processes, flags in CASES:
        step, ideal = median(seconds[name]), alone / min(processes, cores)
        _, table = train(folder, processes, *flags, "--profile")
        shares = (share_of(line, table) for line in ("communication", "Python and waiting", MEANWHILE))
        cells.append([name, f"{step:.2f}", f"{LENGTH * ROWS / step:,.0f}", f"{ideal / step:.0%}", *shares])
    header = ("layout", "s a step", "tokens/s", "of the ideal", "communication", "Python and waiting", "hidden")
    about = (
        f"{ROWS} documents of {LENGTH} tokens a step, one thread a process, medians of {ROUNDS} rounds in turn; "
        f"{facts['cpu']}, {facts['cores']} cores, gloo, torch {version('torch')}."
    )
    return f"{about}\n\n{markdown_table(header, cells)}"


if __name__ == "__main__":
    run_script(__doc__, PLACE, measure)
