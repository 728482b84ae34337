"""Answers in turns: what the model calls is called, and it goes on from what that says (`--tools`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swiftlite.data.calls.reader import with_ids
from swiftlite.data.tokens.own_tools import beside

if TYPE_CHECKING:
    from swiftlite.data.calls.forms import Call
    from swiftlite.data.calls.reader import Message
    from swiftlite.data.calls.toolbox import Toolbox, Turn
    from swiftlite.serving.generate import Answer, Answerer

Schemas = list[dict[str, Any]]
UNREADABLE = "a call that cannot be read"
UNWRITTEN = "the chat template, which cannot write what tools say"


@dataclass
class Exchange:
    """An answer while it is given. ids: what the model goes on from; may_call: that tells of tools; environment: of
    tools that are a class, the object that it calls; text: of its last turn, with the blanks at both ends; messages:
    its turns; rounds: how often it called tools; calls: how many its conversation has; cut: what kept it from its end.
    """

    ids: list[int]
    may_call: bool = True
    environment: Any = None
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    rounds: int = 0
    calls: int = 0
    cut: str | None = None

    @property
    def heard(self) -> list[Message]:
        """What tools have said."""
        return [message for message in self.messages if message["role"] == "tool"]


def printing_aside() -> AbstractContextManager[object]:
    """Code of a user may print: stdout holds answers only."""
    return redirect_stdout(sys.stderr)


class Turns:
    """Takes answers to their ends."""

    def __init__(self, answerer: Answerer, toolbox: Toolbox | None = None, rounds: int = 0) -> None:
        """toolbox: tools that answers may call; rounds: how often an answer may."""
        self._answerer, self._toolbox, self._rounds = answerer, toolbox, rounds

    @property
    def has_tools(self) -> bool:
        return self._toolbox is not None

    def schemas(self, of_row: Schemas | None = None) -> Schemas | None:
        """What the model is told of tools, beside those of a row."""
        return of_row if self._toolbox is None else beside(self._toolbox.schemas, of_row)

    def begin(self, ids: list[int], columns: dict[str, Any], where: str, *, may_call: bool = True) -> Exchange:
        """An answer to a prompt of these tokens. columns, where: as of `Toolbox`. Raises RunError."""
        if not may_call or self._toolbox is None:
            return Exchange(ids, may_call=False)
        with printing_aside():
            return Exchange(ids, environment=self._toolbox.begin(columns, where))

    def finish(self, exchanges: Sequence[Exchange], size: int) -> None:
        """size: how many are answered at once. Objects of tools that are a class are let go then."""
        going = list(exchanges)
        while going:
            answers: dict[int, Answer] = {}
            prompts = [exchange.ids for exchange in going]
            for batch in self._answerer.batches(prompts, size):
                answers.update(zip(batch, self._answerer.answer([prompts[i] for i in batch]), strict=True))
            going = self.take(going, [answers[i] for i in range(len(going))])
        for exchange in exchanges:
            exchange.environment = None

    def take(self, exchanges: Sequence[Exchange], answers: Sequence[Answer]) -> list[Exchange]:
        """Those that go on, of which tools have said something. answers: what the model has said in each."""
        asked = [
            (exchange, calls)
            for exchange, answer in zip(exchanges, answers, strict=True)
            if (calls := self._calls(exchange, answer))
        ]
        if not asked:
            return []
        with printing_aside():
            results = self._toolbox.carry_out([(exchange.environment, calls) for exchange, calls in asked])
        return [
            exchange
            for (exchange, calls), said in zip(asked, results, strict=True)
            if self._tell(exchange, calls, [text for text, _ in said])
        ]

    def _calls(self, exchange: Exchange, answer: Answer) -> list[Call]:
        """What an answer calls now, after its last turn is written down."""
        exchange.text = answer.text
        exchange.cut = None if answer.complete else self._answerer.limit(exchange.ids)
        exchange.ids = [*exchange.ids, *answer.ids]
        if not exchange.may_call:
            exchange.messages.append({"role": "assistant", "content": answer.text})
            return []
        turn = self._toolbox.read(answer.ids)
        exchange.messages.append(_with_ids(turn, exchange.calls))
        if turn.unreadable:
            exchange.cut = UNREADABLE
        elif turn.calls and exchange.rounds == self._rounds:
            exchange.cut = "--tool-rounds"
        return turn.calls if exchange.cut is None else []

    def _tell(self, exchange: Exchange, calls: Sequence[Call], results: Sequence[str]) -> bool:
        """Write down what tools say, and whether the model can go on from that."""
        heard = self._toolbox.tell(calls, results, exchange.ids[-1])
        if heard is None:
            exchange.cut = UNWRITTEN
            return False
        made = exchange.messages[-1]["tool_calls"]
        exchange.messages += [
            message | {"tool_call_id": call["id"]} for message, call in zip(heard.messages, made, strict=True)
        ]
        exchange.ids = [*exchange.ids, *heard.ids]
        exchange.rounds, exchange.calls = exchange.rounds + 1, exchange.calls + len(calls)
        if not self._answerer.has_room(exchange.ids):
            exchange.text, exchange.cut = "", self._answerer.limit(exchange.ids)
            exchange.messages.append({"role": "assistant", "content": ""})
        return exchange.cut is None


def _with_ids(turn: Turn, first: int) -> Message:
    """What the model has said, its calls with ids, by which some templates tell what a result is of. first: of those
    that it does not give itself."""
    return turn.message | {"tool_calls": with_ids(turn.calls, first)} if turn.calls else turn.message
