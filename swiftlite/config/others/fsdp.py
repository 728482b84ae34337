"""transformers' list `fsdp` and block `fsdp_config`: what they say of sharding, where they say nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swiftlite.config.types import FSDP_STRATEGIES
from swiftlite.errors import UserError

LIST, BLOCK = "fsdp", "fsdp_config"
FIX = "write `parallel: fsdp` with `sharding`, `offload` and `activation_checkpointing` instead"
PREFIX = "fsdp_"  # which its keys have or have not
# How the work is done, not what: layers are wrapped, gathered and saved in one way here.
IDLE = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "state_dict_type", "final_state_dict_type", "use_orig_params",
    "limit_all_gathers", "sync_module_states", "cpu_ram_efficient_loading", "backward_prefetch", "forward_prefetch",
    "version",
)  # fmt: skip
STRATEGIES = {name: {"sharding": name} for name in FSDP_STRATEGIES}
# key -> {its value: what it says here}
MEANT: dict[str, dict[str, dict[str, str]]] = {
    "offload_params": {"true": {"offload": "cpu"}, "false": {}},
    "activation_checkpointing": {"true": {"activation_checkpointing": "full"}, "false": {}},
    "reshard_after_forward": {"true": {"sharding": "full"}, "false": {"sharding": "grad_op"}},
    "sharding_strategy": STRATEGIES,
}
WORDS = {**STRATEGIES, "offload": {"offload": "cpu"}, "auto_wrap": {}}


def read_list(words: Iterable[str], where: str) -> dict[str, str]:
    """The settings that `fsdp: [full_shard, auto_wrap]` says, none where it is empty, as transformers has it without
    FSDP. Raises UserError for a word that has no equal here."""
    found: dict[str, str] = {}
    for word in words:
        if word not in WORDS:
            raise UserError(f"{word!r} has no equal here", where=where, fix=FIX)
        found |= {"parallel": "fsdp"} | WORDS[word]
    return found


def read_block(block: Mapping[str, Any], where: str) -> dict[str, str]:
    """The settings that the keys below `fsdp_config` say. Raises UserError for one that says what no setting can."""
    found: dict[str, str] = {}
    for key, value in block.items():
        plain = key.removeprefix(PREFIX)
        if value is None or plain in IDLE:
            continue
        meant = MEANT.get(plain, {}).get(str(value).lower())
        if meant is None:
            raise UserError(f"`{key}: {value}` has no equal here", where=where, fix=FIX)
        found |= meant
    return found
