"""Noise on embeddings: the numbers themselves, a run against plain PyTorch with the same noise, and where it is not."""

import hashlib
import math
from functools import partial

import numpy as np
import pytest
import torch
from test_parity import check, metrics, plain_training, planned_rows, render_chat, settings, train_alone
from transformers import AutoTokenizer

from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.data.order import Sequence
from swiftlite.errors import UserError
from swiftlite.models import noise
from swiftlite.models.noise import uniform
from swiftlite.training import lanes
from swiftlite.training.noise import with_noise

ALPHA = 5.0


def mixed(x):
    """lowbias32 of numpy's unsigned integers."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97), (15, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x


def numbers_of(key, length, width):
    """The noise of a document before it is scaled, `[length, width]`."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    tokens = mixed(mixed(np.arange(length, dtype=np.uint32) ^ low) ^ high)
    channels = np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9)
    hashed = mixed(mixed(channels + tokens[:, None]) ^ high)
    return ((hashed.view(np.int32) >> 8) + 0.5) / 2**23


def key_of(seed, step, place):
    digest = hashlib.blake2b(f"{seed}/{step}/noise/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@pytest.mark.parametrize("width", [1, 7, 64, 515])
def test_the_hash_is_that_of_unsigned_integers(width):
    keys = [key_of(42, 1, place) for place in range(3)] + [0, 2**63 - 1]
    for key in keys:
        found = uniform(torch.full((33,), key), torch.arange(33), width)
        assert np.array_equal(found.numpy(), numbers_of(key, 33, width).astype(np.float32))


def test_noise_is_uniform_and_of_nothing_else_than_its_place():
    keys = torch.tensor([key_of(1, 1, 0), key_of(1, 1, 1), key_of(1, 2, 0)]).repeat_interleave(300)
    found = uniform(keys, torch.arange(300).repeat(3), 400).double().view(3, 300, 400)
    assert -1 < found.min() < -0.9999 and 0.9999 < found.max() < 1
    assert found.mean().abs() < 4 / math.sqrt(3 * found.numel())
    assert found.square().mean().item() == pytest.approx(1 / 3, abs=4 * math.sqrt(4 / 45 / found.numel()))
    for one, other in (
        (found[0], found[1]), (found[0], found[2]), (found[:, 1:], found[:, :-1]), (found[..., 1:], found[..., :-1]),
    ):  # fmt: skip
        assert (one * other).mean().abs() < 4 / 3 / math.sqrt(one.numel())


def test_every_document_of_every_step_has_its_own_key():
    document = Sequence(np.arange(3, dtype=np.int32), np.ones(3, dtype=bool), "rows.jsonl:1")
    packs = [[document, document], [document]]
    keys = [
        each.noise
        for seed in (1, 2)
        for step in (1, 2)
        for pack in with_noise(packs, seed, step)
        for each in pack
    ]  # fmt: skip
    assert len(set(keys)) == 12
    assert keys[:3] == [key_of(1, 1, place) for place in range(3)]


class Noisy:
    """What `plain_training` calls for the embeddings of each document of each step."""

    def __init__(self, seed):
        self._seed = seed

    def __call__(self, model, ids, step, place):
        embedded = model.get_input_embeddings()(torch.tensor([ids]))
        found = torch.from_numpy(numbers_of(key_of(self._seed, step, place), len(ids), embedded.shape[-1]))
        return embedded + (ALPHA / math.sqrt(len(ids) * embedded.shape[-1]) * found).float()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama-tied", {"micro_batch_size": 2}),
        ("gemma2", {"activation_checkpointing": "full"}),
        ("gpt2", {"packing": False}),
        ("qwen3.5", {}),  # documents in rows of their own
        ("llama", {"micro_batch_size": 4}),  # in lanes
    ],
)
def test_a_noisy_run_equals_plain_pytorch(
    tmp_path, tiny_model, write_rows, chat_rows, monkeypatch, request, family, more
):
    twins, make_twin = [], lanes._twin
    monkeypatch.setattr(lanes, "_twin", lambda module: twins.append(module) or make_twin(module))
    if in_lanes := family == "llama":
        monkeypatch.setattr(lanes, "LANE_TOKENS", 64)
        request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
        torch.set_num_threads(2)
    monkeypatch.setattr(noise, "AT_A_TIME", 64 * 20)  # tokens of a row in several parts
    model, data = tiny_model(family), write_rows("rows.jsonl", chat_rows)
    values = settings(tmp_path, model, data, neftune_noise_alpha=ALPHA, seed=7) | more
    config = resolve_config("sft", **values)
    train_alone(config)
    assert bool(twins) == in_lanes
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [[render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows] for rows in planned_rows(config)]
    check(metrics(tmp_path / "out"), plain_training(model, steps, embed=Noisy(7)), steps)


def test_an_evaluation_has_no_noise(tmp_path, tiny_model, write_rows, chat_rows):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), eval_fraction=0.25)
    values |= {"max_steps": 2, "learning_rate": 1e-12, "eval_steps": 1}
    rows = {}
    for alpha in (0.0, 50.0):
        out = tmp_path / f"{alpha}"
        train_alone(resolve_config("sft", **values | {"neftune_noise_alpha": alpha, "output_dir": str(out)}))
        rows[alpha] = metrics(out)
    for quiet, noisy in zip(rows[0.0], rows[50.0], strict=True):
        assert noisy["eval_loss"] == pytest.approx(quiet["eval_loss"], rel=1e-6)
        assert noisy["loss"] != pytest.approx(quiet["loss"], rel=1e-3)


@pytest.mark.parametrize("method", ["dpo", "kto", "rm"])
def test_noise_in_comparisons_is_refused(method):
    given = {"model": "a/b", "dataset": ["c/d"], "neftune_noise_alpha": "5"}
    with pytest.raises(UserError, match=f"{method} compares answers of several lengths"):
        resolve(method, {name: Given(value, name, "flag") for name, value in given.items()}, env={})


@pytest.mark.parametrize(("value", "alpha"), [(None, 0.0), ("null", 0.0), ("0", 0.0), ("5", 5.0)])
def test_no_noise_may_be_a_null(value, alpha):
    config = resolve("sft", {"model": Given("a/b", "", "flag"), "neftune_noise_alpha": Given(value, "", "recipe"),
                             "dataset": Given(["c/d"], "", "flag")}, env={}).config  # fmt: skip
    assert config.neftune_noise_alpha == alpha
