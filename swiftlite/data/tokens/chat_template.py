"""A tokenizer's chat template: messages -> text, through transformers' public interface."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from swiftlite.data.rows.forms import BadRow, Chat
from swiftlite.data.tokens.spans import Span
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = [{"role": "user", "content": "x"}]
_SAID = "abcdefgh2"  # which no template says by itself
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


def in_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each content as a list of one text part, as rows with images have it."""
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


def takes_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template writes content that is a list of parts, and none that is a string, as those of LLaVA, Idefics
    and SmolVLM do. render: messages -> text, may raise anything."""
    asked = [{"role": "user", "content": _SAID}]
    return not _says(render, asked) and _says(render, in_parts(asked))


def _says(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> bool:
    try:
        return _SAID in render(messages)
    except Exception:  # a template is foreign code
        return False


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """The messages, whose contents are strings, as the tokenizer's template writes them. options: of
    `apply_chat_template`. Raises what the template does."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    return render(in_parts(messages) if takes_parts(render) else list(messages))


class ChatTemplate:
    """Renders conversations; one that has tools may have a template of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, date: str) -> None:
        """date: ISO date for templates that write today's date, so that a run does not depend on the day.

        Raises UserError where there is no template, it cannot be compiled, or its date cannot be pinned.
        """
        self._tokenizer = tokenizer
        self._date = datetime.date.fromisoformat(date)
        self._templates = {with_tools: self._prepare(with_tools) for with_tools in (False, True)}
        write = partial(tokenizer.apply_chat_template, tokenize=False)
        self._parted = {
            with_tools: takes_parts(partial(write, chat_template=text)) for with_tools, text in self._templates.items()
        }

    def text_for(self, chat: Chat) -> str:
        """The template itself."""
        return self._templates[bool(chat.tools)]

    def is_marked(self, chat: Chat) -> bool:
        """Whether it says by `{% generation %}` what is an answer."""
        return _GENERATION.search(self.text_for(chat)) is not None

    def render(self, chat: Chat, count: int, *, generation: bool = False) -> str:
        """The first `count` messages as text. Raises BadRow with the template's own message."""
        try:
            return self._tokenizer.apply_chat_template(
                self._first(chat, count),
                tools=chat.tools,
                chat_template=self.text_for(chat),
                add_generation_prompt=generation,
                tokenize=False,
            )
        except Exception as error:
            raise _template_failure(error) from error

    def render_marks(self, chat: Chat, count: int) -> tuple[str, list[Span]]:
        """The first `count` messages as text, and the spans that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marks = render_jinja_template(
                conversations=[self._first(chat, count)],
                tools=chat.tools,
                chat_template=self.text_for(chat),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise _template_failure(error) from error
        return texts[0], marks[0]

    def _first(self, chat: Chat, count: int) -> list[dict[str, Any]]:
        """The first `count` messages in the form that the template takes."""
        messages = chat.messages[:count]
        return in_parts(messages) if self._parted[bool(chat.tools)] else messages

    def _prepare(self, with_tools: bool) -> str:
        try:
            template = self._tokenizer.get_chat_template(None, PROBE if with_tools else None)
        except ValueError as error:
            raise UserError(
                "the tokenizer has no chat template, and the rows are conversations",
                fix="give --chat-template instruction (plain headers), chatml or a .jinja file; "
                "to train plain text use `prompt` and `completion`",
            ) from error
        pinned = _DATE_CALL.sub(lambda call: repr(self._date.strftime(call.group(2))), template)
        if "strftime_now(" in pinned:
            raise UserError(
                "the chat template asks for today's date in a way that cannot be pinned to --template-date",
                fix="write the date format in the template as a literal string, and give it with --chat-template",
            )
        return pinned


def _template_failure(error: Exception) -> Exception:
    """A template is foreign code and may raise anything: its syntax is the user's to mend, the rest is the row's."""
    import jinja2

    if isinstance(error, jinja2.TemplateSyntaxError):
        return UserError(f"the chat template is not valid Jinja: {error}", fix="mend it, or give --chat-template")
    return BadRow("template_error", f"the chat template refuses the row: {str(error)[:300]}")
