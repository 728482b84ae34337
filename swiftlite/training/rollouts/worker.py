"""Prompts -> the model's answers to them, rewarded: the processes share prompts out, and all know all answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftlite.checkpoint.shared import in_turn
from swiftlite.data.order import Sequence as Document
from swiftlite.data.tokens.stops import stop_tokens
from swiftlite.parallel.mesh import Patient
from swiftlite.training.rollouts.engine import Engine
from swiftlite.training.rollouts.engine_generator import EngineGenerator
from swiftlite.training.rollouts.generator import Generator, Request
from swiftlite.training.rollouts.model_generator import build_model_generator
from swiftlite.training.rollouts.rewards import Reward, Rollout, rewards_of
from swiftlite.training.rollouts.tools import Episode, ToolCaller, build_tool_caller

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.world import World
    from swiftlite.training.setup import Trainee


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are drawn. samples: to each prompt; temperature: that logits are divided by, 0 for the likeliest
    token each time; key: (a prompt, its place among those asked) -> what its random numbers are a function of."""

    samples: int
    temperature: float
    key: Callable[[Document, int], tuple[object, ...]]


@dataclass(frozen=True)
class RolloutGroup:
    """The answers to one prompt. place: of the prompt among those asked; answers: in the order they were drawn in;
    rewards: what each function says of each, `[functions][answers]`, NaN where it says nothing."""

    place: int
    answers: list[Rollout]
    rewards: list[list[float]]

    def told(self, totals: list[float | None]) -> dict[str, Any]:
        """As a file of answers has it. totals: the reward of each, None of one that no function rewards."""
        asked = self.answers[0]
        said = [
            {"text": one.text, **one.turns, "reward": reward} for one, reward in zip(self.answers, totals, strict=True)
        ]
        return {"where": asked.where, "prompt": asked.prompt, "expected": asked.expected, "answers": said}


class RolloutWorker:
    """Has prompts answered and the answers rewarded. Every process calls it, with the same prompts."""

    def __init__(
        self,
        config: RunConfig,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Sequence[Reward],
        columns: Sequence[str],
        together: Patient,
        stops: Sequence[int],
        tools: ToolCaller | None = None,
    ) -> None:
        """columns: that some row of the data has; together: the processes, which share the prompts out, and wait for
        one another's functions; stops: ids that end an answer; tools: that answers may call."""
        self._config, self._generator, self._tokenizer, self._rewards = config, generator, tokenizer, rewards
        self._tools = tools
        self._columns, self._together, self._stops = columns, together, stops

    def __call__(self, prompts: list[Document], options: SamplingOptions) -> list[RolloutGroup]:
        """All groups in the order of the prompts, of which each process answers its part."""
        places, asked = self._questions(prompts, options)
        records = {place: json.loads(prompts[place].asked) for place in dict.fromkeys(places)}
        columns = {place: dict.fromkeys(self._columns) | record["columns"] for place, record in records.items()}
        chats = {place: not isinstance(record["prompt"], str) for place, record in records.items()}
        episodes = [Episode(one, knows_tools=chats[place]) for place, one in zip(places, asked, strict=True)]
        mine: list[RolloutGroup] = []

        def begin() -> None:
            for place, episode in zip(places, episodes, strict=True):
                self._tools.begin(episode, columns[place], prompts[place].where)

        def reward() -> None:
            answers = [
                self._read(prompts[place].where, records[place], columns[place], episode)
                for place, episode in zip(places, episodes, strict=True)
            ]
            mine.extend(self._rewarded(places, answers, options.samples))

        if self._tools is not None:
            in_turn(self._together, begin)
        self._converse(episodes, options.temperature)
        in_turn(self._together, reward)  # outside: a function with a model of its own computes as it does elsewhere
        groups = (group for theirs in self._together.collect(mine) for group in theirs)
        return sorted(groups, key=lambda group: group.place)

    def _converse(self, episodes: Sequence[Episode], temperature: float) -> None:
        """Have all answered to their ends. Every process takes part in each turn, also without any of its own."""
        going = list(episodes)

        def answer() -> None:
            requests = [episode.next() for episode in going]
            for episode, drawn in zip(going, self._generator.generate(requests, temperature), strict=True):
                episode.take(drawn)

        def call() -> None:
            self._tools.answer([episode for episode in going if episode.knows_tools])

        while self._together.any(bool(going)):
            with self._generator.ready():
                in_turn(self._together, answer)
            if self._tools is not None:
                in_turn(self._together, call)
            going = sorted((episode for episode in going if episode.is_open), key=lambda episode: -episode.length)

    def foresee(self, prompts: list[Document], options: SamplingOptions) -> None:
        """Have an engine begin with what it will be asked next, by the weights as they are now."""
        with self._generator.ready():
            self._generator.foresee(self._questions(prompts, options)[1], options.temperature)  # its first turn

    @property
    def pads(self) -> bool:
        """As of `Generator`."""
        return self._generator.pads

    @property
    def names(self) -> list[str]:
        """Of the functions."""
        return [reward.name for reward in self._rewards]

    def totals(self, groups: list[RolloutGroup]) -> np.ma.MaskedArray:
        """The reward of each answer, what functions say by their weights, fp64 `[prompts, answers]`; masked where none
        says anything."""
        values, weights = _values(groups), np.asarray([reward.weight for reward in self._rewards])[:, None]
        return np.ma.masked_array(np.nansum(values * weights, axis=1), np.isnan(values).all(axis=1))

    def by_function(self, groups: list[RolloutGroup]) -> dict[str, np.ma.MaskedArray]:
        """What each function says, by its key in metrics.jsonl, fp64 `[prompts, answers]`; masked where nothing."""
        values = np.ma.masked_invalid(_values(groups))
        return {f"rewards/{name}": values[:, place] for place, name in enumerate(self.names)}

    def is_cut(self, answer: Rollout | Episode) -> bool:
        """Whether an answer had no end before `--max-new-tokens`."""
        return not answer.own[-1] or answer.ids[-1] not in self._stops

    def calls(self, groups: list[RolloutGroup]) -> tuple[int, int] | None:
        """(how many calls of tools answers made, how many of them came to nothing), None without tools."""
        if self._tools is None:
            return None
        episodes = [answer.episode for group in groups for answer in group.answers]
        return sum(episode.calls for episode in episodes), sum(episode.failed for episode in episodes)

    def _questions(self, prompts: list[Document], options: SamplingOptions) -> tuple[list[int], list[Request]]:
        """(the place of the prompt, what is asked) for each answer of this process's part, those to one prompt in a
        row."""
        ranks, most = self._together.size, self._config.max_new_tokens
        by_length = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].input_ids))
        rows = [
            (place, number) for place in by_length[self._together.rank :: ranks] for number in range(options.samples)
        ]
        return [place for place, _ in rows], [
            Request(prompts[place].input_ids.tolist(), (*options.key(prompts[place], place), number), most)
            for place, number in rows
        ]

    def _rewarded(self, places: Sequence[int], answers: Sequence[Rollout], samples: int) -> Iterator[RolloutGroup]:
        """places: of the prompt of each answer, of which each has as many as there are samples."""
        rewards = rewards_of(self._rewards, answers, self._config.max_new_tokens)
        for first in range(0, len(places), samples):
            part = slice(first, first + samples)
            sent = [answer.without_environment() for answer in answers[part]]  # which may be anything, to all processes
            yield RolloutGroup(places[first], sent, [of_function[part] for of_function in rewards])

    def _read(self, where: str, record: dict[str, Any], columns: dict[str, Any], episode: Episode) -> Rollout:
        """An answer when it is given. record, columns: of the row that stands at `where`."""
        called = episode if self._tools is not None else None
        ids, prompt, expected = episode.ids, record["prompt"], record["expected"]
        text = self._tokenizer.decode(ids if self.is_cut(episode) else ids[:-1], skip_special_tokens=True)
        return Rollout(prompt, text, ids, columns, where, expected, episode.logprobs, called)


def of_calls(found: tuple[float, float] | None, answers: int) -> dict[str, float | None]:
    """What metrics have of calls. found: of `RolloutWorker.calls`; answers: how many there are."""
    if found is None:
        return {}
    calls, failed = found
    return {"tools/calls": calls / answers, "tools/failed": failed / calls if calls else None}


def of_sets(prompts: Sequence[Document], data_sets: Sequence[str]) -> dict[str, np.ndarray]:
    """Which prompts are of each of several data sets, bool `[prompts]`. data_sets: as of `StepBatch`."""
    numbers = np.asarray([-1 if prompt.data_set is None else prompt.data_set for prompt in prompts])
    return {name: numbers == number for number, name in enumerate(data_sets)}


def _values(groups: list[RolloutGroup]) -> np.ndarray:
    """fp64 `[prompts, functions, answers]`, also of no function."""
    shape = len(groups), len(groups[0].rewards), len(groups[0].answers)
    return np.reshape([group.rewards for group in groups], shape).astype(np.float64)


def build_worker(
    config: RunConfig,
    model_config: PretrainedConfig,
    trainee: Trainee,
    load: Callable[[], PreTrainedTokenizerBase],
    world: World,
    rewards: Sequence[Reward],
    columns: Sequence[str],
    ending: ExitStack,
) -> RolloutWorker:
    """With the model itself, a copy of it, or engines to answer. columns: as for `RolloutWorker`; ending: is left when
    the run ends, however it does. Raises UserError where a reward model cannot be loaded, or an engine cannot take the
    weights over."""
    tokenizer = load()
    for model in filter(None, (reward.model for reward in rewards)):
        model.load(config, world.device, alone=world.size == 1)
    stops = stop_tokens(trainee.base.generation_config, tokenizer)
    together = Patient(trainee.mesh)
    if config.engine_url:
        generator = EngineGenerator(Engine(config, stops, together.rank), config, trainee, together, ending)
    else:
        generator = build_model_generator(config, model_config, trainee, load, world, stops)
    if (tools := build_tool_caller(config, tokenizer, stops)) is not None:
        ending.callback(tools.close)
    return RolloutWorker(config, generator, tokenizer, rewards, columns, together, stops, tools)
