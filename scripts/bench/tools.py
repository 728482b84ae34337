"""The command line of every tool and configuration that `bench_cpu.py` and `bench_135m.py` measure.

All train the same rows with micro-batches of 4 x 2, fp32, AdamW, a constant rate of 1e-4 where the tool has one, loss
on the answers only, and neither save in between nor evaluate. "shipped" leaves the tool's speed settings as they come;
"tuned" turns activation checkpointing off and groups or packs rows by the tool's own means.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.pairs import PairWorkload
from bench.settings import ACCUMULATION, MAX_LENGTH, MICRO_BATCH, Benchmark, Command, Setting
from bench.workload import Workload

LEARNING_RATE = "1e-4"
GOALS = {"shipped": 2.2, "tuned": 1.5}

SETTINGS = (
    Setting("swiftlite", "defaults", "swiftlite", packed=True),
    Setting("swiftlite", "no packing", "swiftlite", ("--no-packing",)),
    Setting("trl", "as shipped", "shipped"),
    Setting("llamafactory", "as shipped", "shipped"),
    Setting("ms-swift", "as shipped", "shipped"),
    Setting("litgpt", "as shipped", "shipped"),
    Setting(
        "trl", "no checkpointing, grouped", "tuned",
        ("--gradient_checkpointing", "false", "--train_sampling_strategy", "group_by_length"),
    ),
    Setting(
        "llamafactory", "no checkpointing, grouped", "tuned",
        ("--disable_gradient_checkpointing", "true", "--train_sampling_strategy", "group_by_length"),
    ),
    Setting(
        "llamafactory", "no checkpointing, neat packing", "tuned",
        ("--disable_gradient_checkpointing", "true", "--neat_packing", "true"), packed=True,
    ),
    Setting(
        "ms-swift", "no checkpointing, grouped", "tuned",
        ("--gradient_checkpointing", "false", "--group_by_length", "true"),
    ),
    Setting("litgpt", "no loader workers", "tuned", ("--data.num_workers", "0")),
)  # fmt: skip


def swiftlite(
    method: str, python: Path, workload: Workload | PairWorkload, output: Path, steps: int, learning_rate: str
) -> list[str]:
    """swiftlite's own command line for a method."""
    return [
        str(python), "-m", "swiftlite", method, "--model", str(workload.model), "--dataset", str(workload.rows),
        "--tuner", "full", "--micro-batch-size", str(MICRO_BATCH),
        "--global-batch-size", str(MICRO_BATCH * ACCUMULATION), "--max-length", str(MAX_LENGTH),
        "--learning-rate", learning_rate, "--lr-scheduler", "constant", "--precision", "fp32",
        "--output-dir", str(output / "out"), "--cache-dir", str(output / "cache"), "--max-steps", str(steps),
    ]  # fmt: skip


def _swiftlite(python: Path, workload: Workload, output: Path, steps: int) -> list[str]:
    return swiftlite("sft", python, workload, output, steps, LEARNING_RATE)


def hf_trainer(output: Path, steps: int, learning_rate: str = LEARNING_RATE) -> list[str]:
    """What the tools built on transformers' Trainer have in common."""
    return [
        "--output_dir", str(output / "out"), "--max_steps", str(steps), "--learning_rate", learning_rate,
        "--lr_scheduler_type", "constant", "--per_device_train_batch_size", str(MICRO_BATCH),
        "--gradient_accumulation_steps", str(ACCUMULATION), "--logging_steps", "1", "--save_strategy", "no",
        "--report_to", "none", "--use_cpu", "true", "--bf16", "false",
    ]  # fmt: skip


def _trl(python: Path, workload: Workload, output: Path, steps: int) -> list[str]:
    return [
        str(python.parent / "trl"), "sft", "--model_name_or_path", str(workload.model),
        "--dataset_name", str(workload.chat), "--assistant_only_loss", "true", "--max_length", str(MAX_LENGTH),
        "--dtype", "float32", *hf_trainer(output, steps),
    ]  # fmt: skip


def _llamafactory(python: Path, workload: Workload, output: Path, steps: int) -> list[str]:
    return [
        str(python.parent / "llamafactory-cli"), "train", "--stage", "sft", "--do_train", "true",
        "--model_name_or_path", str(workload.model), "--dataset_dir", str(workload.llamafactory), "--dataset", "bench",
        "--template", "chatml", "--finetuning_type", "full", "--cutoff_len", str(MAX_LENGTH),
        *hf_trainer(output, steps),
    ]  # fmt: skip


def _ms_swift(python: Path, workload: Workload, output: Path, steps: int) -> list[str]:
    return [
        str(python.parent / "swift"), "sft", "--model", str(workload.model), "--model_type", "qwen2",
        "--template", "chatml", "--dataset", str(workload.rows), "--tuner_type", "full", "--torch_dtype", "float32",
        "--max_length", str(MAX_LENGTH), "--split_dataset_ratio", "0", "--use_hf", "true", "--check_model", "false",
        *hf_trainer(output, steps),
    ]  # fmt: skip


def _litgpt(python: Path, workload: Workload, output: Path, steps: int) -> list[str]:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": float(LEARNING_RATE)}}
    return [
        str(python.parent / "litgpt"), "finetune_full", str(workload.litgpt_model), "--out_dir", str(output / "out"),
        "--data", "JSON", "--data.json_path", str(workload.litgpt), "--data.mask_prompt", "true",
        "--data.prompt_style", "qwen3", "--precision", "32-true",
        "--optimizer", json.dumps(optimizer), "--train.micro_batch_size", str(MICRO_BATCH),
        "--train.global_batch_size", str(MICRO_BATCH * ACCUMULATION), "--train.max_seq_length", str(MAX_LENGTH),
        "--train.max_steps", str(steps), "--train.lr_warmup_steps", "1",
    ]  # fmt: skip


# LoRA of one kind for all: every matrix of the layers, rank 16, scaled by 2, no dropout.
LORA = {
    "swiftlite": ("--tuner", "lora", "--lora-rank", "16", "--lora-alpha", "32"),
    "trl": (
        "--use_peft", "true", "--lora_r", "16", "--lora_alpha", "32", "--lora_dropout", "0",
        "--lora_target_modules", "all-linear",
    ),
    "llamafactory": ("--finetuning_type", "lora", "--lora_rank", "16", "--lora_alpha", "32", "--lora_target", "all"),
    "ms-swift": (
        "--tuner_type", "lora", "--lora_rank", "16", "--lora_alpha", "32", "--lora_dropout", "0",
        "--target_modules", "all-linear",
    ),
}  # fmt: skip


def larger(name: str, lora: bool) -> Benchmark:
    """The same job for a larger model, by the tools that are not far behind: full tuning, or LoRA."""
    commands = {"swiftlite": _swiftlite, "trl": _trl, "llamafactory": _llamafactory, "ms-swift": _ms_swift}

    def adapted(tool: str) -> Command:
        return lambda *given: [*commands[tool](*given), *(LORA[tool] if lora else ())]

    return Benchmark(
        name=name,
        rate="tokens_per_second",
        settings=tuple(s for s in SETTINGS if s.tool in commands and s.name != "no checkpointing, neat packing"),
        commands={tool: adapted(tool) for tool in commands},
        pack_tokens=MAX_LENGTH,
        kinds=GOALS,
        first_step=0.5,
        memory=0.7,
    )


SFT = Benchmark(
    name="bench_cpu",
    rate="tokens_per_second",
    settings=SETTINGS,
    commands={
        "swiftlite": _swiftlite, "trl": _trl, "llamafactory": _llamafactory, "ms-swift": _ms_swift, "litgpt": _litgpt,
    },
    pack_tokens=MAX_LENGTH,
    kinds=GOALS,
    first_step=0.5,
    memory=0.7,
)  # fmt: skip
