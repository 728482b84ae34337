"""Measures full tuning and LoRA of a model in SmolLM2-135M's size against TRL, LLaMA-Factory and ms-swift, on one CPU.

    python scripts/bench_135m.py --rounds 2 --markdown docs/performance.md

The rows of `scripts/bench_cpu.py`, whose docstring tells how the runs are made, and few steps: one takes a quarter of a
minute to a minute. Length-grouping samplers begin with the longest rows, so the peers' grouped steps have next to no
padding here. A round takes about twenty minutes on two cores.
"""

from __future__ import annotations

import sys

from bench.campaign import carry_out, parse
from bench.tools import larger
from bench.workload import SHAPE, make_workload

SMOLLM2 = SHAPE | {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49_152,
}  # fmt: skip
FULL, LORA = larger("bench_135m_full", lora=False), larger("bench_135m_lora", lora=True)


def main() -> int:
    failed = 0
    for benchmark in (FULL, LORA):
        options = parse(benchmark, __doc__, steps=2, skip=1)
        workload = make_workload((options.work / "workload-135m").absolute(), options.seed, SMOLLM2)
        failed |= carry_out(benchmark, options, workload)
    return failed


if __name__ == "__main__":
    sys.exit(main())
