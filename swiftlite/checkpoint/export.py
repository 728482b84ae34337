"""Write a trained model as every other tool reads it: safetensors shards, config, tokenizer, or a peft adapter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(
    folder: Path,
    model: nn.Module,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    """Save to an existing empty folder.

    model: a peft model (its adapter alone is written) or `base` itself; dtype: of the files and of config.json.
    Names are the hub's own: `save_pretrained` reverses the conversions of loading and stores a tied tensor once.
    """
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model is base:
            _save_whole(folder, base, dtype, max_shard_size)
        else:
            model.save_pretrained(folder, safe_serialization=True)
            (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _save_whole(folder: Path, base: PreTrainedModel, dtype: torch.dtype, max_shard_size: str) -> None:
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}  # one result a storage keeps tied tensors tied
    state = {}
    for name, tensor in base.state_dict().items():
        if tensor.is_floating_point():
            key = tensor.data_ptr(), tensor.shape
            tensor = cast.setdefault(key, tensor.to(dtype))
        state[name] = tensor
    trained_as = base.config.dtype
    try:
        base.config.dtype = dtype
        base.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    finally:
        base.config.dtype = trained_as
