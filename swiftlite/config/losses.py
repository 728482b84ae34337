"""The names of the losses of each method, and `--loss sigmoid:0.8 sft:1.0` as names with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from swiftlite.config.flags import nearest
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

PAIR_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "simpo",
    "cpo",
    "orpo",
    "sft",
)
UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired")
CROSS_ENTROPY, DYNAMIC = SUPERVISED_LOSSES = ("cross_entropy", "dft")
POLICY_LOSSES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")
CLIPS = {"gspo": (3e-4, 4e-4), "cispo": (math.inf, 5.0)}  # where others than CLIP: arXiv 2507.18071, 2510.13786
CLIP = 0.2
LOSSES = {  # of the methods that have several
    "sft": SUPERVISED_LOSSES, "dpo": PAIR_LOSSES, "kto": UNPAIRED_LOSSES, "grpo": POLICY_LOSSES,
}  # fmt: skip

REFERENCE_FREE = ("simpo", "cpo", "orpo", "sft")

OTHERS = {"nll": CROSS_ENTROPY, "chunked_nll": CROSS_ENTROPY}  # what TRL calls those of sft
METHODS = {"dpo": "sigmoid", "cdpo": "sigmoid", "slic": "hinge"}  # papers' names that no spelling leads from


def parse_losses(
    words: Iterable[str], known: Sequence[str] = PAIR_LOSSES, where: str = "--loss"
) -> list[tuple[str, float]]:
    """`NAME[:WEIGHT]`, parted by spaces or commas, as (name, weight) in the order given; a weight left out is 1.

    where: the flag or recipe key, for errors. Raises UserError for an unknown name (naming the nearest known one), a
    name given twice, a weight that is not a number above 0, and no name at all.

    >>> parse_losses(["sigmoid:0.8", "sft"])
    [('sigmoid', 0.8), ('sft', 1.0)]
    """
    losses: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        spelled, colon, weight = word.partition(":")
        name = _known(spelled, known, where)
        if name in losses:
            raise UserError(f"the loss `{name}` is given twice", where=where, fix="add the weights up and keep one")
        losses[name] = _weight(weight, word, where) if colon else 1.0
    if not losses:
        raise UserError("no loss is named", where=where, fix=f"name one of {', '.join(known)}")
    return list(losses.items())


def losses_of(method: str, words: Sequence[str], where: str = "--loss") -> list[tuple[str, float]]:
    """(name, weight) of the losses of a method; its first where no word is given. Raises UserError as `parse_losses`,
    and for several or weighted losses of others than dpo.
    """
    known = LOSSES[method]
    losses = parse_losses(words or known[:1], known, where)
    if method != "dpo" and (len(losses) > 1 or losses[0][1] != 1.0):
        raise UserError(f"{method} takes one loss without a weight", where=where, fix=f"use --loss {losses[-1][0]}")
    return losses


def weighs_by_probability(config: RunConfig) -> bool:
    """Whether each token's cross-entropy is weighted by the token's own probability."""
    return config.method == "sft" and losses_of("sft", config.loss)[0][0] == DYNAMIC


def policy_loss(config: RunConfig) -> str:
    """Of a method that learns from its own answers."""
    ((name, _),) = losses_of(config.method, config.loss)
    return name


def clip_range(config: RunConfig) -> tuple[float, float]:
    """How far a probability ratio may be below and above 1 and still teach, of a method that learns from its own
    answers."""
    name = policy_loss(config)
    low, high = CLIPS.get(name, (CLIP, CLIP))
    if config.epsilon is not None and name != "cispo":
        low, high = config.epsilon, config.epsilon
    return low, high if config.epsilon_high is None else config.epsilon_high


def _known(spelled: str, known: Sequence[str], where: str) -> str:
    name = spelled.lower().replace("-", "_")
    name = OTHERS.get(name, name) if CROSS_ENTROPY in known else name
    if name in known:
        return name
    meant = METHODS.get(name, name)
    longer = [other for other in known if other.startswith(meant)] if meant else []
    near = longer[0] if longer else nearest(meant, known)
    hint = f"did you mean `{near}`? " if near else ""
    for method, names in LOSSES.items():
        if name in names:  # and not in those of this method
            hint = f"`swiftlite {method}` has it; "
    fix = f"{hint}the losses are {', '.join(known)}"
    raise UserError(f"unknown loss `{spelled}`", where=where, fix=fix)


def _weight(text: str, word: str, where: str) -> float:
    number = float(text) if re.fullmatch(r"\d*\.?\d+([eE][+-]?\d+)?|\d+\.", text) else math.nan
    if not 0 < number < math.inf:
        raise UserError(
            f"`{word}`: a weight is a number above 0", where=where, fix="write NAME:WEIGHT, such as sigmoid:0.8"
        )
    return number
