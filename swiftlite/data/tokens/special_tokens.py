"""Where a tokenizer's special tokens stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def squash(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
