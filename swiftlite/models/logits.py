"""What a causal language model does between its decoder and its logits beside the head's product.

Cohere, Granite and many others scale, Gemma and xLSTM cap, MiniCPM divides the hidden states before. The model's own
forward pass tells: it is run with a decoder and a head that give known numbers, which needs no weights, and no word of
any architecture's config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from swiftlite.errors import UserError

FOUND = "_logit_transform"  # on the model: what was found while it was whole
# Known logits: a soft cap leaves the smallest as they are, and of the largest only itself. A factor of theirs is exact.
POWERS = torch.exp2(torch.arange(-10.0, 21.0))
KNOWN = torch.cat([POWERS, -POWERS])
EXACT = torch.linspace(1, 1.75, 4)  # hidden states that no type of 16 bits rounds: a model may cast them for its head
ROUNDING = 1e-5


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to `hidden @ head.T` before the softmax: `softcap * tanh(scale * logits / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        scaled = logits * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


class _Outputs(BaseModelOutputWithPast):
    """Has nothing but hidden states, whatever else a model looks for."""

    def __getattr__(self, _name: str) -> None:
        return None


def find_transform(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> LogitTransform:
    """model: on `meta` will do, and whole: what was found is remembered, also for the parts that it is divided into.

    Raises UserError where the model does anything else. A forward pass of foreign code that cannot be run so is taken
    to do nothing; `TokenScorer.check` compares logits once there are weights.
    """
    found = vars(model).get(FOUND)
    if found is None:
        try:
            found = _measure(model, decoder, head)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
            found = LogitTransform()
        setattr(model, FOUND, found)
    return found


def _measure(model: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> LogitTransform:
    vocabulary, width = head.weight.shape
    hidden = EXACT[torch.arange(width) % len(EXACT)].expand(1, 2, width)
    raw = KNOWN.repeat(-(-vocabulary // len(KNOWN)))[:vocabulary]
    entered: list[torch.Tensor] = []

    def give_raw(given: torch.Tensor) -> torch.Tensor:
        entered.append(given)
        return raw.expand(*given.shape[:-1], vocabulary).clone()

    tokens = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad(), _in_place_of(decoder, lambda *_, **__: _Outputs(hidden)), _in_place_of(head, give_raw):
        logits = model.forward(input_ids=tokens, use_cache=False).logits[0, -1].float()
    [given] = entered
    factors = given[0, -1].float() / hidden[0, -1]
    before, behind, bound = _number(factors[0]), _number(logits[0] / raw[0]), logits.abs().max().item()
    found = LogitTransform(before * behind, bound if bound < abs(behind) * raw.abs().max() / 2 else None)
    expected = LogitTransform(behind, found.softcap)(raw)
    plain = before == 1 or getattr(head, "bias", None) is None  # a bias is added behind the factor
    if not (plain and _close(factors, factors[:1].expand(width)) and _close(logits, expected)):
        raise unknown_transform(model)
    return found


def unknown_transform(model: PreTrainedModel) -> UserError:
    """The error for a model that does anything else."""
    return UserError(
        f"{type(model).__name__} turns hidden states into logits in a way swiftlite does not know",
        fix="use another model, or report the architecture",
    )


@contextlib.contextmanager
def _in_place_of(module: nn.Module, forward: Callable) -> Iterator[None]:
    own = vars(module).get("forward")  # where it was replaced before
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _number(factor: torch.Tensor) -> float:
    """A factor, 1 where a soft cap has rounded it."""
    return 1.0 if abs(factor.item() - 1) < ROUNDING / 10 else factor.item()


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=ROUNDING, atol=0)
