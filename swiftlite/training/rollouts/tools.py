"""Tools in answers: what the model calls is called, and it goes on from what that says.

The tokens of what tools say stand in an answer and are none of the model's own: nothing of them is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from swiftlite.config.methods import answers
from swiftlite.data.calls.forms import Call
from swiftlite.data.calls.reader import Message
from swiftlite.data.calls.toolbox import Toolbox
from swiftlite.data.tokens.own_tools import load_tools
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.training.rollouts.generator import Generation, Request

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig
    from swiftlite.data.prepare import LoadTokenizer


@dataclass
class Episode:
    """An answer while it is given. asked: its prompt; knows_tools: which is a conversation that tells of them; ids:
    what stands behind that; own: which of them the model drew; logprobs: as of `Generation`, 0 of those that it did not
    draw; messages: the turns; rounds: how often it called tools; calls, failed: how many calls it made, and how many of
    these came to nothing; environment: of tools that are a class, its object; is_open: it goes on."""

    asked: Request
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

    def next(self) -> Request:
        """What the model is asked now."""
        if not self.rounds:
            return self.asked
        return Request([*self.asked.ids, *self.ids], (*self.asked.key, self.rounds, 0), self.asked.most - len(self.ids))

    def take(self, drawn: Generation) -> None:
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


class ToolCaller:
    """Goes on with answers that call tools."""

    def __init__(self, toolbox: Toolbox, rounds: int) -> None:
        """rounds: how often an answer may call."""
        self._toolbox, self._rounds = toolbox, rounds

    def begin(self, episode: Episode, columns: dict[str, Any], where: str) -> None:
        """Before an answer. As of `Toolbox`."""
        episode.environment = self._toolbox.begin(columns, where)

    def answer(self, episodes: Sequence[Episode]) -> None:
        """Go on with what answers call, which have just said something: each that is done with is closed."""
        asked = [(episode, calls) for episode in episodes if (calls := self._calls(episode))]
        results = self._toolbox.carry_out([(episode.environment, calls) for episode, calls in asked])
        for (episode, calls), said in zip(asked, results, strict=True):
            episode.failed += sum(failed for _, failed in said)
            self._tell(episode, calls, [text for text, _ in said])

    def close(self) -> None:
        """As of `Toolbox`."""
        self._toolbox.close()

    def _calls(self, episode: Episode) -> list[Call]:
        """What an answer calls now, after its last turn is written down."""
        turn = self._toolbox.read(episode.last)
        episode.messages.append(turn.message)
        episode.calls += turn.unreadable
        episode.failed += turn.unreadable
        if episode.rounds == self._rounds:
            return []
        episode.calls += len(turn.calls)
        return turn.calls

    def _tell(self, episode: Episode, calls: Sequence[Call], results: Sequence[str]) -> None:
        """Write down what tools say, and behind it what opens the next turn."""
        heard = self._toolbox.tell(calls, results, episode.ids[-1])
        if heard is None:
            episode.failed += len(calls)
            return
        episode.messages += heard.messages
        episode.hear(heard.ids)
        if not episode.is_open:  # whoever reads the last message reads what the model says
            episode.messages.append({"role": "assistant", "content": ""})


def check_tools(config: RunConfig, model_config: PretrainedConfig, load: LoadTokenizer) -> None:
    """Before the model loads. Raises UserError where tools cannot be had, or the chat template writes no calls."""
    if answers(config) and config.tools:
        build_tool_caller(config, load(), stop_tokens(model_config.get_text_config(), load()))


def build_tool_caller(config: RunConfig, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> ToolCaller | None:
    """None without tools. stops: ids that end an answer."""
    if not config.tools:
        return None
    return ToolCaller(Toolbox(load_tools(config.tools), tokenizer, config.template_date, stops), config.tool_rounds)
