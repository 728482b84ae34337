"""Measures GRPO by swiftlite against TRL on one CPU machine: the same tiny model, prompts and reward function.

    python scripts/bench_grpo.py --rounds 3 --markdown docs/performance.md

Prompts have 200-600 tokens; each step has 8 of them with 8 answers of 64 tokens, which a random model hardly ever ends
before. Steps are what is counted, answers and training together. How the runs are made: `scripts/bench_cpu.py`.
"""

from __future__ import annotations

import sys

from bench.campaign import carry_out, parse
from bench.pairs import make_pairs
from bench.rollout_tools import GRPO


def main() -> int:
    options = parse(GRPO, __doc__, steps=6, skip=1)
    return carry_out(GRPO, options, make_pairs((options.work / "pairs").absolute(), options.seed))


if __name__ == "__main__":
    sys.exit(main())
