"""Trained spans under templates that behave like the families' own: exactly the answers and their end tokens."""

import numpy as np
import pytest
from transformers import GenerationConfig

from swiftlite.data.rows.formats import detect_format, read_row
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.tokens.encode import overlaps
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.data.tokens.template import ChatRenderer
from swiftlite.errors import UserError
from swiftlite.models.tokenizer import read_chat_template
from swiftlite.models.toys import toy_tokenizer

PLAIN = (  # ChatML that knows no tools
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED_WIDE = CHATML_MARKED.replace(
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
)
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
  {%- set content = m.content %}{%- set thought = m.reasoning_content or '' %}
  {%- if '</think>' in content %}
    {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {%- if loop.index0 > ns.last and (loop.last or thought) %}
    {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}
  {%- else %}{{- '<|im_start|>assistant\n' + content }}{% endif %}
  {%- for call in m.tool_calls or [] %}
    {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
THINKING_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA3 = """{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' }}
{{- strftime_now("%d %b %Y") }}{{- '\n\n<|eot_id|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + eos_token }}{% endif %}{%- endfor %}"""
MISTRAL_SYSTEM = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
{%- elif loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}{%- endfor %}"""
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
DROPS_THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NO_END = (
    "{% for m in messages %}{{ '\n### ' + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n### assistant: ' }}{% endif %}"
)

GLM = (
    "<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM_MARKED = GLM.replace(
    "|>\n{{ m.content }}", "|>{% if m.role == 'assistant' %}{% generation %}{{ '\n' + m.content }}"
)
GLM_MARKED = GLM_MARKED.replace(
    "{% endfor %}{% endfor %}",
    "{% endfor %}{% endgeneration %}{% else %}\n{{ m.content }}{% endif %}{% endfor %}",
)


@pytest.fixture(scope="module")
def make_tokenizer():
    """A factory: template and special tokens -> tokenizer."""

    def make(template, special=(), bos=None):
        tokenizer = toy_tokenizer()
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        if bos:
            tokenizer.add_special_tokens({"bos_token": bos})
        tokenizer.chat_template = template
        return tokenizer

    return make


def chat(messages, **row):
    if messages and isinstance(messages[0], str):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    row = {"messages": messages, **row}
    return read_row(row, detect_format(row, "sft"))


def trained_texts(tokenizer, conversation, date="2025-03-09"):
    """For each sequence: the trained stretches as text, told by tokens and not by characters."""
    found = []
    for part in ChatRenderer(tokenizer, date).render(conversation):
        encoded = tokenizer(part.text, add_special_tokens=False, return_offsets_mapping=True)
        flags = overlaps(np.asarray(encoded["offset_mapping"]), part.spans)
        stretches, current = [], []
        for token, flag in zip(encoded["input_ids"], [*flags], strict=True):
            if flag:
                current.append(token)
            elif current:
                stretches, current = [*stretches, tokenizer.decode(current)], []
        found.append([*stretches, tokenizer.decode(current)] if current else stretches)
    return found


TWO_TURNS = ["Who are you?", "I am small.", "And now?", "Now I answer."]


@pytest.mark.parametrize("template", [None, CHATML_MARKED, CHATML_MARKED_WIDE], ids=["prefix", "marked", "marked-wide"])
def test_answers_and_their_end_tokens_are_trained(make_tokenizer, template):
    tokenizer = make_tokenizer(template or toy_tokenizer().chat_template)
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<|im_end|>", "Now I answer.<|im_end|>"]]


@pytest.mark.parametrize("template", [None, CHATML_MARKED], ids=["prefix", "marked"])
def test_train_false_leaves_one_answer_out(make_tokenizer, template):
    tokenizer = make_tokenizer(template or toy_tokenizer().chat_template)
    conversation = chat(
        [
            {"role": "user", "content": "Who are you?"},
            {"role": "assistant", "content": "I am big.", "train": False},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "I am small."},
        ]
    )
    assert trained_texts(tokenizer, conversation) == [["I am small.<|im_end|>"]]


def test_what_follows_the_last_trained_answer_is_cut():
    cut = chat(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    )
    assert [m["content"] for m in cut.messages] == ["a", "b"]


def test_llama_date_is_pinned_and_content_trimmed(make_tokenizer):
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = make_tokenizer(LLAMA3, special, bos="<|begin_of_text|>")
    conversation = chat(["Who are you?", "  I am small. "])
    assert trained_texts(tokenizer, conversation) == [["I am small.<|eot_id|>"]]
    text = ChatRenderer(tokenizer, "2025-03-09").render(conversation)[0].text
    assert "Today Date: 09 Mar 2025" in text
    assert text.count("<|begin_of_text|>") == 1


def test_a_date_that_cannot_be_pinned_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("{% set f = '%d' %}{{ strftime_now(f) }}{{ messages[0].content }}")
    with pytest.raises(UserError, match="template-date"):
        ChatRenderer(tokenizer, "2025-03-09")


def test_gemma(make_tokenizer):
    tokenizer = make_tokenizer(GEMMA, ["<start_of_turn>", "<end_of_turn>"], bos="<bos>")
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<end_of_turn>", "Now I answer.<end_of_turn>"]]
    with pytest.raises(BadRow, match="System role not supported") as failure:
        ChatRenderer(tokenizer, "2025-03-09").render(chat(TWO_TURNS, system="Be short."))
    assert failure.value.reason == "template_error"


def test_mistral(make_tokenizer):
    tokenizer = make_tokenizer(MISTRAL, bos="<s>")
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [[" I am small.<|im_end|>", " Now I answer.<|im_end|>"]]
    two_answers = [{"role": "user", "content": "a"}, *({"role": "assistant", "content": c} for c in "bc")]
    with pytest.raises(BadRow, match="must alternate"):
        ChatRenderer(tokenizer, "2025-03-09").render(chat(two_answers))


def test_a_system_message_in_the_last_question_only(make_tokenizer):
    """As Mistral v3's and later templates have it: each answer is trained behind the prompt that the model gets."""
    tokenizer = make_tokenizer(MISTRAL_SYSTEM, bos="<s>")
    conversation = chat(TWO_TURNS, system="Be short.")
    assert trained_texts(tokenizer, conversation) == [[" I am small.<|im_end|>"], [" Now I answer.<|im_end|>"]]
    assert [part.text for part in ChatRenderer(tokenizer, "2025-03-09").render(conversation)] == [
        "<s>[INST] Be short.\n\nWho are you?[/INST] I am small.<|im_end|>",
        "<s>[INST] Who are you?[/INST] I am small.<|im_end|>"
        "[INST] Be short.\n\nAnd now?[/INST] Now I answer.<|im_end|>",
    ]


def test_phi3_text_behind_the_end_token_is_not_trained(make_tokenizer):
    tokenizer = make_tokenizer(PHI3, ["<|end|>"])
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<|end|>", "Now I answer.<|end|>"]]
    text = ChatRenderer(tokenizer, "2025-03-09").render(chat(TWO_TURNS))[0].text
    assert text.count("<|im_end|>") == 1  # eos, behind the whole conversation only
    own = chat(["Which token ends a turn?", "It is <|end|>"])  # an answer that itself ends with a special token
    assert trained_texts(tokenizer, own) == [["It is <|end|><|end|>"]]


def test_a_dropped_tool_call_is_a_bad_row(make_tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "I add.", "tool_calls": [call]}]
    with pytest.raises(BadRow) as failure:
        ChatRenderer(make_tokenizer(PLAIN), "2025-03-09").render(chat(messages))
    assert failure.value.reason == "template_drops_content"


def test_qwen3_history_without_thinking_splits_the_row(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3)
    turns = ["Who?", "<think>\nhm\n</think>\n\nMe.", "Sure?", "<think>\nyes\n</think>\n\nQuite."]
    assert trained_texts(tokenizer, chat(turns)) == [
        ["<think>\nhm\n</think>\n\nMe.<|im_end|>"],
        ["<think>\nyes\n</think>\n\nQuite.<|im_end|>"],
    ]
    second = ChatRenderer(tokenizer, "2025-03-09").render(chat(turns))[1].text
    assert "hm" not in second  # as the model sees its history
    assert "Me.<|im_end|>" in second


def test_qwen3_tool_turns_stay_in_one_sequence(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    conversation = chat(
        [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "reasoning_content": "call", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two.", "reasoning_content": "done"},
        ]
    )
    assert trained_texts(tokenizer, conversation) == [
        [
            '<think>\ncall\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            "<think>\ndone\n</think>\n\nTwo.<|im_end|>",
        ]
    ]


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ("Hello.", "Hello."),
        ("<b>Hello</b>", "<b>Hello</b>"),
        ("<think>\nhm\n</think>\nHello.", "hm\n</think>\nHello."),
    ],
)
def test_a_generation_prompt_that_opens_thinking(make_tokenizer, answer, trained):
    """What the prompt already says is not trained; an answer without thinking is trained whole."""
    assert trained_texts(make_tokenizer(THINKING_PROMPT), chat(["Hi", answer])) == [[trained + "<|im_end|>"]]


def test_thinking_that_the_template_drops_of_every_answer_is_learnt_whole(make_tokenizer):
    """As DeepSeek R1's does: an answer is learnt as the model gives it, and read without its thinking later on."""
    turns = ["Hi", "<think>hm</think>Hello.", "Sure?", "<think>yes</think>Quite.", "Bye", "Bye."]
    parts = ChatRenderer(make_tokenizer(DROPS_THINKING), "2025-03-09").render(chat(turns))
    learnt = [[part.text[start:end] for start, end in part.spans] for part in parts]
    assert learnt == [["<think>hm</think>Hello.<|im_end|>"], ["<think>yes</think>Quite.<|im_end|>"], ["Bye.<|im_end|>"]]
    assert "hm" not in parts[1].text and "yes" not in parts[2].text and "Hello." in parts[2].text
    opens = DROPS_THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    asked = chat(["Hi", "<think>\nhm\n</think>\n\nHello."])
    apart = chat(["Hi", "Hello."])
    apart.messages[1]["reasoning_content"] = "hm"
    for row in (asked, apart):
        assert trained_texts(make_tokenizer(opens), row) == [["hm\n</think>\n\nHello.<|im_end|>"]]


def test_content_that_the_template_drops_is_a_bad_row(make_tokenizer):
    tokenizer = make_tokenizer(DROPS_THINKING.replace("split('</think>')", "split('###')"))
    with pytest.raises(BadRow) as failure:
        ChatRenderer(tokenizer, "2025-03-09").render(chat(["Hi", "Hm. ### Hello."]))
    assert failure.value.reason == "template_drops_content"
    reasoning = chat(["Hi", "Hello."])
    reasoning.messages[1]["thinking"] = "hm"
    with pytest.raises(BadRow, match="message 1"):
        ChatRenderer(tokenizer, "2025-03-09").render(reasoning)


def test_a_template_without_end_token_asks_for_eos(make_tokenizer):
    parts = ChatRenderer(make_tokenizer(NO_END), "2025-03-09").render(chat(TWO_TURNS))
    assert [part.add_eos for part in parts] == [True]
    assert not any(part.add_eos for part in ChatRenderer(make_tokenizer(QWEN3), "2025-03-09").render(chat(TWO_TURNS)))


def glm_chat():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [("user", "1 + 1?"), ("assistant", ""), ("tool", "2"), ("assistant", "Two."), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in [*said, ("assistant", "Is it <|user|>")]]
    messages[1]["tool_calls"] = [call]
    return messages


@pytest.mark.parametrize("template", [GLM, GLM_MARKED], ids=["glm", "marked"])
def test_an_answer_without_an_end_runs_over_the_token_that_opens_the_next_turn(make_tokenizer, template):
    """GLM's models stop there; the last answer is closed by the end of the text."""
    tokenizer = make_tokenizer(template, ["<|user|>", "<|assistant|>", "<|observation|>", "<sop>"])
    answers = ["\nadd(1)<|observation|>", "\nTwo.<|user|>", "\nIs it <|user|>"]
    assert trained_texts(tokenizer, chat(glm_chat())) == [answers]
    (part,) = ChatRenderer(tokenizer, "2025-03-09").render(chat(glm_chat()))
    assert part.add_eos and part.text.endswith("Is it <|user|>")
    own = [("user", "a"), ("assistant", "Is it <|user|>"), ("user", "b"), ("assistant", "c"), ("assistant", "d")]
    own = [{"role": role, "content": content} for role, content in own]
    assert trained_texts(tokenizer, chat(own)) == [["\nIs it <|user|><|user|>", "\nc", "\nd"]]
    left_out = glm_chat()
    left_out[3]["train"] = False
    assert trained_texts(tokenizer, chat(left_out)) == [[answers[0], answers[2]]]


def test_history_that_is_rewritten_ends_each_part_by_itself(make_tokenizer):
    """As GLM 4.5's drops the thinking of earlier answers."""
    template = GLM.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}")
    tokenizer = make_tokenizer(template, ["<|user|>", "<|assistant|>", "<|observation|>", "<sop>"])
    turns = ["Hi", "<think>hm</think>Hello.", "Sure?", "Yes.", "Bye", "Bye."]
    assert trained_texts(tokenizer, chat(turns)) == [
        ["\n<think>hm</think>Hello."],
        ["\nYes.<|user|>", "\nBye."],
    ]


def test_what_follows_an_answer_without_an_end_and_is_no_stop_stays_untrained(make_tokenizer):
    opens_text = NO_END.replace("{{ '\n### '", "{% if m.role == 'user' %}{{ bos_token }}{% endif %}{{ '\n### '")
    for tokenizer in (make_tokenizer(NO_END), make_tokenizer(opens_text, bos="<s>")):
        (part,) = ChatRenderer(tokenizer, "2025-03-09").render(chat(TWO_TURNS))
        assert [part.text[start:end] for start, end in part.spans] == ["I am small.", "Now I answer."]


def test_an_end_of_turn_among_new_tokens_is_one(make_tokenizer):
    template = toy_tokenizer().chat_template.replace("<|im_end|>", "<|turn_end|>")
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens(["<|turn_end|>"])
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<|turn_end|>", "Now I answer.<|turn_end|>"]]
    assert not ChatRenderer(tokenizer, "2025-03-09").render(chat(TWO_TURNS))[0].add_eos
    in_plain_text = make_tokenizer(template.replace("turn_end", "turn_ends"))
    part = ChatRenderer(in_plain_text, "2025-03-09").render(chat(TWO_TURNS))[0]
    assert trained_texts(in_plain_text, chat(TWO_TURNS))[0][0] == "I am small.<|turn_ends|>"
    assert part.add_eos and part.text.endswith("Now I answer.<|turn_ends|>")
    assert stop_tokens(GenerationConfig(), tokenizer)[-1] == tokenizer.convert_tokens_to_ids("<|turn_end|>")


def test_plain_headers_end_answers_with_the_models_own_end_of_text(make_tokenizer):
    tokenizer = make_tokenizer(read_chat_template("instruction"))
    told = [{"role": "system", "content": "Be brief."}, *chat(TWO_TURNS).messages]
    assert trained_texts(tokenizer, chat(told)) == [["I am small.<|im_end|>", "Now I answer.<|im_end|>"]]
    (part,) = ChatRenderer(tokenizer, "2025-03-09").render(chat(["Who?", "Me."]))
    assert part.text == "### Instruction:\nWho?\n\n### Response:\nMe.<|im_end|>\n\n"
    assert part.asked and not part.add_eos
    asked = tokenizer.apply_chat_template(told[:2], tokenize=False, add_generation_prompt=True)
    assert asked.startswith("Be brief.\n\n### Instruction:\n") and asked.endswith("\n\n### Response:\n")
    assert stop_tokens(GenerationConfig(), tokenizer) == [tokenizer.eos_token_id]


def test_alpacas_opening_stands_where_there_is_no_system_message(make_tokenizer):
    tokenizer = make_tokenizer(read_chat_template("alpaca"))
    plain = make_tokenizer(read_chat_template("instruction"))
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<|im_end|>", "Now I answer.<|im_end|>"]]
    told = chat([{"role": "system", "content": "Be brief."}, *chat(TWO_TURNS).messages])
    for messages, opens in ((chat(TWO_TURNS), True), (told, False)):
        (found,), (without,) = (ChatRenderer(one, "2025-03-09").render(messages) for one in (tokenizer, plain))
        assert found.text.endswith(without.text) and found.text.startswith("Below is an instruction") == opens
        assert (found.text == without.text) != opens


@pytest.mark.parametrize("template", [None, QWEN3, CHATML_MARKED], ids=["chatml", "qwen3", "marked"])
def test_an_answer_that_comes_first(make_tokenizer, template):
    tokenizer = make_tokenizer(template or toy_tokenizer().chat_template)
    texts = trained_texts(tokenizer, chat([{"role": "assistant", "content": "Hello, ask me."}]))
    assert len(texts) == 1
    assert texts[0][0].endswith("Hello, ask me.<|im_end|>")
    assert "<|im_start|>" not in texts[0][0]


def test_consecutive_answers(make_tokenizer):
    messages = [{"role": "user", "content": "a"}, *({"role": "assistant", "content": c} for c in ("One.", "Two."))]
    texts = trained_texts(make_tokenizer(toy_tokenizer().chat_template), chat(messages))
    assert texts == [["One.<|im_end|>", "Two.<|im_end|>"]]


def test_an_answer_found_in_its_own_header_is_trained_without_it(make_tokenizer):
    tokenizer = make_tokenizer(THINKING_PROMPT)
    assert trained_texts(tokenizer, chat(["Which role?", "assistant"])) == [["assistant<|im_end|>"]]
    assert trained_texts(tokenizer, chat(["a or b?", "a"])) == [["a<|im_end|>"]]
    assert trained_texts(tokenizer, chat(["Less?", "<"])) == [["<<|im_end|>"]]


def test_a_template_that_opens_the_next_answer_unasked(make_tokenizer):
    """As the first template of Llama 3 does: the header behind an answer is not of it, and the row stays whole."""
    template = toy_tokenizer().chat_template.replace("{% if add_generation_prompt %}", "{% if true %}")
    assert trained_texts(make_tokenizer(template), chat(TWO_TURNS)) == [
        ["I am small.<|im_end|>", "Now I answer.<|im_end|>"]
    ]


def test_an_end_of_turn_of_two_tokens(make_tokenizer):
    """As Cohere's Command R7B has it; the model stops at the second."""
    template = CHATML_MARKED.replace(
        "{% generation %}{{ m.content }}{% endgeneration %}", "<|start|>{{ m.content }}<|end|>"
    )
    tokenizer = make_tokenizer(template, ["<|start|>", "<|end|>"])
    answers = ["<|start|>I am small.<|end|><|im_end|>", "<|start|>Now I answer.<|end|><|im_end|>"]
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [answers]


def test_an_end_of_turn_with_words_between_its_tokens(make_tokenizer):
    """As Kimi K3 has it: what is opened by name is closed by name, and the model stops behind all of it. An answer
    that holds such a closing ends at its own; one that ends the text otherwise is cut at its first token."""
    close = "<|close|>response<|sep|><|close|>message<|sep|><|im_end|>"
    template = (
        "{% for m in messages %}<|open|>message {{ m.role }}<|sep|>{% if m.role == 'assistant' %}"
        "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}"
        "<|close|>message<|sep|><|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|open|>message assistant<|sep|><|open|>response<|sep|>{% endif %}"
    )
    tokens = ["<|open|>", "<|sep|>", "<|close|>"]
    tokenizer = make_tokenizer(template, tokens)
    assert trained_texts(tokenizer, chat(TWO_TURNS)) == [[f"I am small.{close}", f"Now I answer.{close}"]]
    assert trained_texts(tokenizer, chat(["Close it.", f"So: {close}"])) == [[f"So: {close}{close}"]]
    last = template.replace("{% endif %}<|close|>message<|sep|><|im_end|>", "{% endif %}<|im_end|>")
    last = last.removesuffix("{% endif %}") + "{% else %}the<|sep|>end<|im_end|>{% endif %}"
    assert trained_texts(make_tokenizer(last, tokens), chat(TWO_TURNS)) == [
        ["I am small.<|close|>", "Now I answer.<|close|>"]
    ]


def test_an_end_token_of_its_own_does_not_stand_for_the_turns(make_tokenizer):
    conversation = chat(["Which token ends a turn?", "It is <|im_end|>"])
    for template in (toy_tokenizer().chat_template, CHATML_MARKED, CHATML_MARKED_WIDE):
        assert trained_texts(make_tokenizer(template), conversation) == [["It is <|im_end|><|im_end|>"]]


JOINED = "{{ '<' + c.function.name + c.function.arguments + '>' }}"  # as DeepSeek V3 does
PRINTED = "<{{ c.function.name }}{{ c.function.arguments }}>"  # as Functionary does
DUMPED = "<{{ c.function.name }}{{ c.function.arguments | tojson }}>"


def test_marks_that_hold_more_than_the_answer(make_tokenizer):
    """As TRL's do: the header with the answer (gpt-oss), and an end-of-text behind the last one (Phi-3)."""
    header = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    with_header = CHATML_MARKED.replace(header, "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n")
    with_header = with_header.replace("{% else %}", "{% else %}<|im_start|>{{ m.role }}\n")
    opens_thinking = with_header.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with_eos = CHATML_MARKED_WIDE.replace(
        "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{% generation %}<|end|>{% endgeneration %}"
        "{% else %}",
    )  # fmt: skip
    for template in (with_header, opens_thinking, with_eos):
        tokenizer = make_tokenizer(template, ["<|end|>"])
        assert trained_texts(tokenizer, chat(TWO_TURNS)) == [["I am small.<|im_end|>", "Now I answer.<|im_end|>"]]
        assert trained_texts(tokenizer, chat(TWO_TURNS[:2])) == [["I am small.<|im_end|>"]]


@pytest.mark.parametrize("written", [JOINED, PRINTED, DUMPED], ids=["joined", "printed", "dumped"])
@pytest.mark.parametrize("given", [{"a": [1, None]}, '{"a": [1, null]}'], ids=["object", "text"])
def test_arguments_are_written_as_json_whatever_the_template_takes(make_tokenizer, written, given):
    call = {"type": "function", "function": {"name": "add", "arguments": given}}
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    calls = "{% for c in message['tool_calls'] or [] %}" + written + "{% endfor %}<|im_end|>"
    tokenizer = make_tokenizer(PLAIN.replace("<|im_end|>", calls))
    assert trained_texts(tokenizer, chat(messages)) == [['<add{"a": [1, null]}><|im_end|>']]


def test_a_template_that_writes_the_first_call_only_is_told(make_tokenizer):
    """As that of gpt-oss does."""
    calls = "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% endif %}<|im_end|>"
    tokenizer = make_tokenizer(PLAIN.replace("<|im_end|>", calls))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained_texts(tokenizer, chat(messages)) == [["add<|im_end|>"]]
    messages[1]["tool_calls"].append(call)
    with pytest.raises(BadRow, match="leaves out a part of message 1, of its tool_calls"):
        ChatRenderer(tokenizer, "2025-03-09").render(chat(messages))


def test_a_developer_is_the_system_where_the_template_knows_none(make_tokenizer):
    messages = [{"role": role, "content": text} for role, text in (("developer", "Be kind"), ("user", "Hi"))]
    row = chat([*messages, {"role": "assistant", "content": "Hello"}])
    plain = toy_tokenizer().chat_template
    raises = "{% for m in messages if m.role == 'developer' %}{{ raise_exception('no') }}{% endfor %}" + plain
    skips = "{% set messages = messages | rejectattr('role', 'equalto', 'developer') | list %}" + plain
    for template, role in ((plain, "developer"), (raises, "system"), (skips, "system")):
        (part,) = ChatRenderer(make_tokenizer(template), "2025-03-09").render(row)
        assert f"<|im_start|>{role}\nBe kind<|im_end|>" in part.text


def test_a_template_that_is_missing_or_broken(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }")
    with pytest.raises(UserError, match="not valid Jinja"):
        ChatRenderer(tokenizer, "2025-03-09").render(chat(TWO_TURNS))
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template") as failure:
        ChatRenderer(tokenizer, "2025-03-09")
    assert "--chat-template" in failure.value.fix


def test_chatml_writes_tools_as_hermes_does():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "See:", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}] * 2
    text = toy_tokenizer().apply_chat_template(messages, tools=tools, tokenize=False)
    told, said, heard = text.split("<|im_end|>\n")[:3]
    listed = '{"type": "function", "function": {"name": "add"}}\n' * 2
    assert told.startswith("<|im_start|>system\nBe kind.\n\n") and f"<tools>\n{listed}</tools>\n" in told
    written = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert said == "<|im_start|>assistant\nSee:" + 2 * written
    assert heard == "<|im_start|>tool\n<tool_response>\n1\n</tool_response>"
