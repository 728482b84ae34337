"""Calls of tools in answers: read as the model's chat template writes them, and gone on from with what tools say.

Every family of models has a form of its own, such as `<tool_call>{"name": ...}</tool_call>`, `<function=...>` with a
tag for each argument, or `[TOOL_CALLS]...`. None is known here. The template writes calls whose names, keys and values
are known, and what stands between these is the form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swiftlite.data.calls.forms import Call, Example, Form, Unreadable, check, cut_tag
from swiftlite.data.calls.objects import as_objects
from swiftlite.data.calls.tagged import as_tagged
from swiftlite.data.rows.forms import BadRow, Chat
from swiftlite.data.tokens.chat_template import PROBE, ChatTemplate
from swiftlite.data.tokens.own_tools import FLAG
from swiftlite.data.tokens.questions import opened
from swiftlite.data.tokens.template import ChatRenderer
from swiftlite.data.tokens.thoughts import OPENS, THOUGHT
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Tool = dict[str, Any]  # as chat templates take it
EXAMPLES = (  # ids as Mistral's templates want them
    Call("probe_of_words", {"alpha_key": "alpha said", "beta_key": "beta said"}, "abcdefgh1"),
    Call("other_with_sum", {"delta_key": 731, "gamma_key": 942}, "ZYXWVUTS9"),
)
ARGUMENTS = {"key": "value"}
_TYPES = {str: "string", int: "integer"}
_VALUES: dict[str, Any] = {"string": "some words", "integer": 7, "number": 0.5, "boolean": True}
FIX = f"use a model whose chat template writes calls, give --chat-template chatml, or leave {FLAG} out"


class CallReader:
    """Reads what a model with this chat template writes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, date: str, tools: Sequence[Tool], stops: Sequence[int]
    ) -> None:
        """date: as for `ChatTemplate`; stops: ids that end an answer. Raises UserError where the template writes no
        calls of these tools that can be read back, or no results behind them."""
        self._template, self._renderer = ChatTemplate(tokenizer, date), ChatRenderer(tokenizer, date)
        self._ends = [tokenizer.decode([stop]) for stop in stops]
        self._tools = list(tools)
        self._types = {tool["function"]["name"]: _parameters(tool) for tool in tools}
        form = self._learnt()
        if form is None:
            raise UserError("the chat template writes calls of tools in no form that can be read", where=FLAG, fix=FIX)
        self._form = form
        self._thinks = self._opens_thoughts()
        for tool in tools:
            self._check(self._call_of(tool))
        self._check(self._call_of(tools[0]), self._call_of(tools[-1]))

    def read(self, text: str) -> tuple[str, list[Call]]:
        """(what an answer says before it calls anything, its calls in order). text: with its special tokens, but
        for what ended it. What it thinks calls nothing. Raises Unreadable."""
        thought, closed, said = text.rpartition(THOUGHT)
        place, calls = self._form.read(said, self._types)
        if OPENS in said[:place] or (self._thinks and not closed):  # a thought that has no end
            return text, []
        check([[call.name, call.arguments, call.id] for call in calls])
        return thought + closed + said[:place], calls

    def behind(self, calls: Sequence[Call], results: Sequence[str]) -> str:
        """What stands between an answer that calls tools and the next one: what they say, and what opens that. Raises
        BadRow where the template cannot write it."""
        try:
            return self._behind(calls, results)
        except BadRow:  # of ids that the answer gives, and the template does not take
            return self._behind([replace(call, id="") for call in calls], results)

    def _behind(self, calls: Sequence[Call], results: Sequence[str]) -> str:
        """By arguments that are alike: those of an answer may be whatever it writes, and stand in it already."""
        ids = [call["id"] for call in with_ids(calls)]
        calling = _calling([Call(call.name, ARGUMENTS, id_) for call, id_ in zip(calls, ids, strict=True)])
        said = [
            {"role": "tool", "name": call.name, "tool_call_id": id_, "content": result}
            for call, id_, result in zip(calls, ids, results, strict=True)
        ]
        answer = self._answer(calling, self._tools)
        asked = opened([*PROBE, calling, *said], self._write)
        own = answer[answer.find(calls[0].name) :]
        place = asked.find(own)  # a result may hold it again
        if place < 0:
            raise BadRow("template_error", "the template writes a call otherwise where its result stands behind it")
        return asked[place + len(own) :]

    def _write(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        return self._template.render(Chat(messages, [], self._tools), len(messages), generation=add_generation_prompt)

    # ---- learning the form --------------------------------------------------------------------------------------

    def _learnt(self) -> Form | None:
        tools = [_described(call) for call in EXAMPLES]
        try:
            plain = self._said({"role": "assistant", "content": "\0"}, tools)
            bare = self._said(_calling([Call(EXAMPLES[0].name, {})]), tools)
            texts = [self._said(_calling([call]), tools) for call in EXAMPLES]
        except BadRow:
            return None
        both = self._calls(EXAMPLES, tools)
        first, other, both = (text and _behind(plain, text) for text in (*texts, both))
        example = Example(EXAMPLES, (first, other), both, bare)
        return as_objects(example) or as_tagged(example)

    def _calls(self, calls: Sequence[Call], tools: Sequence[Tool]) -> str | None:
        try:
            return self._said(_calling(calls), tools)
        except BadRow:
            return None

    def _answer(self, message: Message, tools: Sequence[Tool]) -> str:
        found = self._renderer.render(Chat([*PROBE, message], [False, True], list(tools)))[0]
        return found.text[found.spans[0][0] : found.spans[-1][1]]

    def _said(self, message: Message, tools: Sequence[Tool]) -> str:
        """An answer without what ends it."""
        text = self._answer(message, tools)
        end = next((end for end in self._ends if end and text.endswith(end)), "")
        return text.removesuffix(end)

    def _opens_thoughts(self) -> bool:
        """Whether an answer begins in a thought that the prompt has opened, and closes it before it calls."""
        try:
            asked = opened([*PROBE], self._write).rstrip()
            return asked.endswith(OPENS) and THOUGHT in self._said(
                _calling([self._call_of(self._tools[0])]), self._tools
            )
        except BadRow:  # which `_check` tells
            return False

    def _call_of(self, tool: Tool) -> Call:
        """With an argument of each type that is known."""
        name = tool["function"]["name"]
        values = {key: _value(of) for key, of in self._types[name].items()}
        return Call(name, {key: value for key, value in values.items() if value is not None})

    def _check(self, *calls: Call) -> None:
        """Raises UserError where they are not read back as written. A template may refuse to write several."""
        names = " and ".join(call.name for call in calls)
        try:
            text = self._said(_calling(calls), self._tools)
            _, read = self.read(text)
            self.behind(calls, ["x"] * len(calls))
        except Unreadable:
            read, why = [], f"{text!r} is read as none"
        except BadRow as error:
            read, why = list(calls) if len(calls) > 1 else [], error.detail
        else:
            why = f"{text!r} is read as {read}"
        if read != list(calls):
            raise UserError(f"the chat template's calls of {names} cannot be read back: {why}", where=FLAG, fix=FIX)


def _behind(plain: str, text: str) -> str:
    """What a text has that another one does not begin with too, tags whole."""
    shared, _ = cut_tag(os.path.commonprefix([plain, text]))
    return text[len(shared) :]


def with_ids(calls: Sequence[Call], first: int = 0) -> list[dict[str, Any]]:
    """As messages have them. first: the number of the first id, of nine letters and digits as Mistral's templates want
    it, that an answer does not give itself."""
    return [{"id": call.id or f"call{first + place:05d}"} | call.told for place, call in enumerate(calls)]


def _calling(calls: Sequence[Call]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": with_ids(calls)}


def _described(call: Call) -> Tool:
    parameters = {key: {"type": _TYPES[type(value)], "description": "x"} for key, value in call.arguments.items()}
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": call.name, "description": "x", "parameters": schema}}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool["function"].get("parameters", {}).get("properties", {})


def _value(of: dict[str, Any]) -> Any:
    """One that a schema describes, None where it says no type."""
    kinds = of.get("type")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "array":
        return [item] if (item := _value(of.get("items", {}))) is not None else []
    return {**ARGUMENTS} if kind == "object" else _VALUES.get(kind)
