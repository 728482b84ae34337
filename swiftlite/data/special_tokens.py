"""Where a tokenizer's special tokens stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

SPARE = re.compile(r"pad|reserved|unused", re.IGNORECASE)  # names of tokens that no text has


class SpecialTokens:
    """Some tokens, of which the longest counts where one begins as another."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(sorted(tokens, key=len, reverse=True))

    def at(self, text: str, place: int) -> str:
        """The one that stands at a place, or nothing."""
        return next((token for token in self._tokens if text.startswith(token, place)), "")

    def end(self, text: str) -> bool:
        """Whether a text ends with one."""
        return text.endswith(self._tokens)

    def opening(self, text: str) -> list[int]:
        """Where those end that a text begins with, ascending; white space may stand between them."""
        ends, place = [], 0
        while token := self.at(text, place):
            ends.append(place + len(token))
            place = behind_space(text, ends[-1])
        return ends

    def closing(self, text: str) -> list[int]:
        """Where those end that close a text, ascending; white space may stand between them.

        The first that is not the answer's own ends the turn. (Phi-3 puts `<|endoftext|>` behind its `<|end|>` wherever
        no generation prompt follows; after a tool call special tokens of the call come first.)
        """
        ends: list[int] = []
        while token := next((token for token in self._tokens if text.rstrip().endswith(token)), ""):
            text = text.rstrip()
            ends.append(len(text))
            text = text[: -len(token)]
        return ends[::-1]


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Those that the tokenizer says are special."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)


def behind_space(text: str, place: int) -> int:
    """The place behind the white space that a place begins with."""
    return len(text) - len(text[place:].lstrip())


def stop_tokens(settings: GenerationConfig | PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: all that the settings name, the tokenizer's end of text, the template's end of a turn."""
    given = settings.eos_token_id
    stops = list(given) if isinstance(given, list | tuple) else [given]
    stops += [tokenizer.eos_token_id, _end_of_turn(tokenizer)]
    return list(dict.fromkeys(stop for stop in stops if stop is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that the chat template writes behind an answer, if it writes one."""
    if tokenizer.chat_template is None:
        return None
    mark = "MARK"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], tokenize=False
        )
    except Exception:  # foreign code; a template that refuses this refuses the conversation too, and says so then
        return None
    ids = tokenizer(text.rpartition(mark)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and (ids[0] in tokenizer.all_special_ids or ids[0] in tokenizer.added_tokens_decoder) else None


def padding_token(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of a token that may fill up rows, since it ends no answer: the model's own, the tokenizer's, or another
    special one. None where all of them end answers."""
    stops = stop_tokens(model_config, tokenizer)
    special = [(id_, str(token)) for id_, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    special.sort(key=lambda item: SPARE.search(item[1]) is None)  # others open something, and end nothing either
    named = (model_config.pad_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return next((id_ for id_ in (*named, *(id_ for id_, _ in special)) if id_ not in (None, *stops)), None)
