"""The schema as a table of flags: names, aliases, choices, defaults in words, and the nearest name to a wrong one.

The schema itself is imported on first use: `swiftlite --help` needs none of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


# Switches of other tools that are values here; the nearest name would mislead.
ELSEWHERE = {
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "fsdp": "parallel: fsdp",
    "deepspeed": "parallel: fsdp",
    "use_peft": "tuner: lora",
    "no_gradient_checkpointing": "activation_checkpointing: none",
    "no_activation_checkpointing": "activation_checkpointing: none",
    "save_strategy": "save_steps: 500",
    "eval_strategy": "eval_steps: 500",
    "evaluation_strategy": "eval_steps: 500",
    "logging_strategy": "log_steps: 1",
    "gpus": "nproc_per_node: 2",
    "num_gpus": "nproc_per_node: 2",
}
NEEDLESS = {  # and those that nothing here needs
    "per_device_eval_batch_size": "evaluation takes micro-batches as training does",
    "eval_batch_size": "evaluation takes micro-batches as training does",
    "dataloader_num_workers": "steps are read ahead in any case",
    "remove_unused_columns": "columns that no row format has are counted and not read",
    **dict.fromkeys(
        ("attn_implementation", "attn_impl", "flash_attn", "use_flash_attn", "flash_attention"),
        "attention takes the fastest of PyTorch's own kernels that keeps documents apart",
    ),
    "do_train": "the command says what to do",
    "device": "CUDA_VISIBLE_DEVICES says which GPUs there are",
    "push_to_hub": "`hf upload` takes the result, OUT/model, to the hub",
}


@dataclass(frozen=True)
class Flag:
    """One setting as the command line and recipes see it. kind: bool, int, float, str, list or map."""

    name: str
    kind: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    panel: str
    help: str
    default: Any
    shown: str | None
    metavar: str | None
    short: str | None
    bare: str | None
    env: str | None

    @property
    def option(self) -> str:
        """`max_length` -> `--max-length`."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_in_words(self) -> str:
        """What help shows as the default."""
        if self.shown is not None:
            return self.shown
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, list):
            return " ".join(self.default) or "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@cache
def all_flags() -> dict[str, Flag]:
    """Name -> flag, panel by panel, in the order of the schema."""
    from swiftlite.config.schema import RunConfig
    from swiftlite.config.setting import PANELS

    read = [_read(name, field) for name, field in RunConfig.model_fields.items()]
    return {item.name: item for item in sorted(read, key=lambda item: PANELS.index(item.panel))}


@cache
def _by_spelling() -> dict[str, Flag]:
    table: dict[str, Flag] = {}
    for item in all_flags().values():
        for name in (item.name, *item.aliases):
            table[name] = item
    return table


def find_flag(spelled: str) -> Flag | None:
    """The flag of that name or alias, with `-` or `_`; None where there is none."""
    return _by_spelling().get(spelled.replace("-", "_"))


def known_names() -> list[str]:
    """Every name and alias, in snake_case."""
    return list(_by_spelling())


def elsewhere(name: str, *, in_recipe: bool) -> str | None:
    """What a user of another tool does here instead of naming `name`, None where nothing is known of it."""
    if why := NEEDLESS.get(name):
        return f"leave it out: {why}"
    if name not in ELSEWHERE:
        return None
    written = ELSEWHERE[name] if in_recipe else "--" + ELSEWHERE[name].replace(":", "").replace("_", "-")
    return f"write `{written}`"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like a wrong one, or None where none is alike."""
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.55)
    return found[0] if found else None


def _read(name: str, field: FieldInfo) -> Flag:
    from swiftlite.config.types import literal_choices

    extra = field.json_schema_extra
    assert isinstance(extra, dict), name
    kind = _kind(field.annotation)
    return Flag(
        name=name,
        kind=kind,
        choices=tuple(literal_choices(field.annotation)),
        aliases=tuple(extra["aliases"]),
        panel=extra["panel"],
        help=field.description or "",
        default=field.get_default(call_default_factory=True),
        shown=extra["shown"],
        metavar=extra.get("metavar"),
        short=extra.get("short"),
        bare=extra.get("bare"),
        env=extra.get("env"),
    )


def _kind(annotation: Any) -> str:
    """The plain type inside `Annotated[int | None, ...]` and the like."""
    origin = get_origin(annotation)
    if origin is list or annotation is list:
        return "list"
    if origin is dict:
        return "map"
    if annotation in (bool, int, float, str):
        return annotation.__name__
    kinds = [_kind(part) for part in get_args(annotation) if part is not type(None) and not isinstance(part, str)]
    return kinds[0] if kinds else "str"
