"""Muon: the momentum of each hidden matrix, orthogonalised, is its update; all else is AdamW's.

Sources: Jordan, https://kellerjordan.github.io/posts/muon/; Moonlight, arXiv 2502.16982, for the scale of updates, by
which learning rate and weight decay mean what they mean for AdamW; the arithmetic is that of `torch.optim.Muon`
(https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html) with `match_rms_adamw`. Momentum is kept as a
mean, as AdamW keeps its own: the update has no scale, so a sum would give the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from swiftlite.checkpoint.state import COUNTER, MOMENTUM
from swiftlite.dtensors import local
from swiftlite.parallel.mesh import Mesh
from swiftlite.training.optimizers.adamw_bf16 import AdamWBf16, in_fp32
from swiftlite.training.optimizers.whole_matrices import WholeMatrices

DECAY = 0.95  # of the momentum, which Nesterov's looks ahead by once more
STEPS = 5  # of Newton and Schulz
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of their polynomial x, x^3, x^5: the steepest at zero that stays near one
SMALLEST_NORM = 1e-7  # that a matrix is divided by, as in `torch.optim.Muon`
ADAMW_RMS = 0.2  # of AdamW's updates (arXiv 2502.16982, section 2.2)
PIECE = 1 << 26  # numbers of a batch of matrices that are orthogonalised at a time


class Muon(AdamWBf16):
    """`AdamWBf16`, but for hidden matrices, wherever their parts are."""

    def __init__(self, groups: list[dict[str, Any]], *, matrices: Collection[str], mesh: Mesh, **options: Any) -> None:
        """matrices: names of the hidden matrices. Every process of the run makes its own together with the others."""
        super().__init__(groups, **options)
        parameters = [p for group in self.param_groups for p in group["params"]]
        hidden = [(name, p) for p in parameters if (name := self._names[id(p)]) in matrices]
        self._hidden = {p for _, p in hidden}
        self._wholes = WholeMatrices(hidden, mesh, orthogonalizing_flops)
        self._device = mesh.device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. Those who hold parts of the same matrices call it together."""
        hidden = ((group, p) for group in self.param_groups for p in group["params"] if p in self._hidden)
        taken = {p: (group, p.grad) for group, p in hidden if p.grad is not None}
        for parameter in taken:
            parameter.grad = None
        super().step(closure)  # the others
        for turn in self._wholes.turns(list(taken)):
            parts = [self._direction(p, taken[p][1]) for p in turn.parameters]
            updates = self._wholes.apply(orthogonalized, turn, parts)
            for parameter, update in zip(turn.parameters, updates, strict=True):
                self._change(taken[parameter][0], parameter, update)
        for parameter, (_, gradient) in taken.items():
            parameter.grad = gradient

    def _is_apart(self, parameter: nn.Parameter) -> bool:
        return parameter in self._hidden or super()._is_apart(parameter)

    def _direction(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """What to orthogonalise, this process's part of it: the momentum one step ahead."""
        if parameter not in self.state:
            self.begin(parameter)
        momentum, gradient = local(self.state[parameter][MOMENTUM]), local(gradient).float()
        momentum.lerp_(gradient, 1 - DECAY)
        return gradient.lerp(momentum, DECAY).to(self._device, orthogonalized_in(self._device))

    def _change(self, group: dict[str, Any], parameter: nn.Parameter, update: torch.Tensor) -> None:
        state, chance, weights = self.state[parameter], self._chance(parameter), local(parameter)
        scale = ADAMW_RMS * max(parameter.shape[-2:]) ** 0.5
        with in_fp32(weights, chance) as exact:
            exact.mul_(1 - group["lr"] * group["weight_decay"])
            exact.add_(update.to(exact.device, exact.dtype), alpha=-group["lr"] * scale)
        state[COUNTER] += 1

    def begin(self, parameter: nn.Parameter) -> None:
        """Make the moments of a parameter that was never updated: of a hidden matrix the momentum alone."""
        if parameter not in self._hidden:
            super().begin(parameter)
            return
        momentum = torch.zeros_like(parameter, dtype=torch.float32)
        self.state[parameter] = {COUNTER: torch.zeros(()), MOMENTUM: momentum}


def orthogonalized_in(device: torch.device) -> torch.dtype:
    """The type of the products: on a GPU bf16, as Muon's author has it, on a CPU fp32."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Nearly U V^T of each matrix U S V^T: S becomes ones between 0.7 and 1.2, by `STEPS` steps of Newton and Schulz.
    matrices: `[rows, columns]` or `[batch, rows, columns]`; the result is of their shape and type.
    """
    if matrices.ndim == 2:
        return _orthogonalized(matrices[None])[0]
    done = torch.empty_like(matrices)
    count = max(1, PIECE // max(1, matrices[0].numel())) if len(matrices) else 1
    for piece, result in zip(matrices.split(count), done.split(count), strict=True):
        result.copy_(_orthogonalized(piece))
    return done


def _orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    rows, columns = matrices.shape[-2:]
    x = matrices.mT if rows > columns else matrices  # products of the shorter side
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        squares = x @ x.mT
        factors = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        x = torch.baddbmm(x, factors, x, beta=a)
    return x.mT if rows > columns else x


def orthogonalizing_flops(shape: tuple[int, ...]) -> float:
    """Of the products by which matrices of a shape, `[..., rows, columns]`, are orthogonalised."""
    short, long = sorted(shape[-2:])
    return torch.Size(shape[:-2]).numel() * STEPS * (4 * short * short * long + 2 * short**3)
