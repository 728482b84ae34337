"""Tools of users, in use: an answer's calls are read, carried out, and what they say is written behind it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from swiftlite.data.calls.forms import Call, Unreadable
from swiftlite.data.calls.reader import CallReader, Message
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.tokens.own_tools import FLAG, RESET, Tool
from swiftlite.ending import is_of_a_signal
from swiftlite.errors import RunError, kind_and_words
from swiftlite.own_code import ending_forks, setting_back

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Turn:
    """What the model has said. calls: that it makes; unreadable: it means to call something, and nobody can tell
    what."""

    message: Message
    calls: list[Call]
    unreadable: bool = False


@dataclass(frozen=True)
class Heard:
    """What the model is told of its calls. ids: behind its turn, with what opens the next one."""

    messages: list[Message]
    ids: list[int]


class Toolbox:
    """Calls what answers call."""

    def __init__(
        self, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase, date: str, stops: Sequence[int]
    ) -> None:
        """date: as for `ChatTemplate`; stops: ids that end an answer. Raises UserError as `CallReader` does."""
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in tools]
        self._reader = CallReader(tokenizer, date, self.schemas, stops)
        self._tokenizer, self._stops = tokenizer, stops
        self._runner = asyncio.Runner()
        self._owner = next((tool.owner for tool in tools if tool.owner is not None), None)

    def begin(self, columns: dict[str, Any], where: str) -> Any:
        """The object of an answer, where tools are a class. columns: of the row that stands at `where`. Raises RunError
        where the class fails."""
        if self._owner is None:
            return None
        try:
            with setting_back(), ending_forks():
                environment = self._owner()
                reset = getattr(environment, RESET) if hasattr(self._owner, RESET) else None
                said = None if reset is None else reset(**deepcopy(columns))  # which it may keep and change
        except BaseException as error:  # of several processes one that ends would leave the others waiting
            raise RunError(
                f"the class of tools {self._owner.__name__} failed: {_words(error)}",
                where=f"{FLAG}, before an answer to {where}",
                fix=f"mend it; `{RESET}` gets the row's columns, and takes those that it does not name as **others",
            ) from error
        if said is not None:
            raise RunError(
                f"`{RESET}` of {self._owner.__name__} gave {type(said).__name__}, and a prompt is what its row has",
                where=f"{FLAG}, before an answer to {where}",
                fix="let it return nothing, and write what the model is to know into the rows",
            )
        return environment

    def read(self, ids: Sequence[int]) -> Turn:
        """ids: of a turn, with the token that ended it, if one did."""
        ended = bool(ids) and ids[-1] in self._stops
        ids = list(ids[:-1] if ended else ids)
        said, calls, unreadable = self._tokenizer.decode(ids, skip_special_tokens=True), [], False
        if ended:
            try:
                written = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
                before, calls = self._reader.read(written)
                said = self._plain(before) if calls else said
            except Unreadable:
                unreadable = True
        message = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [call.told for call in calls]
        return Turn(message, calls, unreadable)

    def _plain(self, text: str) -> str:
        """Without special tokens."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def tell(self, calls: Sequence[Call], results: Sequence[str], last: int) -> Heard | None:
        """None where the template cannot write it. last: the token that ended the turn that made the calls."""
        try:
            behind = self._reader.behind(calls, results)
        except BadRow:
            return None
        ids = self._tokenizer(behind, add_special_tokens=False)["input_ids"]
        if ids[:1] == [last]:  # what opens the turn behind an answer may be what ends that, as GLM has it
            ids = ids[1:]
        said = zip(calls, results, strict=True)
        return Heard([{"role": "tool", "name": call.name, "content": text} for call, text in said], ids)

    def carry_out(self, asked: Sequence[tuple[Any, Sequence[Call]]]) -> list[list[tuple[str, bool]]]:
        """(what each call says, whether it came to nothing) for each answer: one after the other, those of asynchronous
        functions side by side. asked: the calls of each, with its object."""
        with setting_back(), ending_forks():
            given = [self._given(environment, call) for environment, calls in asked for call in calls]
            waiting = [place for place, (said, _) in enumerate(given) if inspect.isawaitable(said)]
            if waiting:
                found = self._awaited([given[place][0] for place in waiting])
                for place, value in zip(waiting, found, strict=True):
                    given[place] = value
            said = iter([_as_text(*one) for one in given])
            return [list(islice(said, len(calls))) for _, calls in asked]

    def _awaited(self, waiting: Sequence[Awaitable[Any]]) -> list[tuple[Any, bool]]:
        """In one loop for all turns, of which a connection that an object keeps is a part. One that was broken off is
        not gone on with."""
        try:
            return self._runner.run(_gathered(waiting))
        except BaseException:
            broken, self._runner = self._runner, asyncio.Runner()
            broken.close()
            raise

    def close(self) -> None:
        """End what asynchronous tools have left running."""
        self._runner.close()

    def _given(self, environment: Any, call: Call) -> tuple[Any, bool]:
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name}, but {', '.join(self._tools)}"), True
        function: Callable[..., Any] = tool.function
        if tool.owner is not None:
            function = getattr(environment, tool.name)
        try:
            return function(**deepcopy(call.arguments)), False  # which it may change
        except BaseException as error:  # code of a user may raise anything, and the model is told
            return _failure(error), True


async def _gathered(waiting: Sequence[Awaitable[Any]]) -> list[tuple[Any, bool]]:
    return await asyncio.gather(*map(_heard, waiting))


async def _heard(waiting: Awaitable[Any]) -> tuple[Any, bool]:
    try:
        return await waiting, False
    except BaseException as error:  # what ends a program would end all that are waited for
        return _failure(error), True


def _as_text(said: Any, failed: bool) -> tuple[str, bool]:
    """What a call says as the model is told of it, whether that came to nothing."""
    try:
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
    except BaseException as error:  # of things that are no JSON, or hold code of a user
        text, failed = _failure(error), True
    return text.encode(errors="replace").decode(), failed  # half a character has no tokens


def _failure(error: BaseException) -> str:
    """What the model is told of it. Raises what a signal has raised."""
    return _error(_words(error))


def _words(error: BaseException) -> str:
    """Of what code of a user raises. Raises what a signal has raised."""
    if is_of_a_signal(error):
        raise error
    try:
        return kind_and_words(error)
    except Exception:  # it cannot say what it is
        return type(error).__name__


def _error(words: str) -> str:
    return json.dumps({"error": words}, ensure_ascii=False)
