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
from swiftlite.training.own_answers.speaker import Asked, Drawn, Speaker

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

    @property
    def ids(self) -> list[list[int]]:
        """Of each answer."""
        return [answer.ids for answer in self.answers]

    def told(self, totals: list[float | None]) -> dict[str, Any]:
        """As a file of answers has it. totals: the reward of each, None of one that no function rewards."""
        asked = self.answers[0]
        said = [{"text": one.text, "reward": reward} for one, reward in zip(self.answers, totals, strict=True)]
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
    ) -> None:
        """columns: that some row of the data has; together: the processes, which share the prompts out, and wait for
        one another's functions; stops: ids that end an answer."""
        self._config, self._speaker, self._tokenizer, self._rewards = config, speaker, tokenizer, rewards
        self._columns, self._together, self._stops = columns, together, stops

    def __call__(self, prompts: list[Document], draw: Draw) -> list[Answers]:
        """All groups in the order of the prompts, of which each process answers its part."""
        drawn: dict[tuple[int, int], Drawn] = {}
        mine: list[Answers] = []

        def answer() -> None:
            drawn.update(self._drawn(prompts, draw))

        def reward() -> None:
            mine.extend(self._rewarded(prompts, drawn, draw.samples))

        with self._speaker.ready():
            in_turn(self._together, answer)
        in_turn(self._together, reward)  # outside: a function with a model of its own computes as it does elsewhere
        groups = (group for theirs in self._together.collect(mine) for group in theirs)
        return sorted(groups, key=lambda group: group.place)

    def foresee(self, prompts: list[Document], draw: Draw) -> None:
        """Have an engine begin with what it will be asked next, by the weights as they are now."""
        with self._speaker.ready():
            self._speaker.foresee(self._questions(prompts, draw)[1], draw.temperature)

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

    def is_cut(self, ids: list[int]) -> bool:
        """Whether an answer had no end before `--max-new-tokens`."""
        return ids[-1] not in self._stops

    def _drawn(self, prompts: list[Document], draw: Draw) -> Iterator[tuple[tuple[int, int], Drawn]]:
        """(place of the prompt, number of the answer) and the answer, of this process's part, groups in order."""
        rows, asked = self._questions(prompts, draw)
        return zip(rows, self._speaker.answer(asked, draw.temperature), strict=True)

    def _questions(self, prompts: list[Document], draw: Draw) -> tuple[list[tuple[int, int]], list[Asked]]:
        """The same places and numbers, with what is asked for each."""
        ranks = self._together.size
        by_length = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].input_ids))
        rows = [(place, number) for place in by_length[self._together.rank :: ranks] for number in range(draw.samples)]
        return rows, [
            Asked(prompts[place].input_ids.tolist(), (*draw.key(prompts[place], place), number))
            for place, number in rows
        ]

    def _rewarded(
        self, prompts: list[Document], drawn: dict[tuple[int, int], Drawn], samples: int
    ) -> Iterator[Answers]:
        """drawn: as `_drawn` gives it."""
        places = [place for place, _ in drawn]
        records = {place: json.loads(prompts[place].asked) for place in dict.fromkeys(places)}
        columns = {place: dict.fromkeys(self._columns) | record["columns"] for place, record in records.items()}
        answered = [
            self._read(prompts[place].where, records[place], columns[place], one) for (place, _), one in drawn.items()
        ]
        rewards = rewards_of(self._rewards, answered, self._config.max_new_tokens)
        for first in range(0, len(places), samples):
            part = slice(first, first + samples)
            yield Answers(places[first], answered[part], [of_function[part] for of_function in rewards])

    def _read(self, where: str, record: dict[str, Any], columns: dict[str, Any], drawn: Drawn) -> Answered:
        """An answer by what was drawn. record, columns: of the row that stands at `where`."""
        ids = drawn.ids
        text = self._tokenizer.decode(ids if self.is_cut(ids) else ids[:-1], skip_special_tokens=True)
        return Answered(record["prompt"], text, ids, columns, where, record["expected"], drawn.logprobs)


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
    return Asker(config, speaker, tokenizer, rewards, columns, together, stops)
