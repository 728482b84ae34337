"""The layouts that a number of processes allows, each as the flags that a user would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Case:
    """A layout. name: for the table; flags: of `swiftlite sft`, beside those that all cases share; experts: only for
    models that have some.
    """

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    experts: bool = False


@dataclass(frozen=True)
class Subject:
    """What is trained in every layout. architecture: of the toy model; flags: tuner, packing and the like; method: the
    command."""

    architecture: str
    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    method: str = "sft"

    def takes(self, case: Case) -> bool:
        return not case.experts or "moe" in self.architecture


DEFAULT_ARCHITECTURES = ("llama", "qwen3", "gemma3", "mistral", "qwen3-moe", "gpt2")
DIMENSIONS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size"}
SCHEDULES = ("gpipe", "interleaved-1f1b", "zero-bubble")
FULL: dict[str, Any] = {"tuner": "full"}
LORA: dict[str, Any] = {"tuner": "lora", "lora_rank": 4}
SAMPLED: dict[str, Any] = {"reward": [f"{__name__}.vowels"], "samples": 4, "max_new_tokens": 12, "beta": 0.1}


def vowels(completions: list[list[dict[str, str]]], **_others: object) -> list[float]:
    """Rewards answers by their share of vowels, which even a random model's answers differ in."""
    texts = [answer["content"] for (answer,) in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


def subjects(architectures: tuple[str, ...] = DEFAULT_ARCHITECTURES) -> list[Subject]:
    """Each architecture in full and packed; the first also unpacked, with adapters, and by the other methods."""
    found = [Subject(name, name, FULL) for name in architectures]
    first = architectures[0]
    found.append(Subject(first, f"{first}, unpacked", FULL | {"packing": False}))
    found.append(Subject(first, f"{first}, LoRA", LORA))
    found.append(Subject(first, f"{first}, DPO", FULL, "dpo"))
    found.append(Subject(first, f"{first}, RM", FULL, "rm"))
    found.append(Subject(first, f"{first}, KTO with LoRA", LORA, "kto"))
    found.append(Subject(first, f"{first}, GRPO", FULL | SAMPLED, "grpo"))
    return found


def cases(world: int) -> list[Case]:
    """The layouts of `world` processes, the plain ones first."""
    return [*_data_cases(world), *_product_cases(world)]


def _data_cases(world: int) -> Iterator[Case]:
    yield Case(f"ddp {world}", {"parallel": "ddp"})
    yield Case(f"fsdp full {world}", {"parallel": "fsdp", "sharding": "full"})
    yield Case(f"fsdp grad_op {world}", {"parallel": "fsdp", "sharding": "grad_op"})
    yield Case(
        f"fsdp full {world}, recomputing",
        {
            "parallel": "fsdp",
            "activation_checkpointing": "full",
            "sync_every_microbatch": True,
            "fsdp_min_params": 10**9,
        },
    )
    if world % 2 == 0 and world > 2:
        yield Case(f"hybrid 2x{world // 2}", {"parallel": "fsdp", "sharding": "hybrid", "mesh": f"2x{world // 2}"})
    yield Case(f"fsdp full {world}, offloaded", {"parallel": "fsdp", "offload": "cpu"})


def _product_cases(world: int) -> Iterator[Case]:
    """Every other dimension alone, then with data parallelism, then with each other."""
    for name, flag in DIMENSIONS.items():
        yield Case(f"{name} {world}", {flag: world})
        if world > 2:
            yield Case(f"dp {world // 2} x {name} 2", {flag: 2})
    for schedule in SCHEDULES:
        yield Case(f"pp {world} {schedule}", {DIMENSIONS["pp"]: world, "pipeline_schedule": schedule})
        if world > 2:
            yield Case(f"dp {world // 2} x pp 2 {schedule}", {DIMENSIONS["pp"]: 2, "pipeline_schedule": schedule})
    yield Case(f"ep {world}", {"parallel": "fsdp", "expert_parallel_size": world}, True)
    if world > 2:
        yield Case(f"dp {world} with ep 2", {"parallel": "fsdp", "expert_parallel_size": 2}, True)
        yield Case(f"hybrid 2x{world // 2} with ep 2", {"mesh": f"2x{world // 2}", "expert_parallel_size": 2}, True)
    for first, second in combinations(DIMENSIONS, 2):
        if world >= 4:
            yield Case(f"{first} {world // 2} x {second} 2", {DIMENSIONS[first]: world // 2, DIMENSIONS[second]: 2})
        if world >= 8:
            size = world // 4
            yield Case(f"dp {size} x {first} 2 x {second} 2", {DIMENSIONS[first]: 2, DIMENSIONS[second]: 2})
