"""What `gpu_check.py` trains: shapes of well-known models, and how each of them."""

from __future__ import annotations

from dataclasses import dataclass

GLOBAL_BATCH = 8  # rows a step
FULL_TUNING_BYTES = 18  # a parameter: fp32 weight, gradient and two moments, and the bf16 copy of autocast
LEAN_BYTES = 10  # bf16 weight and two moments
TORCHAO, TRL = "torchao", ("trl", "accelerate")


@dataclass(frozen=True)
class Way:
    """How a model is trained. rows: of a forward pass; step_rows: of a step; bytes: that a parameter takes at least;
    packages: that it needs; by_trl: TRL trains it, and flags are those of `bench.gpu_trl`."""

    name: str
    flags: tuple[str, ...]
    rows: int = 4
    step_rows: int = GLOBAL_BATCH
    bytes: int = 2
    packages: tuple[str, ...] = ()
    by_trl: bool = False


LORA, FULL, COMPILED = ("--tuner", "lora"), ("--tuner", "full"), ("--compile",)
PURE = (*FULL, "--pure-bf16")
EARLY = ("--optimizer-in-backward", "--max-grad-norm", "0")
LEAN = (*PURE, *EARLY)
KEPT, RECOMPUTED = ("--activation-checkpointing", "none"), ("--activation-checkpointing", "full")
USUAL = (
    Way("lora", LORA),
    Way("lora, by TRL", LORA, packages=TRL, by_trl=True),
    Way("full", FULL, bytes=FULL_TUNING_BYTES),
    Way("full, by TRL", (*FULL, "--dtype", "float32"), bytes=FULL_TUNING_BYTES, packages=TRL, by_trl=True),
    Way("full, compiled", (*FULL, *COMPILED), bytes=FULL_TUNING_BYTES),
    Way("full, compiled, 8-bit floats", (*FULL, *COMPILED, "--fp8"), bytes=FULL_TUNING_BYTES, packages=(TORCHAO,)),
)
IN_BACKWARD = "full, bf16 without masters, updates in the backward"
LARGE = (
    Way("lora", LORA, rows=2),
    Way("lora, by TRL", LORA, rows=2, packages=TRL, by_trl=True),
    Way("lora, compiled", (*LORA, *COMPILED), rows=2),
    Way("full, bf16 without masters, compiled", (*PURE, *COMPILED, *KEPT), rows=1, bytes=LEAN_BYTES),
    Way("full, bf16 without masters, by TRL", FULL, rows=2, bytes=LEAN_BYTES, packages=TRL, by_trl=True),
    Way(IN_BACKWARD, (*LEAN, *KEPT), rows=2, step_rows=2, bytes=LEAN_BYTES),
    Way(f"{IN_BACKWARD}, layers recomputed", (*LEAN, *RECOMPUTED), rows=2, step_rows=2, bytes=LEAN_BYTES),
)
TINY = (
    Way("lora", LORA, rows=2),
    Way("full", FULL, rows=2, bytes=FULL_TUNING_BYTES),
    Way("full, updates in the backward", (*FULL, *EARLY), step_rows=4),
    Way("lora, by TRL", LORA, rows=2, packages=TRL, by_trl=True),
    Way("full, by TRL", FULL, rows=2, packages=TRL, by_trl=True),
)


@dataclass(frozen=True)
class Shape:
    """A model shape and how it is trained."""

    name: str
    family: str
    sizes: dict
    ways: tuple[Way, ...]


def shapes(tiny: bool) -> list[Shape]:
    """0.5B, 1.7B and 8B, or one tiny stand-in."""
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True}  # fmt: skip
        return [Shape("tiny", "llama", sizes, TINY)]
    return [
        Shape("0.5B (Qwen2.5-0.5B)", "qwen2", {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        }, USUAL),
        Shape("1.7B (SmolLM2-1.7B)", "llama", {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 49152, "tie_word_embeddings": True,
        }, USUAL),
        Shape("8B (Llama-3.1-8B)", "llama", {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        }, LARGE),
    ]  # fmt: skip
