"""Attention of one document in fp32 on a CPU, forwards and backwards: in blocks of queries, and by PyTorch's kernel.

    python scripts/measure_attention.py --markdown docs/performance.md

Both run in turn in one process; a figure is the fastest of several calls. Takes a minute; needs a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from bench.campaign import machine
from bench.script import run_script
from bench.tables import markdown_table

from swiftlite.models import attention_blocks
from swiftlite.models.attention_cpu import attend_by_document

PLACE, CALLS = "attention", 12
SHAPES = ((9, 3, 64), (16, 8, 128), (32, 8, 128))  # heads, heads of keys, size: SmolLM2-135M, Qwen3-0.6B, Llama 3 8B
LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
EVERYTHING, NOTHING = (1, 1, max(LENGTHS)), (1, 1, 0)  # heads, and documents, that are computed in blocks


def fastest(work: Callable[[], object]) -> float:
    """Seconds."""
    work()
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def call(shape: tuple[int, int, int], length: int) -> Callable[[], None]:
    """Attention of a document and its gradients."""
    heads, kv_heads, size = shape
    counts = (heads, kv_heads, kv_heads)
    row = [torch.randn(1, length, count, size).transpose(1, 2).requires_grad_() for count in counts]
    upstream = torch.randn(1, length, heads, size)

    def work() -> None:
        torch.autograd.grad(attend_by_document(*row, [length], None), row, upstream)

    return work


def measure(options: argparse.Namespace) -> str:
    """Markdown."""
    torch.set_num_threads(options.threads)
    blocks = attention_blocks
    usual = blocks.SMALLEST_HEAD, blocks.SHORTEST, blocks.LONGEST
    cells = []
    for shape in SHAPES:
        ratios = []
        for length in LENGTHS:
            work, seconds = call(shape, length), {}
            for served in (NOTHING, EVERYTHING):
                blocks.SMALLEST_HEAD, blocks.SHORTEST, blocks.LONGEST = served
                seconds[served] = fastest(work)
            ratios.append(f"{seconds[EVERYTHING] / seconds[NOTHING]:.2f}")
        heads, kv_heads, size = shape
        cells.append([f"{heads} ({kv_heads}) of {size}", *ratios])
        print(*cells[-1], sep="  ", flush=True)
    facts = machine()
    return (
        f"{facts['cpu']}, {options.threads} threads, torch {version('torch')}, on {time.strftime('%Y-%m-%d')}: time in "
        f"blocks, of that by PyTorch's kernel. Blocks are used for heads of {usual[0]} and more, from {usual[1]} to "
        f"{usual[2]} tokens.\n\n"
        + markdown_table(["heads (of keys)", *(f"{length:,} tokens" for length in LENGTHS)], cells)
    )


if __name__ == "__main__":
    threads = {"type": int, "default": 1, "help": "of each call (1, as a lane has)"}
    run_script(__doc__, PLACE, measure, threads=threads)
