"""Where activations change between whole and divided under tensor parallelism, and how a module sees local weights.

Three forms of an activation: whole (a plain tensor, equal on each rank), divided by tokens (a DTensor, between the
blocks of a layer under sequence parallelism) and divided by features (a plain tensor, inside a block). The gradient of
a whole activation is whole too; `enter` marks the one place where the ranks hold only parts of it.
Source: conjugate operators f, g of arXiv 1909.08053 and their sequence-parallel forms of arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from swiftlite.errors import UserError

DELETES_HIDDEN = "2.12" <= torch.__version__ < "2.13"  # a compiled layer deletes the parameter with what hid it
View = Callable[[DTensor], torch.Tensor | None]
WHOLE, PARTS, TOKENS, FEATURES = (Replicate(),), (Partial(),), (Shard(1),), (Shard(-1),)


class Borders:
    """The changes between the forms, on one 1-D mesh. Activations are `[1, tokens, features]`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Whole, for use in divided computation: the ranks' parts of its gradient are summed."""
        return self._whole(x).to_local(grad_placements=PARTS)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Whole, for use in whole computation."""
        return self._whole(x).to_local()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's part, whole."""
        return DTensor.from_local(x, self.mesh, PARTS, run_check=False).redistribute(placements=WHOLE).to_local()

    def sum_by_tokens(self, x: torch.Tensor) -> DTensor:
        """The sum of every rank's part, divided by tokens."""
        return DTensor.from_local(x, self.mesh, PARTS, run_check=False).redistribute(placements=TOKENS)

    def split_tokens(self, x: torch.Tensor) -> DTensor:
        """From whole to divided by tokens."""
        return self._whole(x).redistribute(placements=TOKENS)

    def on_tokens(self, x: DTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
        """A function of each token by itself, on this rank's tokens. Keeps the shape."""
        local = function(x.to_local())
        return DTensor.from_local(local, self.mesh, TOKENS, run_check=False, shape=x.shape, stride=x.stride())

    def split_features(self, x: torch.Tensor) -> torch.Tensor:
        """From whole to this rank's features."""
        return self._whole(x).redistribute(placements=FEATURES).to_local()

    def gather_features(self, x: torch.Tensor, features: int) -> torch.Tensor:
        """From this rank's features to whole. features: of all ranks together."""
        shape = torch.Size((*x.shape[:-1], features))
        stride = torch.empty(shape, device="meta").stride()
        part = DTensor.from_local(x, self.mesh, FEATURES, run_check=False, shape=shape, stride=stride)
        return part.redistribute(placements=WHOLE).to_local()

    def _whole(self, x: torch.Tensor) -> DTensor:
        if isinstance(x, DTensor):
            return x.redistribute(placements=WHOLE)
        return DTensor.from_local(x, self.mesh, WHOLE, run_check=False)

    def local_weight(self, weight: DTensor) -> torch.Tensor:
        """This rank's part of a weight, or a whole weight in whole computation."""
        return weight.to_local()

    def summed_weight(self, weight: DTensor) -> torch.Tensor:
        """A whole weight in divided computation: the ranks' parts of its gradient are summed."""
        return self.enter(weight.to_local()) if weight.requires_grad else weight.to_local()


def change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let `change` act on the first argument of a module, or on its `hidden_states`."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def change_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let `change` act on the output of a module, or on the first of its outputs."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)


def see_locally(module: nn.Module, views: dict[str, View]) -> None:
    """While the module runs, its parameters are what `views` make of them: plain tensors, or None.

    The parameters themselves stay where they are: an attribute of the same name hides each of them meanwhile, so names,
    state dicts and FSDP's exchange of sharded for gathered parameters are untouched.
    """

    def hide(module: nn.Module, _args: Any) -> None:
        for name, view in views.items():
            vars(module)[name] = view(module._parameters[name])

    def show(module: nn.Module, _args: Any, _output: Any) -> None:
        for name in views:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, always_call=True)


def check_compiler() -> None:
    """Raises UserError for a release of torch that cannot compile modules which see local weights."""
    if DELETES_HIDDEN:
        raise UserError(
            f"torch {torch.__version__} cannot compile layers that tensor parallelism divides: it would delete weights",
            where="--compile, --tensor-parallel-size",
            fix="leave --compile out, or install torch 2.13",
        )


def run_on_tokens(module: nn.Module, borders: Borders) -> None:
    """Run a module that treats each token by itself on this rank's tokens: DTensor in, DTensor out."""
    entered: list[DTensor] = []

    def keep_local(x: DTensor) -> torch.Tensor:
        entered[:] = [x]
        return x.to_local()

    def restore(output: torch.Tensor) -> DTensor:
        x = entered.pop()
        return borders.on_tokens(x, lambda _: output)

    change_input(module, keep_local)
    change_output(module, restore)
