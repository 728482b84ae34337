"""Fused kernels of Liger (arXiv 2410.10989) for norms, gated MLPs and rotary embeddings, where a GPU runs them.

The output head stays swiftlite's own, which already makes no logits as a whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from swiftlite.errors import UserError, kind_and_words
from swiftlite.imports import is_installed

PACKAGE = "liger_kernel"


def choose_kernels(
    wanted: str, model_type: str, device: torch.device, *, divided: bool, tell: Callable[[str], None]
) -> str:
    """`liger` or `none`. wanted: of `--kernels`; divided: layers are compiled, or tensor parallelism divides them;
    tell: is told why `auto` does without a package that is there.

    Raises UserError where Liger was asked for by name and cannot serve.
    """
    if wanted == "none" or (wanted == "auto" and (device.type != "cuda" or divided or not is_installed(PACKAGE))):
        return "none"
    if device.type != "cuda":
        raise _cannot("its kernels need a GPU")
    try:
        patches = importlib.import_module(f"{PACKAGE}.transformers.monkey_patch")
    except Exception as error:  # each package has its own reasons to fail
        why = f"its import fails: {kind_and_words(error)[:200]}"
        if wanted == "auto":
            tell(f"--kernels auto does without Liger's kernels, {why}")
            return "none"
        raise _cannot(why) from error
    if model_type in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return "liger"
    if wanted == "auto":
        return "none"
    raise _cannot(f"it has none for the architecture {model_type}")


def apply_liger(base: PreTrainedModel) -> None:
    """Exchange the forward methods of the base's modules, in place; weights and names stay as they are."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=base, cross_entropy=False, fused_linear_cross_entropy=False)


def _cannot(why: str) -> UserError:
    return UserError(f"Liger cannot be used: {why}", where="--kernels liger", fix="use --kernels auto or none")
