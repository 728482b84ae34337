"""What stands before a trained answer: the prompt that the model is asked with, in shapes that real templates have."""

from test_template import GLM
from transformers import GenerationConfig

from swiftlite.data.stops import stop_tokens
from swiftlite.models.toys import toy_tokenizer

PLAIN = toy_tokenizer().chat_template


def tokenizer_of(template, special=(), bos=None):
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.chat_template = template
    return tokenizer


def test_generation_ends_where_trained_answers_end():
    """At the end of a call (gpt-oss), and at what opens the next turn where no answer has an end (GLM)."""
    calls = "{% for c in message['tool_calls'] or [] %}{{ c.function.name }}<|call|>{% endfor %}"
    ends = PLAIN.replace("<|im_end|>", calls + "{% if not message['tool_calls'] %}<|end|>{% endif %}")
    for template, special, stops in (
        (ends, ["<|call|>", "<|end|>"], ["<|end|>", "<|call|>"]),
        (GLM, ["<|user|>", "<|assistant|>", "<|observation|>", "<sop>"], ["<|user|>", "<|observation|>"]),
    ):
        tokenizer = tokenizer_of(template, special)
        found = tokenizer.convert_ids_to_tokens(stop_tokens(GenerationConfig(), tokenizer))
        assert found == [tokenizer.eos_token, *stops]
