"""Shared fixtures: a small BPE trained here, random tiny models of each family, and rows to train on."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests must never reach for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from threads

import pytest

from swiftlite.models.toys import toy_config, toy_rows, toy_tokenizer, write_toy

LONGEST = ("test_verify", "test_launch", "test_grpo", "test_pipeline", "test_imports")  # of the files


def pytest_collection_modifyitems(items):
    """The longest files first: begun last, one of them would keep a core busy alone."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def tokenizer():
    return toy_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A factory: family -> folder with a random tiny model in fp32 and its tokenizer, made once a session."""
    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            made[family] = write_toy(tmp_path_factory.mktemp(f"model-{family}"), toy_config(family))
        return made[family]

    return make


@pytest.fixture
def write_rows(tmp_path):
    """A factory: (name, rows) -> jsonl file in the test's own folder."""

    def write(name: str, rows: list[dict]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chat_rows() -> list[dict]:
    """32 short conversations of unequal length, some of several turns."""
    return toy_rows(32)
