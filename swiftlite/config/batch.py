"""Batch arithmetic: global batch = micro-batch x accumulation x data ranks. Any one or two of them define the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swiftlite.errors import UserError

DEFAULT_GLOBAL = 8  # packs of a step: enough tokens for a steady gradient with packed rows of 2,048 tokens
ALL = GLOBAL, MICRO, ACCUMULATION = "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Sequences per optimizer step over all ranks, per forward on one rank, and forwards per step on one rank."""

    global_size: int
    micro_size: int
    accumulation: int


def weigh(flags: Mapping[str, int], recipe: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Let flags win where flags and recipe give all three sizes: (sizes that count, recipe keys that give way).

    A flag for the micro-batch keeps the recipe's global batch, which defines the step; a flag for the accumulation
    keeps the recipe's micro-batch, which fits the memory.
    """
    keep = dict(flags)
    spare = {name: size for name, size in recipe.items() if name not in flags}
    if not flags:
        return dict(recipe), []
    order = (MICRO, GLOBAL, ACCUMULATION) if ACCUMULATION in flags else (GLOBAL, MICRO, ACCUMULATION)
    for name in order:
        if name in spare and len(keep) < 2:
            keep[name] = spare.pop(name)
    return keep, [name for name in order if name in spare]


def fit_batch(
    flags: Mapping[str, int],
    recipe: Mapping[str, int],
    ranks: Sequence[int],
    *,
    stages: int,
    said: str,
    spare: Sequence[Collection[str]],
) -> tuple[Batch, list[str]]:
    """(the batch, the recipe keys that give way). ranks: of data, the first number that shares it evenly counts; spare:
    which of the recipe's sizes may give way where none does, the first of these groups that helps. Raises UserError."""
    failures = []
    for group in ((), *spare):
        kept, gave_way = weigh(flags, {name: size for name, size in recipe.items() if name not in group})
        lost = [name for name in recipe if name in group and name not in flags]
        for count in ranks:
            try:
                return solve_batch(kept, count, stages=stages, said=said), [*gave_way, *lost]
            except UserError as error:
                failures.append(error)
    raise failures[0]


def solve_batch(
    sizes: Mapping[str, int], ranks: int, *, stages: int = 1, said: str = "--gradient-accumulation-steps"
) -> Batch:
    """Fill in what is missing. ranks: data ranks; stages: of the pipeline, each of which needs a micro-batch of a step;
    said: the flag that the accumulation was given by.

    Raises UserError naming the numbers that would agree.
    """
    total, micro, accumulation = (sizes.get(name) for name in (GLOBAL, MICRO, ACCUMULATION))
    if total is None:
        micro = micro or 1
        accumulation = accumulation or max(stages, math.ceil(DEFAULT_GLOBAL / (micro * ranks)))
        batch = Batch(micro * accumulation * ranks, micro, accumulation)
        return _checked(batch, stages, said if ACCUMULATION in sizes else None)
    if micro is not None and accumulation is not None and total != micro * accumulation * ranks:
        raise _disagree(total, micro, accumulation, ranks, said)
    if accumulation is None:
        micro = micro or 1
        _check_divides(total, micro * ranks, f"micro-batch {micro} x {ranks_in_words(ranks)}")
        return _checked(Batch(total, micro, total // (micro * ranks)), stages, None)
    _check_divides(total, accumulation * ranks, f"accumulation {accumulation} x {ranks_in_words(ranks)}")
    return _checked(Batch(total, total // (accumulation * ranks), accumulation), stages, said)


def _checked(batch: Batch, stages: int, said: str | None) -> Batch:
    """said: the flag that the accumulation was given by, if it was."""
    if batch.accumulation < stages:
        size = f"--global-batch-size {batch.global_size // batch.accumulation * stages}"
        raise UserError(
            f"a pipeline of {stages} stages needs at least {stages} micro-batches a step, but there are "
            f"{batch.accumulation}",
            fix=f"use {said} {stages} with {size}" if said else f"use {size}, or a smaller --micro-batch-size",
        )
    return batch


def _disagree(total: int, micro: int, accumulation: int, ranks: int, said: str) -> UserError:
    agree = [f"--global-batch-size {micro * accumulation * ranks}"]
    if total % (micro * ranks) == 0:
        agree.append(f"{said} {total // (micro * ranks)}")
    if total % (accumulation * ranks) == 0:
        agree.append(f"--micro-batch-size {total // (accumulation * ranks)}")
    return UserError(
        f"the batch sizes disagree: micro-batch {micro} x accumulation {accumulation} x {ranks_in_words(ranks)} = "
        f"{micro * accumulation * ranks}, not {total}",
        fix="leave one of the three out, or use " + " or ".join(agree),
    )


def _check_divides(total: int, part: int, words: str) -> None:
    if total % part == 0:
        return
    below, above = total // part * part, math.ceil(total / part) * part
    near = " or ".join(str(size) for size in (below, above) if size > 0)
    raise UserError(
        f"--global-batch-size {total} is not a multiple of {words} = {part}", fix=f"use --global-batch-size {near}"
    )


def ranks_in_words(ranks: int) -> str:
    """`1 data rank`, `4 data ranks`."""
    return f"{ranks} data rank{'s' if ranks > 1 else ''}"
