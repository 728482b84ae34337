"""The conversation loop of `swiftlite infer`: in a terminal with streaming answers, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

from swiftlite.errors import UserError
from swiftlite.serving.generate import Answerer
from swiftlite.serving.prompts import Message

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
            say("(a new conversation)") if interactive else None
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


class Conversation:
    """What was said so far."""

    def __init__(self, answerer: Answerer, system: str | None) -> None:
        self._answerer = answerer
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def clear(self) -> None:
        self._messages = list(self._opening)

    def ask(self, text: str, *, streaming: bool) -> str:
        """Prints and remembers the answer. Ctrl-C stops it, and what was said so far is kept.

        Without a chat template there is no conversation: each text is completed by itself. Raises UserError.
        """
        if not self._answerer.has_template:
            self.clear()
        asked = [*self._messages, {"role": "user", "content": text}]
        prompt = self._answerer.encode(asked, "the conversation")
        said = self._stream(prompt) if streaming else self._whole(prompt)
        self._messages = [*asked, {"role": "assistant", "content": said}]
        return said

    def _stream(self, prompt: list[int]) -> str:
        said = ""
        with closing(self._answerer.stream(prompt)) as pieces:
            try:
                for piece in pieces:
                    said += piece
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                say(" (stopped)")
        print(flush=True)
        return said.strip()

    def _whole(self, prompt: list[int]) -> str:
        said = self._answerer.answer([prompt])[0].text
        print(said, flush=True)
        return said


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            say("\n(/exit or Ctrl-D leaves)")
