"""Measures DPO by swiftlite against TRL and LLaMA-Factory on one CPU machine: the same tiny model and pairs.

    python scripts/bench_preference.py --rounds 3 --markdown docs/performance.md

Prompts have 200-600 tokens, answers 50-200. Pairs are counted by one rule for all (`bench/probe`): a token that ends
each answer and is nowhere else, where it enters the token embedding in training. The reference's own passes are not
counted as pairs; where they happen in a step they cost its time. How the runs are made: `scripts/bench_cpu.py`.
"""

from __future__ import annotations

import sys

from bench.campaign import carry_out, parse
from bench.pairs import make_pairs
from bench.preference_tools import DPO


def main() -> int:
    options = parse(DPO, __doc__)
    return carry_out(DPO, options, make_pairs((options.work / "pairs").absolute(), options.seed))


if __name__ == "__main__":
    sys.exit(main())
