"""Calls of tools in the forms that chat templates write them in, and what stands behind them."""

import pytest

from swiftlite.data.calls.forms import Call, Unreadable
from swiftlite.data.calls.reader import CallReader
from swiftlite.errors import UserError
from swiftlite.models.toys import toy_tokenizer

DATE = "2026-01-01"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
NAME = "{{ c.function.name }}"
MANY = "{% for c in m.tool_calls or [] %}"
SAYING = (  # of Gemma 4, whose lists and objects hold texts between quotes of its own, and keys without any
    """{% macro say(v) %}{% if v is string %}<|"|>{{ v }}<|"|>"""
    """{% elif v is mapping %}{{ "{" }}{% for k, x in v.items() %}{{ k }}:{{ say(x) }}{{ "," if not loop.last }}"""
    """{% endfor %}}{% elif v is iterable %}[{% for x in v %}{{ say(x) }}{{ "," if not loop.last }}{% endfor %}]"""
    """{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"""
)
FORMS = {  # after the templates of the families that are named
    "hermes": MANY + '<tool_call>\n{"name": "' + NAME + '", "arguments": ' + ARGUMENTS
    + "}\n</tool_call>\n{% endfor %}",
    "mistral": "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS][' if loop.first else ', ' }}"
    '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + ', "id": "{{ c.id }}"}{{ "]" if loop.last }}{% endfor %}',
    "llama 3": '{% if m.tool_calls %}{% set c = m.tool_calls[0] %}{"name": "' + NAME + '", "parameters": ' + ARGUMENTS
    + "}{% endif %}",
    "cohere": "{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}\n"
    '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS
    + '}{{ "," if not loop.last }}{% endfor %}\n]<|END_ACTION|>{% endif %}',
    "apertus": "{% if m.tool_calls %}<|tools|>[{% for c in m.tool_calls %}" + '{"' + NAME + '": ' + ARGUMENTS
    + '}{{ ", " if not loop.last }}{% endfor %}]<|end|>{% endif %}',
    "devstral": MANY + "[TOOL_CALLS]" + NAME + "[CALL_ID]{{ c.id }}[ARGS]" + ARGUMENTS + "{% endfor %}",
    "kimi": "{% if m.tool_calls %}<|calls|>" + MANY + "<|call|>functions." + NAME + ":{{ loop.index0 }}<|args|>"
    + ARGUMENTS + "<|end|>{% endfor %}<|/calls|>{% endif %}",
    "deepseek": MANY + "<|call|>function<|sep|>" + NAME + "\n```json\n" + ARGUMENTS + "\n```<|end|>\n{% endfor %}",
    "qwen 3.5": MANY + "<tool_call>\n<function=" + NAME + ">\n" + PAIRS + "<parameter={{ k }}>\n" + VALUE
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}",
    "glm": MANY + "<tool_call>" + NAME + "\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "deepseek 3.2": MANY + '<invoke name="' + NAME + '">\n' + PAIRS
    + '<parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">' + VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}",
    "minimax": MANY + '<invoke name="' + NAME + '">' + PAIRS + "<{{ k }}>" + VALUE
    + "</{{ k }}>{% endfor %}</invoke>{% endfor %}",
    "lfm": "{% if m.tool_calls %}<|calls|>[" + MANY + NAME + "(" + PAIRS
    + """{{ k }}={{ "'" ~ v ~ "'" if v is string else v }}{{ ", " if not loop.last }}{% endfor %})"""
    + '{{ ", " if not loop.last }}{% endfor %}]<|end|>{% endif %}',
    "gemma 4": SAYING + MANY + "<|call>call:" + NAME + '{{ "{" }}' + PAIRS
    + """{{ k }}:{{ say(v) }}{{ "," if not loop.last }}{% endfor %}}<call|>{% endfor %}""",
    "kimi 3": "{% if m.tool_calls %}<|open|>tools<|sep|>" + MANY + '<|open|>call tool="' + NAME
    + '" index="{{ loop.index }}"<|sep|>' + PAIRS + '<|open|>argument key="{{ k }}" type="'
    + '{{ "string" if v is string else "other" }}"<|sep|>' + VALUE
    + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>{% endif %}",
    "minimax 3": "{% if m.tool_calls %}]<]m[>[<calls>\n" + MANY + ']<]m[>[<invoke name="' + NAME + '">' + PAIRS
    + "]<]m[>[<{{ k }}>" + VALUE + "]<]m[>[</{{ k }}>{% endfor %}]<]m[>[</invoke>\n{% endfor %}"
    + "]<]m[>[</calls>{% endif %}",
}  # fmt: skip
SINGLE = ("llama 3",)  # writes one call at a time
IN_JSON = ("hermes", "mistral", "cohere", "apertus", "devstral", "kimi", "deepseek")


def template(calls, close="<|im_end|>\n"):
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}says {{ m.content }} ({{ m.tool_call_id }}){% else %}{{ m.content }}{% endif %}"
        + calls
        + f"{close}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    )


def tool(name, **types):
    parameters = {key: {"type": kind, "description": "x"} for key, kind in types.items()}
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}


TOOLS = [
    tool("weather", city="string", days="integer", warm="boolean"),
    tool("now"),
    tool("add", a="number", b="number"),
    tool("plan", places="array", options="object"),
]


def reader(calls, tools=TOOLS, **more):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template(calls, **more)
    return CallReader(tokenizer, DATE, tools, [tokenizer.eos_token_id]), tokenizer


def written(tokenizer, *calls):
    """As the template writes an answer that is these calls."""
    given = [
        {"id": f"abcdefg{i:02}", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": given}]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    return text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_as_they_are_written(form):
    read, tokenizer = reader(FORMS[form])
    one = Call("weather", {"city": "São Paulo, north", "days": 3, "warm": True})
    other = Call("add", {"a": 0.5, "b": -2})
    for calls in ([one], [Call("now", {})], [other], *([[one, other, Call("now", {})]] if form not in SINGLE else [])):
        before, found = read.read(written(tokenizer, *calls))
        assert (before.strip(), found) == ("", calls)
    assert read.read("It is 7 o'clock.") == ("It is 7 o'clock.", [])
    if form not in SINGLE:
        before, found = read.read("Let me see. " + written(tokenizer, one))
        assert (before.strip(), found) == ("Let me see.", [one])
    thought = "<think>I could write " + written(tokenizer, one) + "</think>"
    assert read.read(thought + "No.") == (thought + "No.", [])
    assert read.read(thought + written(tokenizer, other))[1] == [other]


@pytest.mark.parametrize("form", FORMS)
def test_lists_and_objects_are_read(form):
    read, tokenizer = reader(FORMS[form])
    call = Call("plan", {"places": ["Rome, north", "3", 4], "options": {"by_car": True, "stops": [{"in": "Pisa"}]}})
    assert read.read(written(tokenizer, call))[1] == [call]


@pytest.mark.parametrize("form", FORMS)
def test_what_tools_say_stands_behind_their_calls(form):
    read, _ = reader(FORMS[form])
    opening = "\n<|im_start|>tool\nsays {} (call0000{})<|im_end|>".format
    end = "\n<|im_start|>assistant\n"
    assert read.behind([Call("now", {})], ["seven"]) == opening("seven", 0) + end
    if form not in SINGLE:
        calls = [Call("now", {}), Call("add", {"a": 1, "b": 2})]
        assert read.behind(calls, ["seven", "3"]) == opening("seven", 0) + opening("3", 1) + end


def test_a_result_may_hold_a_call():
    """Of the same tool, as that is written whose place is looked for."""
    read, tokenizer = reader(FORMS["hermes"])
    result = "It says " + written(tokenizer, Call("now", {"key": "value"}))
    assert f"says {result} (call00000)" in read.behind([Call("now", {})], [result])


@pytest.mark.parametrize("form", ["mistral", "devstral"])
def test_a_result_names_the_id_that_the_answer_gave(form):
    read, tokenizer = reader(FORMS[form])
    _, calls = read.read(written(tokenizer, Call("now", {}), Call("add", {"a": 1, "b": 2})))
    assert [call.id for call in calls] == ["abcdefg00", "abcdefg01"]
    assert "says 3 (abcdefg01)" in read.behind(calls, ["seven", "3"])


@pytest.mark.parametrize("form", IN_JSON)
def test_texts_in_json_are_any(form):
    read, tokenizer = reader(FORMS[form])
    call = Call("weather", {"city": 'a "b" \\ {c} [d]\n</tool_call>', "list": [1, {"x": None}]})
    assert read.read(written(tokenizer, call))[1] == [call]


def test_values_are_what_a_schema_says_they_are():
    """Where a template writes texts and numbers alike."""
    read, _ = reader(FORMS["qwen 3.5"])
    text = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    text += "<parameter=other>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    assert read.read(text)[1] == [Call("weather", {"city": "12", "days": 12, "other": [1, 2]})]
    several = text.replace("\n12\n", "\nfirst\n\nsecond \n", 1)
    assert read.read(several)[1][0].arguments["city"] == "first\n\nsecond "


def test_blanks_are_no_part_of_a_form():
    read, _ = reader(FORMS["hermes"])
    assert read.read('<tool_call> {"arguments":{"a":1},"name":"add"}</tool_call>')[1] == [Call("add", {"a": 1})]
    read, _ = reader(FORMS["glm"])
    text = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert read.read(text)[1] == [Call("add", {"a": 1})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>now()</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 99_999),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}'),  # which nothing closes
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}] and'),
        ("apertus", '<|tools|>[{"add": {"a": 1}, "now": {}}]<|end|>'),
        ("devstral", "[TOOL_CALLS]add[ARGS][1]"),
        ("devstral", "[TOOL_CALLS]"),
        ("devstral", "[TOOL_CALLS]now[ARGS]{}}"),
        ("kimi", "<|calls|><|call|>functions.now:0<|args|>{}"),
        ("qwen 3.5", "<tool_call>\n<function=now>\n</tool_call>"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),
        ("lfm", "<|calls|>[now()"),
        ("gemma 4", "<|call>call:now{}"),
        ("qwen 3.5", "<tool_call>\n<function=add>\n<parameter=a>\n1"),
        ("lfm", "<|calls|>[add(a=1"),
        ("lfm", "<|calls|>[add(a={1, 2})]<|end|>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>"),
    ],
)
def test_what_is_no_call_is_not_taken_for_one(form, text):
    read, _ = reader(FORMS[form])
    with pytest.raises(Unreadable):
        read.read(text)


def test_what_is_thought_calls_nothing():
    """Nor where nothing closes the thought, be it that the prompt has opened it."""
    read, tokenizer = reader(FORMS["hermes"])
    call = written(tokenizer, Call("now", {}))
    for text in ("<think>I may " + call, "<think>Well.</think>I <think>may " + call):
        assert read.read(text) == (text, [])
    thinking = "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"
    opened = template(FORMS["hermes"]).replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    tokenizer.chat_template = opened.replace("{{ m.content }}", thinking)
    read = CallReader(tokenizer, DATE, TOOLS, [tokenizer.eos_token_id])
    assert read.read("I may " + call) == ("I may " + call, [])
    assert read.read("I may.</think>" + call)[1] == [Call("now", {})]


def test_arguments_may_have_several_types():
    of = tool("either", x="string")
    of["function"]["parameters"]["properties"]["x"]["type"] = ["integer", "string"]
    read, tokenizer = reader(FORMS["qwen 3.5"], [of])
    for value in (3, "three"):
        assert read.read(written(tokenizer, Call("either", {"x": value})))[1] == [Call("either", {"x": value})]


def test_other_json_is_no_call():
    read, _ = reader(FORMS["llama 3"])
    for text in ('{"city": "Rome"}', "[1, 2]", '{"name": "add"', "{}"):
        assert read.read(text) == (text, [])


@pytest.mark.parametrize(
    "calls",
    [
        "",
        MANY + NAME + " " + ARGUMENTS + "{% endfor %}",  # behind nothing
        FORMS["hermes"].replace(ARGUMENTS, '{"x": 1}'),
        FORMS["hermes"].replace(ARGUMENTS, "{{ c.function.arguments | tojson | upper }}"),
    ],
)
def test_a_template_without_calls_is_told(calls):
    with pytest.raises(UserError, match="in no form that can be read") as failure:
        reader(calls)
    assert "--tools" in failure.value.fix


def test_a_template_that_writes_a_call_anew_is_told():
    """Once its result is known."""
    with pytest.raises(UserError, match="writes a call otherwise where its result stands behind it"):
        reader(FORMS["hermes"].replace("</tool_call>", "{{ '' if loop.last and messages | length == 2 else '!' }}"))


def test_a_template_that_mixes_two_calls_up_is_told():
    mixed = FORMS["hermes"].replace(NAME, NAME + "{{ '' if loop.first else '_other' }}")
    with pytest.raises(UserError, match="calls of weather and plan cannot be read back"):
        reader(mixed)


def test_a_template_that_loses_a_kind_of_value_is_told():
    lossy = FORMS["qwen 3.5"].replace(VALUE, "{{ 'a value' if v == true else v }}")
    with pytest.raises(UserError, match="calls of weather cannot be read back"):
        reader(lossy)


def test_a_call_is_written_before_its_result_as_it_was():
    """Qwen3 writes an empty thought before a last answer, and none before one that a result follows."""
    tokenizer = toy_tokenizer()
    thinking = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    tokenizer.chat_template = template(FORMS["hermes"]).replace("{{ m.content }}", thinking)
    read, text = CallReader(tokenizer, DATE, TOOLS, [tokenizer.eos_token_id]), written(tokenizer, Call("now", {}))
    assert text.startswith("<think>") and read.read(text)[1] == [Call("now", {})]
    assert read.behind([Call("now", {})], ["x"]).startswith("\n<|im_start|>tool\nsays x")
