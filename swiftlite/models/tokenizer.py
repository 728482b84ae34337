"""Tokenizers and chat templates from a local folder or the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.config.names import check_name
from swiftlite.errors import UserError
from swiftlite.hub import fetched_file, kept_file
from swiftlite.models.load import check_model_path, hub_errors, read_settings
from swiftlite.quick_imports import quick_imports
from swiftlite.untrusted import existing, read_json_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig

CHATML = (  # with tools as Hermes and Qwen 2.5 write them
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n"
    "{% endif %}You may call these functions:\n<tools>\n{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "</tools>\nWrite a call as an object with its name and arguments:\n<tool_call>\n"
    '{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'tool' %}<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n' if message['content'] or not loop.first }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCTION = (  # for models that have no marks of turns: plain headers, and their own end-of-text behind an answer
    "{% for message in messages %}{% if message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
    "### Response:\n{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}"
)
ALPACA = (  # the same behind the opening of Stanford Alpaca's rows, https://github.com/tatsu-lab/stanford_alpaca
    "{% if messages[0]['role'] != 'system' %}Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n{% endif %}" + INSTRUCTION
)
LARGEST_TEMPLATE = 1 << 20  # bytes
BUILT_IN_TEMPLATES = {"chatml": CHATML, "instruction": INSTRUCTION, "alpaca": ALPACA}
AS_WRITTEN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that take all from tokenizer.json
PROBE = (  # what tokenizers divide unlike each other
    " It's 12345 of  them, I'M sure.\n\n  été \tx1=f(3.14); //...\r\n\u4f60\u597d\uff0c\u30c6\u30b9\u30c8 don't\n"
)
PROCESSOR_TEMPLATE = "chat_template.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def tokenizer_loader(
    config: RunConfig, tell: Callable[[str], None] = lambda _text: None
) -> Callable[[], PreTrainedTokenizerBase]:
    """A function that loads the run's tokenizer once, at its first call: most processes need none for cached rows.

    tell: is told which of `--new-tokens` are not new.
    """
    loaded: list[PreTrainedTokenizerBase] = []

    def load() -> PreTrainedTokenizerBase:
        if not loaded:
            loaded.append(
                load_tokenizer(
                    config.model,
                    tokenizer=config.tokenizer,
                    revision=config.revision,
                    trust_remote_code=config.trust_remote_code,
                    chat_template=config.chat_template,
                    new_tokens=config.new_tokens,
                    vocabulary_of=config.adapter,
                    tell=tell,
                )
            )
        return loaded[0]

    return load


def load_tokenizer(
    model: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    new_tokens: list[str] | None = None,
    vocabulary_of: str | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template and the new tokens that were asked for.

    chat_template: a name of `BUILT_IN_TEMPLATES` or a Jinja file; revision: of the model, another tokenizer
    has its own; vocabulary_of: an adapter with which the vocabulary cannot grow any more;
    tell: is told which new tokens are known, and of a tokenizer that is not what its file says. Raises UserError where
    it cannot be had.
    """
    with quick_imports():
        from transformers import AutoTokenizer

    source = tokenizer or model
    if tokenizer is None:
        check_model_path(source)
    else:
        check_name(source, "--tokenizer")
    check_tokenizer_folder(Path(source).expanduser())
    with hub_errors(source, "tokenizer"):
        its_revision = revision if source == model else None
        loaded = AutoTokenizer.from_pretrained(source, revision=its_revision, trust_remote_code=trust_remote_code)
    if (told := _other_than_its_file(loaded, source, its_revision)) is not None:
        tell(told)
    if new_tokens:
        vocabulary = loaded.get_vocab()
        if known := [token for token in new_tokens if token in vocabulary]:
            tell(f"note: the tokenizer knows {', '.join(known)} of --new-tokens already")
        if vocabulary_of is not None and (more := [token for token in new_tokens if token not in vocabulary]):
            raise UserError(
                f"the adapter cannot learn new tokens, and its tokenizer does not know {', '.join(more)}",
                where=f"--adapter {vocabulary_of}",
                fix="leave them out of --new-tokens, or merge the adapter (swiftlite export) and train a new one",
            )
        loaded.add_tokens(new_tokens)
    if chat_template is not None:
        loaded.chat_template = read_chat_template(chat_template)
    elif loaded.chat_template is None:
        loaded.chat_template = _template_of_processor(source, its_revision)
    return loaded


def _template_of_processor(source: str, revision: str | None) -> str | None:
    """The chat template of models that take images too, which some have beside their tokenizer alone: transformers'
    tokenizers do not read that file. Raises UserError where it holds none."""
    path = fetched_file(source, PROCESSOR_TEMPLATE, revision)
    if path is None:
        return None
    template = read_settings(path).get("chat_template")
    if not isinstance(template, str):
        fix = "give --chat-template, or copy the file again"
        raise UserError(f"{PROCESSOR_TEMPLATE} holds no chat template", where=str(path), fix=fix)
    return template


def _other_than_its_file(tokenizer: PreTrainedTokenizerBase, source: str, revision: str | None) -> str | None:
    """What to tell of a tokenizer that divides a text otherwise than its tokenizer.json: of some types of models
    transformers 5 takes a class of its own, which builds it anew, whatever class the files name."""
    kind = type(tokenizer).__name__
    if kind in AS_WRITTEN or getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    from tokenizers import Tokenizer

    settings, whole = (kept_file(source, name, revision) for name in ("tokenizer_config.json", "tokenizer.json"))
    named = None if settings is None else read_json_file(settings).get("tokenizer_class")
    if whole is None or (named is not None and named.removesuffix("Fast") == kind):
        return None
    mine, theirs = (one.encode(PROBE).tokens for one in (tokenizer.backend_tokenizer, Tokenizer.from_file(str(whole))))
    if mine == theirs:
        return None
    place = next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
    return (
        f"note: transformers makes a {kind} of the tokenizer, which divides texts otherwise than tokenizer.json says: "
        f"a probe has {len(mine)} tokens and not {len(theirs)}, {mine[place]!r} and not {theirs[place]!r} among them; "
        "engines that load it by transformers do the same"
    )


def check_tokenizer_folder(folder: Path) -> None:
    """Raises UserError for a folder without a tokenizer. What is no folder may be a hub id."""
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            "the model folder has no tokenizer",
            where=str(folder),
            fix="copy tokenizer.json and tokenizer_config.json into it, or give --tokenizer",
        )


def read_chat_template(name: str) -> str:
    """The text of a built-in template or of a Jinja file. Raises UserError."""
    if name.lower() in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[name.lower()]
    path = existing(name)
    if path is None or not path.is_file():
        known = ", ".join(BUILT_IN_TEMPLATES)
        where = f"--chat-template {name[:80]}"
        fix = f"leave it out for the model's own, or name a .jinja file or one of: {known}"
        raise UserError("no such chat template", where=where, fix=fix)
    try:
        with path.open("rb") as file:
            held = file.read(LARGEST_TEMPLATE + 1)
        if len(held) > LARGEST_TEMPLATE:
            what = f"the chat template is larger than {LARGEST_TEMPLATE >> 20} MiB"
            raise UserError(what, where=str(path), fix="name a file that holds a template alone")
        return held.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the chat template cannot be read: {error}", where=str(path), fix="save it as UTF-8"
        ) from error
