"""Chat -> text and the exact character spans that are trained: each answer with its end-of-turn token, nothing else.

Two ways to find a span. A template with `{% generation %}` marks says it itself. For any other the conversation is
rendered up to the answer with the generation prompt, and up to and with the answer: what lies between is the span.
Templates that write history differently from the present (Qwen3 drops the thinking of earlier turns) break the
prefix; the conversation is then split, and each part trains only the answers that stand in it as the model gives them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from swiftlite.data.rows.arguments import CALL, with_fitting_arguments
from swiftlite.data.rows.forms import BadRow, Chat
from swiftlite.data.rows.messages import REASONING_KEYS, TRAIN_KEYS
from swiftlite.data.rows.roles import with_known_roles
from swiftlite.data.tokens.chat_template import PROBE, ChatTemplate
from swiftlite.data.tokens.spans import (
    OPEN_TAG,
    Span,
    behind_like,
    blanks_behind,
    ends_within,
    moved,
    thinks_nothing,
    without_gaps,
)
from swiftlite.data.tokens.special_tokens import SpecialTokens, behind_space, special_tokens_of, squash
from swiftlite.data.tokens.thoughts import OPENS, THOUGHT, thought_key, with_placed_thoughts, with_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENING = 64  # characters; a generation prompt that goes on behind its header (`<think>`) is far shorter
_ANSWER = "ANSWER"


@dataclass(frozen=True)
class Rendered:
    """text: the whole conversation or a part of it; spans: trained characters, ascending; add_eos: the template ends
    answers with no token at all, so that the tokenizer's end-of-text has to be appended and trained; asked: the model
    is asked for each of the answers with what stands before it."""

    text: str
    spans: list[Span]
    add_eos: bool
    asked: bool


@dataclass(frozen=True)
class _Turn:
    """One trained answer: the text up to its end, the spans within it, whether an end-of-turn token closes it, the role
    of the message behind it, and whether the model is asked for it with what stands before it."""

    text: str
    spans: list[Span]
    closed: bool
    next_role: str
    asked: bool


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template through transformers' public interface."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_date: str) -> None:
        """Raises UserError where there is no template, it cannot be compiled, or its date cannot be pinned."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_date)
        self._render = self._template.render
        self._shown: dict[tuple[str, str, bool], bool] = {}
        self._thought_keys: dict[bool, str | None] = {}
        end = self._behind_an_answer()
        self._end, self._endless = end or "", end == ""
        added = map(str, tokenizer.added_tokens_decoder.values())  # of which those of --new-tokens are not special
        special = special_tokens_of(tokenizer) | {token for token in added if self._end.startswith(token)}
        self._special = SpecialTokens(special)
        self._openers = self._opening_tokens()
        self._end_of_turn = self._learnt_end()

    def render(self, chat: Chat) -> list[Rendered]:
        """One text, or several where the template rewrites history. Raises BadRow."""

        def rendered(given: list[dict[str, Any]]) -> str:
            return self._render(replace(chat, messages=given), len(given))

        def key_of_thoughts() -> str | None:
            if (with_tools := bool(chat.tools)) not in self._thought_keys:
                self._thought_keys[with_tools] = thought_key(rendered)
            return self._thought_keys[with_tools]

        messages = with_placed_thoughts(with_known_roles(chat.messages, rendered), key_of_thoughts)
        messages = with_fitting_arguments(messages, rendered)
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
        template, found = self._template.text_for(chat), set()
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
            user, answer = PROBE[0], {"role": "assistant", "content": "x"}
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
        text, spans, asked = self._located(chat, index) if index else self._first(chat)
        start, end = spans[-1]
        last = text[start:end].rstrip()
        ends = self._before_opener(last, self._special.closing(last))
        if self._end_of_turn and last.endswith(self._end):
            spans = [*spans[:-1], (start, start + len(last) - len(self._end) + len(self._end_of_turn))]
        elif ends:  # what stands behind the end-of-turn token belongs to the template, not to the answer
            message = chat.messages[index]
            own = len(ends) if message.get("tool_calls") else len(self._special.closing(message["content"]))
            spans = [*spans[:-1], (start, start + ends[min(own, len(ends) - 1)])]
        elif self._end and text[:end].rstrip().endswith(self._end):  # an end in plain text
            spans = [*spans[:-1], (start, len(text[:end].rstrip()))]
        elif not self._end:  # a token of white space and of what follows is none of the answer's
            own = chat.messages[index]["content"]
            spans = [*spans[:-1], (start, end - max(0, blanks_behind(text[:end]) - blanks_behind(own)))]
        self._check_content(chat, index, text[: spans[0][0]], "".join(text[s:e] for s, e in spans))
        following = chat.messages[index + 1 : index + 2]
        next_role = following[0]["role"] if following else ""
        return _Turn(text, spans, closed=bool(ends) and not self._endless, next_role=next_role, asked=asked)

    def _joined(self, turns: list[_Turn]) -> Rendered:
        """The sequence of some answers; an end-of-text stands right behind the last of them."""
        last = turns[-1]
        spans = [span for turn in turns[:-1] for span in self._ended(turn, last.text)] + last.spans
        text = last.text if last.closed else last.text[: spans[-1][1]]
        return Rendered(text, spans, add_eos=not last.closed, asked=all(turn.asked for turn in turns))

    def _ended(self, turn: _Turn, text: str) -> list[Span]:
        """The spans of an answer within a longer conversation.

        Models whose template ends no answer (GLM) stop at the special token that opens the next turn, of a user or a
        tool: it is the answer's end. The header of another answer is not, nor a system's, nor what opens every text.
        """
        start, end = turn.spans[-1]
        place = behind_space(text, end)
        token = self._special.at(text, place)
        bos = self._tokenizer.bos_token
        if not self._endless or turn.next_role not in ("user", "tool") or not token or token == bos:
            return turn.spans
        return [*turn.spans[:-1], (start, place + len(token))]

    def _located(self, chat: Chat, index: int) -> tuple[str, list[Span], bool]:
        """(text up to the end of the answer, its spans, whether the model is asked with what stands before them)."""
        prompt = self._render(chat, index, generation=True)
        text, spans = (self._marked if self._template.is_marked(chat) else self._between)(chat, index, prompt)
        start = spans[0][0]
        if text.startswith(prompt[:start]) and thinks_nothing(prompt[start:], text[start:]):
            text, spans = prompt + text[start:], moved(spans, len(prompt) - start)
        return text, spans, text[: spans[0][0]] == prompt

    def _first(self, chat: Chat) -> tuple[str, list[Span], bool]:
        """The same of an answer that no question comes before: it is written as behind one."""
        behind = replace(chat, messages=[*PROBE, chat.messages[0]])
        asked, spans, _ = self._located(behind, 1)
        header, answer = asked[len(self._render(behind, 1)) : spans[0][0]], asked[spans[0][0] :]
        text = self._answered(chat, 0)
        place = text.find(header)
        if header and place >= 0 and answer.endswith(text[place + len(header) :]):
            text = text[:place] + header + answer  # Qwen3 leaves out the thought of an answer that has no question
        if text == answer or not text.endswith(header + answer):
            raise BadRow("template_error", "the template does not open an answer that no question comes before")
        return text, moved(spans, len(text) - len(asked)), True

    def _marked(self, chat: Chat, index: int, prompt: str) -> tuple[str, list[Span]]:
        """(text up to the end of the answer, spans the template marks for it).

        Some mark the header too, or an end-of-text behind the last answer: neither is the answer's. Some leave out the
        white space behind the generation prompt, which the model has to write.
        """
        text, marks = self._template.render_marks(chat, index + 1)
        begin = self._start(chat, index, text, prompt)
        if begin is None:  # the marks are of a text that the model is not asked with
            return self._between(chat, index, prompt)
        spans = without_gaps([(max(start, begin), end) for start, end in marks])
        if not spans:
            raise BadRow("template_error", f"the template's generation marks leave out message {index}")
        if text[begin : spans[0][0]].isspace():
            spans[0] = (begin, spans[0][1])
        end = self._over_end_token(text, spans[-1][1], chat.messages[index]["content"].rstrip())
        return text, [*spans[:-1], (spans[-1][0], end)]

    def _over_end_token(self, text: str, end: int, content: str) -> int:
        """The end of the span, moved over an end-of-turn token that the template leaves outside its marks."""
        marked = text[:end].rstrip()
        if self._special.end(marked) and not (self._special.end(content) and marked.endswith(content)):
            return end
        return end + len(self._special.at(text, end))

    def _between(self, chat: Chat, index: int, prompt: str) -> tuple[str, list[Span]]:
        """(text up to the end of the answer, the one span behind the generation prompt)."""
        text = self._answered(chat, index)
        start = self._start(chat, index, text, prompt)
        if start is None:
            text, start = prompt + self._behind_question(chat, index, text, prompt), len(prompt)
        return text, [(start, len(text))]

    def _start(self, chat: Chat, index: int, text: str, prompt: str) -> int | None:
        """Where the answer starts in the text; None where that does not go on from the question. Raises BadRow."""
        if text.startswith(prompt):
            return len(prompt)
        before = self._render(chat, index)
        history = len(os.path.commonprefix([before, prompt]))
        if (place := behind_like(text, prompt, history)) is not None:
            return place
        return self._after_header(chat, index, text, prompt, len(before)) if text.startswith(before) else None

    def _answered(self, chat: Chat, index: int) -> str:
        """The conversation up to and with an answer.

        DeepSeek R1's template drops what stands before an answer's `</think>`, be it the one that is learnt. Such an
        answer goes whole where the template writes the rest of it, as the model gives it; the earlier ones stay cut.
        """
        text, message = self._render(chat, index + 1), chat.messages[index]
        content = with_thinking(message)
        thoughts = [content] if content == message["content"] else [message.get(key) or "" for key in REASONING_KEYS]
        rest = content.rpartition(THOUGHT)[2]
        if rest == content or self._adds(chat, index, text, thoughts):
            return text
        if any(squash(self._saying(chat, index, what)) != squash(text) for what in (content, rest)):
            return text  # it does something else
        before, found, behind = self._saying(chat, index, _ANSWER).rpartition(_ANSWER)
        return before + content + behind if found else text

    def _adds(self, chat: Chat, index: int, text: str, parts: list[str]) -> bool:
        """Whether the parts of an answer stand in what it adds to the text before it."""
        before = self._render(chat, index) if index else ""
        added = squash(text.removeprefix(before))
        return all(squash(part) in added for part in parts)

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

    def _after_header(self, chat: Chat, index: int, text: str, prompt: str, before: int) -> int:
        """Where the answer starts if the generation prompt says more than the header of a given answer has.

        Templates of thinking models end their generation prompt with `<think>`, which is not there in an answer
        without thinking: what both share is the header, as long as it says more than the `before` characters before it.
        What an answer begins with may be shared by chance: another answer has the same header, and no tag is cut.
        """
        other = replace(chat, messages=[*chat.messages[:index], {"role": "assistant", "content": _ANSWER}])
        shared = min(len(os.path.commonprefix([one, prompt])) for one in (text, self._render(other, index + 1)))
        if cut := OPEN_TAG.search(text, before, shared):
            shared = cut.start()
        if shared <= before:
            raise BadRow("template_error", f"the template does not begin message {index} with its generation prompt")
        return shared

    def _check_content(self, chat: Chat, index: int, before: str, trained: str) -> None:
        """The answer must stand in the trained text, white space aside: some templates drop a part of it.

        Its first characters may belong to a generation prompt that opens the thinking.
        """
        message = chat.messages[index]
        parts = [key for key in ("content", *REASONING_KEYS) if message.get(key)]
        opening, found = squash(before[-OPENING:]), squash(trained)
        calls = found.replace(squash(message["content"]), "", 1)  # a call may be named by a word of the answer
        names = Counter(squash(call["function"]["name"]) for call in message.get("tool_calls") or [])
        lost = [key for key in parts if not ends_within(squash(message[key]), opening, found)]
        if any(calls.count(name) < times for name, times in names.items()):  # some write only the first call
            lost.append("tool_calls")
        said = with_thinking(message)
        if said.lstrip().startswith(OPENS) and THOUGHT + squash(said) in opening + found:
            what = f"the chat template closes the thinking before message {index}, which thinks for itself"
            raise BadRow("template_error", what)
        if lost:
            what = f"the chat template leaves out a part of message {index}, of its {' and '.join(lost)}"
            raise BadRow("template_drops_content", what)

    # ---- the end of a turn --------------------------------------------------------------------------------------

    def _behind_an_answer(self, following: Sequence[dict[str, str]] = ()) -> str | None:
        """What the template writes behind an answer, without white space around it; None where it refuses to.
        following: messages after it."""
        messages = [*PROBE, {"role": "assistant", "content": _ANSWER}, *following]
        try:
            text = self._render(Chat(messages, []), len(messages))
        except BadRow:  # a template that refuses this may take the rows
            return None
        return text.rpartition(_ANSWER)[2].strip()

    def _learnt_end(self) -> str:
        """What of `_end` belongs to the answer: its first special token.

        Or several, if these are all that it is, and stand behind an answer that is not the last one too: Cohere's
        Command R7B has two. Phi-3 adds one at the very end; the first Llama 3 and Command A open the next answer, asked
        or not. Or all of it, with words between special tokens, where each answer is closed so: Kimi K3 closes
        `response` and `message` by their names before its `<|end_of_msg|>`.
        """
        ends = self._special.opening(self._end)
        between = self._behind_an_answer(PROBE) or ""
        if ends and ends[-1] < len(self._end) and between.startswith(self._end) and self._special.end(self._end):
            return self._end
        if not ends or ends[-1] < len(self._end):
            return self._end[: min(ends, default=0)]
        shared = len(os.path.commonprefix([self._end, between]))
        closing = self._before_opener(self._end, ends)
        return self._end[: max((end for end in closing if end <= shared), default=ends[0])]

    def _opening_tokens(self) -> set[str]:
        """The special tokens that a text begins with: they open turns, and end none."""
        try:
            text = self._render(Chat(PROBE, []), 1)
        except BadRow:  # a template that refuses this may take the rows
            return set()
        ends = self._special.opening(text)
        return {text[start:end].strip() for start, end in pairwise([0, *ends])}

    def _before_opener(self, text: str, ends: list[int]) -> list[int]:
        """Where the special tokens of a row of them end, up to one that opens the next turn."""
        opened = (i for i, (start, end) in enumerate(pairwise(ends), 1) if text[start:end].strip() in self._openers)
        return ends[: next(opened, len(ends))]
