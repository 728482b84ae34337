"""What each way to save memory saves, and what it costs in time.

    python scripts/measure_savers.py --markdown docs/performance.md

Trains a model of random weights in the shape of SmolLM2-135M by the `swiftlite` command, a new process for each row of
the table, on the GPU where there is one. Takes a quarter of an hour on two cores; needs a quiet machine.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench.campaign import machine
from bench.script import run_script, train_documents, write_text
from bench.tables import markdown_table

PLACE, STEPS = "savers", 3
FULL, LORA = ("--tuner", "full"), ("--tuner", "lora")
RECOMPUTED, SOME = (("--activation-checkpointing", mode) for mode in ("full", "selective"))
ACTIVATIONS = (  # what matters where documents are long
    ("full", FULL),
    ("full, activations recomputed", (*FULL, *RECOMPUTED)),
    ("full, some activations recomputed", (*FULL, *SOME)),
    ("LoRA", LORA),
    ("LoRA, activations recomputed", (*LORA, *RECOMPUTED)),
    ("LoRA, some activations recomputed", (*LORA, *SOME)),
    ("QLoRA in 8 bits", (*LORA, "--quantization", "int8")),
    ("QLoRA", (*LORA, "--quantization", "nf4")),
    ("QLoRA, activations recomputed", (*LORA, "--quantization", "nf4", *RECOMPUTED)),
)
BACKWARD = ("--optimizer-in-backward", "--max-grad-norm", "0")
EIGHT_BITS, HALF = ("--optimizer", "adamw_8bit"), ("--pure-bf16", "--precision", "bf16")
STATES = (  # what matters where the model is large
    ("full", FULL),
    ("updates in the backward pass", (*FULL, *BACKWARD)),
    ("AdamW of 8 bits", (*FULL, *EIGHT_BITS)),
    ("Muon", (*FULL, "--optimizer", "muon")),
    ("both", (*FULL, *BACKWARD, *EIGHT_BITS)),
    ("bf16 without masters", (*FULL, *HALF)),
    ("all three", (*FULL, *BACKWARD, *EIGHT_BITS, *HALF)),
)


def make_model(folder: Path) -> Path:
    """Random weights in bf16, as on the hub."""
    from transformers import LlamaConfig

    from swiftlite.models.toys import write_toy

    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192, bos_token_id=0, eos_token_id=2,
        dtype="bfloat16",
    )  # fmt: skip
    return write_toy(folder / "model", config)


def measure(options: argparse.Namespace) -> str:
    """Markdown."""
    facts = machine()
    where = f"{facts['cpu']}, {facts['cores']} cores, torch {version('torch')}, bitsandbytes {version('bitsandbytes')}"
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        parts = ((options.length, ACTIVATIONS), (options.short, STATES))
        tables = [table(Path(folder), length, cases) for length, cases in parts]
    return "\n\n".join([f"{where}.", *tables])


def table(folder: Path, length: int, cases: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """Markdown. length: tokens of a document; cases: (name, flags)."""
    write_text(folder / "text.jsonl", STEPS, 8 * length)
    cells: list[list[str]] = []
    first = None
    for name, flags in cases:
        found, _ = train_documents(folder, folder / "model", length, STEPS, *flags)
        peak, seconds = found[-1]["peak_memory_gib"], min(row["step_seconds"] for row in found[1:])
        first = first or (peak, seconds)
        cells.append([name, f"{peak:.2f}", f"{peak / first[0]:.2f}", f"{seconds:.2f}", f"{seconds / first[1]:.2f}",
                      f"{found[-1]['loss']:.4f}"])  # fmt: skip
        print(*cells[-1], sep="  ", flush=True)
    header = ("", "peak GiB", "of the first", "s a step", "of the first", f"loss of step {STEPS}")
    return f"One document of {length:,} tokens a step:\n\n{markdown_table(header, cells)}"


if __name__ == "__main__":
    run_script(
        __doc__,
        PLACE,
        measure,
        length={"type": int, "default": 1024, "help": "tokens of a document for the first table (1024)"},
        short={"type": int, "default": 64, "help": "and for the second (64)"},
    )
