"""The layouts that so many devices allow, as the flags that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from swiftlite.config.layout import divisors

TP, PP, CP, EP = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
)  # fmt: skip
LEAST_SLICE = 4096  # tokens of a row on a context-parallel rank; rows of fewer are not worth dividing


def candidates(
    given: Mapping[str, Any], *, world: int, per_machine: int, layers: int, row: int, experts: int
) -> Iterator[dict[str, Any]]:
    """Flags of every layout that leaves what is given as it is, the simplest first.

    world: devices in all; per_machine: of them, among which alone tensor, context and expert parallelism send; row:
    tokens of one; experts: of a layer, 0 where there are none.
    """
    sizes = [size for size in divisors(world) if size <= per_machine]
    free = {
        TP: sizes,
        PP: [size for size in divisors(world) if size <= layers],
        CP: [size for size in sizes if size == 1 or row // size >= LEAST_SLICE],
        EP: [size for size in sizes if size == 1 or (experts and experts % size == 0)],
    }
    tried = product(*([given[name]] if name in given else free[name] for name in free))
    for tp, pp, cp, ep in sorted(tried, key=lambda shape: (sum(size > 1 for size in shape), shape)):
        data, rest = divmod(world, tp * pp * cp)
        divides_twice = EP not in given and ep > 1 and (tp > 1 or data % ep)
        undivided = given.get("parallel") == "megatron" and tp * pp == 1
        if rest or divides_twice or undivided:
            continue
        for sharing in _sharings(given, data * cp, max(1, per_machine // tp), whole=pp > 1):
            if ep == 1 or sharing.get("parallel") != "ddp":  # whose ranks share no experts
                yield {TP: tp, PP: pp, CP: cp, EP: ep} | sharing


def _sharings(given: Mapping[str, Any], ranks: int, near: int, *, whole: bool) -> Iterator[dict[str, Any]]:
    """How ranks with the same part of the model share it. near: of them, on one machine; whole: weights are gathered
    once a step in any case."""
    parallel = given.get("parallel", "auto")
    if ranks == 1 or parallel in ("none", "ddp") or "sharding" in given or "mesh" in given:
        yield {}
        return
    named = {"parallel": "fsdp"} if parallel == "auto" else {}
    if parallel != "fsdp":
        yield {"parallel": "ddp"} if parallel == "auto" else {"sharding": "none"}
    yield named | {"sharding": "full"}
    if not whole:
        yield named | {"sharding": "grad_op"}
    if 1 < near < ranks and ranks % near == 0 and CP not in given:
        yield named | {"sharding": "hybrid", "mesh": f"{ranks // near}x{near}"}
