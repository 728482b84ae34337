"""The tokenizer of a run: its revision, and tokens that are new to it."""

import pytest
import transformers

from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.models.toys import toy_tokenizer


@pytest.fixture
def folder(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path / "toy")
    return str(tmp_path / "toy")


def test_a_new_token_that_is_known_is_told(folder):
    said = []
    loaded = load_tokenizer("org/model", tokenizer=folder, new_tokens=["<|im_end|>", "<think>"], tell=said.append)
    assert said == ["note: the tokenizer knows <|im_end|> of --new-tokens already"]
    assert len(loaded) == len(toy_tokenizer()) + 1


@pytest.mark.parametrize(("tokenizer", "asked"), [(None, "v2"), ("org/model", "v2"), ("org/other", None)])
def test_the_models_revision_is_not_asked_of_another_tokenizer(monkeypatch, tokenizer, asked):
    seen = {}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **options: seen.update(options))
    load_tokenizer("org/model", tokenizer=tokenizer, revision="v2")
    assert seen["revision"] == asked
