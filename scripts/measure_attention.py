"""Attention of one document on a CPU, forwards and backwards: in blocks of queries, with gradients in another type, and
with a sliding window in tiles.

    python scripts/measure_attention.py --markdown docs/performance.md

Beside each way runs PyTorch's kernel, in turn in one process; a figure is the fastest of several calls. Takes four
minutes; needs a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from bench.campaign import machine
from bench.script import run_script
from bench.tables import markdown_table

from swiftlite.models.attention import blocks as attention_blocks
from swiftlite.models.attention import cpu as attention_cpu
from swiftlite.models.attention.cpu import attend_by_document

PLACE, CALLS = "attention", 12
SHAPES = ((9, 3, 64), (16, 8, 128), (32, 8, 128))  # heads, heads of keys, size: SmolLM2-135M, Qwen3-0.6B, Llama 3 8B
HALF_SHAPES = ((8, 4, 32), *SHAPES[:2])
LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
WINDOWS = ((64, 8, 64, 128), (4, 1, 256, 512))  # heads, heads of keys, size, window: gpt-oss, Gemma 3 1B
WINDOWED, TILES = (256, 512, 1024, 2048, 4096), (64, 128, 256)
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


def call(shape: tuple[int, int, int], length: int, dtype: torch.dtype, window: int | None = None) -> Callable[[], None]:
    """Attention of a document and its gradients."""
    heads, kv_heads, size = shape
    counts = (heads, kv_heads, kv_heads)
    row = [torch.randn(1, length, count, size, dtype=dtype).transpose(1, 2).requires_grad_() for count in counts]
    upstream = torch.randn(1, length, heads, size, dtype=dtype)

    def work() -> None:
        torch.autograd.grad(attend_by_document(*row, [length], [length], None, window), row, upstream)

    return work


def compare(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, use: Callable[[bool], None]) -> str:
    """A table of time with what `use(True)` turns on, of that with what `use(False)` does."""
    cells = []
    for shape in shapes:
        ratios = []
        for length in LENGTHS:
            work, seconds = call(shape, length, dtype), []
            for on in (True, False):
                use(on)
                seconds.append(fastest(work))
            ratios.append(f"{seconds[0] / seconds[1]:.2f}")
        heads, kv_heads, size = shape
        cells.append([f"{heads} ({kv_heads}) of {size}", *ratios])
        print(*cells[-1], sep="  ", flush=True)
    return markdown_table(["heads (of keys)", *(f"{length:,} tokens" for length in LENGTHS)], cells)


def compare_tiles(dtype: torch.dtype) -> str:
    """A table of time with tiles of so many queries, of that where all queries behind the first window are one tile."""
    cells = []
    for *shape, window in WINDOWS:
        seconds = {}
        for tile in (*TILES, max(WINDOWED)):
            attention_cpu.TILE = tile
            attention_cpu._band.cache_clear()
            seconds[tile] = [fastest(call(tuple(shape), length, dtype, window)) for length in WINDOWED]
        whole = seconds.pop(max(WINDOWED))
        for tile, found in seconds.items():
            pairs = zip(WINDOWED, found, whole, strict=True)
            ratios = [f"{ours / theirs:.2f}" if length > window else "-" for length, ours, theirs in pairs]
            heads, kv_heads, size = shape
            cells.append([f"{heads} ({kv_heads}) of {size}", str(window), str(tile), *ratios])
            print(*cells[-1], sep="  ", flush=True)
    return markdown_table(["heads (of keys)", "window", "tile", *(f"{n:,} tokens" for n in WINDOWED)], cells)


def use_blocks(on: bool) -> None:  # noqa: FBT001 - what `compare` calls
    blocks = attention_blocks
    blocks.SMALLEST_HEAD, blocks.SHORTEST, blocks.LONGEST = EVERYTHING if on else NOTHING


def use_wide_gradients(on: bool) -> None:  # noqa: FBT001
    attention_cpu.WIDE = math.inf if on else 0


def measure(options: argparse.Namespace) -> str:
    """Markdown."""
    torch.set_num_threads(options.threads)
    head, shortest, longest = attention_blocks.SMALLEST_HEAD, attention_blocks.SHORTEST, attention_blocks.LONGEST
    wide, tile, facts = attention_cpu.WIDE, attention_cpu.TILE, machine()
    limits = ", ".join(f"{int(wide / size**1.5):,} tokens for heads of {size}" for _, _, size in HALF_SHAPES)
    return (
        f"{facts['cpu']}, {options.threads} threads, torch {version('torch')}, on {time.strftime('%Y-%m-%d')}: time in "
        f"blocks, of that by PyTorch's kernel, in fp32. Blocks are used for heads of {head} and more, from {shortest} "
        f"to {longest} tokens.\n\n{compare(SHAPES, torch.float32, use_blocks)}\n\n"
        f"Time with gradients in fp32, of that by PyTorch's kernel in bf16. Gradients are in fp32 up to {limits}.\n\n"
        f"{compare(HALF_SHAPES, torch.bfloat16, use_wide_gradients)}\n\n"
        "Time with a sliding window in tiles of queries, of that with all queries behind the first window at a time, "
        f"in fp32. Tiles are of {tile} queries.\n\n{compare_tiles(torch.float32)}"
    )


if __name__ == "__main__":
    threads = {"type": int, "default": 1, "help": "of each call (1, as a lane has)"}
    run_script(__doc__, PLACE, measure, threads=threads)
