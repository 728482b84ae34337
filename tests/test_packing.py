"""Packs are full, whole and isolated; their order is a function of (seed, epoch, step)."""

import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlite.data.batches import collate
from swiftlite.data.order import BatchPlan, Part, PlanOptions, Sequence, permutation
from swiftlite.data.packing import best_fit_decreasing
from swiftlite.data.store import SequenceStore, SequenceWriter
from swiftlite.data.tokens.tokenize import TokenBatch


def log_normal_lengths(count, capacity):
    lengths = np.random.default_rng(0).lognormal(4.8, 0.75, count)
    return np.clip(lengths, 10, capacity).astype(np.int32)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_every_row_is_in_one_pack_that_holds_it(lengths):
    packs = best_fit_decreasing(np.asarray(lengths), 64)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= 64 for pack in packs)
    assert sum(sum(lengths[i] for i in pack) <= 32 for pack in packs) <= 1  # two half-empty packs would be one


def slow_best_fit(lengths, capacity):
    """The textbook: each row, longest first, into the pack with the least room that takes it."""
    packs = []
    for index in np.argsort(-lengths, kind="stable"):
        fitting = [p for p in packs if capacity - lengths[p].sum() >= lengths[index]]
        if fitting:
            min(fitting, key=lambda p: capacity - lengths[p].sum()).append(index)
        else:
            packs.append([index])
    return packs


def test_it_is_best_fit_decreasing():
    lengths = log_normal_lengths(300, 512)
    fast, slow = best_fit_decreasing(lengths, 512), slow_best_fit(lengths, 512)
    rooms = [sorted(int(512 - lengths[pack].sum()) for pack in packs) for packs in (fast, slow)]
    assert rooms[0] == rooms[1]


def test_a_pack_for_more_than_all_rows_is_quickly_found():
    lengths = log_normal_lengths(1000, 512)
    started = time.process_time()
    packs = best_fit_decreasing(lengths, 1 << 30)
    assert time.process_time() - started < 1
    assert packs.sizes.tolist() == [1000] and packs.members.tolist() == slow_best_fit(lengths, 1 << 30)[0]
    assert len(best_fit_decreasing(lengths[:0], 1 << 30)) == 0


def test_packs_are_full_and_quickly_found():
    seconds = {}
    for rows in (10_000, 100_000):
        lengths = log_normal_lengths(rows, 2048)
        started = time.process_time()
        packs = best_fit_decreasing(lengths, 2048)
        seconds[rows] = time.process_time() - started
    assert seconds[100_000] / seconds[10_000] < 40  # measured: 10; 100 where it is quadratic
    assert lengths.sum() / (len(packs) * 2048) > 0.99


class FakeStore:
    """Sequences of given lengths; row i of the store is named `name:i`."""

    preferences = None

    def __init__(self, name, lengths, rows=None):
        self.lengths = np.asarray(lengths, dtype=np.int32)
        self.trained = self.lengths - 1
        rows = np.arange(len(lengths)) if rows is None else np.asarray(rows)
        self.firsts = np.flatnonzero(np.diff(rows, prepend=-1)).astype(np.int32)
        self._name = name

    def __len__(self):
        return len(self.lengths)

    def read(self, index):
        ids = np.full(self.lengths[index], index, dtype=np.int32)
        return ids, np.arange(len(ids)) > 0, f"{self._name}:{index}"

    def preference(self, index):
        return None

    def asked(self, index):
        return None


def plan(lengths=None, *, weight=1.0, rows=None, **options):
    store = FakeStore("a", log_normal_lengths(200, 256) if lengths is None else lengths, rows)
    chosen = dict(seed=1, capacity=256, packing=True, shuffle=True, global_batch_size=4) | options
    return BatchPlan([Part("a", store, weight=weight)], PlanOptions(**chosen))


def content(batches):
    return [(b.step, b.epoch, [[s.where for s in pack] for pack in b.packs]) for b in batches]


def test_a_step_is_a_function_of_seed_and_step_only():
    whole = content(plan(epochs=3).steps())
    assert content(plan(epochs=3).steps()) == whole
    for start in (1, len(whole) // 3, len(whole) // 3 + 1, len(whole) - 1, len(whole)):
        assert content(plan(epochs=3).steps(start)) == whole[start:]
    assert content(plan(epochs=3, seed=2).steps()) != whole
    assert content(plan(epochs=3, max_steps=5).steps()) == whole[:5]


def test_another_process_finds_the_same_order():
    code = "from swiftlite.data.order import permutation; print(permutation(20, 7, 3, 'rows').tolist())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(permutation(20, 7, 3, "rows").tolist())
    # written down once: a change of this line would change the order of every run that is resumed
    assert permutation(8, 42, 0, "rows").tolist() == EXPECTED_PERMUTATION


EXPECTED_PERMUTATION = [2, 0, 6, 4, 1, 3, 5, 7]


def test_every_row_is_seen_once_an_epoch_and_the_order_changes():
    made = plan(epochs=2)
    steps = list(made.steps())
    half = made.steps_per_epoch
    assert made.total_steps == len(steps) == 2 * half
    epochs = [[s.where for b in part for pack in b.packs for s in pack] for part in (steps[:half], steps[half:])]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == len(epochs[0]) == 200
    assert epochs[0] != epochs[1]
    assert [steps[half - 1].epoch, steps[-1].epoch] == [1.0, 2.0]


def test_rows_and_packs_are_shuffled_anew_each_epoch():
    steps = list(plan(epochs=2, packing=False).steps())
    names = [s.where for b in steps for pack in b.packs for s in pack]
    assert names[:200] != names[200:]
    emptiest = set()
    for seed in range(8):
        fills = [sum(len(s.input_ids) for s in pack) for b in plan(seed=seed).steps() for pack in b.packs]
        emptiest.add(int(np.argmin(fills)))
    assert len(emptiest) > 2  # packing makes the emptiest pack last; training must not


def test_packs_hold_at_most_max_length_and_steps_the_global_batch():
    steps = list(plan().steps())
    assert all(sum(len(s.input_ids) for s in pack) <= 256 for b in steps for pack in b.packs)
    assert {len(b.packs) for b in steps[:-1]} == {4}
    assert 1 <= len(steps[-1].packs) <= 4  # the last step of an epoch may be shorter; no row is left out


def test_without_packing_a_pack_is_a_row():
    steps = list(plan(packing=False, shuffle=False).steps())
    assert [s.where for b in steps for pack in b.packs for s in pack] == [f"a:{i}" for i in range(200)]
    assert all(len(pack) == 1 for b in steps for pack in b.packs)


def test_epochs_may_be_a_fraction():
    one = plan(packing=False).total_steps
    assert plan(packing=False, epochs=2.5).total_steps == 2 * one + one // 2
    assert plan(packing=False, epochs=0.1).total_steps == one // 10


@pytest.mark.parametrize(("weight", "visits"), [(2.0, {2}), (0.5, {0, 1}), (1.5, {1, 2})])
def test_weights_repeat_rows_or_take_a_fresh_part(weight, visits):
    made = plan(weight=weight, packing=False, epochs=2)
    steps = list(made.steps())
    names = [s.where for b in steps for pack in b.packs for s in pack]
    half = len(names) // 2
    assert half == 200 * weight
    per_epoch = [{f"a:{i}": part.count(f"a:{i}") for i in range(200)} for part in (names[:half], names[half:])]
    assert set(per_epoch[0].values()) == visits
    assert (per_epoch[0] != per_epoch[1]) == (weight != 2.0)


def test_parts_of_a_row_stay_together_under_a_weight():
    made = plan([10] * 100, rows=np.repeat(np.arange(50), 2), weight=0.5, packing=False)
    seen = sorted(int(s.where[2:]) for b in made.steps() for pack in b.packs for s in pack)
    assert len(seen) == 50
    assert all(seen[i] + 1 == seen[i + 1] for i in range(0, 50, 2))
    assert made.describe()["rows"] == 25


def test_the_description_counts_what_the_steps_hold():
    made = plan()
    described, documents = made.describe(), [s for b in made.steps() for pack in b.packs for s in pack]
    assert described["tokens"] == sum(len(s.input_ids) for s in documents)
    assert described["trained_tokens"] == sum(int(s.trained.sum()) for s in documents)
    assert described["packs"] == sum(len(b.packs) for b in made.steps())
    assert described["fill"] == round(described["tokens"] / described["packs"] / 256, 4)
    assert made.describe_parts()["a"]["tokens"] == described["tokens"]


# ---- micro-batches --------------------------------------------------------------------------------------------------


def document(ids, trained, where="a:1"):
    return Sequence(np.asarray(ids, dtype=np.int32), np.asarray(trained, dtype=np.bool_), where)


@pytest.mark.parametrize("packing", [True, False])
def test_the_order_of_many_rows_takes_little_memory(packing):
    lengths = log_normal_lengths(100_000, 1024)
    tracemalloc.start()
    made = plan(lengths, capacity=1024, packing=packing)
    next(made.steps())
    made.describe()
    made.describe_parts()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * len(lengths)  # bytes; numbers of 8 bytes and copies of them took 150


def test_sequences_are_found_across_record_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftlite.data.store.BATCH_TOKENS", 10)
    rows = [0, 1, 1, 4, 4, 4, 5]  # some were split, two were left out
    with SequenceWriter(tmp_path) as writer:
        for number, row in enumerate(rows):
            ids, runs = np.full(4, number, dtype=np.int32), np.array([1, 3], dtype=np.int32)
            writer.append(TokenBatch(ids=[ids], runs=[runs], rows=[(row, 0, row + 1)]))
    store = SequenceStore(tmp_path, ["file"])
    assert store.firsts.tolist() == [0, 1, 3, 6]
    assert store.lengths.tolist() == [4] * 7 and store.trained.tolist() == [2] * 7
    for number, row in enumerate(rows):
        ids, trained, where = store.read(number)
        assert ids.tolist() == [number] * 4 and trained.tolist() == [False, True, True, False]
        assert where == f"file:{row + 1}"


def test_labels_are_shifted_and_never_cross_a_document():
    packs = [[document([5, 6, 7], [0, 1, 1]), document([8, 9], [1, 1], "a:2")], [document([3, 4], [0, 0], "a:3")]]
    batch = collate(packs)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4]]
    assert batch.labels.tolist() == [[6, 7, -100, 9, -100, -100, -100]]  # 8 is predicted by nobody: it opens a document
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7]
    assert (batch.max_document, batch.tokens, batch.trained_tokens) == (3, 7, 3)
    assert batch.where == ["a:1", "a:2", "a:3"]


def test_trained_tokens_are_those_with_a_label():
    batch = collate([[document([1, 2, 3], [1, 1, 0]), document([4], [1])]])
    assert batch.trained_tokens == int((batch.labels != -100).sum()) == 1
    assert str(batch.labels.dtype) == str(batch.input_ids.dtype) == "torch.int64"
    assert str(batch.cu_seqlens.dtype) == "torch.int32"


def test_how_packs_are_shared_out_changes_no_label():
    steps = list(plan().steps())
    together = collate(steps[0].packs)
    apart = [collate([pack]) for pack in steps[0].packs]
    assert together.trained_tokens == sum(batch.trained_tokens for batch in apart)
    assert together.labels[0].tolist() == [label for batch in apart for label in batch.labels[0].tolist()]


def test_others_are_the_rest_of_an_epoch_in_an_order_of_the_steps_own():
    options, orders = {"packing": False, "global_batch_size": 3, "epochs": 2}, []
    once = plan([5] * 8, **options)
    for step in once.steps():
        there = {document.identity for pack in step.packs for document in pack}
        orders.append([document.identity for document in once.others(step)])
        assert not there & {*orders[-1]} and len(orders[-1]) == len({*orders[-1]}) == 8 - len(there)
    assert len({*map(tuple, orders)}) == len(orders) == 6
    assert [document.identity for document in once.others(next(plan([5] * 8, **options).steps(2)))] == orders[2]
    repeated = plan([5] * 4, weight=2.0, **options)
    assert len([*repeated.others(next(repeated.steps()))]) < 4
