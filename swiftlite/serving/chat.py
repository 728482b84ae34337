"""The conversation loop of `swiftlite infer`: in a terminal with streaming answers, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from swiftlite.errors import UserError
from swiftlite.serving.prompts import check_utf8, not_utf8

if TYPE_CHECKING:
    from swiftlite.data.tokens.questions import Message
    from swiftlite.serving.generate import Answerer

HELP = "/clear starts a new conversation, /exit leaves; Ctrl-C stops an answer"


def say(text: str) -> None:
    """A line that is no answer: it goes to stderr, so that stdout holds answers only."""
    print(text, file=sys.stderr, flush=True)


def chat(answerer: Answerer, system: str | None, *, streaming: bool) -> None:
    """Answers line after line until /exit or the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() editing and history

        say(HELP)
    history = Conversation(answerer, system)
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

    def __init__(self, answerer: Answerer, system: str | None) -> None:
        self._answerer = answerer
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._complete = True  # the last answer

    def clear(self) -> None:
        """Begin again, behind the system message."""
        self._messages = list(self._opening)

    def ask(self, text: str, *, streaming: bool) -> None:
        """Prints and remembers the answer; when Ctrl-C stops it, what was said so far.

        Without a chat template there is no conversation: each text is completed by itself. Raises UserError.
        """
        check_utf8(text, "the conversation")
        if not self._answerer.has_template:
            self.clear()
        asked = [*self._messages, {"role": "user", "content": text}]
        prompt = self._answerer.encode(asked, "the conversation")
        said = ""
        with closing(self._pieces(prompt, streaming)) as pieces:
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
                    said += piece
            finally:
                print(flush=True)
                if said.strip():
                    self._messages = [*asked, {"role": "assistant", "content": said.strip()}]
        if not self._complete:
            say(f"(cut off by {self._answerer.limit(prompt)})")

    def _pieces(self, prompt: list[int], streaming: bool) -> Generator[str, None, None]:
        if streaming:
            self._complete = yield from self._answerer.stream(prompt)
        else:
            answer = self._answerer.answer([prompt])[0]
            self._complete = answer.complete
            yield answer.text.strip() if self._answerer.has_template else answer.text


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
