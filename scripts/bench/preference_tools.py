"""The command line of every tool and configuration that `scripts/bench_preference.py` measures.

All train DPO's sigmoid loss with beta 0.1 on the same pairs, micro-batches of 4 x 2 pairs, fp32, AdamW, a constant rate
of 1e-5, full fine-tuning. "shipped" leaves the tool's speed settings as they come; "tuned" computes the reference
beforehand where the tool can and turns activation checkpointing off.
"""

from __future__ import annotations

from pathlib import Path

from bench.pairs import PairWorkload
from bench.settings import MAX_LENGTH, Benchmark, Setting
from bench.tools import hf_trainer, swiftlite

LEARNING_RATE = "1e-5"
SETTINGS = (
    Setting("swiftlite", "defaults", "swiftlite", packed=True),
    Setting("swiftlite", "no packing", "swiftlite", ("--no-packing",)),
    Setting("swiftlite", "precomputed reference", "swiftlite", ("--reference", "precompute"), packed=True),
    Setting("swiftlite", "prompt computed twice", "swiftlite", ("--no-share-prompt",), packed=True),
    Setting("trl", "as shipped", "shipped"),
    Setting("llamafactory", "as shipped", "shipped"),
    Setting("trl", "precomputed reference", "precomputed", ("--precompute_ref_log_probs", "true")),
    Setting(
        "trl", "precomputed reference, no checkpointing", "tuned",
        ("--precompute_ref_log_probs", "true", "--gradient_checkpointing", "false"),
    ),
    Setting("llamafactory", "no checkpointing", "tuned", ("--disable_gradient_checkpointing", "true")),
)  # fmt: skip


def _swiftlite(python: Path, workload: PairWorkload, output: Path, steps: int) -> list[str]:
    return swiftlite("dpo", python, workload, output, steps, LEARNING_RATE)


def _trl(python: Path, workload: PairWorkload, output: Path, steps: int) -> list[str]:
    return [
        str(python.parent / "trl"), "dpo", "--model_name_or_path", str(workload.model),
        "--dataset_name", str(workload.pairs), "--max_length", str(MAX_LENGTH), "--dtype", "float32", "--beta", "0.1",
        *hf_trainer(output, steps, LEARNING_RATE),
    ]  # fmt: skip


def _llamafactory(python: Path, workload: PairWorkload, output: Path, steps: int) -> list[str]:
    return [
        str(python.parent / "llamafactory-cli"), "train", "--stage", "dpo", "--do_train", "true",
        "--model_name_or_path", str(workload.model), "--dataset_dir", str(workload.llamafactory), "--dataset", "bench",
        "--template", "chatml", "--finetuning_type", "full", "--cutoff_len", str(MAX_LENGTH), "--pref_beta", "0.1",
        "--pref_loss", "sigmoid", *hf_trainer(output, steps, LEARNING_RATE),
    ]  # fmt: skip


DPO = Benchmark(
    name="bench_preference",
    rate="pairs_per_second",
    settings=SETTINGS,
    commands={"swiftlite": _swiftlite, "trl": _trl, "llamafactory": _llamafactory},
    pack_tokens=2 * MAX_LENGTH,
    kinds={"shipped": 2.0, "precomputed": 2.0, "tuned": 2.0},
    first_step=0.5,
    memory=1.0,
)
