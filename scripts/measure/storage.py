"""Memory of each rank, and seconds of loading and saving, of a toy and of a model in the shape of Qwen2.5-0.5B.

Each process loads the model in its layout, trains a step, writes a checkpoint and the result, and looks at its memory
and its clock around each of them. The plain speed of the disk is that of the same bytes written and read in sequence,
by one process, in the same run. Files are dropped from the system's cache before each reading.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from measure.resident import PeakGrowth, tensor_bytes
from measure.world import Trainer, build, shared_flags
from swiftlite.checkpoint.export import create_model_files
from swiftlite.checkpoint.shared import to_write, write_together
from swiftlite.checkpoint.state import plan_resume_file, resume_tensors
from swiftlite.cli.errors import show_error
from swiftlite.models.toys import toy_config, toy_tokenizer, write_toy
from swiftlite.parallel.start import Machines, start_processes
from swiftlite.parallel.world import World, joined
from swiftlite.planning.footprint import STATE_BYTES, TRAINED_BYTES
from swiftlite.planning.memory import free_bytes
from swiftlite.training.setup import Trainee
from swiftlite.verification.run import resolve_in_world

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RESULTS = "storage.jsonl"
BLOCK = 8 << 20
ROOM = 1.3  # a step is trained only where this many times its states are free, all ranks together
TOKENS = 64
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """shards: by how much a rank's share of weights, gradients and moments is smaller than the whole."""

    name: str
    world: int
    shards: int
    flags: dict[str, Any] = field(default_factory=dict)


MEMORY = [
    Case("one process", 1, 1),
    Case("ddp 2", 2, 1, {"parallel": "ddp"}),
    Case("fsdp full 2", 2, 2, {"parallel": "fsdp"}),
    Case("fsdp full 4", 4, 4, {"parallel": "fsdp"}),
    Case("tp 2", 2, 2, {"tensor_parallel_size": 2}),
    Case("pp 2", 2, 2, {"pipeline_parallel_size": 2}),
]
DISK = [MEMORY[0], MEMORY[2], MEMORY[3]]


@dataclass(frozen=True)
class Found:
    """Of one rank; bytes and seconds. None where a step was not trained for want of memory.

    loading, saving: the most that the process's own memory grew meanwhile; load: seconds of building and reading;
    checkpoint, result: seconds of writing.
    """

    weights: int
    loading: int
    load: float
    gradients: int | None = None
    moments: int | None = None
    saving: int | None = None
    checkpoint: float | None = None
    result: float | None = None
    checkpoint_bytes: int = 0
    result_bytes: int = 0


def qwen_shape() -> PretrainedConfig:
    """Qwen2.5-0.5B (https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json)."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32_768, rope_theta=1e6, tie_word_embeddings=True,
        bos_token_id=151_643, eos_token_id=151_643,
    )  # fmt: skip


def write_models(folder: Path, *, large: bool) -> dict[str, Path]:
    """Random models by name: a toy in fp32 and, if `large`, one of 0.5 B parameters in bf16 (about 1 GB)."""
    models = {"toy": write_toy(folder / "toy", toy_config("llama", 4))}
    return models | ({"0.5B": _write_large(folder / "0.5B")} if large else {})


def _write_large(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(qwen_shape(), dtype=torch.bfloat16).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def measure_storage(folder: Path, model: Path, cases: list[Case]) -> dict[str, list[Found]]:
    """For each layout what each of its ranks found. folder: for what is written."""
    for case in cases:  # in new processes: what one has given back to itself would hide what the next one takes
        try:
            start_processes(Machines(case.world), _measure_in_process, str(folder), str(model), case)
        except SystemExit as ended:
            if ended.code:
                raise
    path = folder / RESULTS
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.unlink()
    return {row["case"]: [Found(**found) for found in row["ranks"]] for row in rows}


def _measure_in_process(folder: str, model: str, case: Case) -> int:
    with joined() as world, world.told_once(show_error):
        found = _measure(Path(folder), Path(model), case, world)
        ranks: list[Any] = [None] * world.size
        dist.all_gather_object(ranks, asdict(found))
        if world.rank == 0:
            with (Path(folder) / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case.name, "ranks": ranks}) + "\n")
            print(f"{model}: {case.name}: measured", file=sys.stderr, flush=True)
    return 0


def _measure(folder: Path, model: Path, case: Case, world: World) -> Found:
    output = folder / "out"
    resolved = resolve_in_world(
        "sft", shared_flags(model, output) | {"lr_scheduler": "constant"} | case.flags, world.size
    )
    drop_from_cache(model)
    world.meet("load")
    started = time.perf_counter()
    with PeakGrowth() as loading:
        trainee = build(resolved, world)
    world.meet("loaded")
    load = time.perf_counter() - started
    weights = tensor_bytes(parameter for _, parameter in trainee.trained())
    needed = trainee.parameters[0] * TRAINED_BYTES * case.world / case.shards
    if not _same_everywhere(world, free_bytes(world.device) * world.size > ROOM * needed):
        return Found(weights, loading.bytes, load)
    trainer = Trainer(trainee, resolved.config, TOKENS, max(1, trainee.mesh.layout.pp))
    trainer.add_gradients()
    gradients = tensor_bytes(p.grad for _, p in trainee.trained() if p.grad is not None)
    trainer.update()
    moments = tensor_bytes(
        tensor for state in trainer.optimizer.state.values() for name, tensor in state.items() if name != "step"
    )
    with PeakGrowth() as saving:
        checkpoint = _save_checkpoint(trainee, trainer.optimizer, output / "checkpoint", world)
        result = _save_result(trainee, output / "model", world)
    sizes = [_size(output / name) for name in ("checkpoint", "model")]
    world.meet("weighed")
    if world.rank == 0:
        shutil.rmtree(output)
    return Found(weights, loading.bytes, load, gradients, moments, saving.bytes, checkpoint, result, *sizes)


def _same_everywhere(world: World, here: bool) -> bool:
    return world.same("room", str(here)) == "True"


def _save_checkpoint(trainee: Trainee, optimizer: torch.optim.Optimizer, final: Path, world: World) -> float:
    """Seconds of what `training.run.Session.save_checkpoint` writes but for its counters."""
    masters = trainee.files.rounded
    uncounted = trainee.uncounted()
    counted = [(name, p) for name, p in trainee.trained() if id(p) not in uncounted]
    tensors = resume_tensors(counted, optimizer, masters=masters)
    plan = plan_resume_file(trainee.trained_shapes, masters=masters, moments=True, single=trainee.matrices)

    def create(folder: Path) -> None:
        create_model_files(folder, trainee.files, trainee.model, trainee.base, None)
        plan.create(folder)

    def write(folder: Path) -> None:
        trainee.files.plan.write(folder, to_write(trainee.mesh, trainee.tensors()))
        plan.write(folder, to_write(trainee.mesh, tensors.items()))

    world.meet("checkpoint")
    started = time.perf_counter()
    write_together(trainee.mesh, final, create, write)
    return time.perf_counter() - started


def _save_result(trainee: Trainee, final: Path, world: World) -> float:
    world.meet("result")
    started = time.perf_counter()
    write_together(
        trainee.mesh,
        final,
        lambda folder: create_model_files(folder, trainee.files, trainee.model, trainee.base, None),
        lambda folder: trainee.files.plan.write(folder, to_write(trainee.mesh, trainee.tensors())),
        manifest=False,
    )
    return time.perf_counter() - started


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def drop_from_cache(folder: Path) -> None:
    """Have the system forget the pages of a folder's files, once they are on the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_speed(folder: Path, source: Path) -> tuple[float, float]:
    """Bytes a second of (writing a file of a model's size in sequence with fsync, reading it from the disk)."""
    (weights,) = source.glob("*.safetensors")
    copy = folder / "plain"
    block = os.urandom(BLOCK)
    count = weights.stat().st_size // BLOCK
    started = time.perf_counter()
    with copy.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
    written = time.perf_counter() - started
    with copy.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(BLOCK)
        started = time.perf_counter()
        while file.readinto(buffer):
            pass
        read = time.perf_counter() - started
    copy.unlink()
    return count * BLOCK / written, count * BLOCK / read


def memory_table(
    name: str, cases: list[Case], found: dict[str, list[Found]]
) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, cells): MiB of the rank that has most, beside the share of the whole that the layout leaves to it."""
    header = (
        "model", "layout", "weights", "gradients", "moments", "together", "by the formula", "ratio",
        "loading: own memory", "more than its weights", "saving: own memory",
    )  # fmt: skip
    whole = found[cases[0].name][0].weights // STATE_BYTES["weights"]
    cells = []
    for case in cases:
        ranks = found[case.name]
        top = max(ranks, key=lambda rank: rank.weights)
        states = [top.weights, top.gradients, top.moments]
        together = None if None in states else sum(states)
        formula = whole * TRAINED_BYTES / case.shards
        loading = max(rank.loading for rank in ranks)
        extra = max(rank.loading - rank.weights for rank in ranks)
        saving = None if top.saving is None else max(rank.saving for rank in ranks)
        numbers = [*states, together, formula]
        ratio = "-" if together is None else f"{together / formula:.2f}"
        cells.append([name, case.name, *map(_mib, numbers), ratio, *map(_mib, (loading, extra, saving))])
    return header, cells


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:,.1f}"


def disk_table(
    cases: list[Case], found: dict[str, list[Found]], read_bytes: int, speed: tuple[float, float]
) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, cells): seconds and MB/s of loading and saving, beside the plain speed of the disk."""
    header = ("processes", "load s", "MB/s", "model/ s", "MB/s", "checkpoint s", "MB/s")
    plain = ["one, plain in sequence", "", _rate(speed[1]), "", _rate(speed[0]), "", _rate(speed[0])]
    cells = [plain]
    for case in cases:
        top = found[case.name][0]
        cells.append([case.name, f"{top.load:.1f}", _rate(read_bytes / top.load)])
        for seconds, size in ((top.result, top.result_bytes), (top.checkpoint, top.checkpoint_bytes)):
            cells[-1] += ["-", "-"] if seconds is None else [f"{seconds:.1f}", _rate(size / seconds)]
    return header, cells


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e6:,.0f}"
