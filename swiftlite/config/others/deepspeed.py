"""DeepSpeed's JSON files: what they say of sharding and offloading, where they say nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from swiftlite.config.names import placed
from swiftlite.config.others.words import shown
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.untrusted import read_json_file

STAGES = {"0": "none", "2": "grad_op", "3": "full"}
# How the work is done, not what: they change no number, and little of what fits.
IDLE = re.compile(
    "steps_per_print|wall_clock_breakdown|zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|overlap_comm|"
    "contiguous_gradients|reduce_scatter|allgather_partitions|round_robin_gradients|sub_group_size|"
    r"(stage3_)?(max_live_parameters|max_reuse_distance|gather_16bit_weights_on_model_save)|"
    r"stage3_param_persistence_threshold|\w+_bucket_size"
)
OFFLOADS = ("offload_optimizer", "offload_param")
PRECISIONS = ("bf16", "fp16")
READ = ("zero_optimization", "stage", *OFFLOADS, *PRECISIONS)


def read_deepspeed(given: dict[str, Given], base: Path | None) -> list[str]:
    """Put what a file that `deepspeed` names says in its place; what is given besides wins. base: the recipe's folder.

    A path that leads nowhere is left to whoever checks the value. Returns a note. Raises UserError for a file that says
    what the settings cannot.
    """
    said = given.get("sharding")
    path = placed(said.value, base) if said and isinstance(said.value, str) and said.value.endswith(".json") else None
    if path is None or not Path(path).is_file():
        return []
    try:
        settings = read_json_file(Path(path))
        zero = settings.get("zero_optimization", {})
        stage, offloads = zero.get("stage", 0), [zero.get(key, {}).get("device", "none") for key in OFFLOADS]
        on = [name for name in PRECISIONS if settings.get(name, {}).get("enabled") is True]
    except (OSError, ValueError, AttributeError) as error:
        fix = shown("write {sharding: full} for ZeRO-3, {sharding: grad_op} for ZeRO-2")
        raise UserError(f"DeepSpeed's file cannot be read: {error}", where=path, fix=fix) from error
    found = {"sharding": STAGES.get(str(stage), "grad_op")}
    found |= {"offload": "cpu"} if offloads == ["cpu", "cpu"] else {}
    found |= {"precision": on[0]} if on else {}
    if wrong := [*_wrong_stage(str(stage), offloads), *_others(settings), *_others(zero)]:
        fix = f"write {{sharding: {found['sharding']}}}; {{offload: cpu}} keeps weights and optimizer in the host's "
        fix += "memory, {optimizer: paged_adamw} the optimizer alone; the rest has settings of its own"
        what = f"DeepSpeed's file says what has no equal here: {', '.join(wrong)}"
        raise UserError(what, where=path, fix=shown(fix, in_recipe=said.by == "recipe"))
    for name, value in found.items():
        if name == "sharding" or name not in given:
            given[name] = Given(value, said.where, said.by)
    return [f"{said.value} is read as " + ", ".join(f"{name} {value}" for name, value in found.items())]


def _wrong_stage(stage: str, offloads: list[Any]) -> list[str]:
    """What of ZeRO is done otherwise here: stage 1, and offloading of one part, or under stage 2."""
    wrong = [] if stage in STAGES else [f"stage {stage}"]
    if offloads == ["none", "none"] or (offloads == ["cpu", "cpu"] and stage == "3"):
        return wrong
    return wrong + [f"{key} {place}" for key, place in zip(OFFLOADS, offloads, strict=True) if place != "none"]


def _others(settings: dict[str, Any]) -> list[str]:
    """The keys that say more than this module reads. `auto` leaves it to the trainer's own settings."""
    unread = {key: value for key, value in settings.items() if key not in READ and not IDLE.fullmatch(key)}
    return [key for key, value in unread.items() if value not in ("auto", None) and value is not False]
