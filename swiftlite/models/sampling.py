"""Answers of a model drawn from its own distribution, by random numbers that are given.

transformers' own `generate` does the work: caches of every architecture, and padding on the left. What token comes next
is decided here, by one number between 0 and 1 for each token of each answer, so that an answer does not depend on which
others are sampled beside it, or on which process samples it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from swiftlite.models.load import own_attention

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

DRAWN_BYTES = 28  # of each row and word of the vocabulary while a token is drawn: logits twice, and three times in fp64


@contextmanager
def answering(model: PreTrainedModel, *, switch: bool) -> Iterator[None]:
    """A context in which a model that is trained can answer: with transformers' attention, which knows padding and
    caches, and without settings of its generation_config, which would be taken where a call gives none. switch: its
    attention is not transformers' own."""
    attention, settings, training = model.config._attn_implementation, model.generation_config, model.training
    model.generation_config = type(settings)()
    model.eval()
    if switch:
        model.set_attn_implementation(own_attention(model))
    try:
        with torch.no_grad():
            yield
    finally:
        if switch:
            model.set_attn_implementation(attention)
        model.generation_config = settings
        model.train(training)


def without_router_loss(model: PreTrainedModel) -> dict[str, bool]:
    """What a forward pass is told besides, where answers are drawn: a mixture whose config.json says that routers are
    balanced would compute that loss at each token, and fail, since it counts those that the cache has."""
    from swiftlite.models.anatomy import balances_router

    return {"output_router_logits": False} if balances_router(model.config) else {}


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    numbers: torch.Tensor,
    stops: Sequence[int],
    temperature: float = 1.0,
    *,
    once: bool = True,
) -> list[list[int]]:
    """An answer to each prompt, with the token that ended it, if one did.

    numbers: fp64 `[prompts, tokens at most]`, each in `[0, 1)`; stops: ids that end an answer; temperature: that logits
    are divided by, 0 for the likeliest token each time; once: a prompt that comes several times in a row is read once,
    which a model can whose cache is of keys and values. To be called within `answering`.
    """
    from transformers import GenerationConfig

    runs = [(prompt, len(list(same))) for prompt, same in groupby(map(tuple, prompts))]
    pad = stops[0] if stops else 0
    ids, mask = padded([prompt for prompt, _ in runs], pad, model.device)
    longest = ids.shape[1]
    rows = torch.arange(len(runs)).repeat_interleave(torch.tensor([count for _, count in runs])).to(model.device)
    settings = GenerationConfig(
        max_new_tokens=numbers.shape[1],
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
        use_cache=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _forget_images(model)
        read = _read_once(model, ids, mask, rows) if once and longest > 1 and len(runs) < len(prompts) else {}
        out = model.generate(
            input_ids=ids[rows],
            attention_mask=mask[rows],
            generation_config=settings,
            logits_processor=[_Drawn(numbers.to(model.device), longest, temperature)] if temperature else [],
            **without_router_loss(model),
            **read,
        )
    return [_ended(row, stops) for row in out[:, longest:].tolist()]


def padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device, *, side: str = "left"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of rows that are run together, int64 `[rows, tokens of the longest]`. The mask goes by length, since
    pad may be a token that a row has. side: which is filled up, `left` of prompts that are to go on."""
    fill = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return fill(ids, padding_value=pad).to(device), fill(mask).to(device)


def _forget_images(model: PreTrainedModel) -> None:
    """Of the rows before: Qwen's models for images keep by how much these shift the places behind them, and would add
    it to those of other rows."""
    for module in model.modules():
        if vars(module).get("rope_deltas") is not None:
            module.rope_deltas = None


def _read_once(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor
) -> dict[str, DynamicCache]:
    """The cache of all but the last token of some prompts, each for all of its rows, as an argument of `generate`.

    ids, mask: int64 `[prompts, tokens]`, filled up on the left; rows: int64, the prompt of each row.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    named = {"cache" if "cache" in signature(model.forward).parameters else "past_key_values": cache}  # before 5.24
    places = (mask.cumsum(-1) - 1).clamp_(min=0)
    model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=places[:, :-1],
        use_cache=True,
        logits_to_keep=1,
        **without_router_loss(model),
        **named,
    )
    cache.batch_select_indices(rows)
    return named


class _Drawn:
    """A logits processor that leaves one token: the one at which the summed probabilities pass the row's number."""

    def __init__(self, numbers: torch.Tensor, begun: int, temperature: float) -> None:
        self._numbers, self._begun, self._temperature = numbers, begun, temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids: `[rows, tokens so far]`; scores: `[rows, vocabulary]`, logits."""
        sums = (scores.double() / self._temperature).softmax(-1).cumsum(-1)
        wanted = self._numbers[:, input_ids.shape[1] - self._begun, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, wanted, right=True).clamp_(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def _ended(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """What stands behind the end is padding."""
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]
