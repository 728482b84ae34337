"""The optimizer over the trained parameters, gradient clipping, and when weights change."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.checkpoint.state import begin_moments
from swiftlite.dtensors import is_dtensor, local
from swiftlite.models.kernels.lora import is_lora_b
from swiftlite.parallel.mesh import STORED, Mesh
from swiftlite.training.optimizers.adamw_8bit import AdamW8bit
from swiftlite.training.optimizers.adamw_bf16 import AdamWBf16
from swiftlite.training.optimizers.adamw_paged import PagedAdamW
from swiftlite.training.optimizers.muon import Muon

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

RATIO = "ratio"  # of a group's learning rate to that of the run


def build_optimizer(
    trained: list[tuple[str, nn.Parameter]], config: RunConfig, mesh: Mesh, matrices: Collection[str] = ()
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101): fused, with moments of 8 bits or in the host's memory, or for weights without fp32
    masters; or Muon. Vectors (norms, biases) are not decayed. LoRA's B matrices learn faster where the settings say so.

    matrices: names of the hidden ones, which Muon takes. Every process of the run calls it together.
    """
    # one fused update takes parameters of one mesh
    groups: dict[tuple[bool, float, object], list[nn.Parameter]] = {}
    for name, parameter in trained:
        own = parameter.device_mesh if is_dtensor(parameter) else None
        ratio = config.lora_plus_ratio if is_lora_b(name) else 1.0
        groups.setdefault((parameter.ndim >= 2, ratio, own), []).append(parameter)
    make = torch.optim.AdamW
    if config.optimizer != "adamw" or config.pure_bf16:
        kind = {"adamw": AdamWBf16, "adamw_8bit": AdamW8bit, "paged_adamw": PagedAdamW, "muon": Muon}[config.optimizer]
        more = {"matrices": matrices, "mesh": mesh} if kind is Muon else {}
        names = {id(parameter): name for name, parameter in trained}
        make = functools.partial(kind, seed=config.seed, names=names, **more)
    optimizer = make(
        [
            {"params": group, "weight_decay": config.weight_decay * decay, RATIO: ratio}
            for (decay, ratio, _), group in groups.items()
        ]
        or [{"params": [], RATIO: 1.0}],  # a stage of a pipeline may be frozen as a whole
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    set_rate(optimizer, config.learning_rate)
    return optimizer


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first update would make, so that its memory is taken."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                begin_moments(optimizer, parameter)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """rate: the learning rate, of which LoRA's B matrices have a multiple under LoRA+ (arXiv 2402.12354)."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATIO]


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
    counted = [p.grad for p in trained if id(p) not in uncounted]
    norm = _whole_norm(_local_norms(counted), counted, mesh) / scale
    gradients = [local(p.grad) for p in trained]
    factor = min(1.0, limit / (norm + 1e-6)) if limit > 0 and math.isfinite(norm) else 1.0
    if gradients and factor / scale != 1.0:
        torch._foreach_mul_(gradients, factor / scale)
    return norm


def _local_norms(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The 2-norm of what this process holds of each, in fp32.

    On a CPU PyTorch adds up squares one after another, so that the norm of a matrix of a million numbers is 4e-5 too
    small, of 28 million 2e-3. There each row has a norm of its own, and those are added up in fp64.
    """
    parts = [local(gradient) for gradient in gradients]
    if any(part.device.type != "cpu" for part in parts):
        return torch._foreach_norm(parts, dtype=torch.float32)
    rows = (torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts)
    return [torch.linalg.vector_norm(norms, dtype=torch.float64).float() for norms in rows]


def _whole_norm(norms: Collection[torch.Tensor], tensors: Collection[torch.Tensor], mesh: Mesh) -> float:
    """Of all processes. norms: fp32, of this process's parts of some tensors, or of what is divided as they are."""
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    if norms:
        squares = torch.stack([*norms]).square()
        copies = torch.tensor([mesh.copies(tensor) for tensor in tensors], device=squares.device)
        total += (squares / copies).sum().to(mesh.device)
    return mesh.sum_over(total, *STORED).sqrt().item()


class Updates:
    """Changes the weights when the gradients of a step are complete.

    at_once: all of them in `finish`, so that before it they are those of the step before, whatever happens.
    """

    at_once = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], uncounted: Collection[int], mesh: Mesh
    ) -> None:
        """uncounted: ids of parameters that another process counts."""
        self._optimizer, self._trained, self._uncounted, self._mesh = optimizer, trained, uncounted, mesh

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around the forward and backward passes of a step that is learnt from."""
        yield

    def norm(self, limit: float, scale: float) -> float:
        """Of the step's gradients, which are clipped and freed of the loss scale: see `clip_gradients`."""
        return clip_gradients(self._trained, limit, self._mesh, scale, self._uncounted)

    def finish(self) -> None:
        """Change what has not been changed."""
        self._optimizer.step()


class UpdatesInBackward(Updates):
    """Changes each weight when its gradient is complete, and drops the gradient: there is never more than a few.

    Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """

    at_once = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], uncounted: Collection[int], mesh: Mesh
    ) -> None:
        super().__init__(optimizer, trained, uncounted, mesh)
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        self._learning = False
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._update)

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        self._learning = True
        try:
            yield
        finally:
            self._learning = False

    def _update(self, parameter: nn.Parameter) -> None:
        if not self._learning:
            parameter.grad = None  # here too a step would not hold it
            return
        if parameter.grad.device != self._mesh.device:  # FSDP's copy of it to the host may still be under way
            torch.accelerator.synchronize(self._mesh.device)
        [self._norms[parameter]] = _local_norms([parameter.grad])
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [self._groups[parameter] | {"params": [parameter]}]  # or it would visit all
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None

    def norm(self, limit: float, scale: float) -> float:
        """Of the step's gradients, as they were."""
        norm = _whole_norm(self._norms.values(), self._norms.keys(), self._mesh)
        self._norms.clear()
        return norm

    def finish(self) -> None:
        """Nothing is left to do."""
