"""Bytes that ranks send in a step of a toy model, counted in real processes, beside the formula of each layout."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from measure.counter import TrafficCounter
from measure.world import Trainer, build, shared_flags
from swiftlite.cli.errors import show_error
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.stages import choose_schedule
from swiftlite.parallel.start import Machines, start_processes
from swiftlite.parallel.world import World, joined
from swiftlite.planning.communication import ModelShape, Step, step_traffic
from swiftlite.training.optimizers.muon import orthogonalized_in
from swiftlite.training.setup import Trainee
from swiftlite.verification.run import resolve_in_world

LAYERS, TOKENS, MICRO_BATCHES = 4, 96, 4
RESULTS = "traffic.jsonl"


@dataclass(frozen=True)
class Case:
    """A layout and what is trained in it. flags: beside `measure.world.shared_flags`."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    architecture: str = "llama"


TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
CASES: dict[int, list[Case]] = {
    2: [
        Case("fsdp full 2", {"parallel": "fsdp"}),
        Case("fsdp grad_op 2, bf16", {"parallel": "fsdp", "sharding": "grad_op", "precision": "bf16"}),
        Case("fsdp full 2, Muon", {"parallel": "fsdp", "optimizer": "muon"}, "qwen3-moe"),
        Case("ddp 2, Muon", {"parallel": "ddp", "optimizer": "muon"}, "qwen3-moe"),
    ],
    4: [
        Case("ddp 4", {"parallel": "ddp"}),
        Case("fsdp full 4", {"parallel": "fsdp"}),
        Case("fsdp full 4, bf16", {"parallel": "fsdp", "precision": "bf16"}),
        Case("fsdp full 4, LoRA", {"parallel": "fsdp", "tuner": "lora"}),
        Case("fsdp full 4, Muon", {"parallel": "fsdp", "optimizer": "muon"}),
        Case("fsdp full 4, reduced each micro-batch", {"parallel": "fsdp", "sync_every_microbatch": True}),
        Case("fsdp grad_op 4", {"parallel": "fsdp", "sharding": "grad_op"}),
        Case("hybrid 2x2", {"mesh": "2x2"}),
        Case("tp 4", {TP: 4}, "gemma2"),
        Case("tp 4, bf16", {TP: 4, "precision": "bf16"}),
        Case("tp 4, experts", {TP: 4}, "qwen3-moe"),
        Case("fsdp 2 x tp 2", {"parallel": "fsdp", TP: 2}),
        Case("pp 4", {PP: 4}),
        Case("fsdp 2 x pp 2, tied", {"parallel": "fsdp", PP: 2}, "llama-tied"),
        Case("ddp 2 x pp 2 interleaved-1f1b", {"parallel": "ddp", PP: 2, "pipeline_schedule": "interleaved-1f1b"}),
        Case("fsdp 2 x pp 2 zero-bubble", {"parallel": "fsdp", PP: 2, "pipeline_schedule": "zero-bubble"}),
        Case("tp 2 x pp 2", {TP: 2, PP: 2}),
        Case("cp 4", {CP: 4}),
        Case("fsdp 2 x cp 2, bf16", {"parallel": "fsdp", CP: 2, "precision": "bf16"}),
        Case("ep 4", {"parallel": "fsdp", "expert_parallel_size": 4}, "qwen3-moe"),
        Case("fsdp 4 with ep 2", {"parallel": "fsdp", "expert_parallel_size": 2}, "qwen3-moe"),
    ],
}


@dataclass(frozen=True)
class Row:
    """One kind of collective in one layout; bytes a rank in a step, the mean over all ranks."""

    case: str
    dimensions: str
    collective: str
    what: str
    measured: float
    formula: float


def measure_traffic(folder: Path, world: int, only: list[str] | None = None) -> list[Row]:
    """Start `world` processes and count in each layout. folder: an empty one, for models and results."""
    cases = [case for case in CASES[world] if only is None or case.name in only]
    for name in {case.architecture for case in cases}:
        write_toy(folder / name, toy_config(name, LAYERS))
    try:
        start_processes(Machines(world), _count_in_process, str(folder), cases)
    except SystemExit as ended:
        if ended.code:
            raise
    return [Row(**json.loads(line)) for line in (folder / RESULTS).read_text(encoding="utf-8").splitlines()]


def _count_in_process(folder: str, cases: list[Case]) -> int:
    with joined() as world, world.told_once(show_error):
        for number, case in enumerate(cases):
            rows = _count(Path(folder), case, world.within(str(number)))
            if world.rank == 0:
                with (Path(folder) / RESULTS).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
                print(f"{case.name}: counted", file=sys.stderr, flush=True)
    return 0


def _count(folder: Path, case: Case, world: World) -> list[Row]:
    """The second step: the first one also sets things up."""
    resolved = resolve_in_world(
        "sft", shared_flags(folder / case.architecture, folder / "none") | case.flags, world.size
    )
    trainee = build(resolved, world)
    trainer = Trainer(trainee, resolved.config, TOKENS, MICRO_BATCHES)
    trainer.add_gradients()
    trainer.update()
    with TrafficCounter() as counter:
        trainer.add_gradients()
        trainer.update()
    counted: list[Counter] = [Counter()] * world.size
    dist.all_gather_object(counted, counter.sent)
    return _compare(case, trainee, resolved.config.pipeline_schedule, counted)


def _compare(case: Case, trainee: Trainee, schedule: str, counted: list[Counter]) -> list[Row]:
    """One row for each group of ranks along the same dimensions and each collective in it."""
    layout, config = trainee.mesh.layout, trainee.base.config.get_text_config()
    step = Step(
        tokens=TOKENS,
        trained=TOKENS - 1,
        micro_batches=MICRO_BATCHES,
        compute=trainee.precision.dtype.itemsize,
        stored=trainee.base.get_input_embeddings().weight.element_size(),
        sync_every_microbatch=bool(case.flags.get("sync_every_microbatch")),
        orthogonalized=orthogonalized_in(trainee.mesh.device).itemsize if trainee.matrices else 0,
        schedule=choose_schedule(schedule, config.num_hidden_layers, layout.pp) if layout.pp > 1 else None,
    )
    groups = _groups(trainee.mesh)
    formula: dict[tuple[int, str], list] = {}
    for entry in step_traffic(layout, ModelShape.of(trainee.base), step):
        formula.setdefault((groups[entry.dimension], entry.collective), []).append(entry)
    measured: Counter = Counter()
    for sent in counted:
        for (ranks, collective), size in sent.items():
            measured[_spacing(ranks), collective] += size / len(counted)
    return [
        Row(
            case=case.name,
            dimensions=" + ".join(dict.fromkeys(entry.dimension for entry in formula.get(key, []))),
            collective=key[1],
            what=", ".join(entry.what for entry in formula.get(key, [])),
            measured=measured[key],
            formula=sum(entry.size for entry in formula.get(key, [])),
        )
        for key in dict.fromkeys([*formula, *measured])
    ]


Spacing = tuple[int, int]


def _spacing(ranks: tuple[int, ...]) -> Spacing:
    """(ranks, distance from one to the next): alike for all groups along the same dimensions."""
    return len(ranks), ranks[1] - ranks[0]


def _groups(mesh: Mesh) -> dict[str, Spacing]:
    """The spacing of each dimension's groups."""
    layout = mesh.layout
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "fsdp": layout.dp_shard * layout.cp, "tp": layout.tp}
    found, inner = {}, layout.world
    for name, size in sizes.items():
        inner //= size
        found[name] = size, inner
    shared, expert = layout.dp_shard * layout.cp, layout.expert_parallel
    return found | {
        "cp": (layout.cp, layout.tp),
        "ep": (expert, layout.tp),
        "efsdp": (shared // expert, layout.tp * expert),
    }


def table(rows: list[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, cells) for Markdown."""
    header = ("layout", "along", "collective", "what", "bytes measured", "bytes by the formula", "ratio")
    cells = [
        [row.case, row.dimensions, row.collective, row.what, f"{row.measured:,.0f}", f"{row.formula:,.0f}", _ratio(row)]
        for row in rows
    ]
    return header, cells


def _ratio(row: Row) -> str:
    return f"{row.measured / row.formula:.3f}" if row.formula else "not in the formula"
