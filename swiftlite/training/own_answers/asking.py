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
from swiftlite.training.own_answers.answerer import build_answerer
from swiftlite.training.own_answers.engine import Engine
from swiftlite.training.own_answers.handover import FromEngine
from swiftlite.training.own_answers.rewards import Answered, Reward, rewards_of
from swiftlite.training.own_answers.speaker import Asked, Speaker
from swiftlite.training.own_answers.tools import Caller, Talk, build_caller

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.world import World
    from swiftlite.training.setup import Trainee


@dataclass(frozen=True)
class Draw:
    """How answers are drawn. samples: to each prompt; temperature: that logits are divided by, 0 for the likeliest
    token each time; key: (a prompt, its place among those asked) -> what its random numbers are a function of."""

    samples: int
    temperature: float
    key: Callable[[Document, int], tuple[object, ...]]


@dataclass(frozen=True)
class Answers:
    """The answers to one prompt. place: of the prompt among those asked; answers: in the order they were drawn in;
    rewards: what each function says of each, `[functions][answers]`, NaN where it says nothing."""

    place: int
    answers: list[Answered]
    rewards: list[list[float]]

    def told(self, totals: list[float | None]) -> dict[str, Any]:
        """As a file of answers has it. totals: the reward of each, None of one that no function rewards."""
        asked = self.answers[0]
        said = [
            {"text": one.text, **one.turns, "reward": reward} for one, reward in zip(self.answers, totals, strict=True)
        ]
        return {"where": asked.where, "prompt": asked.prompt, "expected": asked.expected, "answers": said}


class Asker:
    """Has prompts answered and the answers rewarded. Every process calls it, with the same prompts."""

    def __init__(
        self,
        config: RunConfig,
        speaker: Speaker,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Sequence[Reward],
        columns: Sequence[str],
        together: Patient,
        stops: Sequence[int],
        tools: Caller | None = None,
    ) -> None:
        """columns: that some row of the data has; together: the processes, which share the prompts out, and wait for
        one another's functions; stops: ids that end an answer; tools: that answers may call."""
        self._config, self._speaker, self._tokenizer, self._rewards = config, speaker, tokenizer, rewards
        self._tools = tools
        self._columns, self._together, self._stops = columns, together, stops

    def __call__(self, prompts: list[Document], draw: Draw) -> list[Answers]:
        """All groups in the order of the prompts, of which each process answers its part."""
        places, asked = self._questions(prompts, draw)
        records = {place: json.loads(prompts[place].asked) for place in dict.fromkeys(places)}
        columns = {place: dict.fromkeys(self._columns) | record["columns"] for place, record in records.items()}
        chats = {place: not isinstance(record["prompt"], str) for place, record in records.items()}
        talks = [Talk(one, knows_tools=chats[place]) for place, one in zip(places, asked, strict=True)]
        mine: list[Answers] = []

        def begin() -> None:
            for place, talk in zip(places, talks, strict=True):
                self._tools.begin(talk, columns[place], prompts[place].where)

        def reward() -> None:
            answers = [
                self._read(prompts[place].where, records[place], columns[place], talk)
                for place, talk in zip(places, talks, strict=True)
            ]
            mine.extend(self._rewarded(places, answers, draw.samples))

        if self._tools is not None:
            in_turn(self._together, begin)
        self._converse(talks, draw.temperature)
        in_turn(self._together, reward)  # outside: a function with a model of its own computes as it does elsewhere
        groups = (group for theirs in self._together.collect(mine) for group in theirs)
        return sorted(groups, key=lambda group: group.place)

    def _converse(self, talks: Sequence[Talk], temperature: float) -> None:
        """Have all answered to their ends. Every process takes part in each turn, also without any of its own."""
        going = list(talks)

        def answer() -> None:
            asked = [talk.next() for talk in going]
            for talk, drawn in zip(going, self._speaker.answer(asked, temperature), strict=True):
                talk.take(drawn)

        def call() -> None:
            self._tools.answer([talk for talk in going if talk.knows_tools])

        while self._together.any(bool(going)):
            with self._speaker.ready():
                in_turn(self._together, answer)
            if self._tools is not None:
                in_turn(self._together, call)
            going = sorted((talk for talk in going if talk.is_open), key=lambda talk: -talk.length)

    def foresee(self, prompts: list[Document], draw: Draw) -> None:
        """Have an engine begin with what it will be asked next, by the weights as they are now."""
        with self._speaker.ready():
            self._speaker.foresee(self._questions(prompts, draw)[1], draw.temperature)  # its first turn

    @property
    def pads(self) -> bool:
        """As of `Speaker`."""
        return self._speaker.pads

    @property
    def names(self) -> list[str]:
        """Of the functions."""
        return [reward.name for reward in self._rewards]

    def totals(self, groups: list[Answers]) -> np.ma.MaskedArray:
        """The reward of each answer, what functions say by their weights, fp64 `[prompts, answers]`; masked where none
        says anything."""
        values, weights = _values(groups), np.asarray([reward.weight for reward in self._rewards])[:, None]
        return np.ma.masked_array(np.nansum(values * weights, axis=1), np.isnan(values).all(axis=1))

    def by_function(self, groups: list[Answers]) -> dict[str, np.ma.MaskedArray]:
        """What each function says, by its key in metrics.jsonl, fp64 `[prompts, answers]`; masked where nothing."""
        values = np.ma.masked_invalid(_values(groups))
        return {f"rewards/{name}": values[:, place] for place, name in enumerate(self.names)}

    def is_cut(self, answer: Answered | Talk) -> bool:
        """Whether an answer had no end before `--max-new-tokens`."""
        return not answer.own[-1] or answer.ids[-1] not in self._stops

    def calls(self, groups: list[Answers]) -> tuple[int, int] | None:
        """(how many calls of tools answers made, how many of them came to nothing), None without tools."""
        if self._tools is None:
            return None
        talks = [answer.talk for group in groups for answer in group.answers]
        return sum(talk.calls for talk in talks), sum(talk.failed for talk in talks)

    def _questions(self, prompts: list[Document], draw: Draw) -> tuple[list[int], list[Asked]]:
        """(the place of the prompt, what is asked) for each answer of this process's part, those to one prompt in a
        row."""
        ranks, most = self._together.size, self._config.max_new_tokens
        by_length = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].input_ids))
        rows = [(place, number) for place in by_length[self._together.rank :: ranks] for number in range(draw.samples)]
        return [place for place, _ in rows], [
            Asked(prompts[place].input_ids.tolist(), (*draw.key(prompts[place], place), number), most)
            for place, number in rows
        ]

    def _rewarded(self, places: Sequence[int], answers: Sequence[Answered], samples: int) -> Iterator[Answers]:
        """places: of the prompt of each answer, of which each has as many as there are samples."""
        rewards = rewards_of(self._rewards, answers, self._config.max_new_tokens)
        for first in range(0, len(places), samples):
            part = slice(first, first + samples)
            sent = [answer.without_environment() for answer in answers[part]]  # which may be anything, to all processes
            yield Answers(places[first], sent, [of_function[part] for of_function in rewards])

    def _read(self, where: str, record: dict[str, Any], columns: dict[str, Any], talk: Talk) -> Answered:
        """An answer when it is given. record, columns: of the row that stands at `where`."""
        called = talk if self._tools is not None else None
        ids, prompt, expected = talk.ids, record["prompt"], record["expected"]
        text = self._tokenizer.decode(ids if self.is_cut(talk) else ids[:-1], skip_special_tokens=True)
        return Answered(prompt, text, ids, columns, where, expected, talk.logprobs, called)


def of_calls(found: tuple[float, float] | None, answers: int) -> dict[str, float | None]:
    """What metrics have of calls. found: of `Asker.calls`; answers: how many there are."""
    if found is None:
        return {}
    calls, failed = found
    return {"tools/calls": calls / answers, "tools/failed": failed / calls if calls else None}


def of_sets(prompts: Sequence[Document], data_sets: Sequence[str]) -> dict[str, np.ndarray]:
    """Which prompts are of each of several data sets, bool `[prompts]`. data_sets: as of `StepBatch`."""
    numbers = np.asarray([-1 if prompt.data_set is None else prompt.data_set for prompt in prompts])
    return {name: numbers == number for number, name in enumerate(data_sets)}


def _values(groups: list[Answers]) -> np.ndarray:
    """fp64 `[prompts, functions, answers]`, also of no function."""
    shape = len(groups), len(groups[0].rewards), len(groups[0].answers)
    return np.reshape([group.rewards for group in groups], shape).astype(np.float64)


def build_asker(
    config: RunConfig,
    model_config: PretrainedConfig,
    trainee: Trainee,
    load: Callable[[], PreTrainedTokenizerBase],
    world: World,
    rewards: Sequence[Reward],
    columns: Sequence[str],
    ending: ExitStack,
) -> Asker:
    """With the model itself, a copy of it, or engines to answer. columns: as for `Asker`; ending: is left when the run
    ends, however it does. Raises UserError where a reward model cannot be loaded, or an engine cannot take the weights
    over."""
    tokenizer = load()
    for judge in filter(None, (reward.judge for reward in rewards)):
        judge.load(config, world.device, alone=world.size == 1)
    stops = stop_tokens(trainee.base.generation_config, tokenizer)
    together = Patient(trainee.mesh)
    if config.engine_url:
        speaker = FromEngine(Engine(config, stops, together.rank), config, trainee, together, ending)
    else:
        speaker = build_answerer(config, model_config, trainee, load, world, stops)
    tools = build_caller(config, tokenizer, stops)
    return Asker(config, speaker, tokenizer, rewards, columns, together, stops, tools)
