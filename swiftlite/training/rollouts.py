"""A step of prompts -> the model's answers to them, rewarded, as documents to learn from.

Each prompt is answered several times, and an answer's advantage is by how much its reward is better than that of the
others: the policy gradient with a group as its own baseline (GRPO, arXiv 2402.03300). A step is learnt from once, by
the weights that gave its answers, so each token's probability ratio is 1 and nothing has to be clipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swiftlite.checkpoint.shared import in_turn
from swiftlite.config.losses import losses_of
from swiftlite.data.order import Pack, StepBatch
from swiftlite.data.order import Sequence as Document
from swiftlite.data.packing import best_fit_decreasing
from swiftlite.data.preference_tokens import Group, Preference
from swiftlite.data.stops import stop_tokens
from swiftlite.objectives.policy import Policy
from swiftlite.seeds import key_digest
from swiftlite.training.answers import Answerer, build_answerer
from swiftlite.training.rewards import Answered, Reward, rewards_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig
    from swiftlite.parallel.mesh import Mesh
    from swiftlite.parallel.world import World
    from swiftlite.training.setup import Trainee

LEAST_SPREAD = 1e-4  # added to what rewards are divided by, as in the paper's implementation


@dataclass(frozen=True)
class Answers:
    """The answers to one prompt. place: of the prompt in the step; answers: in the order they were drawn in; rewards:
    what each function says of each, `[functions][answers]`, NaN where it says nothing."""

    place: int
    answers: list[Answered]
    rewards: list[list[float]]


class Rollouts:
    """Answers each step's prompts."""

    def __init__(
        self,
        config: RunConfig,
        answerer: Answerer,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Sequence[Reward],
        mesh: Mesh,
        stops: Sequence[int],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        """mesh: of the trained model, whose processes share the prompts out; stops: ids that end an answer; tell: gets
        a row of answers.jsonl each step."""
        self._config, self._answerer, self._tokenizer, self._rewards = config, answerer, tokenizer, rewards
        self._mesh, self._stops, self._tell = mesh, stops, tell
        self.told: dict[str, float | None] = {}
        self.policy: Policy | None = None

    def __call__(self, batch: StepBatch) -> StepBatch:
        """The same step with answers in place of its prompts. `told` says of them what metrics are to have, `policy`
        what the loss has to know.

        An answer without an advantage has nothing to teach and is left out, unless the model is held to a reference. A
        step in which none has one keeps an answer, of which nothing is learnt.
        """
        began, prompts = time.perf_counter(), [document for pack in batch.packs for document in pack]
        groups = self._answered(prompts, batch.step)
        seconds = time.perf_counter() - began
        totals = np.ma.masked_invalid([_total(group.rewards, self._rewards) for group in groups])
        equal = np.ma.ptp(totals, axis=1).filled(0.0) == 0
        advantages = self._advantages(totals, equal).tolist()
        documents = [
            document
            for group, of_group in zip(groups, advantages, strict=True)
            for document in self._documents(prompts[group.place], group, of_group)
        ]
        answers = [answer.ids for group in groups for answer in group.answers]
        lengths = list(map(len, answers))
        config = self._config
        ((loss, _),) = losses_of(config.method, config.loss)
        self.policy = Policy(loss, config.beta, len(lengths), sum(lengths), config.max_new_tokens)
        self.told = {
            "reward": _known(totals.mean()),
            "reward_std": _known(totals.std(axis=1).mean()),
            **self._by_function(groups),
            "answers/length": sum(lengths) / len(lengths),
            "answers/cut": sum(ids[-1] not in self._stops for ids in answers) / len(answers),
            "answers/equal": float(equal.mean()),
            "answers/unrewarded": float(np.ma.getmaskarray(totals).mean()),
            "sampling_seconds": round(seconds, 6),
        }
        self._tell(_row(batch.step, groups[0], totals[0].tolist()))  # of one without a reward it is None
        return replace(batch, packs=self._packs(documents or [_untaught(prompts[0], answers[0])]))

    def _advantages(self, rewards: np.ma.MaskedArray, equal: np.ndarray) -> np.ndarray:
        """fp64 `[prompts, answers]`, 0 for an answer that no function rewards, which the others are not compared with.
        rewards: of the same shape, such answers masked; equal: bool `[prompts]`, whether all rewards are the same."""
        found = rewards - rewards.mean(axis=1, keepdims=True)
        if self._config.scale_rewards == "group":
            found /= rewards.std(axis=1, ddof=1, keepdims=True) + LEAST_SPREAD
        return np.where(equal[:, None], 0.0, found.filled(0.0))

    def _answered(self, prompts: list[Document], step: int) -> list[Answers]:
        """All groups in the order of the prompts, of which each process answers its part."""
        drawn: dict[tuple[int, int], list[int]] = {}
        mine: list[Answers] = []

        def answer() -> None:
            drawn.update(self._drawn(prompts, step))

        def reward() -> None:
            mine.extend(self._rewarded(prompts, drawn))

        with self._answerer.ready():
            in_turn(self._mesh, answer)
        with _set_back():
            in_turn(self._mesh, reward)  # a function with a model of its own computes as it does elsewhere
        return sorted((group for theirs in self._mesh.collect(mine) for group in theirs), key=lambda group: group.place)

    def _drawn(self, prompts: list[Document], step: int) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """(place of the prompt, number of the answer) and the answer's ids, of this process's part, groups in order."""
        config, ranks = self._config, self._mesh.layout.world
        by_length = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].input_ids))
        rows = [(place, number) for place in by_length[self._mesh.rank :: ranks] for number in range(config.samples)]
        for some in self._at_once(rows, prompts):
            numbers = np.stack([_uniform(config.max_new_tokens, config.seed, step, *row) for row in some])
            asked = [prompts[place].input_ids.tolist() for place, _ in some]
            yield from zip(some, self._answerer.answer(asked, torch.from_numpy(numbers)), strict=True)

    def _rewarded(self, prompts: list[Document], drawn: dict[tuple[int, int], list[int]]) -> Iterator[Answers]:
        """drawn: as `_drawn` gives it."""
        records = [json.loads(prompt.asked) for prompt in prompts]
        names = [name for record in records for name in record["columns"]]  # of the step, not of this process's rows
        places = [place for place, _ in drawn]
        columns = [dict.fromkeys(names) | record["columns"] for record in records]
        answered = [
            self._read(prompts[place].where, records[place]["prompt"], columns[place], ids)
            for (place, _), ids in drawn.items()
        ]
        rewards = rewards_of(self._rewards, answered)
        for first in range(0, len(places), self._config.samples):
            part = slice(first, first + self._config.samples)
            yield Answers(places[first], answered[part], [of_function[part] for of_function in rewards])

    def _at_once(self, rows: list[tuple[int, int]], prompts: list[Document]) -> Iterator[list[tuple[int, int]]]:
        """Rows that are answered together: of like length, or of one where nothing may be padded."""
        some: list[tuple[int, int]] = []
        for row in rows:
            alike = not some or self._answerer.pads or _same_length(prompts, some[0], row)
            if len(some) == self._config.answers_at_once or not alike:
                yield some
                some = []
            some.append(row)
        if some:
            yield some

    def _read(self, where: str, prompt: Any, columns: dict[str, Any], ids: list[int]) -> Answered:
        """An answer by its ids. prompt, columns: of the row that stands at `where`."""
        said = ids[:-1] if ids[-1] in self._stops else ids
        return Answered(prompt, self._tokenizer.decode(said, skip_special_tokens=True), ids, columns, where)

    def _documents(self, prompt: Document, group: Answers, advantages: list[float]) -> Iterator[Document]:
        """A prompt with the answers that have something to teach: as many behind one prompt as a pack may hold, or each
        behind its own."""
        shares, limit = self._config.share_prompt and self._answerer.pads, self._config.max_length
        some: list[tuple[list[int], float]] = []
        size = len(prompt.input_ids) - 1
        for answer, advantage in zip(group.answers, advantages, strict=True):
            if not (advantage or self._config.beta):
                continue
            if some and (not shares or size + 1 + len(answer.ids) > limit):
                yield _document(prompt, some)
                some, size = [], len(prompt.input_ids) - 1
            some.append((answer.ids, advantage))
            size += 1 + len(answer.ids)
        if some:
            yield _document(prompt, some)

    def _packs(self, documents: list[Document]) -> list[Pack]:
        if not self._config.packing:
            return [[document] for document in documents]
        lengths = np.asarray([len(document.input_ids) for document in documents], dtype=np.int32)
        return [[documents[i] for i in pack] for pack in best_fit_decreasing(lengths, self._config.max_length)]

    def _by_function(self, groups: list[Answers]) -> dict[str, float | None]:
        """The mean of what each function says, None where it says nothing."""
        found: dict[str, float | None] = {}
        for place, reward in enumerate(self._rewards):
            values = np.concatenate([group.rewards[place] for group in groups])
            known = values[~np.isnan(values)]
            found[f"rewards/{reward.name}"] = float(known.mean()) if len(known) else None
        return found


def build_rollouts(
    config: RunConfig,
    model_config: PretrainedConfig,
    trainee: Trainee,
    load: Callable[[], PreTrainedTokenizerBase],
    world: World,
    rewards: Sequence[Reward],
    tell: Callable[[dict[str, Any]], None],
) -> Rollouts:
    """What answers the prompts of a run's steps. tell: as for `Rollouts`."""
    tokenizer = load()
    stops = stop_tokens(trainee.base.generation_config, tokenizer)
    answerer = build_answerer(config, model_config, trainee, load, world, stops)
    return Rollouts(config, answerer, tokenizer, rewards, trainee.mesh, stops, tell)


@contextmanager
def _set_back() -> Iterator[None]:
    """What functions set for all of torch, training does not see."""
    kind, learning = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(kind)
        torch.set_grad_enabled(learning)


def _total(said: list[list[float]], rewards: Sequence[Reward]) -> np.ndarray:
    """The reward of each answer of a group: what functions say, by their weights; NaN where none says anything."""
    values, weights = np.asarray(said, dtype=np.float64), np.asarray([reward.weight for reward in rewards])
    return np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values * weights[:, None], axis=0))


def _known(mean: float) -> float | None:
    """None where all is masked."""
    return None if np.ma.is_masked(mean) else float(mean)


def _row(step: int, group: Answers, rewards: list[float | None]) -> dict[str, Any]:
    """Of answers.jsonl: the answers to the first prompt of a step."""
    asked = group.answers[0]
    said = [{"text": one.text, "reward": reward} for one, reward in zip(group.answers, rewards, strict=True)]
    return {"step": step, "where": asked.where, "prompt": asked.prompt, "answers": said}


def _uniform(count: int, *key: object) -> np.ndarray:
    """Numbers in `[0, 1)` that are a function of the key only, fp64 `[count]`."""
    philox = np.random.Philox(key=np.frombuffer(key_digest("answers", *key, size=16), dtype=np.uint64))
    return (philox.random_raw(count) >> np.uint64(11)) * 2.0**-53


def _same_length(prompts: list[Document], one: tuple[int, int], other: tuple[int, int]) -> bool:
    return len(prompts[one[0]].input_ids) == len(prompts[other[0]].input_ids)


def _document(prompt: Document, answers: list[tuple[list[int], float]]) -> Document:
    """A prompt with some answers and their advantages, laid out as `Group` says; with one as any document."""
    count, (opening, last) = len(prompt.input_ids), np.split(prompt.input_ids, [-1])
    parts = [np.concatenate([last, np.asarray(ids, dtype=np.int32)]) for ids, _ in answers]
    ids = np.concatenate([opening, *parts])
    trained = np.concatenate([np.zeros(count - 1, dtype=np.bool_), *(np.arange(len(part)) > 0 for part in parts)])
    lengths, advantages = tuple(map(len, parts)), tuple(advantage for _, advantage in answers)
    layout = Group(count - 1, lengths, advantages) if len(parts) > 1 else Preference(count, margin=advantages[0])
    return Document(ids, trained, prompt.where, layout)


def _untaught(prompt: Document, answer: list[int]) -> Document:
    """With nothing to learn in it."""
    document = _document(prompt, [(answer, 0.0)])
    return replace(document, trained=np.zeros_like(document.trained))
