"""The optimizer over the trained parameters, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from swiftlite.checkpoint.state import fresh_moments, put_moments
from swiftlite.parallel.mesh import STORED, Mesh, local
from swiftlite.training.adamw_8bit import AdamW8bit

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def build_optimizer(trained: list[tuple[str, nn.Parameter]], config: RunConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101), fused or with moments of 8 bits; vectors (norms, biases) are not decayed."""
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}  # one fused update takes parameters of one mesh
    for _, parameter in trained:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    kind = AdamW8bit if config.optimizer == "adamw_8bit" else torch.optim.AdamW
    return kind(
        [{"params": group, "weight_decay": config.weight_decay * decay} for (decay, _), group in groups.items()]
        or [{"params": []}],  # a stage of a pipeline may be frozen as a whole
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first update would make, so that its memory is taken."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                put_moments(optimizer, parameter, fresh_moments(parameter))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def clip_gradients(
    parameters: list[nn.Parameter],
    limit: float,
    mesh: Mesh,
    scale: float = 1.0,
    uncounted: Collection[int] = (),
) -> float:
    """Divide gradients by `scale` and make their global 2-norm at most `limit` (0: any). Returns the norm before that.

    The norm is over the whole model, whichever process holds which part: squares of local shards are summed over all
    processes, a tensor that several hold counting once. uncounted: ids of parameters that another process counts.
    """
    trained = [p for p in parameters if p.grad is not None]
    norm = _norm([p.grad for p in trained if id(p) not in uncounted], mesh) / scale
    gradients = [local(p.grad) for p in trained]
    factor = min(1.0, limit / (norm + 1e-6)) if limit > 0 and math.isfinite(norm) else 1.0
    if gradients and factor / scale != 1.0:
        torch._foreach_mul_(gradients, factor / scale)
    return norm


def _norm(gradients: list[torch.Tensor], mesh: Mesh) -> float:
    parts = [local(gradient) for gradient in gradients]
    if mesh.layout.world == 1:
        return torch.nn.utils.get_total_norm(parts).item() if parts else 0.0
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    if parts:
        squares = torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).square()
        copies = torch.tensor([mesh.copies(gradient) for gradient in gradients], device=squares.device)
        total += (squares / copies).sum().to(mesh.device)
    return mesh.sum_over(total, *STORED).sqrt().item()
