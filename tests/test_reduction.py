"""Sums of gradients that travel during the backward pass, between real ranks."""

import torch
from curves import Case, build, steps
from worlds import run_world

from swiftlite.config.layout import Layout
from swiftlite.models.anatomy import dissect
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.data import DataParallel, shard_over_data
from swiftlite.parallel.mesh import build_mesh

PASSES = 3


def gradients(rank: int, mesh, background: bool) -> list[torch.Tensor]:
    """Of the local shards, of some backward passes."""
    case = Case("llama", mesh.layout, sharded=True)
    scorer, base = build(case)
    options = DataParallel(torch.float32, "full", background_sums=background)
    shard_over_data(scorer, dissect(base).layers, mesh, options)
    found = []
    for batches in list(steps())[:PASSES]:
        supervised_loss(scorer(batches[rank]).logprobs, 10).backward()
        found += [parameter.grad.to_local().clone() for parameter in scorer.parameters()]
        scorer.zero_grad()
    return found


def body(rank: int) -> tuple[bool, list[str], int]:
    """(whether both ways give the same, what happened in the first pass, sums left under way)"""
    from swiftlite.parallel import reduction

    mesh = build_mesh(Layout(dp_shard=2, sharding="full"), torch.device("cpu"))
    happened, made = [], []

    class Noted:
        def __init__(self, work):
            self._work = work

        def wait(self):
            happened.append("awaited")
            self._work.wait()

    plain, begin = reduction.DefaultReduceScatter.__call__, reduction.BackgroundReduceScatter.__init__

    def reduce(self, *positional, **named):
        work = plain(self, *positional, **named)
        if not isinstance(self, reduction.BackgroundReduceScatter):
            return work
        happened.append("begun")
        return Noted(work)

    def remember(self):
        made.append(self)
        begin(self)

    reduction.DefaultReduceScatter.__call__, reduction.BackgroundReduceScatter.__init__ = reduce, remember
    sums = gradients(rank, mesh, background=True)
    (background,) = made
    first = happened[: len(happened) // PASSES]
    expected = gradients(rank, mesh, background=False)
    same = all(torch.equal(*pair) for pair in zip(sums, expected, strict=True))
    return same and len(sums) == len(expected) > 0, first, len(background._under_way)


def test_sums_begin_while_layers_compute_and_are_there_at_the_end_of_the_pass():
    for same, first, left in run_world(2, body):
        assert same
        # two layers, and the rest of the model, whose sum has to wait for one of theirs
        assert first == ["begun", "begun", "awaited", "begun", "awaited", "awaited"]
        assert left == 0
