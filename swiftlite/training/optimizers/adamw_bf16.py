"""AdamW for weights that exist in bf16 only: the update is computed in fp32 and rounded stochastically.

bf16 has 8 bits of precision, so most updates are less than half a step between two numbers: rounded to the nearest one
they would vanish. Rounded up or down by chance, in proportion to the distances, they are right on average
(arXiv 2010.06192, section 4).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from swiftlite.checkpoint.boxes import holdings
from swiftlite.checkpoint.state import COUNTER, MOMENTS, fresh_moments
from swiftlite.dtensors import local
from swiftlite.fused import can_fuse, fused
from swiftlite.seeds import derive_seed

PIECE, FUSED_PIECE = 1 << 24, 1 << 26  # numbers that exist in fp32 at a time, or as noise alone
DROPPED = 1 << 16  # fp32 is bf16 with 16 more bits


class AdamWBf16(torch.optim.AdamW):
    """`torch.optim.AdamW`, but for bf16 parameters, whose moments are fp32.

    What decides about the rounding of a number is a function of the seed, the parameter's name and update and the
    shard: replicas round alike, and a run that goes on from a checkpoint stays the same bit for bit.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, seed: int = 0, names: Mapping[int, str] | None = None, **options: Any
    ) -> None:
        """names: of the parameters, by id."""
        super().__init__(groups, **options)
        self._seed, self._names = seed, names or {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        apart = [(group, p, p.grad) for group in self.param_groups for p in group["params"] if self._is_apart(p)]
        for _, parameter, _ in apart:
            parameter.grad = None
        super().step(closure)  # the others
        for group, parameter, gradient in apart:
            if gradient is not None:
                parameter.grad = gradient
                self._update(group, parameter)

    def _is_apart(self, parameter: nn.Parameter) -> bool:
        """Whether `_update` takes it, one parameter at a time."""
        return parameter.dtype == torch.bfloat16

    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if parameter not in self.state:
            self.begin(parameter)
        state, chance = self.state[parameter], self._chance(parameter)
        device, count = parameter.device, float(state[COUNTER])
        fuses = device.type == "cuda" and parameter.dtype == torch.bfloat16 and can_fuse()
        if fuses:
            options = *group["betas"], group["lr"], group["weight_decay"], group["eps"]
            factors = update_factors(*options, count + 1, device)
        changed = [local(x).view(-1) for x in (parameter, *(state[kind] for kind in MOMENTS))]
        pieces = [x.split(FUSED_PIECE if fuses else PIECE) for x in (*changed, local(parameter.grad).reshape(-1))]
        for weights, mean, square, gradient in zip(*pieces, strict=True):
            with at_hand(mean, device) as m, at_hand(square, device) as v:
                if fuses:
                    update_rounded(weights, m, v, gradient, noise_for(weights, chance), factors)
                else:
                    with in_fp32(weights, chance) as exact:
                        _update_exact(group, count, exact, m, v, gradient.float())
        state[COUNTER] += 1

    def begin(self, parameter: nn.Parameter) -> None:
        """Make the moments of a parameter that was never updated."""
        # The updates of those apart are counted on the host: to ask a GPU is to wait for it.
        counter = {COUNTER: torch.zeros(())} if self._is_apart(parameter) else {}
        self.state[parameter] = fresh_moments(parameter) | counter

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Of a parameter that was updated: in fp32, divided over processes as the parameter is."""
        return self.state[parameter]

    def put_moments(self, parameter: nn.Parameter, moments: dict[str, torch.Tensor]) -> None:
        """Go on from these, as `moments` gives them."""
        counter = {COUNTER: moments[COUNTER].to("cpu", copy=True)} if self._is_apart(parameter) else {}
        self.state[parameter] = moments | counter

    def _chance(self, parameter: nn.Parameter) -> torch.Generator:
        """For the parameter's next update; `state` has its counter."""
        boxes = [holding.box for holding in holdings(parameter)]
        count, name = int(self.state[parameter][COUNTER]), self._names.get(id(parameter), "")
        seed = derive_seed(self._seed, count, name, boxes)
        return torch.Generator(parameter.device).manual_seed(seed)


@contextmanager
def in_fp32(weights: torch.Tensor, chance: torch.Generator) -> Iterator[torch.Tensor]:
    """Weights to change: themselves where they are fp32, else a copy that is rounded back into them."""
    if weights.dtype == torch.float32:
        yield weights
        return
    exact = weights.float()
    yield exact
    weights.copy_(round_stochastically(exact, noise_for(exact, chance)))


@contextmanager
def at_hand(moment: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """A moment to change: itself where it lies on the device, else a copy that is written back.

    Writing back into pinned memory is only begun: later work of the device sees it, the host has to wait.
    """
    if moment.device == device:
        yield moment
        return
    visitor = moment.to(device, non_blocking=True)
    yield visitor
    moment.copy_(visitor, non_blocking=True)


def noise_for(values: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """int16, evenly drawn from all that there are, one for each of the values."""
    return torch.empty_like(values, dtype=torch.int16).random_(-(DROPPED >> 1), DROPPED >> 1, generator=chance)


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, to one of the two neighbours, in proportion to the distances from them, as `noise_for` decides."""
    bits = values.view(torch.int32) + (noise.int() & (DROPPED - 1))
    return (bits & -DROPPED).view(torch.float32).to(torch.bfloat16)


@functools.lru_cache(maxsize=16)  # all parameters of a group have the same ones in a step
def update_factors(
    beta1: float, beta2: float, rate: float, decay: float, epsilon: float, count: float, device: torch.device
) -> torch.Tensor:
    """What `update_rounded` wants to know for the update of that number, from 1: fp32 `[6]`, on a device."""
    correction = (1 - beta2**count) ** 0.5
    factors = torch.tensor([1 - rate * decay, 1 - beta1, 1 - beta2, rate / (1 - beta1**count), correction, epsilon])
    return factors.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else factors


@fused(dynamic=True)
def update_rounded(
    weights: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    noise: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    """AdamW's update of bf16 weights and fp32 moments, in place and of one shape, computed in fp32."""
    decay, take_mean, take_square, rate, correction, epsilon = factors.unbind()
    g = gradient.float()
    mean.copy_(mean + (g - mean) * take_mean)
    square.copy_(square + (g * g - square) * take_square)
    exact = weights.float() * decay - rate * mean / (square.sqrt() / correction + epsilon)
    weights.copy_(round_stochastically(exact, noise))


def _update_exact(
    group: dict[str, Any], count: float, weights: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> None:
    """The same of fp32 weights, by PyTorch's own kernel. count: of updates before."""
    adamw(
        [weights],
        [gradient],
        [m],
        [v],
        [],
        [torch.full((), count, device=weights.device)],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
