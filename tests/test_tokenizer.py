"""The tokenizer of a run: its revision, and tokens that are new to it."""

import json

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase

from swiftlite.errors import UserError
from swiftlite.models.tokenizer import LARGEST_TEMPLATE, load_tokenizer, read_chat_template
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


TOO_LARGE = {
    "letters": "x" * (LARGEST_TEMPLATE + 1),
    "pairs": "é" * (LARGEST_TEMPLATE - 1),
    "cut": "x" + "é" * LARGEST_TEMPLATE,
}


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_a_template_is_read_whole_or_not_at_all(tmp_path, kind):
    """Whatever bytes its letters take, and also where one of them would be cut in two."""
    path = tmp_path / "chat.jinja"
    path.write_text(TOO_LARGE[kind], encoding="utf-8")
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read_chat_template(str(path))
    path.write_text("é" * (LARGEST_TEMPLATE // 2), encoding="utf-8")
    assert len(read_chat_template(str(path))) == LARGEST_TEMPLATE // 2


@pytest.mark.parametrize(("tokenizer", "asked"), [(None, "v2"), ("org/model", "v2"), ("org/other", None)])
def test_the_models_revision_is_not_asked_of_another_tokenizer(monkeypatch, tokenizer, asked):
    seen = {}

    def load(name, **options):
        seen.update(options)
        return toy_tokenizer()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    load_tokenizer("org/model", tokenizer=tokenizer, revision="v2")
    assert seen["revision"] == asked


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_tokenizer_that_is_not_what_its_file_says_is_told(tmp_path, folder, kind):
    """Of Qwen2's type transformers takes a class of its own, whatever the files say: here that case is nothing."""
    settings, file = tmp_path / "toy" / "tokenizer_config.json", tmp_path / "toy" / "tokenizer.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    written = Tokenizer.from_file(str(file))
    written.normalizer = Lowercase()
    written.save(str(file))
    (tmp_path / "toy" / "config.json").write_text(json.dumps({"model_type": kind}))
    said = []
    loaded = load_tokenizer(folder, tell=said.append)
    if kind == "qwen3":
        assert loaded("A")["input_ids"] == loaded("a")["input_ids"] and not said
    else:
        assert loaded("A")["input_ids"] != loaded("a")["input_ids"]
        (told,) = said
        assert told.startswith("note: transformers makes a Qwen2Tokenizer") and "74 tokens and not 77" in told
