"""From token log-probabilities to one number a completion."""

from __future__ import annotations

import torch

from swiftlite.dtensors import local


def completion_sums(logprobs: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    """log p of each whole completion: the sum of its tokens' log-probabilities, differentiable.

    logprobs: `[tokens]`, completion tokens only; owner: int64 `[tokens]`, the completion (0 to count - 1) each token is
    of, in any order; count: completions. Returns fp64 `[count]`, 0 for a completion without a token here: fp32 numbers
    near 4,096, a long answer's, lie 5e-4 apart, and the losses take differences of such sums.

    Sums and not means: log p(y | x) = sum_t log p(y_t | y_<t, x) is the probability that the preference losses speak
    of, and a mean would weigh a token of a short completion more than one of a long completion. Losses that normalise
    by length divide afterwards. Sums also add up: where context parallelism divides a completion, its parts are added.
    """
    sums = torch.zeros(count, dtype=torch.float64, device=logprobs.device)
    return sums.index_add(0, owner, logprobs.double())


def answer_scores(hidden: torch.Tensor, weight: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The score of each answer, read at its last token, in fp32 whatever the model computes in.

    hidden: `[T, hidden]`; weight: `[1, hidden]`, or a DTensor that is whole on each rank; last: int64 `[answers]`, the
    place of the token in `hidden`; one beyond it is another rank's, and the score here is 0. Returns `[answers]`.
    """
    here = (last >= 0) & (last < len(hidden))
    states = hidden[last.clamp(0, len(hidden) - 1)]
    return (states.float() * local(weight).float()).sum(-1) * here
