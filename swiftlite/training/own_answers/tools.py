"""Tools in answers: what the model calls is called, and it goes on from what that says.

The tokens of what tools say stand in an answer and are none of the model's own: nothing of them is learnt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from swiftlite.config.methods import answers
from swiftlite.data.calls.forms import Call, Unreadable
from swiftlite.data.calls.reader import CallReader
from swiftlite.data.rows.forms import BadRow
from swiftlite.data.tokens.own_tools import FLAG, RESET, Tool, load_tools
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.ending import is_of_a_signal
from swiftlite.errors import RunError, kind_and_words
from swiftlite.own_code import ending_forks, setting_back
from swiftlite.training.own_answers.speaker import Asked, Drawn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig
    from swiftlite.data.prepare import LoadTokenizer

Message = dict[str, Any]


@dataclass
class Talk:
    """An answer while it is given. asked: its prompt; knows_tools: which is a conversation that tells of them; ids:
    what stands behind that; own: which of them the model drew; logprobs: as of `Drawn`, 0 of those that it did not
    draw; messages: the turns; rounds: how often it called tools; calls, failed: how many calls it made, and how many of
    these came to nothing; environment: of tools that are a class, its object; is_open: it goes on."""

    asked: Asked
    knows_tools: bool
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = None
    messages: list[Message] = field(default_factory=list)
    rounds: int = 0
    calls: int = 0
    failed: int = 0
    environment: Any = None
    is_open: bool = True

    @property
    def length(self) -> int:
        """Tokens, with the prompt."""
        return len(self.asked.ids) + len(self.ids)

    @property
    def last(self) -> list[int]:
        """Of its last turn."""
        count = sum(1 for _ in takewhile(bool, reversed(self.own)))
        return self.ids[len(self.ids) - count :]

    def next(self) -> Asked:
        """What the model is asked now."""
        if not self.rounds:
            return self.asked
        return Asked([*self.asked.ids, *self.ids], (*self.asked.key, self.rounds, 0), self.asked.most - len(self.ids))

    def take(self, drawn: Drawn) -> None:
        """What it has said."""
        self._append(drawn.ids, drawn.logprobs, own=True)
        self.is_open = False

    def hear(self, ids: list[int]) -> None:
        """What it is told, of which as much fits as it may have tokens; where all is taken up, it ends so."""
        left = self.asked.most - len(self.ids)
        self._append(ids[:left], None if self.logprobs is None else [0.0] * len(ids[:left]), own=False)
        self.rounds += 1
        self.is_open = len(ids) < left

    def _append(self, ids: Sequence[int], logprobs: Sequence[float] | None, *, own: bool) -> None:
        self.ids += ids
        self.own += [own] * len(ids)
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *logprobs]


class Toolbox:
    """Calls what answers call."""

    def __init__(
        self, config: RunConfig, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
    ) -> None:
        """stops: ids that end an answer. Raises UserError as `CallReader` does."""
        self._tools = {tool.name: tool for tool in tools}
        self._reader = CallReader(tokenizer, config.template_date, [tool.schema for tool in tools], stops)
        self._tokenizer, self._stops, self._rounds = tokenizer, stops, config.tool_rounds
        self._owner = next((tool.owner for tool in tools if tool.owner is not None), None)

    def begin(self, talk: Talk, columns: dict[str, Any], where: str) -> None:
        """Before an answer. columns: of the row that stands at `where`. Raises RunError where the class fails."""
        if self._owner is None:
            return
        try:
            with setting_back(), ending_forks():
                talk.environment = self._owner()
                said = getattr(talk.environment, RESET)(**columns) if hasattr(self._owner, RESET) else None
        except Exception as error:
            raise RunError(
                f"the class of tools {self._owner.__name__} failed: {kind_and_words(error)}",
                where=f"{FLAG}, before an answer to {where}",
                fix=f"mend it; `{RESET}` gets the row's columns, and takes those that it does not name as **others",
            ) from error
        if said is not None:
            raise RunError(
                f"`{RESET}` of {self._owner.__name__} gave {type(said).__name__}, and a prompt is what its row has",
                where=f"{FLAG}, before an answer to {where}",
                fix="let it return nothing, and write what the model is to know into the rows",
            )

    def answer(self, talks: Sequence[Talk]) -> None:
        """Go on with what answers call, which have just said something: each that is done with is closed."""
        asked = [(talk, calls) for talk in talks if (calls := self._calls(talk))]
        results = self._results([(talk, call) for talk, calls in asked for call in calls])
        for talk, calls in asked:
            said = [results.pop(0) for _ in calls]
            talk.failed += sum(failed for _, failed in said)
            self._tell(talk, calls, [text for text, _ in said])

    def _calls(self, talk: Talk) -> list[Call]:
        """What an answer calls now, after its last turn is written down."""
        ids = talk.last
        ended = bool(ids) and ids[-1] in self._stops
        ids = ids[:-1] if ended else ids
        said, calls = self._tokenizer.decode(ids, skip_special_tokens=True), []
        if ended:
            try:
                written = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
                before, calls = self._reader.read(written)
                said = self._plain(before) if calls else said
            except Unreadable:
                talk.calls, talk.failed = talk.calls + 1, talk.failed + 1
        message = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [call.told for call in calls]
        talk.messages.append(message)
        if talk.rounds == self._rounds:
            return []
        talk.calls += len(calls)
        return calls

    def _plain(self, text: str) -> str:
        """Without special tokens."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _tell(self, talk: Talk, calls: Sequence[Call], results: Sequence[str]) -> None:
        """Write down what tools say, and behind it what opens the next turn."""
        try:
            behind = self._reader.behind(calls, results)
        except BadRow:
            talk.failed += len(calls)
            return
        ids = self._tokenizer(behind, add_special_tokens=False)["input_ids"]
        if ids[:1] == talk.ids[-1:]:  # what opens the turn behind an answer may be what ends that, as GLM has it
            ids = ids[1:]
        talk.messages += [
            {"role": "tool", "name": call.name, "content": text} for call, text in zip(calls, results, strict=True)
        ]
        talk.hear(ids)
        if not talk.is_open:  # whoever reads the last message reads what the model says
            talk.messages.append({"role": "assistant", "content": ""})

    # ---- calling ------------------------------------------------------------------------------------------------

    def _results(self, asked: Sequence[tuple[Talk, Call]]) -> list[tuple[str, bool]]:
        """(what each call says, whether it came to nothing): one after the other, those of asynchronous functions side
        by side."""
        with setting_back(), ending_forks():
            given = [self._given(talk, call) for talk, call in asked]
            waiting = [place for place, (said, _) in enumerate(given) if inspect.isawaitable(said)]
            if waiting:
                found = asyncio.run(_gathered([given[place][0] for place in waiting]))
                for place, value in zip(waiting, found, strict=True):
                    given[place] = value
            return [_as_text(*one) for one in given]

    def _given(self, talk: Talk, call: Call) -> tuple[Any, bool]:
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name}, but {', '.join(self._tools)}"), True
        function: Callable[..., Any] = tool.function
        if tool.owner is not None:
            function = getattr(talk.environment, tool.name)
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
    if is_of_a_signal(error):
        raise error
    try:
        return _error(kind_and_words(error))
    except Exception:  # it cannot say what it is
        return _error(type(error).__name__)


def _error(words: str) -> str:
    return json.dumps({"error": words}, ensure_ascii=False)


def check_tools(config: RunConfig, model_config: PretrainedConfig, load: LoadTokenizer) -> None:
    """Before the model loads. Raises UserError where tools cannot be had, or the chat template writes no calls."""
    if answers(config) and config.tools:
        build_toolbox(config, load(), stop_tokens(model_config.get_text_config(), load()))


def build_toolbox(config: RunConfig, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> Toolbox | None:
    """None without tools. stops: ids that end an answer."""
    return Toolbox(config, load_tools(config.tools), tokenizer, stops) if config.tools else None
