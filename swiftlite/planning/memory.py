"""What training takes of a device's memory, and what is free."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftlite.models.anatomy import attention_heads, head_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def activation_bytes_per_token(
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    checkpointing: str = "none",
    hidden_dtype: torch.dtype | None = None,
) -> int:
    """Bytes that the layers keep for the backward, per token. dtype: of products; hidden_dtype: of hidden states
    between layers, by default the same.

    `16 h + 4 a d + 4 k d + 8 f + 4 a + 8` a layer in bf16 without checkpointing for a Llama-like layer (h hidden, a
    heads, k KV heads, d head size, f feed-forward; counted with `torch.autograd.graph.saved_tensors_hooks`), what
    enters the layer and the results of matrix products and attention under `selective`, what enters it alone under
    `full`; twice that in fp32. Under autocast over fp32 weights hidden states are fp32 too, which adds `10 h`, or `2 h`
    where only what enters a layer is kept of them. On a CPU, where that is much, about as much is left without
    checkpointing as under `selective` (`swiftlite.models.rematerialize`); attention's weights
    (`swiftlite.models.attention_cpu`) come to a fifth more at most, and to less with shorter documents.
    """
    shape = model_config.get_text_config()
    values = shape.to_dict()
    hidden, heads = shape.hidden_size, attention_heads(shape)
    size, _ = head_sizes(shape)  # values narrower than keys are filled up
    kv_heads = values.get("num_key_value_heads") or heads
    feed_forward = values.get("intermediate_size") or values.get("n_inner") or 4 * hidden
    if isinstance(feed_forward, list | tuple):  # layer by layer
        feed_forward = sum(feed_forward) // len(feed_forward)
    layer = {
        "none": 16 * hidden + 4 * heads * size + 4 * kv_heads * size + 8 * feed_forward + 4 * heads + 8,
        "selective": 6 * hidden + 4 * heads * size + 4 * kv_heads * size + 4 * feed_forward + 4 * heads,
        "full": 2 * hidden,
    }[checkpointing]
    if dtype == torch.float32:
        layer *= 2
    elif hidden_dtype == torch.float32:
        layer += (10 if checkpointing == "none" else 2) * hidden
    return layer * shape.num_hidden_layers


def free_bytes(device: torch.device) -> int:
    """Of one process: the processes of a machine share its memory where they compute on its CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _free_host_bytes() -> int:
    info = Path("/proc/meminfo")
    if not info.is_file():
        return 8 << 30
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return min(int(line.split()[1]) * 1024, _free_of_limit(Path("/sys/fs/cgroup")))


def _free_of_limit(group: Path) -> int:
    """Of a container that may take less than the machine has. group: the folder of its control group (version 2)."""
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such group, or no limit, which is written as `max`
        return sys.maxsize
    return max(0, limit - used + int(cached[1] if cached else 0))
