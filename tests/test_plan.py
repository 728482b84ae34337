"""`swiftlite plan`: what it predicts, beside what was measured on a GPU, counted in real processes, or is PyTorch's."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_shapes import real_config
from worlds import run_ranks

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve
from swiftlite.config.validate import Given
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.parallel.stages import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE, ZERO_BUBBLE_V, StagePlan
from swiftlite.parallel.world import joined
from swiftlite.planning.communication import Parameters, Traffic
from swiftlite.planning.devices import Device, find_device
from swiftlite.planning.footprint import MATRIX_COPIES, Blocks, NumberBytes, Work, footprint, in_flight
from swiftlite.planning.memory import Kept
from swiftlite.planning.pace import REACHED_FLOPS, REACHED_LINK, step_pace
from swiftlite.planning.search import CP, EP, PP, TP, candidates
from swiftlite.training.optimizer import build_optimizer, make_moments
from swiftlite.training.optimizers.muon import orthogonalizing_flops
from swiftlite.training.plan import Fleet, outline_of, settle
from swiftlite.verification.run import resolve_in_world

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

GIB = 2**30
LLAMA, SMOLLM = "meta-llama/Llama-3.1-8B-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"
FOUR = Fleet(find_device("h100"), 1, 4)
PURE = {"tuner": "full", "pure_bf16": True}


def outlined(folder, model, kind="cuda", **flags):
    """(resolved settings, outline) of a model on the hub, of which only the config is there."""
    config = real_config(model)
    config.save_pretrained(folder)
    given = {name: Given(value, name, "flag") for name, value in ({"model": str(folder)} | flags).items()}
    resolved = resolve(flags.get("method", "sft"), given, env={}, needs_rows=False)
    return resolved, outline_of(resolved.config, config, kind)


@pytest.mark.parametrize(
    ("model", "flags", "measured"),
    [
        (SMOLLM, {"tuner": "full", "micro_batch_size": 4, "kernels": "liger"}, 67.8),
        (LLAMA, {"tuner": "lora", "micro_batch_size": 2, "kernels": "liger"}, 50.6),
        (LLAMA, PURE | {"compile": True}, 109.9),
        (
            LLAMA,
            PURE
            | {"micro_batch_size": 2, "global_batch_size": 2, "kernels": "liger"}
            | {"optimizer_in_backward": True, "max_grad_norm": 0},
            112.1,
        ),
    ],
)
def test_memory_that_was_measured_on_a_gpu(tmp_path, model, flags, measured):
    """The peaks of the table of one GPU in docs/performance.md, in GiB."""
    common = {"max_length": 4096, "global_batch_size": 8, "activation_checkpointing": "none"}
    resolved, outline = outlined(tmp_path, model, **(common | flags))
    found = settle(resolved, outline, Fleet(find_device("h200"), 1, 1))
    assert found.footprint.total / GIB == pytest.approx(measured, rel=0.02)
    assert found.fits


def test_experts_larger_than_this_machine_can_be_planned(tmp_path):
    """A layer of DeepSeek V3, whose experts take 60 GB in one tensor."""
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=1024, num_experts_per_tok=8
    )
    config.save_pretrained(tmp_path)
    given = {"model": Given(str(tmp_path), "--model", "flag"), "tuner": Given("full", "--tuner", "flag")}
    resolved = resolve("sft", given, env={}, needs_rows=False)
    outline = outline_of(resolved.config, config, "cuda")
    assert outline.trained > 45e9 and all(p.is_meta for p in outline.base.parameters())


def test_a_mixture_is_planned_in_the_type_it_trains_in(monkeypatch, tmp_path):
    """On a CPU fp32, since its experts' products are small."""
    monkeypatch.setattr("swiftlite.training.precision.fast_at_bf16", lambda device: True)
    dense = outlined(tmp_path / "dense", "Qwen/Qwen3-1.7B", "cpu", tuner="full")[1]
    mixed = outlined(tmp_path / "mixed", "Qwen/Qwen3-30B-A3B", "cpu", tuner="full")[1]
    assert (dense.precision.dtype, mixed.precision.dtype) == (torch.bfloat16, torch.float32)


# --- weights, gradients and moments of real ranks -------------------------------------------------------------------

LAYOUTS = {
    "fsdp full 4": ("llama", {"parallel": "fsdp"}),
    "lora": ("llama", {"parallel": "fsdp", "tuner": "lora", "target_modules": ["q_proj", "down_proj"]}),
    "hybrid 2x2": ("llama", {"mesh": "2x2"}),
    "ddp 4": ("llama-tied", {"parallel": "ddp"}),
    "tp 2 x fsdp 2": ("llama", {"parallel": "fsdp", TP: 2}),
    "pp 4": ("llama", {PP: 4}),
    "fsdp 2 x pp 2, tied": ("llama-tied", {"parallel": "fsdp", PP: 2}),
    "pp 2 interleaved": ("llama", {"parallel": "ddp", PP: 2, "pipeline_schedule": "interleaved-1f1b"}),
    "cp 4": ("llama", {CP: 4}),
    "ep 2": ("qwen3-moe", {"parallel": "fsdp", EP: 2}),
    "tp 2 x fsdp 2, experts": ("qwen3-moe", {TP: 2, "parallel": "fsdp"}),
    "tp 2 x fsdp 2, Muon": ("llama", {TP: 2, "parallel": "fsdp", "optimizer": "muon"}),
    "ep 2, Muon": ("qwen3-moe", {EP: 2, "parallel": "fsdp", "optimizer": "muon"}),
}


def _count_in_process(_rank: int, folder: Path) -> list[tuple[int, int]]:
    """Bytes of each layout's weights here, and of the moments of those that are trained."""
    from measure.resident import tensor_bytes
    from measure.world import build, shared_flags

    counted = []
    with joined() as world:
        for number, (toy, flags) in enumerate(LAYOUTS.values()):
            given = shared_flags(folder / toy, folder / "none") | flags
            resolved = resolve_in_world("sft", given, world.size)
            trainee = build(resolved, world.within(str(number)))
            optimizer = build_optimizer(trainee.trained(), resolved.config, trainee.mesh, trainee.matrices)
            make_moments(optimizer)
            moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
            parts = [tensor for part in trainee.divided.parts for _, tensor, _ in part.tensors()]
            counted.append((tensor_bytes(parts), tensor_bytes(moments)))
    return counted


def test_states_of_real_ranks(tmp_path):
    from measure.world import shared_flags

    for toy in {toy for toy, _ in LAYOUTS.values()}:
        write_toy(tmp_path / toy, toy_config(toy, 8))
    ranks = run_ranks(4, _count_in_process, tmp_path)
    for (name, (toy, flags)), *counted in zip(LAYOUTS.items(), *ranks, strict=True):
        resolved = resolve_in_world("sft", shared_flags(tmp_path / toy, tmp_path / "none") | flags, 4)
        held = settle(resolved, outline_of(resolved.config, toy_config(toy, 8), "cpu"), FOUR).footprint
        assert held.weights == pytest.approx(max(weights for weights, _ in counted), rel=0.03), name
        assert held.moments == pytest.approx(max(moments for _, moments in counted), rel=0.03), name


# --- the terms that no process shows ----------------------------------------------------------------------------------


def _orders(engine: str, ranks: int, per_rank: int, micro_batches: int) -> list:
    """What each rank of one of PyTorch's schedules computes, in order."""
    from torch.distributed.pipelining import schedules

    schedule = object.__new__(getattr(schedules, engine))
    rounds = max(1, micro_batches // ranks)
    vars(schedule).update(
        pp_group_size=ranks, n_local_stages=per_rank, _n_microbatches=micro_batches, number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds, _num_stages=ranks * per_rank, num_stages=ranks * per_rank,
    )  # fmt: skip
    return [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]


def _most_held(order: list) -> int:
    """Stages' forward passes whose backward is still to come, or whose weights' gradients are."""
    held = most = 0
    for step in filter(None, order):
        kind = step.computation_type.name
        held += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
        most = max(most, held)
    return most


@pytest.mark.parametrize("schedule", [INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V], ids=lambda schedule: schedule.engine)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (2, 8)])
def test_micro_batches_in_flight_are_those_of_pytorchs_schedules(schedule, ranks, micro_batches):
    plan = StagePlan(tuple(range(n, n + 1) for n in range(ranks * schedule.per_rank)), ranks, schedule)
    held = [_most_held(order) for order in _orders(schedule.engine, ranks, schedule.per_rank, micro_batches)]
    assert [in_flight(plan, rank, micro_batches) * schedule.per_rank for rank in range(ranks)] == held


LAYER = Parameters(1000, 1000, 0, 0)
ENDS = Parameters(600, 600, 0, 0)
NOTHING = Parameters(0, 0, 0, 0)
BLOCKS = Blocks((LAYER,) * 4, (NOTHING,) * 4, ENDS, ENDS, NOTHING, tied=False, idle=NOTHING)
BYTES = NumberBytes(weight=4, gradient=4, moments=8, frozen=2, stored=4, compute=2)
WORK = Work(tokens=64, micro_batches=4, kept=Kept(10, 30), recomputed=Kept(10, 30), hidden=8, chunk=0)


@pytest.mark.parametrize(
    ("layout", "work", "gradients", "gathered"),
    [
        (Layout(), {}, 4 * 5200, 2 * 5200),
        # replicas are FSDP's too, which makes copies of what a rank holds whole
        (Layout(dp_replicate=2), {}, 4 * 5200, 2 * 4000 + (4 + 2) * 1200),
        # two layers in bf16; the ends in fp32, which autocast casts; gradients add up whole
        (Layout(dp_shard=2, sharding="full"), {}, 4 * 5200, 2 * 2000 + (4 + 2) * 1200),
        (Layout(dp_shard=2, sharding="grad_op"), {}, 4 * 5200, 2 * 4000 + (4 + 2) * 1200),
        (Layout(dp_shard=2, sharding="full"), {"accumulates": False}, 4 * (2600 + 2000 + 1200), 4000 + 7200),
        (Layout(dp_shard=2, sharding="full", tp=2), {}, 4 * 2600, 2 * 1000 + (4 + 2) * 600),
    ],
)
def test_what_is_whole_for_a_while(layout, work, gradients, gathered):
    held = footprint(BLOCKS, layout, None, BYTES, replace(WORK, **work))
    assert (held.gradients, held.gathered) == (gradients, gathered)
    assert held.weights == 4 * 5200 / layout.shards and held.moments == 2 * held.weights
    assert held.activations == 4 * 64 * 40 / layout.tp


def test_the_fullest_rank_of_a_pipeline_counts():
    plan = StagePlan((range(3), range(3, 4)), 2, ONE_FORWARD_ONE_BACKWARD)
    held = footprint(BLOCKS, Layout(pp=2), plan, BYTES, WORK)
    assert held.weights == 4 * 3600  # of the first rank, which has two micro-batches in flight
    assert held.activations == 2 * 3 * 64 * 40


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2, sharding="grad_op")])
def test_four_bits_are_gathered_as_they_are(tmp_path, layout):
    """Those of layers; embedding and head stay in bf16."""
    resolved, outline = outlined(tmp_path, LLAMA, quantization="nf4")
    held = outline.holds(resolved.config.model_copy(update={"activation_checkpointing": "none"}), layout, None)
    ends = 2 * 2 * 128256 * 4096
    packed = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) * (1 / 2 + 2 / 64)
    adapters = outline.trained
    assert held.gathered == pytest.approx(ends + packed + 2 * adapters, rel=0.01)
    assert held.weights == pytest.approx((ends + packed + 4 * adapters) / layout.shards, rel=0.01)


def test_matrices_that_are_orthogonalised_are_counted(tmp_path):
    """The momentum of all; of the largest what is there when activations are gone; their arithmetic and messages."""
    flags = {"tuner": "full", "activation_checkpointing": "full", "max_length": 128, "gradient_accumulation_steps": 1}
    resolved, outline = outlined(tmp_path, LLAMA, **flags)

    def held(**more):
        return outline.holds(resolved.config.model_copy(update=more), Layout(dp_shard=8, sharding="full"), None)

    adamw, muon, early = held(), held(optimizer="muon"), held(optimizer="muon", optimizer_in_backward=True)
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    largest = MATRIX_COPIES * 2 * 4096 * 14336
    assert adamw.moments - muon.moments == 4 * matrices / 8
    assert adamw.activations + adamw.workspace < muon.activations + muon.workspace == largest
    assert early.workspace == adamw.workspace + largest
    plain, orthogonal = (
        settle(outlined(tmp_path, LLAMA, **flags, optimizer=name, nproc_per_node=4)[0], outline, FOUR).pace
        for name in ("adamw", "muon")
    )
    more = 32 * sum(map(orthogonalizing_flops, [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3))
    assert orthogonal.compute - plain.compute == pytest.approx(more / 4 / (REACHED_FLOPS * 989e12), rel=1e-3)
    messages = {message.traffic.what: message for message in orthogonal.messages}
    assert messages["matrices"].exposed == messages["matrices"].seconds > 0


def test_a_reference_beside_the_model_is_counted(tmp_path):
    """`--reference model` holds all weights a second time, in fp32 as the trained ones."""
    held = []
    for reference in ("precompute", "model"):
        flags = {"method": "dpo", "tuner": "full", "reference": reference, "activation_checkpointing": "full"}
        resolved, outline = outlined(tmp_path, LLAMA, **flags)
        held.append(outline.holds(resolved.config, Layout(dp_shard=8, sharding="full"), None))
    assert held[1].total - held[0].total == pytest.approx(4 * 8_030_261_248 / 8)


def test_a_device_is_known_by_any_spelling():
    assert find_device("rtx-4090") == find_device("NVIDIA GeForce RTX 4090") is not None
    assert find_device("A100-40GB").memory == 40e9 and find_device("NVIDIA A100-SXM4-80GB").memory == 80e9
    assert find_device("NVIDIA GeForce RTX 4090 Laptop GPU") is find_device("GT 710") is None


def test_messages_cost_what_nothing_hides():
    rates = {"link": 1e9 / REACHED_LINK, "network": 1e8 / REACHED_LINK, "host": 1e9 / REACHED_LINK}
    device = Device("d", flops=1e12 / REACHED_FLOPS, memory=1, capability=None, **rates)
    layout = Layout(dp_shard=2, tp=2, sharding="full")
    traffic = [Traffic("tp", "all-gather", "hidden states", 1e9), Traffic("fsdp", "all-gather", "weights", 3e8)]
    near = step_pace(layout, 8e12, traffic, device, per_machine=4, micro_batches=1, plan=None)
    assert near.compute == pytest.approx(2) and near.exposed == pytest.approx(1) and near.seconds == pytest.approx(3)
    copies = [Traffic("host", "copy", "weights", 1e9), Traffic("host", "copy", "moments", 1e9)]
    beside = step_pace(layout, 8e12, [*traffic, *copies], device, per_machine=2, micro_batches=1, plan=None)
    assert [message.exposed for message in beside.messages] == pytest.approx([1, 1, 1, 1])  # 2 s are hidden already
    assert [message.seconds for message in beside.messages] == pytest.approx([1, 3, 1, 1])
    assert [message.between_machines for message in beside.messages] == [False, True, False, False]
    alone = step_pace(layout, 8e12, copies, device, per_machine=4, micro_batches=1, plan=None)
    assert [message.exposed for message in alone.messages] == pytest.approx([0, 1])
    far = step_pace(layout, 8e12, traffic, device, per_machine=2, micro_batches=1, plan=None)
    assert far.exposed == pytest.approx(1 + 1)  # 3 s between machines, of which arithmetic hides 2


@pytest.mark.parametrize(
    ("flags", "forwards"),
    [
        ({"method": "sft"}, 0),
        ({"method": "dpo"}, 1),
        ({"method": "dpo", "loss": ["simpo"]}, 0),
        ({"method": "dpo", "reference": "precompute"}, 0),
        ({"method": "dpo", "tuner": "full"}, 0),
        ({"method": "dpo", "tuner": "full", "reference": "model"}, 1),
        ({"method": "kto"}, 3),  # of the reference, and of both models over other rows' answers
        ({"method": "kto", "tuner": "full"}, 1),
        ({"method": "kto", "loss": ["apo_zero_unpaired"]}, 1),
        ({"method": "rm"}, 0),
    ],
)
def test_forward_passes_of_a_reference_take_time(tmp_path, flags, forwards):
    """A third of a step's arithmetic each, half of it where most weights are frozen."""
    resolved, outline = outlined(tmp_path, SMOLLM, **({"activation_checkpointing": "none"} | flags))
    found = settle(resolved, outline, Fleet(find_device("h200"), 1, 1))
    rows = resolved.config.global_batch_size * (1 if flags["method"] in ("sft", "kto") else 2)
    own = outline.flops.step([resolved.config.max_length] * rows) / (REACHED_FLOPS * 989e12)
    each = 1 / 3 if flags.get("tuner") == "full" else 1 / 2
    assert found.pace.compute == pytest.approx(own * (1 + forwards * each))


@pytest.mark.parametrize(("flags", "copied"), [({"offload": "cpu"}, {"weights", "gradients"}), ({}, set())])
def test_a_plan_counts_what_waits_in_the_hosts_memory(tmp_path, flags, copied):
    flags = {"tuner": "full", "nproc_per_node": 4, "parallel": "fsdp", "optimizer": "paged_adamw"} | flags
    resolved, outline = outlined(tmp_path / "gpu", SMOLLM, **flags)
    messages = settle(resolved, outline, FOUR).pace.messages
    found = {message.traffic.what: message for message in messages if message.traffic.dimension == "host"}
    assert found.keys() == copied | {"moments"}
    assert found["moments"].seconds == pytest.approx(2 * 8 * outline.trained / 4 / (REACHED_LINK * 64e9), rel=0.01)
    resolved, outline = outlined(tmp_path / "cpu", SMOLLM, "cpu", **flags)
    messages = settle(resolved, outline, FOUR).pace.messages
    assert not [message for message in messages if message.traffic.dimension == "host"]


def test_layouts_leave_what_is_given_as_it_is():
    def found(**given):
        return list(candidates(given, world=8, per_machine=8, layers=32, row=2048, experts=0))

    assert found()[0] == {TP: 1, PP: 1, CP: 1, EP: 1, "parallel": "ddp"}
    assert all(flags[TP] == 4 and flags[CP] == flags[EP] == 1 for flags in found(**{TP: 4}))
    assert all(flags[TP] * flags[PP] > 1 for flags in found(parallel="megatron"))
    assert {tuple(flags) for flags in found(parallel="ddp")} == {(TP, PP, CP, EP)}
    assert not [
        flags for flags in candidates({}, world=8, per_machine=8, layers=2, row=2048, experts=0) if flags[PP] > 2
    ]
