"""The conversation loop of `swiftlite infer`: in a terminal with streaming answers, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from swiftlite.data.tokens.thoughts import with_opened_thought
from swiftlite.errors import UserError
from swiftlite.serving.prompts import check_utf8, not_utf8
from swiftlite.serving.turns import Exchange, Turns
from swiftlite.untrusted import printable

if TYPE_CHECKING:
    from swiftlite.data.tokens.questions import Message
    from swiftlite.serving.generate import Answer, Answerer

WHERE = "the conversation"
SHOWN_RESULT = 200  # characters
HELP = "/clear starts a new conversation, /exit leaves; Ctrl-C stops an answer"


def say(text: str) -> None:
    """A line that is no answer: it goes to stderr, so that stdout holds answers only."""
    print(text, file=sys.stderr, flush=True)


def chat(answerer: Answerer, system: str | None, *, streaming: bool, turns: Turns | None = None) -> None:
    """Answers line after line until /exit or the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() editing and history

        say(HELP)
    history = Conversation(answerer, system, turns)
    for line in _lines(interactive):
        command = line.strip()
        if command in ("/exit", "/quit"):
            return
        if command == "/clear":
            history.clear()
            if interactive:
                say("(a new conversation)")
        elif command in ("/help", "/?"):
            say(HELP)
        elif command.startswith("/") and command[1:].isalpha():
            say(f"unknown command {command}: {HELP}")
        elif command:
            try:
                history.ask(line, streaming=streaming)
            except UserError as error:
                if not interactive:
                    raise
                say(str(error))
            except KeyboardInterrupt:
                if not interactive:
                    raise
                say("(stopped)")


class Conversation:
    """What was said so far."""

    def __init__(self, answerer: Answerer, system: str | None, turns: Turns | None = None) -> None:
        """turns: with tools that answers may call."""
        self._answerer, self._turns = answerer, turns or Turns(answerer)
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._exchange: Exchange | None = None  # the last one
        self._answer: Answer | None = None  # the last one, when it has ended

    def clear(self) -> None:
        """Begin again, behind the system message."""
        self._messages = list(self._opening)
        self._exchange = None

    def ask(self, text: str, *, streaming: bool) -> None:
        """Prints and remembers the answer; when Ctrl-C stops it, what was said so far.

        Without a chat template there is no conversation: each text is completed by itself. Raises UserError.
        """
        check_utf8(text, WHERE)
        if not self._answerer.has_template:
            self.clear()
        asked = [*self._messages, {"role": "user", "content": text}]
        prompt = self._answerer.encode(asked, WHERE, self._turns.schemas())
        exchange, said = self._begin(prompt, text), []
        try:
            self._say(exchange, said, streaming)
        finally:
            if any(map(str.strip, said)):
                self._messages = [*asked, *_remembered(exchange, said)]
        if exchange.cut is not None:
            say(f"(cut off by {exchange.cut})")

    def _begin(self, prompt: list[int], text: str) -> Exchange:
        """Tools that are a class have an object for each conversation."""
        if (before := self._exchange) is None:
            self._exchange = self._turns.begin(prompt, {"prompt": text}, WHERE)
        else:
            self._exchange = Exchange(prompt, before.may_call, before.environment, calls=before.calls)
        return self._exchange

    def _say(self, exchange: Exchange, said: list[str], streaming: bool) -> None:
        """Turn after turn, and between them what tools say. said: gets what is printed of each."""
        going = True
        while going:
            said.append("")
            with closing(self._pieces(exchange.ids, streaming)) as pieces:
                try:
                    for piece in pieces:
                        print(piece, end="", flush=True)
                        said[-1] += piece
                finally:
                    print(flush=True)
            known = len(exchange.heard)
            going = bool(self._turns.take([exchange], [self._answer]))
            for message in exchange.heard[known:]:
                say(f"({message['name']} says {printable(_short(message['content']))})")

    def _pieces(self, prompt: list[int], streaming: bool) -> Generator[str, None, None]:
        if streaming:
            self._answer = yield from self._answerer.stream(prompt)
        else:
            self._answer = self._answerer.answer([prompt])[0]
            yield self._answer.text.strip() if self._answerer.has_template else self._answer.text


def _remembered(exchange: Exchange, said: list[str]) -> list[Message]:
    """The turns of an answer. said: what was printed of each, of which the last may be broken off, or call in vain."""
    turns = list(exchange.messages)
    if turns and turns[-1].get("tool_calls"):
        turns.pop()
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": said[-1]})
    return [
        turn | {"content": with_opened_thought(turn["content"].strip())} if turn["role"] == "assistant" else turn
        for turn in turns
    ]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_RESULT else text[:SHOWN_RESULT] + "..."


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        try:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
        except UnicodeDecodeError as error:
            raise not_utf8("stdin") from error
        return
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            say(str(not_utf8("the line")))
        except KeyboardInterrupt:
            say("\n(/exit or Ctrl-D leaves)")
