"""What a run takes where the flags leave it open: the layout of `--parallel auto`, recomputation, a second model."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_plan import GIB, LLAMA, SMOLLM, outlined
from torch.distributed import HashStore

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.models.load import load_config
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.world import World
from swiftlite.planning.choose import Choice, data_layouts
from swiftlite.planning.devices import find_device
from swiftlite.sizes import in_words
from swiftlite.training import setup
from swiftlite.training.needs import choose
from swiftlite.training.setup import Trainee, build_trainee

H100, H200, L4 = (int(find_device(name).memory) for name in ("h100", "h200", "l4"))
LIGHTER = {"ddp": 0, "fsdp full": 1, "offload": 2}


@pytest.mark.parametrize(("rows", "mode"), [(8, "none"), (64, "full")])
def test_auto_counts_the_gradients_that_add_up(tmp_path, rows, mode):
    """8B on eight GPUs: rows of 4,096 tokens fit without recomputation, unless gradients wait whole for other rows."""
    flags = {"tuner": "full", "max_length": 4096, "global_batch_size": rows, "nproc_per_node": 8, "parallel": "fsdp"}
    resolved, outline = outlined(tmp_path, LLAMA, **flags)
    free = int(find_device("h100").memory)
    choice = choose(resolved.config, outline, free, resolved.layout)
    assert choice.checkpointing == mode and choice.held.total <= 0.85 * free
    told, known = Trainee.memory_words.fget, {"choice": choice, "mesh": Mesh(choice.layout, outline.device)}
    assert told(SimpleNamespace(free=free, **known)).endswith("of 74.51 GiB free on a device")
    assert "`swiftlite plan` shows what would fit" in told(SimpleNamespace(free=free // 2, **known))


def test_a_reference_is_no_second_model_where_the_peak_leaves_no_room(tmp_path):
    flags = {"tuner": "full", "max_length": 4096, "global_batch_size": 64, "nproc_per_node": 8, "parallel": "fsdp"}
    resolved, outline = outlined(tmp_path, LLAMA, activation_checkpointing="selective", **flags)
    held, copy = outline.holds(resolved.config, resolved.layout, None), 4 * outline.trained / 8
    choice, free = Choice(resolved.layout, False, "selective", held), int((held.total + copy) / 0.85) + 1
    assert choice.bears_copy(free) and not choice.bears_copy(free - GIB)
    assert not replace(choice, offload=True).bears_copy(free)
    lighter = replace(held, activations=0, workspace=0)  # a copy is a quarter of what states leave, and fits
    choice, free = Choice(resolved.layout, False, "full", lighter), int((held.resident + 4 * copy) / 0.85) + 1
    assert choice.bears_copy(free + 2) and not choice.bears_copy(free - GIB)


@pytest.mark.parametrize(
    ("model", "free", "flags", "kind", "mode"),
    [
        (LLAMA, H100, {"tuner": "full", "max_length": 4096}, "fsdp full", "none"),
        (LLAMA, H100, {"tuner": "full", "max_length": 8192}, "fsdp full", "selective"),
        (LLAMA, H200, {"tuner": "full", "max_length": 4096}, "fsdp full", "none"),  # 16 bytes x 8 B are 120 GiB
        ("Qwen/Qwen2.5-0.5B-Instruct", L4, {"nproc_per_node": 2}, "ddp", "none"),
        ("Qwen/Qwen2.5-0.5B-Instruct", L4, {"nproc_per_node": 2, "max_length": 32768}, "ddp", "full"),
        ("meta-llama/Llama-3.1-70B-Instruct", H100, {}, "fsdp full", "selective"),
        ("meta-llama/Llama-3.1-70B-Instruct", H100, {"nproc_per_node": 2}, "offload", "none"),
        # of replicas FSDP copies frozen weights as well: 32B in bf16 are 61 GiB, twice
        (
            "Qwen/Qwen2.5-32B-Instruct", H200, {"nproc_per_node": 2, "activation_checkpointing": "none"},
            "fsdp full", "none",
        ),
        (LLAMA, H100, {"tuner": "full", "tensor_parallel_size": 4}, "ddp", "none"),
        (LLAMA, H100, {"tuner": "full", "pipeline_parallel_size": 2}, "fsdp full", "none"),
        (LLAMA, H100, {"tuner": "full", "context_parallel_size": 4, "max_length": 16384}, "fsdp full", "full"),
        # replicas would fit, fully recomputed, which costs more than to send weights
        (LLAMA, H200, {"max_length": 32768}, "fsdp full", "selective"),
    ],
)  # fmt: skip
def test_auto_takes_the_layout_that_sends_least(tmp_path, model, free, flags, kind, mode):
    """Of those that fit by the same sum as in a plan, and none that fits is lighter."""
    resolved, outline = outlined(tmp_path, model, **({"nproc_per_node": 8} | flags))
    choice = choose(resolved.config, outline, free, resolved.layout)
    replicated = choice.layout.dp_replicate == resolved.layout.data_ranks
    found = "offload" if choice.offload else "ddp" if replicated else "fsdp full"
    assert (found, choice.checkpointing) == (kind, mode)
    settled = resolved.config.model_copy(
        update={"activation_checkpointing": mode, "offload": "cpu" if choice.offload else "none"}
    )
    stages = outline.stages(resolved.config, resolved.layout)
    assert outline.holds(settled, choice.layout, stages) == choice.held
    assert choice.held.total <= 0.85 * free and in_words(choice.held.total) in choice.reason
    layouts = data_layouts(resolved.layout)
    lighter = [outline.holds(settled.model_copy(update={"offload": "none"}), one, stages) for one in layouts]
    for held in lighter[: LIGHTER[kind]]:
        assert held.total > 0.85 * free and in_words(held.total) in choice.reason


def test_what_is_given_is_not_chosen(tmp_path):
    for flags in ({"sharding": "full"}, {"parallel": "fsdp"}, {"mesh": "2x2"}, {"offload": "cpu"}):
        resolved, outline = outlined(tmp_path, SMOLLM, nproc_per_node=4, **flags)
        choice = choose(resolved.config, outline, H200, resolved.layout)
        assert choice.layout == resolved.layout and choice.offload == ("offload" in flags) and not choice.reason


def test_states_of_a_cpu_are_not_moved_to_it(tmp_path):
    """They lie there in any case: what fits nowhere is sharded."""
    resolved, outline = outlined(tmp_path, SMOLLM, "cpu", tuner="full", nproc_per_node=2)
    choice = choose(resolved.config, outline, 4 * GIB, resolved.layout)
    assert (choice.layout.dp_shard, choice.offload, choice.checkpointing) == (2, False, "full")
    assert choice.held.moments == pytest.approx(8 * outline.trained / 2)
    asked = outline.holds(
        resolved.config.model_copy(update={"offload": "cpu", "activation_checkpointing": "full"}), resolved.layout, None
    )
    assert asked.moments == choice.held.moments
    assert choose(resolved.config, outline, 400 * GIB, resolved.layout).layout.dp_replicate == 2


def test_tokens_count_twice_on_a_cpu(monkeypatch, tmp_path):
    resolved, outline = outlined(tmp_path, SMOLLM, "cpu", activation_checkpointing="full")
    twice = outline.holds(resolved.config, resolved.layout, None)
    monkeypatch.setattr("swiftlite.training.needs.ON_HOST", 1)
    once = outline.holds(resolved.config, resolved.layout, None)
    assert (twice.activations, twice.workspace) == (2 * once.activations, 2 * once.workspace)
    assert twice.resident == once.resident


class Chosen(Exception):
    """What is free, in place of a choice by it."""


def test_the_fullest_device_decides_for_all(monkeypatch, tiny_model):
    """Whichever it is: what fits the first process's would be too large for another's."""

    def say(_config, _outline, free, _layout):
        raise Chosen(free)

    config = resolve_config("sft", model=str(tiny_model("llama")), dataset=["rows.jsonl"])
    first, second = (World(torch.device("cpu"), rank, 2, store) for store in [HashStore()] for rank in range(2))
    monkeypatch.setattr(setup, "free_bytes", lambda _device: 8 * GIB)
    monkeypatch.setattr(setup, "choose", say)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: (second.meet("weights"), second.least("free memory", GIB))[1])
        with pytest.raises(Chosen) as told:
            build_trainee(config, load_config(config.model), None, None, first, Layout(dp_shard=2, sharding="full"))
    assert told.value.args == (GIB,) and other.result() == GIB


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_an_evaluation_keeps_nothing_for_a_backward_pass(tmp_path, tuner):
    """Long rows, of which nothing is recomputed: reckoned as in training, states would go to the CPU for them."""
    flags = {"tuner": tuner, "max_length": 32768, "nproc_per_node": 8, "activation_checkpointing": "none"}
    resolved, outline = outlined(tmp_path, LLAMA, **flags, **({"pure_bf16": True} if tuner == "full" else {}))
    assert choose(resolved.config, outline, H100, resolved.layout).offload
    choice = choose(resolved.config, replace(outline, evaluates=True), H100, resolved.layout)
    assert choice.layout.dp_replicate == 8 and not choice.offload
    held = choice.held
    assert (held.activations, held.moments) == (0, 0) and held.workspace > 0
