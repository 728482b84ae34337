"""What exact resume needs beside the loadable model: optimizer tensors, fp32 masters and the trainer's counters.

`resume.safetensors` holds `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step` for each trained parameter NAME, and
`NAME.master` where the model files hold it in a smaller type. `trainer_state.json` holds the rest. No pickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swiftlite.errors import UserError

TENSORS, STATE = "resume.safetensors", "trainer_state.json"
FORMAT = 1


def save_resume_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, masters: bool
) -> None:
    """Write both files. masters: also store the trained parameters in fp32. Raises OSError where the disk is full."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in _trained(model):
        if masters:
            tensors[f"{name}.master"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / TENSORS)
    (folder / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=2) + "\n", encoding="utf-8")


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """The counters of a checkpoint. Raises UserError where the file is missing or of another format."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the checkpoint has no readable {STATE}", where=str(folder), fix="resume from another checkpoint"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(
            f"the checkpoint is of format {state.get('format') if isinstance(state, dict) else None}, not {FORMAT}",
            where=str(folder),
            fix="resume with the version that wrote it",
        )
    return state


@torch.no_grad()
def load_resume_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put masters and optimizer tensors back. Raises UserError where they do not fit the model."""
    from safetensors import safe_open

    trained = dict(_trained(model))
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trained}
    with safe_open(folder / TENSORS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
            name, _, kind = key.rpartition(".")
            if name not in trained:
                raise UserError(
                    f"the checkpoint holds {name}, which this run does not train",
                    where=str(folder),
                    fix="resume with the flags of the run that wrote it",
                )
            value = file.get_tensor(key)
            if value.numel() != 1 and value.shape != trained[name].shape:
                raise UserError(
                    f"{key} has shape {tuple(value.shape)}, the model wants {tuple(trained[name].shape)}",
                    where=str(folder),
                    fix="resume with the flags of the run that wrote it",
                )
            if kind == "master":
                trained[name].copy_(value)
            else:
                states[name][kind] = value
    for name, parameter in trained.items():
        if states[name]:
            device = parameter.device
            optimizer.state[parameter] = {kind: value.to(device) for kind, value in states[name].items()}


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
