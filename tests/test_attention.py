"""Packed documents equal documents one by one: attention variants, and the whole model for each family."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from swiftlite.data.batches import collate
from swiftlite.data.order import Sequence
from swiftlite.errors import UserError
from swiftlite.models import attention, attention_blocks, attention_cpu
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention_cpu import attend_by_document
from swiftlite.models.last_layer import spare_last_mlp
from swiftlite.models.toys import toy_config
from swiftlite.models.tuners import set_activation_checkpointing
from swiftlite.objectives.scorer import TokenScorer, decoder_inputs
from swiftlite.objectives.supervised import supervised_loss

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "qwen3-moe", "gpt2"]
LENGTHS = [5, 17, 30, 1, 9]


def naive(query, key, value, scaling, window=None, softcap=None, sinks=None):
    """Masked softmax attention of one document in fp64."""
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    length = query.shape[-2]
    for i in range(length):
        for j in range(length):
            if j > i or (window and i - j >= window):
                scores[..., i, j] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, length, 1)], -1)
    return (scores.softmax(-1)[..., :length] @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_each_document_attends_to_itself_only(window, softcap, with_sinks):
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query = torch.randn(1, 4, total, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, total, 8, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    borders = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    got, _ = attention.document_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, softcap=softcap, s_aux=sinks,
        cu_seq_lens_q=borders, max_length_q=max(LENGTHS),
    )  # fmt: skip
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    pieces = zip(query.split(LENGTHS, 2), key.split(LENGTHS, 2), value.split(LENGTHS, 2), strict=True)
    wanted = torch.cat([naive(q, k, v, 0.3, window, softcap, sinks) for q, k, v in pieces], 1)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


# On both sides of every length at which a document is computed in another way.
WRITTEN_OUT = [95, 96, 128, 129, 256, 1, 257, 512, 513, 544, 545]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 136), (4, 1, 128)])
def test_documents_of_any_length_attend_alike(heads, kv_heads, size):
    torch.manual_seed(0)
    total = sum(WRITTEN_OUT)
    shapes = [(1, total, count, size) for count in (heads, kv_heads, kv_heads)]  # as projections lay them out
    row = [torch.randn(shape, dtype=torch.float64).transpose(1, 2).requires_grad_() for shape in shapes]
    upstream = torch.randn(1, total, heads, size, dtype=torch.float64)
    groups = heads // kv_heads
    query, key, value = row[0], row[1].repeat_interleave(groups, 1), row[2].repeat_interleave(groups, 1)
    pieces = zip(*(each.split(WRITTEN_OUT, 2) for each in (query, key, value)), strict=True)
    wanted = [F.scaled_dot_product_attention(*piece, is_causal=True).transpose(1, 2) for piece in pieces]
    wanted = torch.cat(wanted, 1)
    expected = torch.autograd.grad(wanted, row, upstream)
    single = [each.detach().float().requires_grad_() for each in row]
    got = attend_by_document(*single, WRITTEN_OUT, None)
    found = [got, *torch.autograd.grad(got, single, upstream.float())]
    for single_precision, right in zip(found, [wanted, *expected], strict=True):
        assert (single_precision.double() - right).norm() < 1e-6 * right.norm()  # PyTorch's kernel: 5e-7
    with torch.no_grad():
        assert torch.equal(attend_by_document(*single, WRITTEN_OUT, None), got)


@pytest.mark.parametrize(("size", "longest"), [(32, 994), (64, 351), (128, 124)])
def test_gradients_of_short_documents_in_16_bits_are_taken_in_fp32(size, longest, monkeypatch):
    lengths, types, kernel = [longest, longest + 1, 7], [], attention_cpu._backward
    monkeypatch.setattr(attention_cpu, "_backward", lambda *a, **k: types.append(a[0].dtype) or kernel(*a, **k))
    torch.manual_seed(0)
    rows = [torch.randn(1, sum(lengths), heads, size).bfloat16().transpose(1, 2) for heads in (4, 2, 2)]
    upstream, found = torch.randn(1, sum(lengths), 4, size).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float64):
        row = [each.to(dtype).requires_grad_() for each in rows]
        got = attend_by_document(*row, lengths, None)
        found.append([got, *torch.autograd.grad(got, row, upstream.to(dtype))])
    assert types == [torch.float32, torch.bfloat16, torch.float32, *[torch.float64] * 3]
    for half, right in zip(*found, strict=True):
        assert half.dtype == torch.bfloat16 and (half - right).norm() < 1e-2 * right.norm()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_attention_keeps_is_no_other_with_checkpointing(mode, monkeypatch):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = toy_config("llama", 2)
    config.head_dim, config._attn_implementation = 128, attention.register()
    model = AutoModelForCausalLM.from_config(config).float().train()
    lengths = [130, 40, 300]
    sequences = [Sequence(np.arange(n, dtype=np.int32) % 60, np.ones(n, dtype=np.bool_), "") for n in lengths]
    inputs = decoder_inputs(collate([sequences]))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.model(**inputs).last_hidden_state.square().sum().backward()
        return [parameter.grad for parameter in model.model.parameters()]

    with monkeypatch.context() as patch:
        patch.setattr(attention_blocks, "SHORTEST", 10**9)
        usual = gradients()
    set_activation_checkpointing(model, dissect(model), mode)
    for found, right in zip(gradients(), usual, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


def test_a_model_that_loses_the_borders_is_refused():
    query = torch.randn(1, 2, 6, 8)
    with pytest.raises(UserError, match="packed documents"):
        attention.document_attention(torch.nn.Module(), query, query, query, None)


def lay_out(documents, untrained=2):
    """A micro-batch by hand: documents end to end, the first `untrained` tokens of each not trained."""
    ids = torch.cat(documents)[None]
    labels, positions = torch.full_like(ids, -100), []
    start = 0
    for document in documents:
        n = len(document)
        labels[0, start + untrained - 1 : start + n - 1] = document[untrained:]
        positions.append(torch.arange(n))
        start += n
    lengths = [len(document) for document in documents]
    return SimpleNamespace(
        input_ids=ids,
        labels=labels,
        learnt=(labels[0] != -100).nonzero()[:, 0],
        position_ids=torch.cat(positions)[None],
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        max_document=max(lengths),
        context=None,
        key_index=None,
    )


def build(family, implementation):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(toy_config(family), attn_implementation=implementation).train()


def check_one_by_one(scorer, reference, documents, atol):
    """Loss and gradients of a packed row are those of plain transformers, one document at a time."""
    batch = lay_out(documents)
    tokens = int((batch.labels != -100).sum())
    loss = supervised_loss(scorer(batch).logprobs, tokens)
    loss.backward()
    total = torch.zeros(())
    for document in documents:
        alone = lay_out([document])
        logits = reference(input_ids=alone.input_ids, use_cache=False).logits[0].float()
        total = total + torch.nn.functional.cross_entropy(logits, alone.labels[0], reduction="sum") / tokens
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    for (name, ours), theirs in zip(scorer.base.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize(("spared", "checkpointing"), [(False, "none"), (True, "full"), (True, "offload")])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_loss_and_gradients_equal_the_hf_model_one_by_one(family, spared, checkpointing):
    torch.manual_seed(0)
    documents = [torch.randint(3, 500, (n,)) for n in LENGTHS]
    model, reference = build(family, attention.register()), build(family, "eager")
    reference.load_state_dict(model.state_dict())
    scorer, anatomy = TokenScorer(model, model), dissect(model)
    if spared:
        spare_last_mlp(anatomy.layers[-1])
    set_activation_checkpointing(model, anatomy, checkpointing)
    scorer.check()
    check_one_by_one(scorer, reference, documents, atol=1e-6)


def test_the_last_mlp_runs_where_something_is_learnt():
    model = build("llama", attention.register())
    layers, rows = dissect(model).layers, []
    spare_last_mlp(layers[-1])
    for layer in layers:
        layer.mlp.up_proj.register_forward_hook(lambda _module, args, _output: rows.append(args[0].shape[1]))
    batch = lay_out([torch.randint(3, 500, (n,)) for n in (4, 9)], untrained=3)
    TokenScorer(model, model)(batch)
    assert rows == [13, 1 + 6]


def test_an_unknown_output_head_is_refused():
    model = build("llama", attention.register())
    forward = type(model).forward

    class Scaled(type(model)):
        def forward(self, *args, **kwargs):
            outputs = forward(self, *args, **kwargs)
            outputs.logits = outputs.logits * 7.0
            return outputs

    model.__class__ = Scaled
    with pytest.raises(UserError, match="logits"):
        TokenScorer(model, model).check()


def test_a_head_with_more_weights_is_refused_where_they_do_not_show_yet():
    model = build("llama", attention.register())
    model.lm_head.logit_scale = torch.nn.Parameter(torch.ones(512))
    with pytest.raises(UserError, match="output head with weights that swiftlite does not know: logit_scale"):
        TokenScorer(model, model)


@pytest.mark.parametrize(
    ("sizes", "dtype", "wanted"),
    [
        ((64, 64), torch.bfloat16, True),
        ((256, 256), torch.float16, True),
        ((192, 128), torch.bfloat16, False),
        ((512, 512), torch.bfloat16, False),
        ((64, 64), torch.float32, False),
    ],
)
def test_heads_that_flash_attention_takes(sizes, dtype, wanted):
    query, value = (SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 8, size)) for size in sizes)
    assert attention._serves_varlen(query, value) is wanted


def test_borders_are_read_once(monkeypatch):
    """Not for each layer."""
    borders, read = torch.tensor([0, 3, 3, 7], dtype=torch.int32), []
    diff = torch.diff
    monkeypatch.setattr(torch, "diff", lambda tensor: read.append(tensor) or diff(tensor))
    assert [attention.lengths_between(borders) for _ in range(2)] == [[3, 0, 4]] * 2
    assert len(read) == 1
    assert attention.lengths_between(borders.clone()) == [3, 0, 4] and len(read) == 2
