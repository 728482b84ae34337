"""What a layout sends: the formulas on numbers that a hand can check, and a real world in which they are counted."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite.config.layout import Layout
from swiftlite.models.load import build_model
from swiftlite.models.toys import toy_config
from swiftlite.parallel.stages import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE_V
from swiftlite.planning.communication import ModelShape, Parameters, Step, step_traffic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from measure.traffic import measure_traffic  # noqa: E402

NONE = Parameters(0, 0, 0, 0)
MODEL = ModelShape(
    layers=Parameters(100, 100, 20, 20), experts=NONE, ends=Parameters(40, 40, 0, 0), tied=16, depth=2, mixtures=0,
    hidden=8, heads=4, kv_heads=2, head_size=2, chosen=1,
)  # fmt: skip
MIXTURE = replace(MODEL, experts=Parameters(64, 64, 0, 0), mixtures=2, chosen=2)
STEP = Step(tokens=10, trained=9, micro_batches=3)
ONE = replace(STEP, micro_batches=1)


def sent(layout: Layout, model: ModelShape, step: Step) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for entry in step_traffic(layout, model, step):
        key = entry.dimension, entry.collective
        found[key] = found.get(key, 0) + entry.size
    return found


@pytest.mark.parametrize(
    ("layout", "model", "step", "expected"),
    [
        (Layout(), MODEL, STEP, {}),
        (Layout(dp_replicate=4), MODEL, STEP, {("dp_replicate", "all-reduce"): 2 * 3 / 4 * 4 * 140}),
        (
            Layout(dp_shard=4, sharding="full"), MODEL, STEP,
            {
                ("fsdp", "all-gather"): 3 / 4 * (1.5 * 3 * 100 * 2 + 40 * 4),
                ("fsdp", "reduce-scatter"): 3 / 4 * 140 * 4,
            },
        ),
        (
            Layout(dp_shard=4, sharding="grad_op"), MODEL, STEP,
            {("fsdp", "all-gather"): 3 / 4 * (100 * 2 + 40 * 4), ("fsdp", "reduce-scatter"): 3 / 4 * 140 * 4},
        ),
        (
            Layout(dp_shard=4, sharding="grad_op"), MODEL, replace(STEP, sync_every_microbatch=True),
            {("fsdp", "all-gather"): 3 * 3 / 4 * (100 * 2 + 40 * 4), ("fsdp", "reduce-scatter"): 3 * 3 / 4 * 140 * 4},
        ),
        (
            Layout(dp_replicate=2, dp_shard=2, sharding="full"), MODEL, STEP,
            {
                ("fsdp", "all-gather"): 1 / 2 * (1.5 * 3 * 100 * 2 + 40 * 4),
                ("fsdp", "reduce-scatter"): 1 / 2 * 140 * 4,
                ("dp_replicate", "all-reduce"): 140 * 4 / 2,
            },
        ),
        (  # two layers of two blocks, each 10 tokens x 8 in fp32 and in bf16, both ways; both ends of the layers
            Layout(tp=2), MODEL, ONE,
            {
                ("tp", "all-gather"): 40 * (4 * (4 + 2) + 2 * 4),
                ("tp", "reduce-scatter"): 40 * 4 * (4 + 2),
                ("tp", "all-reduce"): 10 * 8 * 4 + 9 * (3 * 4 + 8 * 4) + 20 * 4,
            },
        ),
        (  # 4 ranks share 2 key/value heads: 2 layers x 2 weights of 4 x 8 more
            Layout(tp=4), MODEL, ONE,
            {
                ("tp", "all-gather"): 60 * (4 * (4 + 2) + 2 * 4),
                ("tp", "reduce-scatter"): 60 * 4 * (4 + 2),
                ("tp", "all-reduce"): 1.5 * (10 * 8 * 4 + 9 * (3 * 4 + 8 * 4) + (20 + 2 * 2 * 4 * 8) * 4),
            },
        ),
        (  # 64 tokens, of two ranks each sends one way; the tied embedding between them
            Layout(pp=2), MODEL, replace(STEP, micro_batches=2, schedule=ONE_FORWARD_ONE_BACKWARD),
            {("pp", "send"): 2 * 64 * 8 * 4 + 16 * 4},
        ),
        (
            Layout(pp=2), MODEL, replace(STEP, micro_batches=2, schedule=INTERLEAVED),
            {("pp", "send"): 3 * 2 * 64 * 8 * 4 + 16 * 4},
        ),
        (  # the bottom of the V and the tied weight stay inside a rank
            Layout(pp=2), MODEL, replace(STEP, micro_batches=2, schedule=ZERO_BUBBLE_V),
            {("pp", "send"): 2 * 2 * 64 * 8 * 4},
        ),
        (  # half of 5 tokens' 2 + 2 query and 1 + 1 key/value heads of size 2, in 2 layers, both ways
            Layout(cp=2), MODEL, ONE,
            {
                ("cp", "all-to-all"): 2 * 2 * 5 * 2 * 2 * (4 + 2 + 2 + 4) / 2,
                ("fsdp", "all-gather"): 1 / 2 * (100 * 2 + 40 * 4),
                ("fsdp", "reduce-scatter"): 1 / 2 * 140 * 4,
            },
        ),
        (
            Layout(cp=8), MODEL, ONE,
            {
                ("cp", "all-gather"): 2 * 2 * 2 * 2 * (2 + 2) * 7,
                ("cp", "all-to-all"): 2 * 2 * 2 * 2 * (2 + 2) * 7,
                ("fsdp", "all-gather"): 7 / 8 * (100 * 2 + 40 * 4),
                ("fsdp", "reduce-scatter"): 7 / 8 * 140 * 4,
            },
        ),
        (
            Layout(dp_shard=4, expert_parallel=2, sharding="full"), MIXTURE, ONE,
            {
                ("fsdp", "all-gather"): 3 / 4 * (1.5 * 100 * 2 + 40 * 4),
                ("fsdp", "reduce-scatter"): 3 / 4 * 140 * 4,
                ("efsdp", "all-gather"): 1 / 2 * 1.5 * 32 * 2,
                ("efsdp", "reduce-scatter"): 1 / 2 * 32 * 4,
                ("ep", "all-to-all"): 4 * 1 / 2 * 2 * 10 * 2 * 8 * 2,
            },
        ),
    ],
)  # fmt: skip
def test_formulas_by_hand(layout, model, step, expected):
    assert sent(layout, model, step) == pytest.approx(expected)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen3-moe"])
def test_shape_of_a_model(architecture):
    config = toy_config(architecture)
    base = build_model("none", config, dtype=None, attention="sdpa")
    shape = ModelShape.of(base)
    assert shape.layers.count + shape.experts.count + shape.ends.count == sum(p.numel() for p in base.parameters())
    assert shape.ends.whole == 64 and shape.tied == (512 * 64 if config.tie_word_embeddings else 0)
    assert shape.mixtures == (2 if architecture == "qwen3-moe" else 0)


def test_counted_bytes_are_those_of_the_formula(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = measure_traffic(tmp_path, 2)
    assert {(row.case, row.collective) for row in rows} == {
        (case, collective)
        for case in ("fsdp full 2", "fsdp grad_op 2, bf16", "fsdp full 2, Muon")
        for collective in ("all-gather", "reduce-scatter")
    } | {("ddp 2, Muon", "all-reduce"), ("ddp 2, Muon", "all-to-all"), ("fsdp full 2, Muon", "all-to-all")}
    assert [row.measured for row in rows] == pytest.approx([row.formula for row in rows])


ADAPTED = replace(
    MODEL, layers=Parameters(100, 10, 20, 0), ends=Parameters(40, 0, 0, 0), experts=Parameters(64, 0, 0, 0)
)


@pytest.mark.parametrize(
    ("layout", "model", "more", "expected"),
    [
        (Layout(), MODEL, {}, {"weights": 140 * 4, "gradients": 140 * 4}),
        (
            Layout(dp_replicate=2, dp_shard=4, sharding="full"), MODEL, {},
            {"weights": (1.5 * 3 * 100 * 4 + 40 * 4) / 4, "gradients": 140 * 4 / 4},
        ),
        (
            Layout(dp_shard=4, sharding="grad_op"), MODEL, {"sync_every_microbatch": True, "masters": 2},
            {"weights": 3 * (100 * 2 + 40 * 2) / 4, "gradients": 3 * 140 * 2 / 4},
        ),
        (  # adapters in fp32 beside a base in 4 bits, whose ends stay in bf16
            Layout(dp_shard=4, sharding="full", expert_parallel=2), ADAPTED, {"stored": 2, "frozen": 0.5},
            {"weights": (1.5 * 3 * (10 * 4 + 154 * 0.5) + 40 * 2) / 4, "gradients": 10 * 4 / 4},
        ),
        (Layout(tp=2, dp_shard=2, sharding="full"), MODEL, {"offload": False, "paged": 8}, {"moments": 2 * 8 * 80 / 2}),
        (Layout(tp=2), MODEL, {"offload": False}, {}),
    ],
)  # fmt: skip
def test_what_is_copied_from_and_to_the_host(layout, model, more, expected):
    step = replace(STEP, **({"offload": True} | more))
    assert {
        entry.what: entry.size for entry in step_traffic(layout, model, step) if entry.dimension == "host"
    } == expected
