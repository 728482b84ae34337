"""A prompt that two answers share gives them what a copy for each gives: attention, models, context ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_preference_tokens import pair_sequence
from worlds import run_world

from swiftlite.config.layout import Layout
from swiftlite.data.batches import MicroBatch, collate
from swiftlite.data.order import Sequence
from swiftlite.data.tokens.preference_tokens import Preference, Tokens, lay_out_pair
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention import documents as attention
from swiftlite.models.checkpointing import set_activation_checkpointing
from swiftlite.models.toys import toy_config
from swiftlite.objectives.inputs import decoder_inputs
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.parallel.context import check_shared_prompts, slice_for_context

WIDE = "llama, wide heads"  # attention of its documents goes in blocks on a CPU
FAMILIES = ["llama", "qwen3", "gemma3", "gemma2", "mistral", "gpt2", WIDE]
SIZES = [(21, 9, 14), (1, 6, 3), (5, 12, 1), (13, 2, 2)]  # prompt, chosen, rejected; windows of 8 end inside prompts
LONGER = [(9, 12, 14), (120, 150, 110), (1, 140, 97)]


def sizes_of(family: str) -> list[tuple[int, int, int]]:
    return LONGER if family == WIDE else SIZES


def batches(*, share: bool, sizes: list[tuple[int, int, int]] = SIZES) -> MicroBatch:
    generator, pack = np.random.default_rng(3), []
    for number, (prompt, *answers) in enumerate(sizes):
        start = generator.integers(3, 500, prompt)
        both: list[Tokens] = []
        for answer in answers:
            ids = np.r_[start, generator.integers(3, 500, answer)].astype(np.int32)
            both.append((ids, np.arange(len(ids)) >= prompt))
        (ids, trained), layout = lay_out_pair(*both, prompt, 0.0, share=share)
        pack.append(Sequence(ids, trained, "a:1", layout, (0, number)))
    return collate([pack])


def model_of(family: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = toy_config(family.partition(",")[0])
    if family == WIDE:
        config.head_dim = 128
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).train()


def run(
    model: torch.nn.Module, batch: MicroBatch, sizes: list[tuple[int, int, int]] = SIZES
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(hidden states where a token is learnt, gradients of a loss made of them)."""
    model.zero_grad()
    learnt = batch.labels[0] != -100
    hidden = dissect(model).decoder(**decoder_inputs(batch)).last_hidden_state[0][learnt]
    upstream = torch.randn(sum(sum(size[1:]) for size in sizes), 64, generator=torch.Generator().manual_seed(2))
    if batch.context is not None:  # the part of it that is this rank's
        counts = [torch.zeros((), dtype=torch.int64) for _ in range(batch.context.size)]
        dist.all_gather(counts, torch.tensor(batch.trained_tokens))
        start = int(sum(counts[: batch.context.rank]))
        upstream = upstream[start : start + batch.trained_tokens]
    (hidden * upstream).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(got: tuple, wanted: tuple) -> None:
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert got[1].keys() == wanted[1].keys()
    largest = max(grad.abs().max() for grad in wanted[1].values())
    for name, grad in wanted[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-5, atol=float(1e-5 * largest), msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_are_those_of_two_documents(family):
    model, sizes = model_of(family), sizes_of(family)
    shared, apart = (batches(share=share, sizes=sizes) for share in (True, False))
    assert apart.tokens - shared.tokens == sum(size[0] - 1 for size in sizes)
    check(run(model, shared, sizes), run(model, apart, sizes))


@pytest.mark.parametrize("family", ["mamba2", "qwen3.5"])
def test_rows_of_their_own_begin_with_the_prompt(family):
    """Also beside answers whose prompt is one token, of which there is nothing to share."""
    model = model_of(family)
    model.set_attn_implementation("eager")
    scorer = TokenScorer(model, model, alone=True)
    shared, apart = (scorer(batches(share=share)).logprobs for share in (True, False))
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_that_are_recomputed_and_padding_change_nothing(family):
    model = model_of(family)
    wanted = run(model, batches(share=False))
    check(run(model, batches(share=True).padded([5, 3])), wanted)
    set_activation_checkpointing(model, dissect(model), "full")
    check(run(model, batches(share=True)), wanted)


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, None, False), (4, None, True), (6, 2.0, False)])
def test_attention_written_out(window, softcap, with_sinks):
    """Against one masked softmax over the whole row, in which the mask says who sees whom."""
    torch.manual_seed(0)
    batch = collate([[pair_sequence(9, 5, 3), pair_sequence(1, 4, 2), pair_sequence(4, 2, 6)]])
    total = batch.tokens
    query = torch.randn(1, 4, total, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, total, 8, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    got, _ = attention.document_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, softcap=softcap, s_aux=sinks,
        cu_seq_lens_q=batch.cu_seqlens, cu_seq_lens_k=batch.key_cu_seqlens, key_index=batch.key_index,
        max_length_q=batch.max_document,
    )  # fmt: skip
    segment = torch.arange(len(batch.cu_seqlens) - 1).repeat_interleave(torch.diff(batch.cu_seqlens))
    # P C R | C R of a prompt of one token, which leaves none to share | P C R
    prompt_of = torch.tensor([-1, 0, 0, -1, -1, -1, 5, 5])
    position = batch.position_ids[0]
    distance = position[:, None] - position[None]
    seen = (segment[None] == segment[:, None]) | (segment[None] == prompt_of[segment][:, None])
    seen &= (distance >= 0) & (distance < (window or total))
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, total, 1)], -1)
    wanted = (scores.softmax(-1)[..., :total] @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


# ---- context ranks ---------------------------------------------------------------------------------------------------

CONTEXT_FAMILIES = ["llama", "gemma3", "gpt2", WIDE]


def body(rank: int) -> dict[str, object]:
    whole, found = batches(share=True), {}
    batch = slice_for_context(whole, dist.group.WORLD)
    found["owner"] = batch.owner
    found["rows"] = len(batch.completions), batch.key_index.tolist(), batch.key_cu_seqlens.tolist(), batch.tokens
    for family in CONTEXT_FAMILIES:
        sizes = sizes_of(family)
        part = slice_for_context(batches(share=True, sizes=sizes), dist.group.WORLD)
        found[family] = run(model_of(family), part, sizes)
    heads = torch.randn(1, 1, batch.input_ids.shape[1], 8)
    try:
        attention.document_attention(
            torch.nn.Module(), heads, heads, heads, None, cu_seq_lens_q=batch.cu_seqlens, key_index=batch.key_index,
            cu_seq_lens_k=batch.key_cu_seqlens, max_length_q=batch.max_document,
            context=batch.context,
        )  # fmt: skip
    except UserError as error:
        found["refused"] = f"{error.what} {error.fix}"
    return found


@pytest.fixture(scope="module")
def world():
    return run_world(2, body)


@pytest.mark.parametrize("family", CONTEXT_FAMILIES)
def test_two_ranks_that_divide_the_row_compute_the_same(world, family):
    hidden, grads = zip(*(rank[family] for rank in world), strict=True)
    assert all(len(part) for part in hidden)
    summed = {name: grads[0][name] + grads[1][name] for name in grads[0]}
    check(
        (torch.cat(hidden), summed),
        run(model_of(family), batches(share=False, sizes=sizes_of(family)), sizes_of(family)),
    )


def test_each_rank_knows_the_owners_of_its_labels_and_the_keys_of_the_row(world):
    whole = batches(share=True)
    assert torch.equal(torch.cat([rank["owner"] for rank in world]), whole.owner)
    assert whole.tokens % 2 == 1  # so there is a document of one token for padding
    for completions, index, borders, _ in (rank["rows"] for rank in world):
        assert completions == 8
        assert index == [*whole.key_index.tolist(), whole.tokens]
        assert borders == [*whole.key_cu_seqlens.tolist(), len(whole.key_index) + 1]
    assert sum(rank["rows"][3] for rank in world) == whole.tokens


def test_fewer_heads_than_ranks_are_refused(world):
    for rank in world:
        assert "1 of 2" in rank["refused"]
        assert "--no-share-prompt" in rank["refused"]


def test_a_model_without_attention_is_not_refused_for_its_heads():
    """`--no-share-prompt` would not help: its documents cannot share a row, which is told once it is built."""
    check_shared_prompts(toy_config("mamba2"), Layout(cp=2), 64)
    with pytest.raises(UserError, match="4 of 8"):
        check_shared_prompts(toy_config("llama"), Layout(cp=8), 64)


def test_a_layout_without_a_shared_prompt_needs_no_keys():
    sequence = pair_sequence(3, 2, 1, share=False)
    assert sequence.preference == Preference(0, 5)
    assert collate([[sequence]]).key_index is None
