"""axolotl's blocks `datasets` and `test_datasets`: lists of data sets, each with how its rows are read.

Where an entry says no more than `dataset`, `columns` and `chat_template` can, it is taken as they are: conversations by
the model's chat template, and `type: alpaca`. Of all else is told what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from swiftlite.config.messages import PROPERTIES, ROLES
from swiftlite.errors import UserError

BLOCKS = {"datasets": "dataset", "test_datasets": "eval_dataset"}
PAIRS = "chat_template.default"  # of `rl: dpo`
ALPACA = "alpaca"
KINDS = {"json": (".json", ".jsonl"), "parquet": (".parquet",), "csv": (".csv",), "arrow": (".arrow",)}
DETECTED = "conversations"  # a key that is known without `columns`
# key -> its values that say what is so in any case
SAME: dict[str, tuple[Any, ...]] = {
    "split": ("train",),
    "roles_to_train": (["assistant"], ["gpt"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "chat_template": ("tokenizer_default",),
    **dict.fromkeys(("trust_remote_code", "drop_system_message", "train_on_inputs"), ("false",)),
}
INSTEAD = (  # a pattern of types, and what becomes of their rows here; NAME is the data set
    ("alpaca.*", "write `dataset: NAME`, asked by the model's chat template, or by `chat_template: alpaca`"),
    ("completion|pretrain", "write `dataset: NAME`, with `columns: text=KEY` of another key, for `swiftlite pretrain`"),
    (".*", "write `dataset: NAME`, and `columns` where rows have other keys than docs/data.md tells"),
)


def read_block(key: str, block: list[Any], where: str) -> dict[str, Any]:
    """`dataset` (or `eval_dataset`), `columns` and `chat_template` of a block, as nested lists and mappings of strings.
    Raises UserError for what they cannot say. key: of `BLOCKS`."""
    names, mappings = [], []
    for entry in block:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise UserError("a data set has no path", where=where, fix="write `dataset: NAME_OR_PATH` instead")
        given = {key: value for key, value in entry.items() if value not in (None, [], {})}
        name = given["path"]
        name += f":{given['name']}" if isinstance(given.get("name"), str) else ""
        name += f"@{given['split']}" if given.get("split", "train") != "train" else ""
        _check(given, name, where)
        names.append(name)
        keys = {"messages": given.get("field_messages", "messages")}
        keys |= {key: given.get(f"field_{key}", key) for key in ("chosen", "rejected")}
        mappings.append({key: column for key, column in keys.items() if column not in (key, DETECTED)})
    if any(mapping != mappings[0] for mapping in mappings):
        what = "the data sets have their messages under different keys"
        raise UserError(what, where=where, fix="rename the key in the rows of one, and write `dataset` and `columns`")
    written = {entry["type"] == ALPACA for entry in block}
    if len(written) > 1:
        what = "some of the data sets are of type alpaca, and others are written by the model's chat template"
        raise UserError(what, where=where, fix="write `dataset`, and one `chat_template` for all")
    columns = mappings[0] if mappings else {}
    by_alpaca = {"chat_template": ALPACA} if True in written else {}
    return {BLOCKS[key]: names} | ({"columns": columns} if columns else {}) | by_alpaca


def _check(given: dict[str, Any], name: str, where: str) -> None:
    """Raises UserError for a key of an entry that is more than a name of rows. name: what the entry stands for."""
    kind = given.get("type")
    if kind not in ("chat_template", PAIRS, ALPACA):
        said = f"of type {kind}" if isinstance(kind, str) else "of a type of its own" if kind else "of no type"
        pattern = kind if isinstance(kind, str) else ""
        fix = next(fix for types, fix in INSTEAD if re.fullmatch(types, pattern)).replace("NAME", name)
        raise UserError(f"{given['path']} is {said}, which has no equal here", where=where, fix=fix)
    for key, value in given.items():
        if not _is_same(key, value, given):
            word = value if isinstance(value, str) else "..."
            what = f"`{key}: {word}` of {given['path']} has no equal here"
            fix = f"write `dataset: {given['path']}` instead, and the rows as that says"
            raise UserError(what, where=where, fix=fix)


def _is_same(key: str, value: Any, given: dict[str, Any]) -> bool:
    """Whether a key of an entry says what is so here too, or what `dataset` and `columns` say."""
    if key in ("path", "type"):
        return True
    if key in ("name", "split"):
        return isinstance(value, str) and re.fullmatch(r"[\w.-]+(\[[\d%:]+\])?", value) is not None
    if key in ("field_messages", "field_chosen", "field_rejected"):
        return isinstance(value, str) and (key == "field_messages" or given["type"] == PAIRS)
    if key == "message_property_mappings":
        return isinstance(value, dict) and all(name in PROPERTIES.get(its, (its,)) for its, name in value.items())
    if key in ("message_field_role", "message_field_content"):  # as older files have them
        return value in PROPERTIES[key.rsplit("_", 1)[-1]]
    if key == "roles":
        known = isinstance(value, dict) and all(isinstance(names, list) for names in value.values())
        return known and all(ROLES.get(str(name)) == role for role, names in value.items() for name in names)
    if key == "ds_type":
        return Path(given["path"]).suffix in KINDS.get(str(value), ())
    return value in SAME.get(key, ())
