"""TRL's SFTTrainer on one GPU: the peer that `gpu_check.py` measures in the same hour, by its own Python.

    python -m bench.gpu_trl --model FOLDER --data ROWS.jsonl --output FOLDER --tuner lora --micro-batch-size 2

Writes `metrics.jsonl` of the fields that swiftlite's rows have, by a callback that waits for the GPU at each step's
end. bf16, fused AdamW, PyTorch's attention, Liger's kernels where they are installed. Activation checkpointing, TRL's
default, only where the flag says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

LORA_RANK = 16  # swiftlite's default


class Metrics(TrainerCallback):
    """One line a step."""

    def __init__(self, file: Path, tokens: int) -> None:
        """tokens: of a step."""
        self._file, self._tokens, self._last, self._loss = file, tokens, time.perf_counter(), float("nan")

    def on_log(self, _args, _state, _control, logs=None, **_):  # noqa: ANN001, ANN003, ANN201
        if logs and "loss" in logs:
            row = {"loss": logs["loss"], **self._row}
            with self._file.open("a") as output:
                output.write(json.dumps(row) + "\n")

    def on_step_end(self, _args, state, _control, **_):  # noqa: ANN001, ANN003, ANN201
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        rate = self._tokens / (now - self._last)
        self._row = {"step": state.global_step, "tokens_per_second": rate, "peak_memory_gib": peak, "mfu": None}
        self._last = now


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tuner", choices=("lora", "full"), required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument("--checkpointing", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    from peft import LoraConfig

    on_gpu = torch.cuda.is_available()
    output = Path(options.output)
    output.mkdir(parents=True)
    model_options = {"attn_implementation": "sdpa", "dtype": options.dtype}
    settings = SFTConfig(
        output_dir=str(output), max_length=options.max_length, model_init_kwargs=model_options,
        per_device_train_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.global_batch_size // options.micro_batch_size, learning_rate=1e-5,
        lr_scheduler_type="constant", max_steps=10_000, logging_steps=1, save_strategy="no", report_to="none",
        bf16=on_gpu, optim="adamw_torch_fused", gradient_checkpointing=options.checkpointing, use_cpu=not on_gpu,
        use_liger_kernel=on_gpu and importlib.util.find_spec("liger_kernel") is not None, disable_tqdm=True,
    )  # fmt: skip
    adapter = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=options.model,
        args=settings,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=adapter if options.tuner == "lora" else None,
        callbacks=[Metrics(output / "metrics.jsonl", options.global_batch_size * options.max_length)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
