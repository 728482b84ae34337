"""The layout of a run: a point in one mesh, `pp x dp_replicate x dp_shard x cp x tp`, checked before anything loads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

# https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
OF_TORCHRUN = (
    "LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each dimension of the mesh, outermost first.

    sharding: what the data ranks shard within `dp_shard`: full, grad_op or none. expert_parallel regroups `dp_shard`.
    world_source: who said how many processes there are.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    expert_parallel: int = 1
    sharding: str = "none"
    world_source: str = "one process"

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.dp_replicate * self.shards

    @property
    def shards(self) -> int:
        """Processes among which a weight is divided."""
        return self.pp * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """In words: what divides the work."""
        if self.world == 1:
            return "one process"
        kinds = {"full": "full sharding", "grad_op": "sharded gradients and optimizer", "none": "replicas"}
        parts = [(self.dp_shard, kinds[self.sharding]), (self.dp_replicate, "replicas"), (self.tp, "tensor parallel")]
        parts += [
            (self.pp, "pipeline stages"),
            (self.cp, "context parallel"),
            (self.expert_parallel, "expert parallel"),
        ]
        return f"{self.world} processes: " + ", ".join(f"{size} x {what}" for size, what in parts if size > 1)

    def __str__(self) -> str:
        sizes = (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        return " x ".join(map(str, sizes))


def under_torchrun(env: Mapping[str, str]) -> bool:
    """True in a process that torchrun (or another launcher with its variables) started."""
    return all(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def follows(env: Mapping[str, str]) -> bool:
    """True in a process that another one comes before, of those that torchrun started."""
    rank, size = env.get("RANK", ""), env.get("WORLD_SIZE", "")
    return rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)


def leave_torchrun(env: MutableMapping[str, str]) -> None:
    """Forget the others: neither this process nor what it starts waits for them."""
    for name in OF_TORCHRUN:
        env.pop(name, None)


def plan_layout(config: RunConfig, env: Mapping[str, str]) -> Layout:
    """The layout that the flags describe. Raises UserError, naming the nearest layout that works."""
    _check_parallel(config)
    mesh = _read_mesh(config)
    model_ranks = math.prod(_sizes(config))
    world, source = _world(config, env)
    if world is None:
        world = model_ranks * (math.prod(mesh) if mesh else config.expert_parallel_size)
        source = "the smallest that this layout needs" if world > 1 else "one process"
    if config.parallel == "none" and world > 1:
        raise UserError(
            f"--parallel none is one process, but there are {world}", where=source, fix="use --parallel auto or fsdp"
        )
    if world % model_ranks:
        raise _indivisible(config, world, source)
    replicate, shard = _data_mesh(config, mesh, world // model_ranks, _nodes(config, env))
    if shard % config.expert_parallel_size:
        near = _nearest_divisor(shard, config.expert_parallel_size)
        raise UserError(
            f"--expert-parallel-size {config.expert_parallel_size} does not divide the {shard} ranks that shard",
            fix=f"use --expert-parallel-size {near}",
        )
    return Layout(
        pp=config.pipeline_parallel_size,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=config.context_parallel_size,
        tp=config.tensor_parallel_size,
        expert_parallel=config.expert_parallel_size,
        sharding=_sharded(config, shard),
        world_source=source,
    )


def _check_parallel(config: RunConfig) -> None:
    """Raises UserError where `--parallel` and the settings that divide the work contradict one another."""
    split = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.parallel == "megatron" and split == 1:
        raise UserError(
            "--parallel megatron is tensor x pipeline parallelism, but both sizes are 1",
            fix="add --tensor-parallel-size 2, or use --parallel fsdp",
        )
    if config.parallel == "none" and split * config.context_parallel_size * config.expert_parallel_size > 1:
        raise UserError(
            "--parallel none contradicts the tensor, pipeline, context or expert parallel size",
            fix="use --parallel auto, or leave the sizes at 1",
        )
    if config.parallel in ("none", "ddp") and (config.mesh or config.sharding not in (None, "none")):
        raise UserError(
            f"--parallel {config.parallel} shards nothing, which contradicts --sharding or --mesh",
            fix="use --parallel fsdp",
        )
    if config.sharding == "none" and config.mesh:
        raise UserError(
            "--sharding none contradicts --mesh, whose second number is the ranks that shard",
            fix="use --sharding hybrid, or leave --mesh out",
        )


def _read_mesh(config: RunConfig) -> tuple[int, int] | None:
    if config.mesh is None:
        return None
    match = re.fullmatch(r"\s*([1-9]\d{0,5})\s*[xX×*,]\s*([1-9]\d{0,5})\s*", config.mesh)
    if match is None:
        raise UserError(
            f"{config.mesh!r} is not a mesh",
            where="--mesh",
            fix="write REPLICATExSHARD, such as 2x4: 2 replicas of 4-way sharding",
        )
    return int(match[1]), int(match[2])


def _world(config: RunConfig, env: Mapping[str, str]) -> tuple[int | None, str]:
    if under_torchrun(env):
        text = env["WORLD_SIZE"]
        if not text.isdecimal() or int(text) < 1:
            raise UserError(
                f"WORLD_SIZE is {text!r}, not a number of processes", where="environment", fix="start by torchrun again"
            )
        for name in ("RANK", "LOCAL_RANK"):
            if not env[name].isdecimal() or int(env[name]) >= int(text):
                raise UserError(
                    f"{name} is {env[name]!r}, not the number of one of {text} processes",
                    where="environment",
                    fix="start by torchrun again",
                )
        return int(text), "torchrun"
    _check_node(config.node_rank or 0, config.nnodes or 1)
    if config.nproc_per_node is None and config.nnodes is None:
        return None, ""
    processes, nodes = config.nproc_per_node or 1, config.nnodes or 1
    return processes * nodes, f"--nproc-per-node {processes}" + (f" x --nnodes {nodes}" if nodes > 1 else "")


def _check_node(node: int, nodes: int) -> None:
    """A machine with a number too high would wait for others in vain, or train alone."""
    if node >= nodes:
        raise UserError(
            f"--node-rank {node}, but --nnodes is {nodes}: machines are numbered from 0",
            fix=f"use a --node-rank below {nodes}, or --nnodes {node + 1}",
        )


def _nodes(config: RunConfig, env: Mapping[str, str]) -> int:
    """Machines of the run."""
    if under_torchrun(env) and env.get("LOCAL_WORLD_SIZE", "").isdecimal():
        return max(1, int(env["WORLD_SIZE"]) // max(1, int(env["LOCAL_WORLD_SIZE"])))
    return config.nnodes or 1


def _data_mesh(config: RunConfig, mesh: tuple[int, int] | None, data: int, nodes: int) -> tuple[int, int]:
    """(replicas, ranks that shard) of the `data` ranks that tensor, pipeline and context parallelism leave.

    `hybrid` shards inside a machine and replicates across machines, unless `--mesh` says otherwise.
    """
    if mesh is not None:
        wanted = math.prod(mesh)
        if wanted != data:
            fix = f"use --mesh {_nearest_mesh(mesh, data)}, or start {_processes(config, wanted)} processes"
            left = data // wanted * config.tensor_parallel_size
            raise UserError(
                f"--mesh {mesh[0]}x{mesh[1]} needs {wanted} data ranks, but there are {data}",
                where=_arithmetic(config, data),
                fix=f"{fix}, or divide the model by --tp {left}" if data % wanted == 0 else fix,
            )
        return mesh
    if config.sharding == "hybrid":
        if nodes > 1 and data % nodes == 0:
            return nodes, data // nodes
        wanted = 2, max(2, data // 2)
        raise UserError(
            "--sharding hybrid needs to know how many replicas there are",
            fix=f"add --mesh {_nearest_mesh(wanted, data) if data > 1 else '2x2'} (REPLICATExSHARD), "
            "or use --sharding full",
        )
    return (data, 1) if _replicated(config) else (1, data)


def _sharded(config: RunConfig, shard: int) -> str:
    """What `shard` data ranks divide: full, grad_op or none. Ranks of context parallelism hold the same weights."""
    if shard * config.context_parallel_size == 1 or _replicated(config):
        return "none"
    return "grad_op" if config.sharding == "grad_op" else "full"


def _replicated(config: RunConfig) -> bool:
    return config.parallel == "ddp" or config.sharding == "none"


def _sizes(config: RunConfig) -> tuple[int, int, int]:
    """(tp, pp, cp): ranks that see the same rows."""
    return config.tensor_parallel_size, config.pipeline_parallel_size, config.context_parallel_size


def _processes(config: RunConfig, data: int) -> int:
    return data * math.prod(_sizes(config))


def _arithmetic(config: RunConfig, data: int) -> str:
    tp, pp, cp = _sizes(config)
    return f"{_processes(config, data)} processes / (tp {tp} x pp {pp} x cp {cp}) = {data} data ranks"


def _indivisible(config: RunConfig, world: int, source: str) -> UserError:
    sizes = _sizes(config)
    per_copy = math.prod(sizes)
    more = math.ceil(world / per_copy) * per_copy
    flags = "--tensor-parallel-size", "--pipeline-parallel-size", "--context-parallel-size"
    nearest = zip(flags, _nearest_sizes(sizes, world), sizes, strict=True)
    changed = [f"{flag} {new}" for flag, new, old in nearest if new != old]  # only what has to change
    return UserError(
        f"{world} processes cannot be split into tp {sizes[0]} x pp {sizes[1]} x cp {sizes[2]} = {per_copy}",
        where=source,
        fix=f"start {more} processes"
        + (f", or use {' '.join(changed)} with {world} processes" if world > 1 else f": --nproc-per-node {more}"),
    )


def _nearest_sizes(wanted: tuple[int, int, int], world: int) -> tuple[int, int, int]:
    """The (tp, pp, cp) nearest to the wanted one, by ratio, whose product divides the world."""
    fitting = [sizes for sizes in product(divisors(world), repeat=3) if world % math.prod(sizes) == 0]
    return min(fitting, key=lambda sizes: (_distance(sizes, wanted), sizes))


def _nearest_mesh(wanted: tuple[int, int], data: int) -> str:
    shapes = [(size, data // size) for size in divisors(data)]
    replicate, shard = min(shapes, key=lambda shape: (_distance(shape, wanted), shape))
    return f"{replicate}x{shard}"


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(divisors(number), key=lambda size: abs(size - wanted))


def divisors(number: int) -> list[int]:
    """In order, from 1 to the number itself."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _distance(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    return sum(abs(math.log2(size / want)) for size, want in zip(sizes, wanted, strict=True))
