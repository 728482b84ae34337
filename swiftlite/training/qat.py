"""`--qat`: which layers of a model round what they multiply, and what they need of weights for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftlite.checkpoint.weights import shown_names
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.config.schema import RunConfig
    from swiftlite.serving.compress import Chosen
    from swiftlite.training.precision import Precision


def check_rounding(base: PreTrainedModel, form: str, device: torch.device) -> Chosen:
    """What `export --quantization` will round. base: on `meta`, without adapters; form: of `--qat`; device: of the run.
    Raises UserError where that cannot be trained."""
    from swiftlite.models.lora_targets import read_by_kernels, why_unlike_linear
    from swiftlite.serving.compress import choose

    where, fix = f"--qat {form}", "leave --qat out"
    try:
        chosen = choose(base, form)
    except UserError as error:
        raise UserError(error.what, where=where, fix=fix) from error
    if chosen.has_experts:
        what = f"{type(base).__name__} has experts, whose products are made inside of one module"
        raise UserError(what, where=where, fix=fix)
    linear = {name: base.get_submodule(name) for name in chosen.linear}
    reasons = why_unlike_linear(base, linear)
    if device.type == "cuda":
        reasons |= dict.fromkeys(read_by_kernels(base, linear), "whose weight kernels on GPUs read")
    if reasons:
        name, reason = next(iter(reasons.items()))
        what = f"{type(base).__name__} has a layer that cannot be rounded while it is trained, {name}, {reason}"
        raise UserError(what, where=where, fix=fix)
    return chosen


def use_qat(base: PreTrainedModel, config: RunConfig, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Let the layers of a model round, in place. dtype: of the result's files. Returns notes on what is rounded, and
    on what is not. Raises UserError as `check_rounding`."""
    if config.qat == "none":
        return []
    from swiftlite.models.rounding import Rounding, use_rounding

    chosen = check_rounding(base, config.qat, device)
    use_rounding(base, chosen.linear, Rounding(chosen.form, chosen.group, dtype))
    notes = [f"--qat {config.qat} rounds {len(chosen.linear)} matrices"]
    if chosen.misfits:
        left = shown_names(chosen.misfits)
        notes.append(f"--qat {config.qat} leaves as they are, since the format does not fit their shapes: {left}")
    return notes


def gathered_in(config: RunConfig, precision: Precision, dtype: torch.dtype) -> torch.dtype:
    """The type in which FSDP gives layers their weights: that of products, where rounding reads no more of them. dtype:
    of the result's files."""
    return precision.dtype if config.qat == "none" or dtype == precision.dtype else torch.float32
