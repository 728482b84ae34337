"""What training takes of a device's memory, and what is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swiftlite.host_memory import free_host_bytes
from swiftlite.models.anatomy import attention_heads, experts_of_token, head_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNKNOWN_HOST = 8 << 30  # bytes that a machine is taken to have free where its system does not say


@dataclass(frozen=True)
class Written:
    """How a decoder layer is written, as far as it decides what autograd keeps.

    fused_norms, fused_gate: its norms, and the gate of its feed-forward part, are one node of the graph each; compiled
    layers keep about what both leave. head_norms: queries and keys have norms too.
    """

    fused_norms: bool = False
    fused_gate: bool = False
    head_norms: bool = False


BY_TRANSFORMERS = Written()


@dataclass(frozen=True)
class Kept:
    """Bytes that a decoder layer keeps for the backward pass, per token, in the mean over layers.

    hidden: of the width of hidden states, which tensor parallelism divides only where it divides tokens; inner: what it
    divides in any case, heads and feed-forward features.
    """

    hidden: float
    inner: float

    @property
    def whole(self) -> float:
        return self.hidden + self.inner


def layer_keeps(
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    checkpointing: str = "none",
    hidden_dtype: torch.dtype | None = None,
    written: Written = BY_TRANSFORMERS,
) -> Kept:
    """What a layer keeps. dtype: of products; hidden_dtype: of hidden states between layers, by default the same.

    `16 h + 4 a d + 4 k d + 8 f + 4 a + 8` in bf16 without checkpointing for a Llama-like layer as transformers writes
    it (h hidden, a heads, k KV heads, d head size, f feed-forward; counted with
    `torch.autograd.graph.saved_tensors_hooks`), of which a norm of one node takes 4 h away and a gate of one 2 f; norms
    of queries and keys add `6 (a + k) d`, of one node `2 (a + k) d`. `selective` keeps what enters the layer and the
    results of matrix products and attention, `full` what enters it alone. In fp32 all is twice that. Under autocast
    over fp32 weights hidden states are fp32 too, which adds `10 h`, or `2 h` where only what enters a layer is kept of
    them. A mixture keeps `4 h + 8 f` for each expert that a token meets in place of `8 f`, under `selective` nothing:
    its grouped products are made again.
    """
    shape = model_config.get_text_config()
    hidden, heads = shape.hidden_size, attention_heads(shape)
    size, _ = head_sizes(shape)  # values narrower than keys are filled up
    kv_heads = shape.to_dict().get("num_key_value_heads") or heads
    features, copies = _feed_forward(shape)
    norms, gate = (8 if written.fused_norms else 16) * hidden, (6 if written.fused_gate else 8) * features
    attention = 4 * heads * size + 4 * kv_heads * size + 4 * heads
    of_heads = (2 if written.fused_norms else 6) * (heads + kv_heads) * size if written.head_norms else 0
    products = 0 if copies else 4 * features
    inner = {"none": attention + of_heads + gate + 8, "selective": attention + products, "full": 0}
    outer = {"none": norms + 4 * copies * hidden, "selective": 6 * hidden, "full": 2 * hidden}
    if dtype == torch.float32:
        return Kept(2 * outer[checkpointing], 2 * inner[checkpointing])
    wider = (10 if checkpointing == "none" else 2) * hidden if hidden_dtype == torch.float32 else 0
    return Kept(outer[checkpointing] + wider, inner[checkpointing])


def _feed_forward(shape: PretrainedConfig) -> tuple[float, float]:
    """(features that a token meets, experts that it is copied for), in the mean over layers."""
    values = shape.to_dict()
    dense = values.get("intermediate_size") or values.get("n_inner") or 4 * shape.hidden_size
    if isinstance(dense, list | tuple):  # layer by layer
        dense = sum(dense) / len(dense)
    chosen = experts_of_token(shape)
    if not chosen:
        return dense, 0
    width = values.get("moe_intermediate_size") or dense
    if isinstance(width, list | tuple):  # of experts of text and of images, of which those of text are the wider ones
        width = max(width)
    return chosen * width, chosen


def activation_bytes_per_token(
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    checkpointing: str = "none",
    hidden_dtype: torch.dtype | None = None,
) -> int:
    """Bytes that all layers keep for the backward, per token, as transformers writes them; the arguments are those of
    `layer_keeps`.

    On a CPU, where that is much, about as much is left without checkpointing as under `selective`
    (`swiftlite.models.kernels.rematerialize`); attention's weights (`swiftlite.models.attention.cpu`) come to a fifth
    more at most, and to less with shorter documents.
    """
    kept = layer_keeps(model_config, dtype, checkpointing, hidden_dtype)
    return round(kept.whole * model_config.get_text_config().num_hidden_layers)


def cache_bytes_per_token(model_config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that all layers keep of a token while a model answers. Sliding windows keep fewer, and
    layers without attention none."""
    shape = model_config.get_text_config()
    kv_heads = shape.to_dict().get("num_key_value_heads") or attention_heads(shape)
    return sum(head_sizes(shape)) * kv_heads * shape.num_hidden_layers * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Of one process: the processes of a machine share its memory where they compute on its CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = free_host_bytes()
    return UNKNOWN_HOST if free is None else free
