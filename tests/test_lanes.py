"""Micro-batches side by side in threads: the same training as one after another, the same numbers every time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_parity import metrics, settings, train_alone

from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.data.order import Sequence
from swiftlite.models.kernels.products import rounded
from swiftlite.models.toys import toy_judged, toy_pairs
from swiftlite.training import divide, lanes, share
from swiftlite.training.balance import fill, spread
from swiftlite.training.lanes import Lanes, cut_step
from swiftlite.training.share import balance

TOKENS = 64
FULL, LORA = {"tuner": "full"}, {"tuner": "lora", "lora_rank": 4, "learning_rate": 1e-2}


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


@pytest.fixture
def train(tmp_path, tiny_model, write_rows, chat_rows, monkeypatch, several_threads):
    rows = {"sft": chat_rows, "dpo": toy_pairs(24), "kto": toy_judged(24), "rm": toy_pairs(24)}

    def run(out, lanes_at_most, method="sft", family="llama", **more):
        data = write_rows(f"{method}.jsonl", rows[method])
        chosen = []

        def cut(*arguments):
            tokens, count = cut_step(*arguments)
            chosen.append(min(lanes_at_most, count))
            return tokens, chosen[-1]

        monkeypatch.setattr(divide, "cut_step", cut)
        monkeypatch.setattr(lanes, "LANE_TOKENS", TOKENS)
        values = settings(tmp_path, tiny_model(family), data, output_dir=str(tmp_path / out), micro_batch_size=4)
        train_alone(resolve_config(method, **(values | more)))
        return chosen[0], metrics(tmp_path / out)

    return run


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", FULL),
        ("llama-tied", FULL),
        ("gemma2", FULL | {"activation_checkpointing": "full"}),
        ("qwen3-moe", FULL),
        ("qwen3", LORA),
    ],
)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_steps_equal_one_lane(train, method, family, more):
    one, expected = train("one", 1, method, family, **more)
    several, found = train("several", 3, method, family, **more)
    assert (one, several) == (1, 3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["tokens"] == theirs["tokens"]


@pytest.mark.parametrize("method", ["kto", "rm"])
def test_other_methods_too(train, method):
    _, expected = train("one", 1, method)
    several, found = train("several", 3, method)
    assert several == 3
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def test_the_same_bits_every_time_and_after_a_resume(train, tmp_path):
    more = {"save_steps": 2, "eval_fraction": 0.2}
    curves = [[(row["loss"], row["grad_norm"]) for row in train(out, 3, **more)[1]] for out in ("a", "b")]
    assert curves[0] == curves[1]
    train("c", 3, max_steps=2, **more)
    checkpoint = tmp_path / "c" / "checkpoints" / "step-00000002"
    _, rows = train("d", 3, resume=str(checkpoint), **more)
    assert [(row["loss"], row["grad_norm"]) for row in rows] == curves[0][2:]
    files = [tmp_path / out / "model" / "model.safetensors" for out in ("a", "d")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_lane_that_fails_ends_the_step_once_all_have_ended(several_threads):
    running = []

    def work(_module, number):
        if number == 1:
            raise RuntimeError("no")
        running.append(threading.current_thread())

    with pytest.raises(RuntimeError, match="no"):
        Lanes(torch.nn.Linear(2, 2), 3).map(work, [1] * 6)
    assert len(running) == 5  # numbers 0 and 3, 2 and 5, and 4 before 1


def test_lanes_have_equally_much_to_do():
    sizes = [600, 220, 210, 200]
    assert spread(range(4), 2, sizes.__getitem__) == [[0], [1, 2, 3]]
    assert spread([0], 3, float) == [[0], [], []]


def test_a_step_that_cannot_be_shared_out_takes_all_threads(several_threads):
    def work(_module, number):
        return number, torch.get_num_threads(), threading.current_thread()

    run, here = Lanes(torch.nn.Linear(2, 2), 3), threading.current_thread()
    assert run.map(work, [900]) == [(0, 3, here)]
    assert run.map(work, [900, 500, 500]) == [(0, 3, here), (1, 3, here), (2, 3, here)]
    assert {threads for _, threads, _ in run.map(work, [500, 500, 500])} == {1}


def test_gradients_meet_in_the_module_and_weights_are_one(several_threads):
    module = torch.nn.Linear(4, 1)
    rows = torch.randn(5, 4)
    run = Lanes(module, 2)
    for _ in range(2):
        module.zero_grad()
        run.map(lambda twin, number: twin(rows[number]).sum().backward(), [2, 1, 1, 1, 1])
        assert torch.allclose(module.weight.grad, rows.sum(0)[None])
        with torch.no_grad():
            module.weight += 1
    assert run._modules[1].weight.data_ptr() == module.weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "tokens", "count"),
    [
        ({}, 512, 3),
        ({"micro_batch_size": 2, "max_length": 512}, 512, 2),
        ({"micro_batch_size": 1, "max_length": 512}, None, 1),
        ({"micro_batch_size": 1, "max_length": 600}, 512, 1),
        ({"trained": 10**9}, 512, 1),
        ({"trained": 40 * 2**20}, 512, 2),
        ({"kept": 600_000}, 512, 1),
        ({"compile": True}, None, 1),
        ({"tuner": "lora", "lora_dropout": 0.1}, None, 1),
        ({"world": 2}, None, 1),
        ({"device": "cuda"}, None, 1),
        ({"attention_dropout": 0.1}, None, 1),
        ({"classifier_dropout": 0.1, "summary_first_dropout": 0.1}, 512, 3),  # as Pythia and GPT-2 have it
        ({"routed": True}, None, 1),
    ],
)
def test_how_steps_are_cut_and_how_many_lanes_there_are(several_threads, change, tokens, count):
    values = {
        "micro_batch_size": 4,
        "max_length": 1024,
        "compile": False,
        "optimizer_in_backward": False,
        "tuner": "full",
        "lora_dropout": 0.0,
    }
    values |= change
    config = SimpleNamespace(**values)
    layout = Layout() if "world" not in change else Layout(dp_shard=change["world"])
    mesh = SimpleNamespace(device=torch.device(change.get("device", "cpu")), layout=layout)
    facts = {key: value for key, value in change.items() if key.endswith("dropout") and key != "lora_dropout"}
    facts |= {"output_router_logits": change.get("routed", False)}
    text = SimpleNamespace(to_dict=lambda: facts)
    base = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text), modules=lambda: [torch.nn.Dropout(values["lora_dropout"])]
    )
    assert cut_step(config, mesh, base, change.get("trained", 1000), change.get("kept", 100_000)) == (tokens, count)


def documents(*lengths):
    return [
        Sequence(np.arange(length, dtype=np.int32), np.ones(length, dtype=np.bool_), f"{length}") for length in lengths
    ]


def cost(pack):
    return sum(len(document.input_ids) + len(document.input_ids) ** 2 / 1000 for document in pack)


def test_packs_of_equal_cost_for_all_lanes():
    packs = [documents(500, 20, 480), documents(300, 300, 300, 100), documents(64), documents(900)]
    balanced = balance(packs, 512, 2, cost)
    assert [[d.where for d in pack] for pack in balanced[:3]] == [["900"], ["500"], ["480"]]
    assert len(balanced) == 6 and sorted(balanced, key=cost, reverse=True) == balanced
    assert max(map(cost, balanced[3:])) < 1.4 * min(map(cost, balanced[3:]))
    assert sorted(d.where for pack in balanced for d in pack) == sorted(d.where for pack in packs for d in pack)
    assert balance(packs, 512, 2, cost) == balanced


def test_few_documents_make_few_packs():
    assert [len(pack) for pack in balance([documents(5, 6)], 512, 4, cost)] == [1, 1]


def test_data_ranks_share_the_cost_not_the_tokens():
    long, short = documents(1000), documents(*[50] * 20)
    ranks = [share.share_step([long, short, short, long], rank, 2, 1, None, cost) for rank in range(2)]
    documents_of = [[len(batch.cu_seqlens) - 1 for batch in mine.micro_batches] for mine in ranks]
    assert documents_of == [[1, 20], [1, 20]]  # what meets in a collective is alike


def test_rows_of_round_lengths_leave_little_to_fill_up():
    lengths = np.random.default_rng(0).lognormal(np.log(118), 0.7, 50).astype(int).tolist() + [700]
    packs = [documents(*lengths[start : start + 5]) for start in range(0, len(lengths), 5)]
    plain, filled = balance(packs, 512, 2, cost), balance(packs, 512, 2, cost, rounded)
    tokens = sum(lengths)
    padded = [sum(rounded(sum(len(d.input_ids) for d in pack)) for pack in each) for each in (plain, filled)]
    assert padded[1] / tokens < 1.03 < padded[0] / tokens
    assert sorted(len(d.input_ids) for pack in filled for d in pack) == sorted(lengths)
    busiest, other = sorted(sum(map(cost, lane)) for lane in spread(filled, 2, cost))
    assert other < 1.05 * busiest and sorted(filled, key=cost, reverse=True) == filled
    assert balance(packs, 512, 2, cost, rounded) == filled


def test_few_documents_are_not_put_into_one_row():
    assert [len(pack) for pack in balance([documents(40, 60)], 512, 2, cost, rounded)] == [1, 1]


def test_lists_are_filled_as_far_as_can_be():
    assert fill([6, 5, 4, 3, 9], lambda _first: 10, int) == [[9], [6, 4], [5, 3]]
    assert fill([12, 1, 1], lambda first: max(10, first), int) == [[12], [1, 1]]
    assert fill([], lambda _first: 10, int) == []


def test_micro_batches_of_a_mean_are_alike_in_every_layout():
    packs = [documents(1000), documents(*[50] * 20), documents(300, 20), documents(400, 40)]
    flops = SimpleNamespace(work=lambda length, trained, device: length)

    def rows(layout):
        ranks, device = range(layout.data_ranks), torch.device("cpu")
        meshes = [SimpleNamespace(layout=layout, data_rank=rank, device=device) for rank in ranks]
        found = [share.Sharing(mesh, 2, flops, alike=True)(packs).micro_batches for mesh in meshes]
        return sorted(batch.tokens for mine in found for batch in mine if batch.tokens)

    assert rows(Layout()) == rows(Layout(dp_shard=2)) == rows(Layout(cp=2)) == [760, 1000, 1000]
