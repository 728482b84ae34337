"""Packed documents equal documents one by one: attention variants, and the whole model for each family."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from swiftlite.data.batches import collate
from swiftlite.data.order import Sequence
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention import blocks as attention_blocks
from swiftlite.models.attention import cpu as attention_cpu
from swiftlite.models.attention import documents as attention
from swiftlite.models.attention import varlen as attention_varlen
from swiftlite.models.attention import written as attention_written
from swiftlite.models.attention.cpu import attend_by_document
from swiftlite.models.attention.varlen import serves_varlen
from swiftlite.models.checkpointing import set_activation_checkpointing
from swiftlite.models.kernels.last_layer import spare_last_mlp
from swiftlite.models.toys import toy_config
from swiftlite.objectives.inputs import decoder_inputs
from swiftlite.objectives.scorer import TokenScorer
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
    got = attend_by_document(*single, WRITTEN_OUT, WRITTEN_OUT, None)
    found = [got, *torch.autograd.grad(got, single, upstream.float())]
    for single_precision, right in zip(found, [wanted, *expected], strict=True):
        assert (single_precision.double() - right).norm() < 1e-6 * right.norm()  # PyTorch's kernel: 5e-7
    with torch.no_grad():
        assert torch.equal(attend_by_document(*single, WRITTEN_OUT, WRITTEN_OUT, None), got)


def written_out(row, queries, keys, scaling, window, sinks, softcap=None):
    """Attention of the last tokens of documents as it is written in the papers, in the tensors' own precision."""
    groups, outputs = row[0].shape[1] // row[1].shape[1], []
    key, value = (each.repeat_interleave(groups, 1).split(keys, 2) for each in row[1:])
    for q, k, v in zip(row[0].split(queries, 2), key, value, strict=True):
        place = torch.arange(k.shape[2])
        distance = place[k.shape[2] - q.shape[2] :, None] - place
        unseen = (distance < 0) | (distance >= (window or len(place)))
        scores = q @ k.mT * scaling
        scores = (softcap * torch.tanh(scores / softcap) if softcap else scores).masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        outputs.append((scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2))
    return torch.cat(outputs, 1)


def row_of_documents(queries, keys, dtype=torch.float64, width=16):
    torch.manual_seed(0)
    shapes = [(1, sum(queries), 4, 16), (1, sum(keys), 2, 16), (1, sum(keys), 2, width)]
    row = [torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    return row, torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_(), torch.randn(1, sum(queries), 4, width)


# Around the window and the tiles behind it; then documents whose first tokens have no queries, or none has.
TILE = attention_cpu.TILE
assert attention_written.BLOCK == 2 * TILE
WINDOWED = [1, 39, 40, 41, 40 + TILE, 41 + TILE, 3 * TILE]
GOING_ON = [3, 0, 2 * TILE + 9, 1], [10, 44, 2 * TILE + 90, 1]
AT_A_BORDER = [0, 9, 30], [44, 9, 30]  # a slice of a row that begins where a document does


@pytest.mark.parametrize("window", [None, 40, 2, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(WINDOWED, WINDOWED), GOING_ON, AT_A_BORDER])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_windows_sinks_and_soft_caps(window, softcap, with_sinks, queries, keys, dtype, bound):
    row, sinks, upstream = row_of_documents(queries, keys, dtype)
    inputs = [*row, sinks] if with_sinks else row
    borders = [torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in (queries, keys)]
    apart = queries != keys
    got, _ = attention.document_attention(
        torch.nn.Module(), *row, None, scaling=0.3, sliding_window=window, s_aux=sinks if with_sinks else None,
        softcap=softcap, cu_seq_lens_q=borders[0], max_length_q=max(keys), cu_seq_lens_k=borders[1] if apart else None,
        key_index=torch.arange(sum(keys)) if apart else None,
    )  # fmt: skip
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wanted = written_out(exact[:3], queries, keys, 0.3, window, exact[3] if with_sinks else None, softcap)
    found = [got, *torch.autograd.grad(got, inputs, upstream.to(dtype))]
    for ours, right in zip(found, [wanted, *torch.autograd.grad(wanted, exact, upstream.double())], strict=True):
        assert ours.dtype == dtype and (ours - right).norm() < bound * right.norm()


@pytest.mark.parametrize("window", [None, 150])
def test_documents_behind_a_shared_prompt_find_their_own_keys(window):
    """Also those that are computed in blocks: their keys lie further back in the row than their queries do."""
    queries, keys = [7, 130, 20, 512, 96], [57, 130, 150, 512, 96]
    torch.manual_seed(0)
    shapes = [(1, sum(queries), 4, 128), (1, sum(keys), 2, 128), (1, sum(keys), 2, 128)]
    exact = [torch.randn(shape, dtype=torch.float64).transpose(1, 2).requires_grad_() for shape in shapes]
    upstream = torch.randn(1, sum(queries), 4, 128, dtype=torch.float64)
    wanted = written_out(exact, queries, keys, 128**-0.5, window, None)
    row = [each.detach().float().requires_grad_() for each in exact]
    got = attend_by_document(*row, queries, keys, None, window)
    found = [got, *torch.autograd.grad(got, row, upstream.float())]
    for ours, right in zip(found, [wanted, *torch.autograd.grad(wanted, exact, upstream)], strict=True):
        assert (ours - right).norm() < 1e-6 * right.norm()


def test_dropped_weights_are_those_of_one_block():
    row, sinks, _ = row_of_documents([300], [300])
    wanted, got = [], []
    for into, softcap in ((wanted, 1e6), (got, None)):  # a cap that changes nothing asks for what is written out
        torch.manual_seed(3)
        borders = torch.tensor([0, 300], dtype=torch.int32)
        into.append(
            attention.document_attention(
                torch.nn.Module(), *row, None, scaling=0.3, s_aux=sinks, softcap=softcap, dropout=0.5,
                cu_seq_lens_q=borders, max_length_q=300,
            )[0]
        )  # fmt: skip
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got[0], written_out(row, [300], [300], 0.3, None, sinks), atol=1e-2)


def test_a_window_costs_no_more_than_its_tokens():
    """Nothing of a long document is computed between tokens that do not see each other."""
    tiles = list(attention_cpu._tiles([4000], [4000], 100, torch.float32))
    assert sum((tile.queries.stop - tile.queries.start) * tile.length for tile in tiles) < 4000 * (100 + 128)
    assert tiles[1].mask.untyped_storage().data_ptr() == tiles[-1].mask.untyped_storage().data_ptr()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_narrower_than_keys(softcap, with_sinks):
    row, sinks, upstream = row_of_documents(WINDOWED, WINDOWED, width=11)
    inputs = [*row, sinks] if with_sinks else row
    got, _ = attention.document_attention(
        torch.nn.Module(), *row, None, scaling=0.3, sliding_window=40, s_aux=sinks if with_sinks else None,
        softcap=softcap, cu_seq_lens_q=torch.tensor([0, *torch.tensor(WINDOWED).cumsum(0)]), max_length_q=max(WINDOWED),
    )  # fmt: skip
    wanted = written_out(row, WINDOWED, WINDOWED, 0.3, 40, sinks if with_sinks else None, softcap)
    found = [got, *torch.autograd.grad(got, inputs, upstream.double())]
    for ours, right in zip(found, [wanted, *torch.autograd.grad(wanted, inputs, upstream.double())], strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("window", "width"), [(None, 16), (3, 16), (None, 11)])
def test_sinks_beside_the_kernel_of_a_gpu(window, width, monkeypatch):
    """The kernel's place is taken by one that takes and gives the same."""
    lengths = [5, 1, 9]
    row, sinks, upstream = row_of_documents(lengths, lengths, width=width)
    borders = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    exact = [each.detach().requires_grad_() for each in (*row, sinks)]
    wanted = written_out(exact[:3], lengths, lengths, 0.3, window, exact[3])

    def scores(query, key, queries, keys, sides):
        assert sides == (-1 if window is None else window - 1, 0) and torch.equal(queries, borders)
        place = torch.arange(len(query))
        document, distance = torch.bucketize(place, keys, right=True), place[:, None] - place
        seen = (document[:, None] == document) & (distance >= 0) & (distance < (window or 100))
        found = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(len(query[0]) // len(key[0]), 1)) * 0.3
        return found.masked_fill(~seen, -torch.inf)

    def kernel(query, key, value, queries, keys, longest_q, longest_k, *, return_aux, scale, window_size, **_):
        found = scores(query, key, queries, keys, window_size)
        value = value.repeat_interleave(len(query[0]) // len(value[0]), 1)
        assert (longest_q, longest_k, scale) == (9, 9, 0.3) and return_aux.lse and query.shape[2] == value.shape[2]
        return torch.einsum("hqk,khd->qhd", found.softmax(-1), value), found.logsumexp(-1)

    def gradients(upstream, query, key, value, output, logsums, queries, keys, _q, _k, dropout, causal, *_, **options):
        left, right = options["window_size_left"], options["window_size_right"]
        assert dropout == 0 and causal == (window is None)
        groups = len(query[0]) // len(key[0])
        whole_key, whole_value = (each.repeat_interleave(groups, 1) for each in (key, value))
        weights = (scores(query, key, queries, keys, (left, right)) - logsums[..., None]).exp()
        arrived = torch.einsum("qhd,khd->hqk", upstream, whole_value) - (upstream * output).sum(-1).T[..., None]
        arrived = arrived * weights * options["scale"]
        found = torch.einsum("hqk,qhd->khd", arrived, query), torch.einsum("hqk,qhd->khd", weights, upstream)
        return torch.einsum("hqk,khd->qhd", arrived, whole_key), *(f.unflatten(1, (-1, groups)).sum(2) for f in found)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(attention_varlen, "_backward", gradients)
    got = attention_varlen.attend_by_varlen(*row, borders, borders, sinks, longest=9, scaling=0.3, window=window)
    found = [got, *torch.autograd.grad(got, (*row, sinks), upstream.double())]
    for ours, right in zip(found, [wanted, *torch.autograd.grad(wanted, exact, upstream.double())], strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "window", "by_varlen"),
    [((256, 256, 256), None, False), ((512,), None, False), ((256, 512), None, True), ((100, 100), None, True),
     ((256, 256), 16, True)],
)  # fmt: skip
def test_documents_of_one_length_are_a_batch(lengths, window, by_varlen, monkeypatch):
    asked = []
    monkeypatch.setattr(attention_varlen, "_attend", lambda query, *_: asked.append(query.shape) or (query, None))
    torch.manual_seed(0)
    shapes = [(4, 8), (2, 8), (2, 6)]  # fewer and narrower values
    row = [torch.randn(1, heads, sum(lengths), size, dtype=torch.double, requires_grad=True) for heads, size in shapes]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    options = {"longest": max(lengths), "scaling": 0.3, "window": window}
    got = attention_varlen.attend_by_varlen(*row, borders, borders, None, **options)
    assert bool(asked) is by_varlen
    if not by_varlen:
        wanted = attend_by_document(*row, list(lengths), list(lengths), 0.3)
        found = [[each, *torch.autograd.grad(each, row, torch.ones_like(wanted))] for each in (got, wanted)]
        for ours, right in zip(*found, strict=True):
            torch.testing.assert_close(ours, right)


@pytest.mark.parametrize(("size", "longest"), [(32, 994), (64, 351), (128, 124)])
def test_gradients_of_short_documents_in_16_bits_are_taken_in_fp32(size, longest, monkeypatch):
    lengths, types, kernel = [longest, longest + 1, 7], [], attention_cpu._backward
    monkeypatch.setattr(attention_cpu, "_backward", lambda *a, **k: types.append(a[0].dtype) or kernel(*a, **k))
    torch.manual_seed(0)
    rows = [torch.randn(1, sum(lengths), heads, size).bfloat16().transpose(1, 2) for heads in (4, 2, 2)]
    upstream, found = torch.randn(1, sum(lengths), 4, size).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float64):
        row = [each.to(dtype).requires_grad_() for each in rows]
        got = attend_by_document(*row, lengths, lengths, None)
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
        noise=None,
        taught=None,
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


def test_logits_are_compared_where_what_becomes_of_them_could_not_be_found():
    model = build("llama", attention.register())
    forward = type(model).forward

    class Bent(type(model)):
        def forward(self, input_ids, position_ids=None, **kwargs):
            outputs = forward(self, input_ids=input_ids, position_ids=position_ids, **kwargs)
            outputs.logits = outputs.logits + outputs.logits.sin()
            if not input_ids.any():
                raise RuntimeError("these tokens cannot be run")
            return outputs

    model.__class__ = Bent
    scorer = TokenScorer(model, model)
    with pytest.raises(UserError, match="Bent turns hidden states into logits in a way"):
        scorer.check()


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
        ((192, 128), torch.bfloat16, True),
        ((128, 192), torch.bfloat16, False),
        ((512, 512), torch.bfloat16, False),
        ((64, 64), torch.float32, False),
        ((100, 100), torch.bfloat16, False),  # no multiple of 8
    ],
)
def test_heads_that_flash_attention_takes(monkeypatch, sizes, dtype, wanted):
    query, value = (
        SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 8, size), device="cuda:0") for size in sizes
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert serves_varlen(query, value) is wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not serves_varlen(query, value)


def test_borders_are_read_once(monkeypatch):
    """Not for each layer."""
    borders, read = torch.tensor([0, 3, 3, 7], dtype=torch.int32), []
    diff = torch.diff
    monkeypatch.setattr(torch, "diff", lambda tensor: read.append(tensor) or diff(tensor))
    assert [attention.lengths_between(borders) for _ in range(2)] == [[3, 0, 4]] * 2
    assert len(read) == 1
    assert attention.lengths_between(borders.clone()) == [3, 0, 4] and len(read) == 2
