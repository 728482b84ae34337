"""The longest micro-batches of a run, once before its first step: what does not fit memory shows at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from swiftlite.config.methods import SAMPLING
from swiftlite.training.share import Sharing, StepShare

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig
    from swiftlite.data.order import BatchPlan

MICRO_BATCHES = 2  # of a rank, or of each of its lanes: gradients of the first lie beside the activations of the second
MUCH_LONGER = 1.02  # than what the next step has anyway


def longest_share(config: RunConfig, plan: BatchPlan, share_of: Sharing, done: int) -> StepShare | None:
    """This process's micro-batches of the plan's longest packs; None where the step after `done` has as long ones.

    Every process calls it and gets an answer of the same kind. A pipeline has all micro-batches of a step under way, so
    there it is a whole step.
    """
    if config.method in SAMPLING:  # whose prompts are not what a step is trained on
        return None
    mesh, count = share_of.mesh, config.global_batch_size
    layout = mesh.layout
    if layout.pp == 1:
        count = min(count, MICRO_BATCHES * config.micro_batch_size * layout.data_ranks)
    packs = plan.longest(count)
    following = None if packs is None else next(plan.steps(done), None)  # a stream would read windows for it
    if packs is None or following is None:
        return None
    share = share_of(packs)
    compared = [share, share_of(following.packs)]
    lengths = torch.tensor([float(tokens_of_longest(one)) for one in compared], device=mesh.device)
    longest, following_longest = mesh.largest(lengths).tolist()
    if longest <= MUCH_LONGER * following_longest:
        return None
    if layout.pp > 1:
        return share
    largest = sorted(share.micro_batches, key=lambda batch: batch.tokens)[-MICRO_BATCHES * share_of.lanes :]
    return replace(share, micro_batches=largest)


def tokens_of_longest(share: StepShare) -> int:
    return max(batch.tokens for batch in share.micro_batches)
