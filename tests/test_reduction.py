"""Sums of gradients that travel during the backward pass, between real ranks."""

import pytest
import torch
from curves import Case, build, steps, whole
from worlds import run_world

from swiftlite.config.layout import Layout
from swiftlite.models.anatomy import dissect
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.data import DataParallel, reduce_at_last_micro_batch, shard_over_data
from swiftlite.parallel.mesh import build_mesh

PASSES = 3
# Of two layers, and the rest of the model, whose sum has to wait for one of theirs.
OVER_SHARDS = ["shards", "shards", "awaited", "shards", "awaited", "awaited"]
OVER_REPLICAS = ["replicas", "replicas", "replicas", "awaited", "awaited", "awaited"]
OVER_BOTH = ["shards", "shards", "awaited", "replicas", "shards", *["awaited", "replicas"] * 2, *["awaited"] * 3]
SHARDS, REPLICAS = {"dp_shard": 2, "sharding": "full"}, {"dp_replicate": 2, "sharding": "none"}


def gradients(rank: int, mesh, background: bool) -> list[torch.Tensor]:
    """Of the local shards, of some backward passes."""
    case = Case("llama", mesh.layout, sharded=True)
    scorer, base = build(case)
    options = DataParallel(torch.float32, mesh.layout.sharding, background_sums=background)
    shard_over_data(scorer, dissect(base).layers, mesh, options)
    found = []
    for batches in list(steps())[:PASSES]:
        supervised_loss(scorer(batches[rank % len(batches)]).logprobs, 10).backward()
        found += [parameter.grad.to_local().clone() for parameter in scorer.parameters()]
        scorer.zero_grad()
    return found


class Noted:
    """Messages under way, whose end is noted."""

    def __init__(self, work, happened: list[str]):
        self._work, self._happened = work, happened

    def wait(self):
        self._happened.append("awaited")
        self._work.wait()


def looped_gradients(rank: int, mesh, background: bool) -> list[torch.Tensor]:
    """Of the local shards, of two micro-batches of a model that runs its first layer again behind its second."""
    case = Case("llama", mesh.layout, sharded=True)
    scorer, base = build(case)
    first, second = dissect(base).layers
    second.register_forward_hook(lambda _layer, _args, given, hidden: first(hidden, **given), with_kwargs=True)
    options = DataParallel(torch.float32, mesh.layout.sharding, background_sums=background)
    shard_over_data(scorer, dissect(base).layers, mesh, options)
    for place, batch in enumerate(next(steps())[rank % 2 :: 2]):
        reduce_at_last_micro_batch(scorer, is_last=place == 1, sharding=mesh.layout.sharding)
        supervised_loss(scorer(batch).logprobs, 10).backward()
    return [parameter.grad.to_local().clone() for parameter in scorer.parameters()]


def body(rank: int, sizes: dict) -> tuple[bool, list[str], int]:
    """(whether both ways give the same, what happened in the first pass in the background, sums left under way)"""
    from swiftlite.parallel import reduction

    mesh = build_mesh(Layout(**sizes), torch.device("cpu"))
    happened, sums = [], []
    over_shards, over_replicas = reduction.DefaultReduceScatter.__call__, reduction.dist.all_reduce
    begin = reduction.BackgroundSums.__init__

    def note(kind: str, work):
        happened.append(kind)
        return Noted(work, happened)

    def remember(self, *replicas):
        sums.append(self)
        begin(self, *replicas)

    reduction.BackgroundSums.__init__ = remember
    reduction.DefaultReduceScatter.__call__ = lambda self, *most, **rest: note(
        "shards", over_shards(self, *most, **rest)
    )
    reduction.dist.all_reduce = lambda *most, **rest: note("replicas", over_replicas(*most, **rest))
    found = gradients(rank, mesh, background=True)
    reduction.DefaultReduceScatter.__call__, reduction.dist.all_reduce = over_shards, over_replicas
    expected = gradients(rank, mesh, background=False)
    same = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    (background,) = sums
    left = len(background._over_shards) + len(background._over_replicas)
    return same and len(found) == len(expected) > 0, happened[: len(happened) // PASSES], left


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(SHARDS, OVER_SHARDS), (REPLICAS, OVER_REPLICAS), (SHARDS | {"dp_replicate": 2}, OVER_BOTH)],
    ids=["shards", "replicas", "both"],
)
def test_sums_begin_while_layers_compute_and_are_there_at_the_end_of_the_pass(sizes, expected):
    for same, first, left in run_world(Layout(**sizes).world, body, sizes):
        assert same
        assert first == expected
        assert left == 0


class Late:
    """A message that goes out when it is awaited, later than any network would send it."""

    def __init__(self, send):
        self.wait = send


def send_late(send):
    def begin(*most, async_op=False, **rest):
        return Late(lambda: send(*most, **rest)) if async_op else send(*most, **rest)

    return begin


def looped_body(rank: int, sizes: dict) -> bool:
    from swiftlite.parallel import reduction

    mesh = build_mesh(Layout(**sizes), torch.device("cpu"))
    expected = looped_gradients(rank, mesh, background=False)
    reduction.DefaultReduceScatter.__call__ = send_late(reduction.DefaultReduceScatter.__call__)
    reduction.dist.all_reduce = send_late(reduction.dist.all_reduce)
    found = looped_gradients(rank, mesh, background=True)
    return len(found) == len(expected) > 0 and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("sizes", [SHARDS, REPLICAS, SHARDS | {"dp_replicate": 2}], ids=["shards", "replicas", "both"])
def test_a_layer_that_runs_twice_has_all_its_gradients(sizes):
    assert all(run_world(Layout(**sizes).world, looped_body, sizes))


def shared_body(_rank: int, sizes: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of a model whose second layer has the feed-forward weights of its first: (as units, in one piece)"""
    mesh, found = build_mesh(Layout(**sizes), torch.device("cpu")), []
    for divided in (True, False):
        scorer, base = build(Case("llama", mesh.layout))
        first, second = dissect(base).layers
        second.mlp = first.mlp
        if divided:
            shard_over_data(scorer, dissect(base).layers, mesh, DataParallel(torch.float32, mesh.layout.sharding))
        for batch in next(steps())[:1] if divided else next(steps())[:1] * mesh.layout.data_ranks:
            supervised_loss(scorer(batch).logprobs, 10).backward()
        found.append([whole(parameter.grad) for parameter in scorer.parameters()])
    return tuple(found)


@pytest.mark.parametrize("sizes", [SHARDS, REPLICAS], ids=["shards", "replicas"])
def test_layers_that_share_weights(sizes):
    for divided, alone in run_world(2, shared_body, sizes):
        assert len(divided) == len(alone) > 0
        for ours, theirs in zip(divided, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
