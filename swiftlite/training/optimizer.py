"""The optimizer over the trained parameters, and gradient clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def build_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101), fused; vectors (norms, biases) are not decayed. Raises UserError if none is trained."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UserError("no parameter is trained", where="--tuner", fix="choose other layers or modules to train")
    matrices = [p for p in named.values() if p.ndim >= 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most `limit` (0: never). Returns the norm before clipping."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
