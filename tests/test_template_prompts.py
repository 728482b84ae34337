"""What stands before a trained answer: the prompt that the model is asked with, in shapes that real templates have."""

import pytest
from test_template import CHATML_MARKED, GLM, MISTRAL_SYSTEM, THINKING_PROMPT, TWO_TURNS, chat, trained_texts
from tokenizers import normalizers
from transformers import GenerationConfig

from swiftlite.data.rows.formats import detect_format
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.data.tokens.template import ChatRenderer
from swiftlite.data.tokens.tokenize import RawRow, RowTokenizer, TokenOptions
from swiftlite.models.toys import toy_tokenizer

DATE = "2025-03-09"
# As DeepSeek V3.1's: the prompt says that there is no thinking.
NO_THINKING = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
</think>{{ m.content.split('</think>')[-1] }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
</think>{% endif %}"""
# As Qwen3.8's: a thought is written of every answer, and read from its own key only.
OWN_KEY = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
# As that of the larger Gemma 4 models: the prompt has an empty thought, what was said earlier has none.
PLAIN = toy_tokenizer().chat_template
EMPTY_THOUGHT = PLAIN.replace("assistant\n{% endif %}", "assistant\n<|t>thought\n<t|>{% endif %}")


def tokenizer_of(template, special=(), bos=None):
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.chat_template = template
    return tokenizer


def call(name="add"):
    return {"type": "function", "function": {"name": name, "arguments": {"a": 1}}}


def counts_of(tokenizer, row):
    options = TokenOptions("sft", 1000, "error", DATE, {})
    return RowTokenizer(tokenizer, options, [])([RawRow(0, 1, 0, detect_format(row, "sft").name, row)]).counts


def messages_of(texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_marks_in_a_history_that_the_answer_changes():
    """As in TRL's of gpt-oss: the model is asked with what the template leaves out once the answer is there."""
    said = "{{- ' ' + m.content + eos_token }}"
    marked = MISTRAL_SYSTEM.replace(said, "{% generation %}" + said + "{% endgeneration %}")
    for template in (marked, MISTRAL_SYSTEM):
        parts = ChatRenderer(tokenizer_of(template, bos="<s>"), DATE).render(chat(TWO_TURNS, system="Be short."))
        assert [part.text for part in parts] == [
            "<s>[INST] Be short.\n\nWho are you?[/INST] I am small.<|im_end|>",
            "<s>[INST] Who are you?[/INST] I am small.<|im_end|>"
            "[INST] Be short.\n\nAnd now?[/INST] Now I answer.<|im_end|>",
        ]
        assert [part.text[start:end] for part in parts for start, end in part.spans] == [
            " I am small.<|im_end|>", " Now I answer.<|im_end|>",
        ]  # fmt: skip


def test_an_answer_that_comes_first_is_trained_without_its_header():
    header = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    with_header = CHATML_MARKED.replace(header, "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n")
    with_header = with_header.replace("{% else %}", "{% else %}<|im_start|>{{ m.role }}\n")
    unasked = PLAIN.replace("{% if add_generation_prompt %}", "{% if true %}")
    first = chat([{"role": "assistant", "content": "Ask me."}, *messages_of(TWO_TURNS)])
    for template in (with_header, THINKING_PROMPT, unasked):
        learnt = trained_texts(tokenizer_of(template), first)
        assert learnt == [["Ask me.<|im_end|>", "I am small.<|im_end|>", "Now I answer.<|im_end|>"]]


def test_an_answer_that_comes_first_and_has_no_header_is_refused():
    """As in Yi's, which write it with the question: the first token of a text is never predicted."""
    bare = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<|im_start|>{% endif %}{% endfor %}"
    with pytest.raises(BadRow, match="does not open an answer that no question comes before"):
        ChatRenderer(tokenizer_of(bare), DATE).render(chat([{"role": "assistant", "content": "Ask me."}]))


def test_a_tag_that_begins_as_the_prompt_goes_on_is_trained_whole():
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>"
    tokenizer = tokenizer_of(THINKING_PROMPT.replace("<|im_end|>", calls))
    row = chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call()]}])
    assert trained_texts(tokenizer, row) == [["<tool_call>add</tool_call><|im_end|>"]]


def test_an_answer_goes_behind_the_empty_thought_that_the_model_is_asked_with():
    tokenizer = tokenizer_of(EMPTY_THOUGHT, ["<|t>", "<t|>"])
    parts = ChatRenderer(tokenizer, DATE).render(chat(TWO_TURNS))
    assert [part.text for part in parts] == [
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n<|t>thought\n<t|>I am small.<|im_end|>\n",
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nI am small.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n<|t>thought\n<t|>Now I answer.<|im_end|>\n",
    ]
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<|im_end|>"], ["Now I answer.<|im_end|>"]]
    assert all(part.asked for part in parts)
    (thinks,) = ChatRenderer(tokenizer, DATE).render(chat(["Hi", "<|t>thought\nhm<t|>Hello."]))
    assert [thinks.text[start:end] for start, end in thinks.spans] == ["<|t>thought\nhm<t|>Hello.<|im_end|>"]
    assert not thinks.asked


def test_a_header_of_other_white_space_is_not_trained():
    template = PLAIN.replace("assistant\n{% endif %}", "assistant  {% endif %}")
    (part,) = ChatRenderer(tokenizer_of(template), DATE).render(chat(TWO_TURNS))
    assert [part.text[start:end].strip() for start, end in part.spans] == [
        "I am small.<|im_end|>", "Now I answer.<|im_end|>",
    ]  # fmt: skip
    assert not part.asked


def test_thinking_behind_a_prompt_that_closes_it_is_refused():
    (part,) = ChatRenderer(tokenizer_of(NO_THINKING), DATE).render(chat(TWO_TURNS))
    assert part.asked
    thinks = chat(["Hi", "Hello."])
    thinks.messages[1]["reasoning_content"] = "hm"
    kept = NO_THINKING.replace(".split('</think>')[-1]", "")  # as Kimi K2.5's
    inside = chat(["Hi", "<think>hm</think>Hello."])
    for template, row in ((NO_THINKING, thinks), (NO_THINKING, inside), (kept, inside)):
        with pytest.raises(BadRow, match="closes the thinking before message 1"):
            ChatRenderer(tokenizer_of(template), DATE).render(row)


def test_thinking_in_the_text_goes_where_the_template_has_a_place_for_it():
    inside = chat(["Hi", "<think>\nhm\n</think>\n\nHello.", "Sure?", "Yes."])
    learnt = ["hm\n</think>\n\nHello.<|im_end|>", "\n</think>\n\nYes.<|im_end|>"]
    assert trained_texts(tokenizer_of(OWN_KEY), inside) == [learnt]
    other = OWN_KEY.replace("reasoning_content", "thinking")  # as gpt-oss names it
    assert trained_texts(tokenizer_of(other), inside) == [learnt]


@pytest.mark.parametrize(
    ("template", "row", "otherwise"),
    [
        (THINKING_PROMPT, {"messages": messages_of(["Hi", "Hello."])}, 1),
        (THINKING_PROMPT, {"messages": messages_of(["Hi", "<think>\nhm\n</think>\nHello."])}, 0),
        (PLAIN, {"messages": messages_of(TWO_TURNS)}, 0),
        (None, {"prompt": "Two words: ", "completion": "small."}, 1),
        (None, {"prompt": "Two words:", "completion": " small."}, 0),
    ],
)
def test_answers_behind_other_tokens_than_the_model_is_asked_with_are_counted(template, row, otherwise):
    assert counts_of(tokenizer_of(template), row)["asked_otherwise"] == otherwise


def test_white_space_that_marks_leave_out_behind_the_prompt_is_trained():
    template = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %} {% generation %}{{ m.content }}"
    template += "<|im_end|>{% endgeneration %}{% else %} {{ m.content }} {% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    (part,) = ChatRenderer(tokenizer_of(template), DATE).render(chat(TWO_TURNS))
    assert [part.text[start:end] for start, end in part.spans] == [" I am small.<|im_end|>", " Now I answer.<|im_end|>"]
    assert part.asked


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


def test_generation_does_not_end_within_answers():
    """Not at what closes a thought, nor at what stands before the end of the text; a template may want tools."""
    said = "{{ '<|open|>think<|close|>' + message['content'] + '<|close|>said' }}"
    thinks = PLAIN.replace("{{ message['content'] }}", said).replace("<|im_end|>", "")
    calls = "{% for c in m.tool_calls or [] %}<calls>{{ c.function.name }}</calls>{% endfor %}"
    last = "{% if loop.last and m.role == 'assistant' %}{% else %}<|end|>{% endif %}"
    open_end = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + calls + last + "{% endfor %}"
    open_end += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    marked = "{% if m.role == 'assistant' %}{% generation %} {% endgeneration %}|{% generation %}<|open|>"
    marked += "{% endgeneration %}|{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}"
    marked = open_end.replace("{{ m.content }}" + calls + last, marked + "{{ m.content }}{% endif %}")
    tools = "{% for t in tools %}{{ t.function.name }}{% endfor %}"
    for template, special, stops in (
        (thinks, ["<|open|>", "<|close|>"], []),
        (thinks.replace("said'", "said<|end|>'"), ["<|open|>", "<|close|>", "<|end|>"], ["<|end|>"]),
        (open_end, ["<calls>", "</calls>", "<|end|>"], ["<|end|>"]),
        (marked, ["<|open|>", "<|end|>"], ["<|end|>"]),
        (tools + PLAIN.replace("<|im_end|>", "<|end|>"), ["<|end|>"], ["<|end|>"]),
    ):
        tokenizer = tokenizer_of(template, special)
        tokenizer.backend_tokenizer.normalizer = normalizers.Strip()  # a blank is no token then
        found = tokenizer.convert_ids_to_tokens(stop_tokens(GenerationConfig(), tokenizer))
        assert found == [tokenizer.eos_token, *stops]


def test_what_opens_the_next_turn_unasked_is_not_trained():
    """As in Cohere's Command A: special tokens alone, of which all turns have the first."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}<|done|>{% endfor %}"
    template = (
        "<|turn|><|system|>Be kind.<|end|>{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}"
        + calls
        + "{% if m.role == 'assistant' and not m.tool_calls %}<|said|>{% endif %}<|end|>"
        + "{% endfor %}<|turn|><|assistant|>"
    )
    special = [f"<|{name}|>" for name in ("turn", "system", "user", "assistant", "tool", "said", "done", "end")]
    messages = messages_of(TWO_TURNS)
    messages[1] = {"role": "assistant", "content": "", "tool_calls": [call()]}
    learnt = trained_texts(tokenizer_of(template, special), chat(messages))
    assert learnt == [["add<|done|><|end|>", "Now I answer.<|said|><|end|>"]]
    own = chat(["Which ends a turn?", "It is <|turn|>"])
    assert trained_texts(tokenizer_of(template, special), own) == [["It is <|turn|><|said|><|end|>"]]


def test_a_system_message_ends_no_answer():
    """GLM's models stop at a user's or a tool's token, not at that."""
    tokenizer = tokenizer_of(GLM, ["<|user|>", "<|assistant|>", "<|system|>", "<sop>"])
    messages = messages_of(TWO_TURNS)
    messages.insert(2, {"role": "system", "content": "Be kind."})
    assert trained_texts(tokenizer, chat(messages)) == [["\nI am small.", "\nNow I answer."]]


def test_white_space_behind_an_answer_without_an_end_is_not_trained():
    """As LLaVA's template has it: the blank is of one token with the word that follows."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    tokenizer = tokenizer_of(template + "{% if add_generation_prompt %}assistant:{% endif %}")
    messages = messages_of(["Hi", "You.", "the", "Yes \n"])
    (part,) = ChatRenderer(tokenizer, DATE).render(chat(messages))
    assert [part.text[start:end] for start, end in part.spans] == [" You.", " Yes \n"]
    assert part.text.endswith(" Yes \n") and part.add_eos


def test_a_thought_before_a_call_may_exclude_any_text():
    """As gpt-oss's template has it."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    refuses = "{% if m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
    template = THINKING_PROMPT.replace("assistant\n<think>", "assistant")
    tokenizer = tokenizer_of(template.replace("{{ m.content }}", refuses + "{{ m.thinking }}{{ m.content }}" + calls))
    messages = messages_of(["hm?", ""])
    messages[1] |= {"thinking": "hm", "tool_calls": [call()]}
    assert trained_texts(tokenizer, chat(messages)) == [["hmadd<|im_end|>"]]


def test_white_space_of_the_history_is_that_of_the_prompt():
    """Mistral's prompt holds an empty system message, as line breaks, that the answered question has not."""
    system = chat([{"role": "system", "content": ""}, *messages_of(TWO_TURNS)])
    parts = ChatRenderer(tokenizer_of(MISTRAL_SYSTEM, bos="<s>"), DATE).render(system)
    assert [part.text for part in parts] == [
        "<s>[INST] \n\nWho are you?[/INST] I am small.<|im_end|>",
        "<s>[INST] Who are you?[/INST] I am small.<|im_end|>[INST] \n\nAnd now?[/INST] Now I answer.<|im_end|>",
    ]
    assert all(part.asked for part in parts)


def test_white_space_that_ends_the_prompt_is_not_trained():
    """As in Tülu's, which ends an answer that another one follows with a line break that the prompt has not."""
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>"
    template += "{% endif %}{{ '\n' if m.role == 'user' or not loop.last }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    two = [*messages_of(["Hi", "One."]), {"role": "assistant", "content": "Two."}]
    (part,) = ChatRenderer(tokenizer_of(template), DATE).render(chat(two))
    assert [part.text[start:end] for start, end in part.spans] == ["One.<|im_end|>", "Two.<|im_end|>"]


def test_an_answer_that_comes_first_has_the_thought_of_one_behind_a_question():
    """Qwen3's template writes an empty thought of the last answer, if any question comes before it."""
    said = "{{ message['content'] }}"
    thought = "{% if message.role == 'assistant' and loop.last and loop.index0 %}<think>\n\n</think>\n\n{% endif %}"
    template = PLAIN.replace(said, thought + said)
    first = chat([{"role": "assistant", "content": "Ask me."}, *messages_of(TWO_TURNS[:2])])
    assert trained_texts(tokenizer_of(template), first) == [
        ["<think>\n\n</think>\n\nAsk me.<|im_end|>"], ["<think>\n\n</think>\n\nI am small.<|im_end|>"],
    ]  # fmt: skip


def test_an_empty_thought_in_the_text_is_none_under_a_key():
    """gpt-oss would write it as a message of its own."""
    thought = "{% if 'thinking' in message %}<|t>{{ message.thinking }}<t|>{% endif %}"
    template = PLAIN.replace("{{ message['content'] }}", thought + "{{ message['content'] }}")
    blank, full = (chat(["Hi", f"<think>\n{thinking}\n</think>\n\nYes."]) for thinking in ("", "hm"))
    assert trained_texts(tokenizer_of(template), blank) == [["Yes.<|im_end|>"]]
    assert trained_texts(tokenizer_of(template), full) == [["<|t>hm<t|>Yes.<|im_end|>"]]
