"""From a config to a model that is ready to train: device, precision, weights, adapters, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.checkpoint.safetensors_files import inspect_model_folder
from swiftlite.errors import UserError
from swiftlite.models import attention
from swiftlite.models.anatomy import check_trainable_architecture, dissect
from swiftlite.models.load import import_architecture, load_config, load_model
from swiftlite.models.tuners import apply_tuner, grow_vocabulary, set_activation_checkpointing, to_master_precision
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.training.precision import DTYPES, Precision, pick_device, resolve_precision

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swiftlite.config.schema import RunConfig

ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class Trainee:
    """model: what is trained and saved; base: the causal language model inside it; saved_dtype: of the files."""

    model: nn.Module
    base: PreTrainedModel
    scorer: TokenScorer
    device: torch.device
    precision: Precision
    saved_dtype: torch.dtype
    checkpointing: str


def check_model(config: RunConfig, resume: Path | None) -> PretrainedConfig:
    """Everything that can be known of the model without its weights. Raises UserError where it cannot be trained."""
    model_config = load_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    check_trainable_architecture(model_config)
    _check_length(config, model_config)
    source, _ = _weights(config, resume)
    if Path(source).expanduser().is_dir():
        inspect_model_folder(Path(source).expanduser())
    import_architecture(model_config)
    return model_config


def build_trainee(
    config: RunConfig,
    model_config: PretrainedConfig,
    resume: Path | None,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> Trainee:
    """Load and prepare the model. resume: a checkpoint folder whose weights to take.

    Raises UserError where the model, the adapter or a flag does not fit.
    """
    device = pick_device()
    precision = resolve_precision(config.precision, device)
    source, adapter = _weights(config, resume)
    torch.manual_seed(config.seed)  # adapters start from random numbers
    base = load_model(
        source,
        model_config,
        dtype=precision.dtype if config.tuner == "lora" else torch.float32,
        attention=attention.register(),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    saved_dtype = DTYPES[config.save_dtype] if config.save_dtype != "auto" else _source_dtype(model_config)
    if config.new_tokens:
        grow_vocabulary(base, len(load_tokenizer()))
    base.to(device)
    model = apply_tuner(base, config, adapter)
    to_master_precision(model)
    scorer = TokenScorer(model, base)
    scorer.check()
    anatomy = dissect(base)
    checkpointing = _choose_checkpointing(config, model_config, device, precision)
    set_activation_checkpointing(base, anatomy, checkpointing)
    if config.compile:
        for layer in anatomy.layers:
            layer.compile()
    return Trainee(model, base, scorer, device, precision, saved_dtype, checkpointing)


def _weights(config: RunConfig, resume: Path | None) -> tuple[str, Path | None]:
    """(where the model's weights are, the adapter to go on from)."""
    adapter = None if config.adapter is None else Path(config.adapter).expanduser()
    if adapter is not None and not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(f"no {ADAPTER_CONFIG} in the adapter folder", where=str(adapter), fix="check --adapter")
    if resume is None:
        return config.model, adapter
    return (config.model, resume) if config.tuner == "lora" else (str(resume), None)


def _check_length(config: RunConfig, model_config: PretrainedConfig) -> None:
    longest = model_config.get_text_config().to_dict().get("max_position_embeddings")
    longest = longest or model_config.get_text_config().to_dict().get("n_positions")
    if longest and config.max_length > longest:
        raise UserError(
            f"--max-length {config.max_length} is more than the {longest} positions of the model",
            where=config.model,
            fix=f"give --max-length {longest} or less",
        )


def _source_dtype(model_config: PretrainedConfig) -> torch.dtype:
    return model_config.dtype if isinstance(model_config.dtype, torch.dtype) else torch.float32


def _choose_checkpointing(
    config: RunConfig, model_config: PretrainedConfig, device: torch.device, precision: Precision
) -> str:
    """`auto`: none where the activations of a micro-batch take less than half of the free memory, else full."""
    if config.activation_checkpointing != "auto":
        return config.activation_checkpointing
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_host_bytes()
    packs = config.micro_batch_size if device.type == "cuda" else 1
    needed = activation_bytes_per_token(model_config, precision) * packs * config.max_length
    return "none" if needed < free / 2 else "full"


def activation_bytes_per_token(model_config: PretrainedConfig, precision: Precision) -> int:
    """Bytes that the layers keep for the backward, per token, without checkpointing.

    `16 h + 4 a d + 4 k d + 8 f + 4 a + 8` a layer in bf16 for a Llama-like layer (h hidden, a heads, k KV heads, d
    head size, f feed-forward; counted with `torch.autograd.graph.saved_tensors_hooks`), twice that in fp32.
    """
    shape = model_config.get_text_config()
    values = shape.to_dict()
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    size = values.get("head_dim") or hidden // heads
    kv_heads = values.get("num_key_value_heads") or heads
    feed_forward = values.get("intermediate_size") or values.get("n_inner") or 4 * hidden
    layer = 16 * hidden + 4 * heads * size + 4 * kv_heads * size + 8 * feed_forward + 4 * heads + 8
    return layer * shape.num_hidden_layers * (2 if precision.dtype == torch.float32 else 1)


def _free_host_bytes() -> int:
    info = Path("/proc/meminfo")
    if not info.is_file():
        return 8 << 30
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
