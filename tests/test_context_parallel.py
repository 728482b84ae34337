"""Context parallelism equals one process: attention by itself, then whole training curves of several families."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from curves import Case, check_curve, curves, steps
from worlds import run_world

from swiftlite.config.layout import Layout
from swiftlite.errors import UserError
from swiftlite.models.attention import documents as attention
from swiftlite.models.toys import toy_config
from swiftlite.parallel.context import Context, check_context_parallel, divide_heads, slice_for_context
from swiftlite.parallel.division import LONGEST_ALONE, divide_row

# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


ATTENTION = [
    Heads(4, 4),
    Heads(8, 2),  # fewer key heads than ranks
    Heads(8, 4, window=4),
    Heads(10, 2, sinks=True),  # uneven shares, one of which reads its two key heads unevenly
    Heads(5, 5, softcap=2.0),
    Heads(3, 1, window=3, sinks=True),  # fewer heads than ranks: keys are gathered
    Heads(2, 2, softcap=2.0),
    Heads(1, 1),
]
ROWS = {  # over four ranks
    "whole documents, parts and padding": [5, 17, 1, 30, 9],
    "no part on the last rank": [14, 16, 14, 16, 2, 2],
    "whole documents": [7, 9, 16, 16, 14, 1],
    "parts": [20, 18, 17],
}


def attend(heads: Heads, row: list[int], rank: int | None = None):
    """(outputs, gradients) of a rank's part of the row, or of all of it, in fp64."""
    torch.manual_seed(0)
    part, context = torch.arange(64), None
    if rank is not None:
        context = Context(dist.group.WORLD, sum(row), divide_row(row, 4, rank, 16))
        part = context.division.places
    borders = torch.tensor([0, *np.cumsum([*row, 64 - sum(row)])], dtype=torch.int32)
    sizes = (heads.queries, 8), (heads.keys, 8), (heads.keys, 6), (heads.queries, 6)
    query, key, value, upstream = (torch.randn(1, count, 64, dim, dtype=torch.float64) for count, dim in sizes)
    sinks = torch.randn(heads.queries, dtype=torch.float64) if heads.sinks else None
    inputs = [x[:, :, part].clone().requires_grad_() for x in (query, key, value)]
    inputs += [] if sinks is None else [sinks.requires_grad_()]
    output, _ = attention.document_attention(
        torch.nn.Module(), *inputs[:3], None, scaling=0.3, sliding_window=heads.window, softcap=heads.softcap,
        s_aux=sinks, cu_seq_lens_q=borders, max_length_q=30, context=context,
    )  # fmt: skip
    output.backward(upstream.transpose(1, 2)[:, part])
    return output.detach(), [x.grad for x in inputs]


def test_attention_over_slices_equals_attention_over_the_row(world):
    for case in itertools.product(ATTENTION, ROWS):
        wanted, wanted_grads = attend(case[0], ROWS[case[1]])
        outputs, grads = zip(*(rank["attention"][case] for rank in world), strict=True)
        found = divide_row(ROWS[case[1]], 4, 0, 16).found
        torch.testing.assert_close(torch.cat(outputs, 1)[:, found], wanted, msg=lambda m, case=case: f"{case}: {m}")
        for position, grad in enumerate(wanted_grads):
            parts = [rank[position] for rank in grads]
            whole = torch.stack(parts).sum(0) if position == 3 else torch.cat(parts, 2)[:, :, found]
            torch.testing.assert_close(whole, grad, rtol=1e-6, atol=1e-6, msg=lambda m, case=case: f"{case}: {m}")


def test_documents_stay_whole_where_they_can():
    ranks = [divide_row([5, 17, 1, 30, 9], 4, rank, 16) for rank in range(4)]
    assert [division.places.tolist() for division in ranks] == [
        [*range(53, 62), *range(5, 12)],  # the longest that fits one rank, then parts
        [*range(5), *range(12, 22), 23],
        [22, *range(24, 39)],
        [62, 63, *range(39, 53)],  # padding, then the last part
    ]
    assert [division.own.tolist() for division in ranks] == [[0, 9], [0, 5], [0, 1], [0, 2]]
    for division in ranks:
        assert division.shared.tolist() == [0, 17, 47]
        assert division.counts == [7, 11, 15, 14]
    order = torch.cat([division.places for division in ranks])
    assert torch.equal(order[ranks[0].found], torch.arange(64))


def test_a_little_padding_saves_all_messages():
    for rank in range(2):
        division = divide_row([500, 500, 10], 2, rank, 505, slack=15)
        assert division.counts == [0, 0]
        assert division.own.tolist() == ([0, 500, 510, 512] if rank == 0 else [0, 500, 512])  # 512: a multiple of 16
        assert divide_row([500, 500, 100], 2, rank, 550, slack=17).counts == [50, 50]


def test_long_documents_are_shared_though_they_fit():
    division = divide_row([10, LONGEST_ALONE + 1, LONGEST_ALONE, 10], 2, 1, LONGEST_ALONE + 11)
    assert division.shared.tolist() == [0, LONGEST_ALONE + 1]
    assert division.own.tolist() == [0, 10, 20, 21]


def test_padding_is_of_no_longer_documents_than_others():
    assert divide_row([3, 2], 2, 1, 8).own.tolist() == [0, 2, 5, 8]


@pytest.mark.parametrize(("heads", "keys", "size"), [(32, 8, 4), (32, 8, 16), (14, 2, 4), (7, 7, 3), (6, 3, 5)])
def test_shares_of_heads_cover_all_and_read_the_right_keys(heads, keys, size):
    shares = divide_heads(heads, keys, size)
    assert [h for share in shares for h in range(share.queries.start, share.queries.stop)] == list(range(heads))
    for share in shares:
        read = [share.keys.start + key for key in share.key_of_query]
        assert read == [h // (heads // keys) for h in range(share.queries.start, share.queries.stop)]
    sizes = [len(share.key_of_query) for share in shares]
    assert max(sizes) - min(sizes) <= 1


# -- training curves ---------------------------------------------------------------------------------------------------


CP4, CP2 = Layout(cp=4, sharding="full"), Layout(dp_shard=2, cp=2, sharding="full")
CASES = [
    Case("llama", CP4),
    Case("llama-tied", CP2, sharded=True),
    Case("qwen3", CP2, lora="all-linear", sharded=True),
    Case("gemma3", CP4),
    Case("gemma3", Layout(dp_replicate=2, cp=2), sharded=True),
    Case("gemma2", CP4, lora="all-linear"),
    Case("gemma2", CP2, sharded=True),
    Case("mistral", CP2, sharded=True, checkpointing=True),
    Case("gpt2", CP4),
    Case("qwen3-moe", CP4),
    Case("gpt-oss", CP4),
    Case("llama", Layout(cp=2, tp=2, sharding="full"), sharded=True),
    Case("qwen3", Layout(cp=2, tp=2, sharding="full"), lora="all-linear", sharded=True),
    Case("gemma3", Layout(cp=2, tp=2, sharding="full"), sharded=True, checkpointing=True),
]


def body(rank: int):
    results = {"attention": {}}
    for heads, row in itertools.product(ATTENTION, ROWS):
        results["attention"][heads, row] = attend(heads, ROWS[row], rank)
    slices = [slice_for_context(batch, dist.group.WORLD) for batch in next(steps())]
    results["slices"] = [(batch.context.division, replace(batch, context=None)) for batch in slices]
    return results | curves(CASES, rank)


@pytest.fixture(scope="module")
def world():
    return run_world(4, body)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_curve_is_that_of_one_process(world, case):
    check_curve(case, world)


def test_the_slices_of_a_row_are_the_row(world):
    for batch, slices in zip(next(steps()), zip(*(rank["slices"] for rank in world), strict=True), strict=True):
        tokens, found = batch.tokens, slices[0][0].found
        for name, padding in (("input_ids", 0), ("position_ids", None), ("labels", -100)):
            row = torch.cat([getattr(part, name) for _, part in slices], dim=1)[0, found]
            assert torch.equal(row[:tokens], getattr(batch, name)[0])
            assert padding is None or set(row[tokens:].tolist()) <= {padding}
        assert sum(part.tokens for _, part in slices) == tokens
        assert sum(part.trained_tokens for _, part in slices) == batch.trained_tokens
        assert all(part.labels[0, part.learnt].ne(-100).all() for _, part in slices)


def test_what_every_rank_would_scale_otherwise_is_refused():
    config = toy_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    check_context_parallel(config, Layout(cp=1), 4096)
    check_context_parallel(config, Layout(cp=2), 512)
    with pytest.raises(UserError, match="dynamic") as error:
        check_context_parallel(config, Layout(cp=2), 513)
    assert "--max-length 512" in error.value.fix
    for family in ("llama", "gemma3", "gpt2"):
        check_context_parallel(toy_config(family), Layout(cp=2), 4096)
