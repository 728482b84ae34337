"""The command line of every tool and configuration that `scripts/bench_grpo.py` measures.

All train GRPO (the loss dapo, no reference) with 8 prompts a step, 8 answers to each of up to 64 tokens drawn at
temperature 1, rewarded by one function, fp32, AdamW, a constant rate of 1e-6, full fine-tuning. "shipped" leaves the
tool's speed settings as they come; "tuned" turns activation checkpointing off and trains all answers in one pass.
"""

from __future__ import annotations

from pathlib import Path

from bench.pairs import PairWorkload
from bench.settings import MAX_LENGTH, Benchmark, Setting
from bench.tools import hf_trainer

LEARNING_RATE = "1e-6"
PROMPTS, SAMPLES, LONGEST = 8, 8, 64
REWARD = "bench_reward.vowels"  # beside the probe, where each tool's Python finds it
SETTINGS = (
    Setting("swiftlite", "defaults", "swiftlite"),
    Setting("swiftlite", "prompt computed for each answer", "swiftlite", ("--no-share-prompt",)),
    Setting("trl", "as shipped", "shipped"),
    Setting("trl", "no checkpointing", "tuned", ("--gradient_checkpointing", "false")),
    Setting(
        "trl", "no checkpointing, one pass", "tuned",
        (
            "--gradient_checkpointing", "false", "--gradient_accumulation_steps", "1",
            "--per_device_train_batch_size", str(PROMPTS * SAMPLES),
        ),
    ),
)  # fmt: skip


def _swiftlite(python: Path, workload: PairWorkload, output: Path, steps: int) -> list[str]:
    return [
        str(python), "-m", "swiftlite", "grpo", "--model", str(workload.model), "--dataset", str(workload.rows),
        "--reward", REWARD, "--samples", str(SAMPLES), "--max-new-tokens", str(LONGEST), "--tuner", "full",
        "--global-batch-size", str(PROMPTS), "--max-length", str(MAX_LENGTH), "--learning-rate", LEARNING_RATE,
        "--lr-scheduler", "constant", "--precision", "fp32", "--output-dir", str(output / "out"),
        "--cache-dir", str(output / "cache"), "--max-steps", str(steps),
    ]  # fmt: skip


def _trl(python: Path, workload: PairWorkload, output: Path, steps: int) -> list[str]:
    """Batches are of answers. What comes twice counts as it came last."""
    return [
        str(python.parent / "trl"), "grpo", "--model_name_or_path", str(workload.model),
        "--dataset_name", str(workload.pairs), "--reward_funcs", REWARD, "--num_generations", str(SAMPLES),
        "--max_completion_length", str(LONGEST), "--dtype", "float32", *hf_trainer(output, steps, LEARNING_RATE),
        "--per_device_train_batch_size", str(SAMPLES), "--gradient_accumulation_steps", str(PROMPTS),
    ]  # fmt: skip


GRPO = Benchmark(
    name="bench_grpo",
    rate="steps_per_second",
    settings=SETTINGS,
    commands={"swiftlite": _swiftlite, "trl": _trl},
    pack_tokens=MAX_LENGTH,
    kinds={"shipped": 2.0, "tuned": 2.0},
    first_step=0.5,
    memory=1.0,
)
