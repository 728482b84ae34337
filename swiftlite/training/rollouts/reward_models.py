"""Reward models in the place of functions that reward answers: each process has a whole one, which is not trained.

An answer's reward is the model's score of the conversation that ends with it, in the tokens that `swiftlite rm` would
train of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swiftlite.config.flags import nearest
from swiftlite.config.names import gives_scores, most_positions
from swiftlite.data.prepare import token_options
from swiftlite.data.rows.forms import BadRow, Chat, Completion
from swiftlite.data.rows.messages import TOOLS, tools_of
from swiftlite.data.tokens.own_tools import beside, load_tools
from swiftlite.data.tokens.tokenize import RowTokenizer
from swiftlite.errors import UserError
from swiftlite.models.load import build_model, load_config
from swiftlite.models.sampling import padded
from swiftlite.models.tuners import count_parameters
from swiftlite.serving.load import answer_dtype, load_for_answers
from swiftlite.serving.source import ModelSource, find_source
from swiftlite.training.rollouts.rewards import FLAG, Reward, parse_reward

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from swiftlite.config.schema import RunConfig


class RewardModelScorer:
    """Called as functions are, once it is loaded."""

    def __init__(self, source: ModelSource, config: PretrainedConfig) -> None:
        self._source, self._config = source, config

    @property
    def positions(self) -> int | None:
        """The longest conversation that it scores; None where its config.json does not say."""
        return most_positions(self._config.get_text_config().to_dict())

    def load(self, config: RunConfig, device: torch.device, *, alone: bool) -> None:
        """config: of the run; alone: in its only process. Raises UserError."""
        known = {"precision": config.precision, "device": device, "alone": alone}
        self._model, tokenizer = load_for_answers(self._source, **known)
        self._tokenize = RowTokenizer(tokenizer, token_options(config), [])
        self._has_template = tokenizer.chat_template is not None
        self._tools = [tool.schema for tool in load_tools(config.tools)]
        self._at_once = config.answers_at_once

    def weight_bytes(self, precision: str, device: torch.device) -> int:
        """Of what `load` puts on a device. precision: as `--precision` has it."""
        dtype = answer_dtype(precision, device, self._config)
        model = build_model(self._source.base, self._config, dtype=dtype, attention="sdpa", classifier=True)
        return count_parameters(model)[1] * dtype.itemsize

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The score of each answer, None of one that the model's chat template cannot write, or that is longer than it
        has positions. Raises UserError where it has no template, and prompts are conversations."""
        if not self._has_template and not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError(
                "the reward model has no chat template, and the prompts are conversations",
                where=str(self._source.tokenizer),
                fix="put the template that it was trained with into its folder, as chat_template.jinja",
            )
        longest = self.positions
        tokens = {}
        for place, pair in enumerate(zip(prompts, completions, strict=True)):
            with suppress(BadRow):
                tools = tools_of({name: columns[name][place] for name in TOOLS if name in columns})
                ids = self._tokenize.with_prompt(_said(*pair, beside(self._tools, tools)))
                if longest is None or len(ids) <= longest:
                    tokens[place] = ids
        order = sorted(tokens, key=lambda place: len(tokens[place]))
        scores: list[float | None] = [None] * len(prompts)
        for first in range(0, len(order), self._at_once):
            places = order[first : first + self._at_once]
            for place, score in zip(places, self._score([tokens[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    @torch.no_grad()
    def _score(self, tokens: Sequence[np.ndarray]) -> list[float]:
        """Filled up behind their ends with a token that none of them has: the model takes the last other one."""
        base = self._model if self._source.adapter is None else self._model.get_base_model()
        known = set(np.concatenate(tokens).tolist())
        pad = next(token for token in range(len(known) + 1) if token not in known)
        base.config.get_text_config().pad_token_id = base.config.pad_token_id = pad
        ids, mask = padded(tokens, pad, next(base.parameters()).device, side="right")
        return self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()


def notes_on_reward_models(rewards: Sequence[Reward], longest: int) -> Iterator[str]:
    """On reward models that have no score for some answers. longest: tokens that a prompt may have with its answer."""
    for reward in rewards:
        positions = None if reward.model is None else reward.model.positions
        if positions is not None and positions < longest:
            yield (
                f"the reward model {reward.name} has {positions:,} positions, fewer than --max-length {longest:,}: "
                "an answer that is longer with its prompt has no score"
            )


def find_reward_model(name: str, where: str) -> RewardModelScorer:
    """The reward model of a run, a folder or the hub, without its weights. Raises UserError where it is none."""
    try:
        source = find_source(name, None, FLAG)
        config = load_config(source.base)
        if not _gives_one_score(source, config):
            raise UserError(
                "it gives no score of an answer",
                fix="name what `swiftlite rm` has trained, or another model for sequence classification with one label",
            )
    except UserError as error:
        fix = _other_folder(name) or error.fix
        raise UserError(f"of the reward model: {error.what}", where=error.where or where, fix=fix) from error
    return RewardModelScorer(source, config)


def _other_folder(name: str) -> str | None:
    """What to do where a folder may be meant that is not there, and the hub was asked for one of that name."""
    path = Path(name).expanduser()
    if path.exists() or not path.parent.is_dir():
        return None
    near = nearest(path.name, (beside.name for beside in path.parent.iterdir() if beside.is_dir()))
    meant = "check the path" if near is None else f"did you mean {path.parent / near}?"
    return f"there is no folder {name}, so that it was taken for a name of the hub: {meant}"


def _gives_one_score(source: ModelSource, config: PretrainedConfig) -> bool:
    if source.adapter is not None or source.base_folder is not None:
        return source.is_classifier() and (source.adapter is not None or config.num_labels == 1)
    return config.num_labels == 1 and gives_scores(config.architectures)


def _said(prompt: Any, completion: Any, tools: list[dict[str, Any]] | None) -> Chat | Completion:
    """A prompt with its answer, as a row that compares answers has them."""
    if isinstance(prompt, str):
        return Completion(prompt, completion)
    said = [message["role"] == "assistant" for message in completion]  # between, what tools say
    return Chat([*prompt, *completion], [False] * len(prompt) + said, tools)


def bytes_of_reward_models(config: RunConfig, device: torch.device) -> int:
    """Of the reward models that each process has. Raises UserError."""
    named = [(word, parse_reward(word)) for word in config.reward]
    models = [(one.place, f"{FLAG} {word}") for word, one in named if one.kind == "model"]
    return sum(_weight_bytes(*model, config.precision, device) for model in models)


@cache
def _weight_bytes(name: str, where: str, precision: str, device: torch.device) -> int:
    """Found once: a run counts its memory for the model, the copy that answers, and what lies beside them."""
    return find_reward_model(name, where).weight_bytes(precision, device)
