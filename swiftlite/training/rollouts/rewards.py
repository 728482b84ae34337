"""Functions that reward answers: found by name before the model loads, called with each step's answers.

They are called as TRL calls its own (https://huggingface.co/docs/trl/grpo_trainer), so that those written for it serve
here: `function(prompts=..., completions=..., completion_ids=..., COLUMN=..., ...)`, each a list with one entry an
answer, and they return a number for each, or None where they have none to give.
"""

from __future__ import annotations

import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.config.flags import nearest
from swiftlite.config.methods import COMPARED, ENVIRONMENTS, EXPECTED, GIVEN, LIMIT, PREFERENCE, PROMPT, SAMPLING
from swiftlite.config.names import HUB_ID
from swiftlite.data.tokens.own_tools import give_objects
from swiftlite.data.tokens.questions import ANSWERS
from swiftlite.ending import is_of_a_signal
from swiftlite.errors import RunError, SwiftliteError, UserError
from swiftlite.imports import import_package
from swiftlite.own_code import VARIABLE, Code, ending_forks, find, load, setting_back
from swiftlite.training.rollouts.known_rewards import ELSEWHERE, KNOWN, PACKAGES

if TYPE_CHECKING:
    from swiftlite.data.prepare import Asked
    from swiftlite.training.rollouts.reward_models import RewardModelScorer
    from swiftlite.training.rollouts.tools import Episode

FLAG = "--reward"
KNOWN_IN = "swiftlite.training.rollouts.known_rewards"
HOW = f"give {FLAG} FILE.py:NAME, PACKAGE.MODULE.NAME or a reward model, with *WEIGHT behind it if it is not 1"


@dataclass(frozen=True)
class Reward:
    """name: of the function or model; weight: what its number counts; given: as `--reward` names it; model: the
    function, where it is a model that has to be loaded first."""

    name: str
    weight: float
    function: Callable[..., Sequence[float | None]]
    given: str
    model: RewardModelScorer | None = None


@dataclass(frozen=True)
class Rollout:
    """A prompt and an answer. prompt: messages, or the text it goes on from; text: without special tokens; ids: with
    what ended it; columns: of the row; where: `file:line`; expected: what the row itself answers, if it does; logprobs:
    as of `Generation`; episode: how it came about, where the model could call tools."""

    prompt: list[dict[str, Any]] | str
    text: str
    ids: list[int]
    columns: dict[str, Any]
    where: str
    expected: str | None = None
    logprobs: list[float] | None = None
    episode: Episode | None = None

    @property
    def completion(self) -> list[dict[str, Any]] | str:
        """As the prompt is."""
        if self.episode is not None and self.episode.messages:
            return self.episode.messages
        return self.text if isinstance(self.prompt, str) else [{"role": "assistant", "content": self.text}]

    @property
    def turns(self) -> dict[str, Any]:
        """As a file of answers has them, where tools were called."""
        return {"messages": self.completion} if self.episode is not None and self.episode.rounds else {}

    @property
    def own(self) -> list[bool]:
        """Of each token, whether the model has drawn it: the others are what tools say."""
        return [True] * len(self.ids) if self.episode is None else self.episode.own

    @property
    def tokens(self) -> int:
        """That the model has drawn."""
        return sum(self.own)

    def without_environment(self) -> Rollout:
        return self if self.episode is None else replace(self, episode=replace(self.episode, environment=None))


@dataclass(frozen=True)
class Named:
    """What a word of `--reward` names. place: a file, a package, or a reward model; name: of the function, or what the
    model is called; kind: `file`, `package` or `model`."""

    place: str
    name: str
    weight: float
    kind: str


def load_rewards(given: Sequence[str], method: str = SAMPLING[0]) -> list[Reward]:
    """What the words of `--reward` name, reward models without their weights. Raises UserError where one cannot be
    had, or is called as what the method itself has of rewards."""
    found = [_load(word) for word in given]
    names = [reward.name for reward in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        model = any(reward.model is not None for reward in found if reward.name == twice)
        rename = "one of two folders by a link (ln -s FOLDER OTHER_NAME)" if model else "rename one of two functions"
        fix = f"metrics are called so: name it once, or {rename}"
        raise UserError(f"two of them are called {twice}", where=FLAG, fix=fix)
    own = COMPARED if method in PREFERENCE else ()
    if taken := next((reward for reward in found if reward.name in own), None):
        raise UserError(
            f"metrics have {method}'s own numbers as rewards/{taken.name}",
            where=f"{FLAG} {taken.given}",
            fix=f"give it a name that is none of {', '.join(own)}",
        )
    return found


def parse_reward(word: str) -> Named:
    """Nothing is run, and no model is looked at. Raises UserError."""
    spec, star, factor = word.rpartition("*")
    spec, weight = (spec, _number(factor, word)) if star else (word, 1.0)
    if spec and is_model(spec):
        path = Path(spec)
        return Named(spec, path.parent.name if path.name == "model" else path.name, weight, "model")
    if spec in KNOWN:
        return Named(KNOWN_IN, spec, weight, "package")
    where = f"{FLAG} {word}"
    if (found := find(spec, where, HOW)) is not None:
        return Named(found.place, found.name, weight, "file" if found.is_file else "package")
    near = ELSEWHERE.get(spec) or nearest(spec, KNOWN)
    meant = f"did you mean {near}? Else " if near else ""
    fix = f"{meant}{HOW}; those that come with swiftlite: {', '.join(KNOWN)}"
    raise UserError(f"{word!r} names no function", where=FLAG, fix=fix)


def is_model(spec: str) -> bool:
    """Whether a word without its weight names a reward model: a folder, or OWNER/NAME of the hub."""
    on_hub = HUB_ID.fullmatch(spec) is not None and not spec.endswith(".py")
    return on_hub or Path(spec).expanduser().is_dir()


def _load(word: str) -> Reward:
    named, where = parse_reward(word), f"{FLAG} {word}"
    place, name = named.place, named.name
    if named.kind == "model":
        from swiftlite.training.rollouts.reward_models import find_reward_model

        model = find_reward_model(place, where)
        return Reward(name, named.weight, model, word, model)
    if place == KNOWN_IN and name in PACKAGES:
        package, extra = PACKAGES[name]
        import_package(package, f"{FLAG} {name}", extra)
    function = load(Code(place, name, named.kind == "file"), where, HOW)
    if inspect.isclass(function):
        raise UserError(f"{name} is a class", where=where, fix=f"make an object of it in {place}, and name that")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{name} is asynchronous", where=where, fix="write a plain function, which may wait for others")
    return Reward(name, named.weight, function, word)


def _number(text: str, word: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"{text!r} is no weight", where=f"{FLAG} {word}", fix=HOW)
    return weight


def check_columns(rewards: Sequence[Reward], *asked: Asked, tools: Sequence[str] = ()) -> None:
    """Raises UserError for a function that cannot be called with what rows have. tools: the words of `--tools`."""
    for part, reward in itertools.product(asked, rewards):
        if (misfit := _misfit(reward.function, part, tools)) is not None:
            problem, fix = misfit
            where = f"{FLAG} {reward.given}, {part.named}"
            raise UserError(f"the reward function {reward.name} {problem}", where=where, fix=fix)


def _misfit(function: Callable[..., Any], asked: Asked, tools: Sequence[str]) -> tuple[str, str] | None:
    """(why a function cannot be called with what rows have, what to do), None where it can be."""
    named = _parameters(function)
    if named is None:
        return None
    parameters = named.values()
    given, kinds = (*GIVEN, *asked.columns), {one.kind for one in parameters}
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in VARIABLE]
    by_place = next((one.name for one in parameters if one.kind is one.POSITIONAL_ONLY and one.name in needed), None)
    on_request = {LIMIT, *([EXPECTED] if asked.answered else [])}
    if ENVIRONMENTS in needed and give_objects(tools):
        on_request.add(ENVIRONMENTS)
    missing = next((name for name in needed if name not in given and name not in on_request), None)
    if by_place is not None:
        return f"takes `{by_place}` by its place alone", "all are given by their names: leave out the /"
    if missing == EXPECTED:
        fix = f"give rows with answers: messages that end with one, or one of the columns {', '.join(ANSWERS)}, or "
        fix += "name theirs, as --columns answer=COLUMN"
        return f"compares answers with the rows' own, as `{EXPECTED}`, and no row has one", fix
    if missing == ENVIRONMENTS:
        return "asks for the objects of a class of tools, and there is none", "name it: --tools FILE.py:CLASS"
    if missing is not None:
        fix = f"they have {', '.join(asked.columns) or 'none'}: name the argument so, or give it a default"
        if missing in PROMPT:  # as TRL has it
            fix += f"; what rows have as {missing} is not handed on, so write it in a column of another name"
        return f"asks for `{missing}`, which is no column of the rows", fix
    if inspect.Parameter.VAR_KEYWORD not in kinds and (more := set(given) - by_name):
        return f"does not take {', '.join(sorted(more))}", "add **others to its arguments"
    return None


def rewards_of(rewards: Sequence[Reward], answers: Sequence[Rollout], limit: int) -> list[list[float]]:
    """What each function says of each answer, NaN where it says nothing, `[functions][answers]`. limit: tokens that an
    answer can have.

    Raises RunError where a function fails or returns something else.
    """
    if not answers:
        return [[] for _ in rewards]
    names = dict.fromkeys(name for answer in answers for name in answer.columns)
    columns = {name: [answer.columns.get(name) for answer in answers] for name in names}
    columns |= {
        "prompts": [answer.prompt for answer in answers],
        "completions": [answer.completion for answer in answers],
        "completion_ids": [answer.ids for answer in answers],
    }
    environments = [None if answer.episode is None else answer.episode.environment for answer in answers]
    on_request = {EXPECTED: [answer.expected for answer in answers], LIMIT: limit, ENVIRONMENTS: environments}
    asked = [on_request.keys() & (_parameters(reward.function) or {}).keys() for reward in rewards]
    given = [{name: on_request[name] for name in names} | columns for names in asked]
    for reward, mine in zip(rewards, given, strict=True):
        if reward.function is KNOWN["soft_overlong"]:  # which means the limit, whatever rows have by that name
            mine[LIMIT] = limit
    with setting_back():  # and what it gets each may change, but for those objects, which need not be any to copy
        return [
            _asked(reward, deepcopy(mine, {id(environments): environments}), answers)
            for reward, mine in zip(rewards, given, strict=True)
        ]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Of a function by their names; of some that are written in C nobody knows them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _asked(reward: Reward, columns: dict[str, list[Any]], answers: Sequence[Rollout]) -> list[float]:
    asked = f"for answers to {answers[0].where} and others"
    try:
        with ending_forks():
            said = reward.function(**columns)
            if isinstance(said, Iterable) and not isinstance(said, str | bytes | Mapping | Set):  # which have no order
                said = list(said)  # of a generator, whose code runs only now, and of arrays
    except BaseException as error:  # such as asyncio's when it is cancelled
        if is_of_a_signal(error) or isinstance(error, SwiftliteError):  # a reward model says itself what it lacks
            raise
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        raise RunError(
            f"the reward function {reward.name} failed: {type(error).__name__}: {error}",
            where=f"{theirs[-1].filename}:{theirs[-1].lineno}, {asked}" if theirs else asked,
            fix="mend it, and let a run go on by --resume auto; it is called with prompts, completions, completion_ids "
            "and the rows' columns, and takes those that it does not name as **others",
        ) from error
    problem, found = None, []
    if not isinstance(said, list):
        problem = type(said).__name__
    elif len(said) != len(answers):
        problem = f"{len(said)} numbers for {len(answers)} answers"
    else:
        found = [_number_of(value) for value in said]
        problem = next((repr(value) for value, number in zip(said, found, strict=True) if number is None), None)
    if problem is not None:
        raise RunError(
            f"the reward function {reward.name} returned {problem}",
            where=asked,
            fix="return a list with a finite number, or None, for each answer; a run then goes on by --resume auto",
        )
    return found


def _number_of(value: Any) -> float | None:
    """A finite number, also of numpy or torch; NaN for None; None for anything else. What a function gives as NaN would
    else pass for nothing, and of an infinite one no mean can be had."""
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor with several numbers
        return None
    return number if math.isfinite(number) else None
