"""How far two runs of the same steps are from each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swiftlite.checkpoint.folder import hash_file
from swiftlite.config.methods import TOKEN_ACCURACY
from swiftlite.reporting.curves import curve_of

LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-4  # relative
UNDECIDED = 1  # tokens of a step that rounding may make as likely as another, or less


@dataclass(frozen=True)
class Difference:
    """Worst relative differences over all steps, and of all final tensors by their 2-norm. loss: of losses, or of the
    rewards of a model's own answers, also of each data set; right: most tokens of a step that one run finds the
    likeliest and the other does not; same_files: whether every file of the two results has the same bytes; same_rest:
    every file but those of tensors.
    """

    loss: float
    norm: float
    weights: float
    right: int = 0
    same_files: bool = False
    same_rest: bool = False

    @property
    def agrees(self) -> bool:
        """Within the limits; and where the weights are equal, their files are."""
        close = self.loss <= LOSS and self.norm <= NORM and self.weights <= WEIGHTS and self.right <= UNDECIDED
        return close and self.same_rest and (self.same_files or self.weights > 0)


def compare(rows: list[dict[str, Any]], expected: list[dict[str, Any]], folder: Path, reference: Path) -> Difference:
    """rows: of metrics; folder, reference: `model/` of the two runs."""
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        return Difference(math.inf, math.inf, math.inf)
    mine, theirs = _contents(folder), _contents(reference)
    key, _ = curve_of(expected)  # a loss that is 0 but for rounding has no relative difference
    losses = [
        _relative(row.get(name), other[name])
        for row, other in zip(rows, expected, strict=True)
        for name in other
        if name == key or name.startswith(f"{key}/")
    ]
    right = max(abs(_right(row) - _right(other)) for row, other in zip(rows, expected, strict=True))
    return Difference(
        loss=max(losses),
        norm=max(_relative(row["grad_norm"], other["grad_norm"]) for row, other in zip(rows, expected, strict=True)),
        weights=weights_difference(folder, reference),
        right=right,
        same_files=mine == theirs,
        same_rest=_without_tensors(mine) == _without_tensors(theirs),
    )


def _right(row: dict[str, Any]) -> int:
    """How many tokens of a step are the likeliest, where that is told."""
    return round((row.get(TOKEN_ACCURACY) or 0) * row.get("trained_tokens", 0))


def _relative(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:
        return math.inf
    return _finite(abs(value - expected) / max(abs(expected), 1e-12))


def _finite(difference: float) -> float:
    """Infinite for what is no number, which `max` would pass over."""
    return difference if math.isfinite(difference) else math.inf


def weights_difference(folder: Path, reference: Path) -> float:
    """Largest 2-norm of a tensor's difference, relative to the tensor's own; infinite where tensors are others."""
    mine, theirs = _tensors(folder), _tensors(reference)
    if not theirs or mine.keys() != theirs.keys():
        return math.inf
    worst = 0.0
    for name, tensor in theirs.items():
        if mine[name].shape != tensor.shape or mine[name].dtype != tensor.dtype:
            return math.inf
        difference = (mine[name].double() - tensor.double()).norm().item()
        worst = max(worst, _finite(difference / max(tensor.double().norm().item(), 1e-12)))
    return worst


def _contents(folder: Path) -> dict[str, str]:
    """The hash of each file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hash_file(path) for path in files}


def _without_tensors(contents: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in contents.items() if not name.endswith(".safetensors")}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
