"""Chat -> text and the exact character spans that are trained: each answer with its end-of-turn token, nothing else.

Two ways to find a span. A template with `{% generation %}` marks says it itself. For any other the conversation is
rendered up to the answer with the generation prompt, and up to and with the answer: what lies between is the span.
Templates that write history differently from the present (Qwen3 drops the thinking of earlier turns) break the
prefix; the conversation is then split, and each part trains only the answers that stand in it as the model gives them.
"""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swiftlite.data.arguments import CALL, with_fitting_arguments
from swiftlite.data.forms import BadRow, Chat
from swiftlite.data.messages import REASONING_KEYS, TRAIN_KEYS
from swiftlite.data.roles import with_known_roles
from swiftlite.data.special_tokens import SpecialTokens, behind_space, special_tokens_of
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
OPENING = 64  # characters; a generation prompt that goes on behind its header (`<think>`) is far shorter
_PROBE = [{"role": "user", "content": "x"}]
_ANSWER = "ANSWER"
_THOUGHT = "</think>"  # what ends the thinking of DeepSeek R1 and of most that came after it


@dataclass(frozen=True)
class Rendered:
    """text: the whole conversation or a part of it; spans: trained characters, ascending; add_eos: the template ends
    answers with no token at all, so that the tokenizer's end-of-text has to be appended and trained."""

    text: str
    spans: list[Span]
    add_eos: bool


@dataclass(frozen=True)
class _Turn:
    """One trained answer: the text up to its end, the spans within it, whether an end-of-turn token closes it, and the
    role of the message behind it."""

    text: str
    spans: list[Span]
    closed: bool
    next_role: str


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template through transformers' public interface."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_date: str) -> None:
        """template_date: ISO date for templates that write today's date, so that a run does not depend on the day.

        Raises UserError where there is no template, it cannot be compiled, or its date cannot be pinned.
        """
        self._tokenizer = tokenizer
        self._date = datetime.date.fromisoformat(template_date)
        self._templates = {with_tools: self._prepare(with_tools) for with_tools in (False, True)}
        self._shown: dict[tuple[str, str, bool], bool] = {}
        end = self._behind_an_answer()
        self._end, self._endless = end or "", end == ""
        added = map(str, tokenizer.added_tokens_decoder.values())  # of which those of --new-tokens are not special
        special = special_tokens_of(tokenizer) | {token for token in added if self._end.startswith(token)}
        self._special = SpecialTokens(special)
        self._end_of_turn = self._learnt_end()

    def render(self, chat: Chat) -> list[Rendered]:
        """One text, or several where the template rewrites history. Raises BadRow."""

        def rendered(given: list[dict[str, Any]]) -> str:
            return self._render(replace(chat, messages=given), len(given))

        messages = with_fitting_arguments(with_known_roles(chat.messages, rendered), rendered)
        chat = replace(chat, messages=messages)
        turns = [self._turn(chat, index) for index, trained in enumerate(chat.trained) if trained]
        groups = [[turns[0]]]
        for turn in turns[1:]:
            before = groups[-1][-1]
            if turn.text.startswith(before.text[: before.spans[-1][1]]):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        return [self._joined(group) for group in groups]

    def unknown_keys(self, chat: Chat) -> set[str]:
        """Keys of the messages of which the template makes nothing. The thinking of an answer to learn is checked by
        itself."""
        template, found = self._templates[bool(chat.tools)], set()
        for message, trained in zip(chat.messages, chat.trained, strict=True):
            keys = message.keys() - {"role", "content"} - found - ({*REASONING_KEYS} if trained else set())
            for key in keys:
                unknown, text = key in TRAIN_KEYS or key not in template, isinstance(message[key], str)
                if unknown or (text and not self._shows(message["role"], key, chat.tools)):
                    found.add(key)
        return found

    def _shows(self, role: str, key: str, tools: list[dict[str, Any]] | None) -> bool:
        """Whether a text under this key in a message of this role changes what is written. A template that names the
        key may mean that of a tool's call."""
        if (place := (role, key, bool(tools))) not in self._shown:
            user, answer = _PROBE[0], {"role": "assistant", "content": "x"}
            before = {"assistant": [user], "tool": CALL}.get(role, [])
            after = {"system": [user, answer], "assistant": []}.get(role, [answer])
            plain = {"role": role, "content": "x"}
            try:
                without, with_key = (
                    self._render(Chat(messages, [], tools), len(messages))
                    for messages in ([*before, plain | more, *after] for more in ({}, {key: "abcdefgh2"}))
                )
                self._shown[place] = without != with_key
            except BadRow:  # it does not take such a conversation, or wants the key
                self._shown[place] = True
        return self._shown[place]

    # ---- one answer ---------------------------------------------------------------------------------------------

    def _turn(self, chat: Chat, index: int) -> _Turn:
        if _GENERATION.search(self._templates[bool(chat.tools)]):
            text, spans = self._marked(chat, index)
        else:
            text, spans = self._between(chat, index)
        start, end = spans[-1]
        last = text[start:end].rstrip()
        ends = self._special.closing(last)
        if self._end_of_turn and last.endswith(self._end):
            spans = [*spans[:-1], (start, start + len(last) - len(self._end) + len(self._end_of_turn))]
        elif ends:  # what stands behind the end-of-turn token belongs to the template, not to the answer
            message = chat.messages[index]
            own = len(ends) if message.get("tool_calls") else len(self._special.closing(message["content"]))
            spans = [*spans[:-1], (start, start + ends[min(own, len(ends) - 1)])]
        elif self._end and text[:end].rstrip().endswith(self._end):  # an end in plain text
            spans = [*spans[:-1], (start, len(text[:end].rstrip()))]
        self._check_content(chat, index, text[: spans[0][0]], "".join(text[s:e] for s, e in spans))
        following = chat.messages[index + 1 : index + 2]
        next_role = following[0]["role"] if following else ""
        return _Turn(text, spans, closed=bool(ends) and not self._endless, next_role=next_role)

    def _joined(self, turns: list[_Turn]) -> Rendered:
        """The sequence of some answers; an end-of-text stands right behind the last of them."""
        last = turns[-1]
        spans = [span for turn in turns[:-1] for span in self._ended(turn, last.text)] + last.spans
        return Rendered(last.text if last.closed else last.text[: spans[-1][1]], spans, add_eos=not last.closed)

    def _ended(self, turn: _Turn, text: str) -> list[Span]:
        """The spans of an answer within a longer conversation.

        Models whose template ends no answer (GLM) stop at the special token that opens the next turn, of a user or a
        tool: it is the answer's end. The header of another answer is not, nor what opens every text.
        """
        start, end = turn.spans[-1]
        place = behind_space(text, end)
        token = self._special.at(text, place)
        bos = self._tokenizer.bos_token
        if not self._endless or turn.next_role == "assistant" or not token or token == bos:
            return turn.spans
        return [*turn.spans[:-1], (start, place + len(token))]

    def _marked(self, chat: Chat, index: int) -> tuple[str, list[Span]]:
        """(text up to the end of the answer, spans the template marks for it).

        Some mark the header too, or an end-of-text behind the last answer: neither is the answer's.
        """
        text, marks = self._render_marks(chat, index + 1)
        begin = self._answer_start(chat, index, text) if index else 0
        if begin is None:  # earlier messages are written anew, so only the number of marks tells whose they are
            answers = [i for i in range(index) if chat.messages[i]["role"] == "assistant"]
            marks = marks[len(self._render_marks(chat, answers[-1] + 1)[1]) if answers else 0 :]
        spans = _without_gaps([(max(start, begin or 0), end) for start, end in marks])
        if not spans:
            raise BadRow("template_error", f"the template's generation marks leave out message {index}")
        end = self._over_end_token(text, spans[-1][1], chat.messages[index]["content"].rstrip())
        return text, [*spans[:-1], (spans[-1][0], end)]

    def _answer_start(self, chat: Chat, index: int, text: str) -> int | None:
        """Where a marked answer starts at the earliest; None where the text does not go on from the question's."""
        prompt = self._render(chat, index, generation=True)
        if text.startswith(prompt):
            return len(prompt)
        before = self._render(chat, index)
        same = text.startswith(before) and os.path.commonprefix([text, prompt]) != before
        return self._after_header(chat, index, text, prompt, len(before)) if same else None

    def _over_end_token(self, text: str, end: int, content: str) -> int:
        """The end of the span, moved over an end-of-turn token that the template leaves outside its marks."""
        marked = text[:end].rstrip()
        if self._special.end(marked) and not (self._special.end(content) and marked.endswith(content)):
            return end
        return end + len(self._special.at(text, end))

    def _between(self, chat: Chat, index: int) -> tuple[str, list[Span]]:
        """(text up to the end of the answer, the one span behind the generation prompt)."""
        text = self._answered(chat, index)
        prompt = self._render(chat, index, generation=True) if index else self._opening_prompt(chat, text)
        if text.startswith(prompt):
            return text, [(len(prompt), len(text))]
        before = self._render(chat, index) if index else ""
        if text.startswith(before):
            return text, [(self._after_header(chat, index, text, prompt, len(before)), len(text))]
        text = prompt + self._behind_question(chat, index, text, prompt)
        return text, [(len(prompt), len(text))]

    def _answered(self, chat: Chat, index: int) -> str:
        """The conversation up to and with an answer.

        DeepSeek R1's template drops what stands before an answer's `</think>`, be it the one that is learnt. Such an
        answer goes whole where the template writes the rest of it, as the model gives it; the earlier ones stay cut.
        """
        text, content = self._render(chat, index + 1), _with_thinking(chat.messages[index])
        rest = content.rpartition(_THOUGHT)[2]
        if rest == content or squash(content) in squash(text):
            return text
        if any(squash(self._saying(chat, index, what)) != squash(text) for what in (content, rest)):
            return text  # it does something else
        before, found, behind = self._saying(chat, index, _ANSWER).rpartition(_ANSWER)
        return before + content + behind if found else text

    def _saying(self, chat: Chat, index: int, content: str) -> str:
        """The conversation up to an answer that says something else."""
        messages = [*chat.messages[:index], chat.messages[index] | {"content": content}]
        return self._render(replace(chat, messages=messages), index + 1)

    def _behind_question(self, chat: Chat, index: int, text: str, prompt: str) -> str:
        """What stands behind the message before an answer that changes what the template writes of earlier ones.

        Mistral's write the system message into the last question, and leave it out once that is answered. The model
        is asked with it, so the answer goes behind the prompt.
        """
        asked = chat.messages[index - 1]["content"].strip()
        question = prompt[prompt.rfind(asked) :] if asked and asked in prompt else prompt
        place = text.rfind(question)
        if place < 0:
            raise BadRow("template_error", f"the template does not begin message {index} with its generation prompt")
        return text[place + len(question) :]

    def _opening_prompt(self, chat: Chat, text: str) -> str:
        """The generation prompt where nothing comes before the answer: found by what it adds to another question."""
        probe = Chat(_PROBE, [False], chat.tools)
        asked, prompt = self._render(probe, 1), self._render(probe, 1, generation=True)
        header = prompt[len(asked) :] if prompt.startswith(asked) else ""
        start = text.find(header)
        if not header or start < 0:
            raise BadRow("template_error", "the template does not open an answer that no question comes before")
        return text[: start + len(header)]

    def _after_header(self, chat: Chat, index: int, text: str, prompt: str, before: int) -> int:
        """Where the answer starts if the generation prompt says more than the header of a given answer has.

        Templates of thinking models end their generation prompt with `<think>`, which is not there in an answer
        without thinking: what both share is the header, as long as it says more than the `before` characters before it.
        """
        shared = len(os.path.commonprefix([text, prompt]))
        if shared <= before:
            raise BadRow("template_error", f"the template does not begin message {index} with its generation prompt")
        content, body = chat.messages[index]["content"].strip(), text.rstrip().removesuffix(self._end).rstrip()
        start = len(body) - len(content) if content and body.endswith(content) else shared
        return min(shared, start)  # the answer may begin as what the prompt says more

    def _check_content(self, chat: Chat, index: int, before: str, trained: str) -> None:
        """The answer must stand in the trained text, white space aside: some templates drop a part of it.

        Its first characters may belong to a generation prompt that opens the thinking.
        """
        message = chat.messages[index]
        parts = [key for key in ("content", *REASONING_KEYS) if message.get(key)]
        opening, found = squash(before[-OPENING:]), squash(trained)
        calls = found.replace(squash(message["content"]), "", 1)  # a call may be named by a word of the answer
        names = Counter(squash(call["function"]["name"]) for call in message.get("tool_calls") or [])
        lost = [key for key in parts if not _ends_within(squash(message[key]), opening, found)]
        if any(calls.count(name) < times for name, times in names.items()):  # some write only the first call
            lost.append("tool_calls")
        if lost:
            what = f"the chat template leaves out a part of message {index}, of its {' and '.join(lost)}"
            raise BadRow("template_drops_content", what)

    # ---- the template -------------------------------------------------------------------------------------------

    def _prepare(self, with_tools: bool) -> str:
        try:
            template = self._tokenizer.get_chat_template(None, _PROBE if with_tools else None)
        except ValueError as error:
            raise UserError(
                "the tokenizer has no chat template, and the rows are conversations",
                fix="give --chat-template chatml or a .jinja file; to train plain text use `prompt` and `completion`",
            ) from error
        pinned = _DATE_CALL.sub(lambda call: repr(self._date.strftime(call.group(2))), template)
        if "strftime_now(" in pinned:
            raise UserError(
                "the chat template asks for today's date in a way that cannot be pinned to --template-date",
                fix="write the date format in the template as a literal string, and give it with --chat-template",
            )
        return pinned

    def _behind_an_answer(self, following: Sequence[dict[str, str]] = ()) -> str | None:
        """What the template writes behind an answer, without white space around it; None where it refuses to.
        following: messages after it."""
        messages = [*_PROBE, {"role": "assistant", "content": _ANSWER}, *following]
        try:
            text = self._render(Chat(messages, []), len(messages))
        except BadRow:  # a template that refuses this may take the rows
            return None
        return text.rpartition(_ANSWER)[2].strip()

    def _learnt_end(self) -> str:
        """What of `_end` belongs to the answer: its first special token.

        Or several, if these are all that it is, and stand behind an answer that is not the last one too: Cohere's
        Command R7B has two. Phi-3 adds one at the very end, the first Llama 3 opens the next answer, asked or not.
        """
        ends = self._special.opening(self._end)
        if not ends or ends[-1] < len(self._end):
            return self._end[: min(ends, default=0)]
        between = self._behind_an_answer(_PROBE) or ""
        shared = len(os.path.commonprefix([self._end, between]))
        return self._end[: max((end for end in ends if end <= shared), default=ends[0])]

    def _render(self, chat: Chat, count: int, *, generation: bool = False) -> str:
        """The first `count` messages as text. Raises BadRow with the template's own message."""
        try:
            return self._tokenizer.apply_chat_template(
                chat.messages[:count],
                tools=chat.tools,
                chat_template=self._templates[bool(chat.tools)],
                add_generation_prompt=generation,
                tokenize=False,
            )
        except Exception as error:
            raise _template_failure(error) from error

    def _render_marks(self, chat: Chat, count: int) -> tuple[str, list[Span]]:
        """The first `count` messages as text, and the spans that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marks = render_jinja_template(
                conversations=[chat.messages[:count]],
                tools=chat.tools,
                chat_template=self._templates[bool(chat.tools)],
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise _template_failure(error) from error
        return texts[0], marks[0]


def _without_gaps(spans: list[Span]) -> list[Span]:
    """The spans that hold anything, with those that touch as one."""
    found: list[Span] = []
    for start, end in spans:
        if end > start and found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def _template_failure(error: Exception) -> Exception:
    """A template is foreign code and may raise anything: its syntax is the user's to mend, the rest is the row's."""
    import jinja2

    if isinstance(error, jinja2.TemplateSyntaxError):
        return UserError(f"the chat template is not valid Jinja: {error}", fix="mend it, or give --chat-template")
    return BadRow("template_error", f"the chat template refuses the row: {str(error)[:300]}")


def _with_thinking(message: dict[str, Any]) -> str:
    """The answer with its thinking, as models give it whose thinking ends with `</think>`."""
    content = message["content"]
    thinking = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    if not thinking or _THOUGHT in content:
        return content
    thinking, answer = thinking.strip("\n"), content.lstrip("\n")
    return f"<think>\n{thinking}\n{_THOUGHT}\n\n{answer}"


def _ends_within(part: str, opening: str, found: str) -> bool:
    """Whether `part` stands in opening + found and at least its last character in found."""
    reach = min(len(opening), max(0, len(part) - 1))
    return part in opening[len(opening) - reach :] + found


def squash(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
