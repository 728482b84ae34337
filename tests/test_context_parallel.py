"""Context parallelism equals one process: attention by itself, then whole training curves of several families."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from curves import Case, check_curve, curves, steps
from worlds import run_world

from swiftlite.config.layout import Layout
from swiftlite.errors import UserError
from swiftlite.models import attention
from swiftlite.models.toys import toy_config
from swiftlite.parallel.context import Context, check_context_parallel, divide_heads, slice_for_context

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
LENGTHS = [5, 17, 1, 30, 9]  # 62 tokens: over four ranks the second border lies inside a document, and two are padding


def attend(heads: Heads, context=None, part=slice(None), padding=0):
    """(outputs, gradients) of this part of the row, in fp64."""
    torch.manual_seed(0)
    total = sum(LENGTHS) + padding
    sizes = (heads.queries, 8), (heads.keys, 8), (heads.keys, 6), (heads.queries, 6)
    query, key, value, upstream = (torch.randn(1, count, total, dim, dtype=torch.float64) for count, dim in sizes)
    sinks = torch.randn(heads.queries, dtype=torch.float64) if heads.sinks else None
    inputs = [x[:, :, part].clone().requires_grad_() for x in (query, key, value)]
    inputs += [] if sinks is None else [sinks.requires_grad_()]
    lengths = LENGTHS + [padding] * (padding > 0)
    output, _ = attention.document_attention(
        torch.nn.Module(), *inputs[:3], None, scaling=0.3, sliding_window=heads.window, softcap=heads.softcap,
        s_aux=sinks, cu_seq_lens_q=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), max_length_q=30,
        context=context,
    )  # fmt: skip
    output.backward(upstream.transpose(1, 2)[:, part])
    return output.detach(), [x.grad for x in inputs]


def test_attention_over_slices_equals_attention_over_the_row(world):
    ranks = [rank["attention"] for rank in world]
    for index, heads in enumerate(ATTENTION):
        wanted, wanted_grads = attend(heads, padding=2)
        outputs, grads = zip(*(results[index] for results in ranks), strict=True)
        torch.testing.assert_close(torch.cat(outputs, 1), wanted, msg=lambda m, h=heads: f"{h}: {m}")
        for position, grad in enumerate(wanted_grads):
            parts = [rank[position] for rank in grads]
            whole = torch.stack(parts).sum(0) if position == 3 else torch.cat(parts, 2)
            torch.testing.assert_close(whole, grad, rtol=1e-6, atol=1e-6, msg=lambda m, h=heads: f"{h}: {m}")


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
    results = {"attention": []}
    for heads in ATTENTION:
        part = slice(rank * 16, (rank + 1) * 16)
        results["attention"].append(attend(heads, Context(dist.group.WORLD, 62), part, padding=2))
    results["slices"] = [replace(slice_for_context(b, dist.group.WORLD), context=None) for b in next(steps())]
    return results | curves(CASES, rank)


@pytest.fixture(scope="module")
def world():
    return run_world(4, body)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_curve_is_that_of_one_process(world, case):
    check_curve(case, world)


def test_the_slices_of_a_row_are_the_row(world):
    for batch, slices in zip(next(steps()), zip(*(rank["slices"] for rank in world), strict=True), strict=True):
        tokens, padding = batch.tokens, -batch.tokens % 4
        for name, end in (("input_ids", 0), ("position_ids", None), ("labels", -100)):
            row = torch.cat([getattr(part, name) for part in slices], dim=1)[0]
            assert torch.equal(row[:tokens], getattr(batch, name)[0])
            assert row[tokens:].tolist() == (list(range(padding)) if end is None else [end] * padding)
        assert sum(part.tokens for part in slices) == tokens
        assert sum(part.trained_tokens for part in slices) == batch.trained_tokens
        assert slices[0].cu_seqlens.tolist() == batch.cu_seqlens.tolist() + [tokens + padding] * (padding > 0)


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
