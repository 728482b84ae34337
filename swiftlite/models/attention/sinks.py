"""Attention sinks: one learned score a head, which has its share of every softmax and no value (gpt-oss).

A kernel that knows of none gives results o, and the logarithm l of what each softmax divides by. With a sink s it
divides by exp(l) + exp(s). With l' the logarithm of that, the results are o' = o exp(l - l'). The kernel's backward
pass computes the right gradients when it is given o' and l' for its own: its weights, exp(score - l'), are those beside
a sink, and <upstream, o'>, which it takes from the weights' gradients, is their mean, to which the sink adds nothing.

Source: https://arxiv.org/abs/2309.17453 (sinks), https://arxiv.org/abs/2307.08691 (section 3.1.2, the backward pass)
"""

from __future__ import annotations

import torch


def share_with_sinks(
    output: torch.Tensor, logsums: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o', l'), new tensors. output: `[..., tokens, heads, size]`; logsums: `[heads, tokens]`; sinks: `[heads]`."""
    total = torch.logaddexp(logsums, sinks[:, None])
    return output * (logsums - total).exp_().T[..., None].to(output.dtype), total


def sink_gradients(
    upstream: torch.Tensor, output: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """`[heads]`. upstream: the gradient of o'; output, total: o' and l'."""
    taken = (upstream * output).sum(-1, dtype=total.dtype).flatten(0, -2).T
    return -(torch.exp(sinks[:, None] - total) * taken).sum(-1)
