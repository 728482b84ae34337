"""Parts of a step on one CUDA GPU: what PyTorch or the model's own code takes, and what swiftlite runs in its place.

    python scripts/measure_gpu_parts.py --markdown docs/performance.md

Sizes are those of an 8B model of Llama's shape, and of its head with a small model's width; all in bf16, forward and
backward. Medians of ten calls timed by events of the GPU, both sides in turn in one process. Where there is no GPU it
says so and ends well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench.tables import fill, markdown_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swiftlite.models.attention import varlen as attention_varlen
from swiftlite.models.kernels import norms
from swiftlite.objectives import head, logprobs
from swiftlite.training.optimizers import adamw_bf16

CALLS, WARM = 10, 3
DOCUMENTS, LENGTH, HEADS, KV_HEADS, SIZE = 4, 4096, 32, 8, 128
WIDTH, FEED_FORWARD, TOKENS = 4096, 14336, DOCUMENTS * LENGTH
HEADER = ("part", "sizes", "as it comes, ms", "here, ms", "times faster")
Call = Callable[[], object]
Part = tuple[str, str, Call, Call]  # name, sizes, as it comes, as swiftlite has it


def milliseconds(call: Call) -> float:
    """The median of a call."""
    for _ in range(WARM):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def random(*shape: int, scale: float = 1.0, learnt: bool = False) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_(learnt)


def attention() -> Iterator[Part]:
    query, key, value = (random(1, heads, TOKENS, SIZE, learnt=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    upstream = random(1, TOKENS, HEADS, SIZE)
    borders = torch.arange(0, TOKENS + 1, LENGTH, device="cuda", dtype=torch.int32)

    def run(query_borders: torch.Tensor) -> object:
        """Borders that are not the keys' own are not seen to be alike."""
        options = {"longest": LENGTH, "scaling": None, "window": None}
        result = attention_varlen.attend_by_varlen(query, key, value, query_borders, borders, None, **options)
        return torch.autograd.grad(result, (query, key, value), upstream)

    sizes = f"{DOCUMENTS} documents of {LENGTH}, {HEADS} heads of {SIZE}, {KV_HEADS} of keys"
    yield "attention, flash by documents / as a batch", sizes, lambda: run(borders.clone()), lambda: run(borders)


def norm() -> Iterator[Part]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, upstream, ways = random(1, TOKENS, WIDTH, learnt=True), random(1, TOKENS, WIDTH), []
    for fuse in (False, True):
        module = LlamaRMSNorm(WIDTH).to("cuda", torch.bfloat16)
        if fuse:
            norms.fuse_norms(module)
        ways.append(lambda module=module: torch.autograd.grad(module(x), (x, module.weight), upstream))
    yield "norm", f"{TOKENS} x {WIDTH}", *ways


def update() -> Iterator[Part]:
    ways, can_fuse = [], adamw_bf16.can_fuse
    for fuse in (False, True):
        weight = torch.nn.Parameter(random(FEED_FORWARD, 2 * WIDTH))
        weight.grad = random(FEED_FORWARD, 2 * WIDTH)
        groups = [{"params": [weight]}]
        optimizer = adamw_bf16.AdamWBf16(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

        def step(optimizer: adamw_bf16.AdamWBf16 = optimizer, fuse: bool = fuse) -> None:
            adamw_bf16.can_fuse = can_fuse if fuse else lambda: False
            optimizer.step()

        ways.append(step)
    yield "AdamW of bf16 weights", f"{FEED_FORWARD * 2 * WIDTH / 1e6:.0f} M", *ways
    adamw_bf16.can_fuse = can_fuse


def head_and_loss() -> Iterator[Part]:
    for vocabulary, width in ((128256, WIDTH), (151936, 896)):
        weight, hidden = random(vocabulary, width, scale=0.02, learnt=True), random(TOKENS, width, learnt=True)
        targets = torch.randint(0, vocabulary, (TOKENS,), device="cuda")

        def run(
            kind: type[head.Head],
            hidden: torch.Tensor = hidden,
            weight: torch.Tensor = weight,
            targets: torch.Tensor = targets,
        ) -> object:
            logprobs.kind_of_head = lambda _: kind
            found = logprobs.token_logprobs(hidden, weight, None, targets, summed=True)
            return torch.autograd.grad(found.sum(), (hidden, weight))

        sizes = f"{TOKENS} x {width}, vocabulary {vocabulary}"
        yield "head and loss", sizes, lambda run=run: run(head.Head), lambda run=run: run(head.FusedHead)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="Markdown file whose marked place takes the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing was measured")
        return 0
    rows = []
    for parts in (attention, norm, update, head_and_loss):
        for name, sizes, plain, ours in parts():
            before, now = milliseconds(plain), milliseconds(ours)
            rows.append([name, sizes, f"{before:.2f}", f"{now:.2f}", f"{before / now:.2f}"])
            print(rows[-1], flush=True)
    text = f"{markdown_table(HEADER, rows)}\n\n{torch.cuda.get_device_name(0)}, torch {torch.__version__}."
    print(text)
    if options.markdown:
        fill(options.markdown, "gpu_parts", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
