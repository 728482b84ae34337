"""The tokens that end an answer: those that training teaches to end with."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from swiftlite.data.rows.arguments import CALL
from swiftlite.data.rows.forms import BadRow, Chat
from swiftlite.data.tokens.special_tokens import SPARE
from swiftlite.data.tokens.template import ChatRenderer, Rendered
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

_TALK = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
_USED = [*CALL, {"role": "tool", "content": "x", "name": "call", "tool_call_id": "abcdefgh1"}, _TALK[1]]
_TOOL = {"type": "function", "function": {"name": "call", "description": "x", "parameters": {}}}
_SOME_DAY = "2025-01-01"


def stop_tokens(settings: GenerationConfig | PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: all that the settings name, the tokenizer's end of text, the template's ends of turns."""
    given = settings.eos_token_id
    stops = list(given) if isinstance(given, list | tuple) else [given]
    stops += [tokenizer.eos_token_id, *_ends_of_turns(tokenizer)]
    return list(dict.fromkeys(stop for stop in stops if stop is not None))


def _ends_of_turns(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The added tokens that trained answers end with: before the end of the text, a question, or a tool's result.

    They may be three: gpt-oss writes `<|return|>` and `<|call|>`, GLM stops at what opens the next turn. None of them
    stands within an answer too, as what closes its thought; nor is it what the end of the text is written behind.
    """
    if tokenizer.chat_template is None:
        return []
    try:
        renderer = ChatRenderer(tokenizer, _SOME_DAY)
    except UserError:  # of a template that cannot be used; who uses it is told so
        return []
    ends, within = [], set()
    for messages in (_TALK[:2], _TALK, _USED):
        for part in _rendered(renderer, messages):
            texts = [part.text[start:end] for start, end in part.spans]
            spans = tokenizer(texts, add_special_tokens=False)["input_ids"]
            ends += [ids[-1] for ids in spans[: -1 if part.add_eos else None] if ids]
            if messages == _TALK[:2]:  # the spans of one answer; a call may be a turn of its own
                within.update([id_ for ids in spans for id_ in ids][:-1])
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [end for end in ends if end in added and end not in within]


def _rendered(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> list[Rendered]:
    """The texts that train each answer; with a tool where the template takes none without. Empty where it refuses."""
    for tools in (None, [_TOOL]):
        with contextlib.suppress(BadRow, UserError):  # what it does not take, it does not end
            return renderer.render(Chat(messages, [message["role"] == "assistant" for message in messages], tools))
    return []


def padding_token(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of a token that may fill up rows, since it ends no answer: the model's own, the tokenizer's, or another
    special one. None where all of them end answers."""
    stops = stop_tokens(model_config, tokenizer)
    special = [(id_, str(token)) for id_, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    special.sort(key=lambda item: SPARE.search(item[1]) is None)  # others open something, and end nothing either
    named = (model_config.pad_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return next((id_ for id_ in (*named, *(id_ for id_, _ in special)) if id_ not in (None, *stops)), None)
