"""Ids and trained flags: what is found by counting bytes is what characters' offsets say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from swiftlite.data.tokens.encode import TextEncoder, overlaps
from swiftlite.models.toys import toy_tokenizer

WORDS = [
    "Hello",
    " you",
    "  ",
    "\n",
    " gr\u00fcn",
    "\u65e5\u672c",
    "\U0001f642",
    "e\u0301",
    "<|im_end|>",
    "<\uff5cend\uff5c>",
    " 12",
    "\t ",
]


def by_offsets(tokenizer, text, spans):
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], overlaps(np.asarray(encoded["offset_mapping"]).reshape(-1, 2), spans)


def trimming():
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def composing():
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_prefix_space():
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def stripping():
    """An added token that swallows the white space before it, and one of other than byte-level characters."""
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(
        [AddedToken("Hello", lstrip=True, normalized=False), AddedToken("<｜end｜>", normalized=False)]
    )
    return tokenizer


def marked_words():
    """Words that begin with a mark for white space, as SentencePiece writes them: not the text's bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator(["Hello you don't 12"] * 9, trainers.BpeTrainer(special_tokens=["<unk>", "<|im_end|>"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


KINDS = {
    make.__name__: make for make in (toy_tokenizer, trimming, composing, with_prefix_space, stripping, marked_words)
}
MADE = {name: make() for name, make in KINDS.items()}


@pytest.mark.parametrize("kind", MADE)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.tuples(st.sampled_from(WORDS), st.booleans()), min_size=1, max_size=12))
def test_trained_tokens_are_those_that_offsets_show(kind, parts):
    """Spans begin and end anywhere between the words, which may be within a token."""
    tokenizer, text, spans = MADE[kind], "", []
    for word, trained in parts:
        if trained:
            spans.append((len(text), len(text) + len(word)))
        text += word
    ids, trained, _ = TextEncoder(tokenizer)([text], [spans], special_tokens=False)[0]
    expected_ids, expected = by_offsets(tokenizer, text, spans)
    assert ids.tolist() == expected_ids and ids.dtype == np.int32
    assert trained.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", MADE)
@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.sampled_from(["Hello", " ", "\n", "\n\n", *WORDS]), min_size=1, max_size=6),
    answer=st.sampled_from(["you", " you", "12", "\nyou", "e\u0301"]),
)
def test_a_prompt_is_torn_where_it_has_other_tokens_by_itself(kind, prompt, answer):
    """Whatever white space the offsets of tokens show. The model is asked with the prompt alone."""
    tokenizer, prompt = MADE[kind], "".join(prompt)
    ((ids, trained, torn),) = TextEncoder(tokenizer)(
        [prompt + answer], [[(len(prompt), len(prompt + answer))]], special_tokens=False
    )
    own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert torn == (ids[: len(own)].tolist() != own or trained[: len(own)].any())


def test_a_prompt_before_white_space_that_no_token_holds_is_not_torn():
    backend = Tokenizer(models.WordLevel({"Hello": 0, "you": 1}, unk_token="you"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="you"))
    ((ids, trained, torn),) = encoder(["Hello  you"], [[(7, 10)]], special_tokens=False)
    assert (ids.tolist(), trained.tolist(), torn) == ([0, 1], [False, True], False)


def encoder_without_offsets(tokenizer, monkeypatch):
    encoder = TextEncoder(tokenizer)

    def refuse(*_):
        raise AssertionError("asked for offsets")

    monkeypatch.setattr(encoder, "_by_offsets", refuse)
    return encoder


def test_a_template_of_special_tokens_needs_no_offsets(monkeypatch):
    """Or the quick way would be there and never be gone."""
    text = "<|im_start|>user\nWie heißt du?<|im_end|>\n<|im_start|>assistant\nÉmile 🙂<|im_end|>\n"
    start, end = text.index("Émile"), len(text) - 1
    for make in (toy_tokenizer, composing, stripping):
        tokenizer = make()
        ids, trained, _ = encoder_without_offsets(tokenizer, monkeypatch)(
            [text], [[(start, end)]], special_tokens=False
        )[0]
        assert tokenizer.decode(ids[trained]) == text[start:end]


def test_texts_without_spans_are_trained_whole_with_the_tokenizer_s_own_tokens(monkeypatch):
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    ids, trained, _ = TextEncoder(tokenizer)(["Hello you"], [None], special_tokens=True)[0]
    assert ids[0] == tokenizer.bos_token_id and trained.all() and len(trained) == len(ids)
    ids, trained, _ = TextEncoder(tokenizer)(["Hello you"], [[(5, 9)]], special_tokens=True)[0]
    assert tokenizer.decode(ids[trained]) == " you"
    ids, _, _ = encoder_without_offsets(tokenizer, monkeypatch)(["Hello you"], [[(0, 9)]], special_tokens=False)[0]
    assert tokenizer.decode(ids) == "Hello you"


def test_what_a_tokenizer_s_class_does_to_texts_is_done():
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *positional, **named):
            return super()._encode_plus([each.upper() for each in text], *positional, **named)

    tokenizer = Shouting(tokenizer_object=toy_tokenizer().backend_tokenizer)
    ids, _, _ = TextEncoder(tokenizer)(["Hello"], [[(0, 5)]], special_tokens=False)[0]
    assert tokenizer.decode(ids) == "HELLO"


def test_truncation_and_padding_that_a_tokenizer_s_file_asks_for_are_off(monkeypatch):
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    text = "Hello you, how are you today?"
    for spans in ([(0, len(text))], None):
        ids, trained, _ = encoder_without_offsets(tokenizer, monkeypatch)([text], [spans], special_tokens=False)[0]
        assert tokenizer.decode(ids) == text and trained.all()


def test_a_header_that_takes_white_space_of_the_answer_with_it_is_not_trained():
    """As Phi-3's `<|assistant|>` does. The prompt has the same tokens without that white space."""
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken("<|assistant|>", rstrip=True, special=True)])
    text = "Hi<|assistant|>\n  Hello"
    ((ids, trained, torn),) = TextEncoder(tokenizer)(
        [text], [[(len("Hi<|assistant|>\n"), len(text))]], special_tokens=False
    )
    assert tokenizer.decode(ids[trained]) == "Hello"
    assert not torn
