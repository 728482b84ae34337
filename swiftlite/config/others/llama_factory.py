"""LLaMA-Factory's dataset_info.json: a table of data sets, by which the names in its recipes are read.

An entry is taken where it says no more than `dataset` and `columns` can: a file or hub id, rows of Alpaca's or
ShareGPT's kind, and what their keys are called. All else is told what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from swiftlite.config.messages import PROPERTIES, ROLES
from swiftlite.config.names import DATASETS, SPEC, placed
from swiftlite.config.types import split_list
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.untrusted import read_json_file

TABLE = "dataset_info.json"
FOLDER = "data"  # where LLaMA-Factory looks for it
HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url")  # the first counts, where there is one
READ = (*HUBS, "file_name", "subset", "split", "num_samples", "formatting", "ranking", "columns", "tags")
FORMATTINGS = ("alpaca", "sharegpt", "openai")
# Its columns -> keys of the row formats here.
COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label",
    **{name: name for name in ("history", "system", "tools", "chosen", "rejected")},
}  # fmt: skip
OF_ALPACA = ("prompt", "query", "response", "messages")
ANSWERS = ("response", "chosen", "kto_tag")
CONVERSATIONS = ("messages", "conversations")  # which are known by these names
ROLE_TAGS = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "function": "function_call",
}
SPELLINGS = {
    **{f"{tag}_tag": [name for name, meant in ROLES.items() if meant == role] for tag, role in ROLE_TAGS.items()},
    **{f"{name}_tag": keys for name, keys in PROPERTIES.items()},
}


def read_table(given: dict[str, Given], base: Path | None) -> list[str]:
    """Put what a table says in the place of the names that are in it; a path of that name wins. base: the recipe's
    folder. Returns a note for each. Raises UserError for an entry that says what the settings cannot."""
    folder = given.pop("dataset_dir", None)
    table = _table(folder, base)
    notes, mappings = [], []
    for setting in DATASETS if table is not None else ():
        said = given.get(setting)
        if said is None or said.value is None:
            continue
        names = split_list(said.value) if isinstance(said.value, str) else list(said.value)
        for place, spec in enumerate(names):
            found = SPEC.fullmatch(spec)
            entry = _entry(found["name"] if found else spec, table[1], base)
            if entry is not None:
                names[place], columns = _read(found, entry, table[0], said.where)
                mappings.append(columns)
                notes.append(f"{spec} is {names[place]}, as {table[0]} says")
        given[setting] = Given(names, said.where, said.by)
    if "columns" in given or not mappings:
        return notes
    if any(columns != mappings[0] for columns in mappings):
        what = "the data sets have their texts under different keys"
        raise UserError(what, where=str(table[0]), fix="rename the keys in the rows of one, and leave out its columns")
    if mappings[0]:
        given["columns"] = Given(mappings[0], str(table[0]), "recipe")
        notes.append("columns are " + " ".join(f"{key}={column}" for key, column in mappings[0].items()))
    return notes


def _table(folder: Given | None, base: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """(file, entries); None where no folder is named and there is no table where LLaMA-Factory looks for one."""
    path = placed(str(Path(str(folder.value if folder else FOLDER)) / TABLE), base)
    try:
        entries = read_json_file(Path(path or TABLE))
        if not isinstance(entries, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        if folder is None or folder.value is None:
            return None
        fix = f"name the folder of {TABLE}, or leave it out and write paths as --dataset"
        raise UserError(f"the table of data sets cannot be read: {error}", where=folder.where, fix=fix) from error
    return Path(path), entries


def _entry(name: str, entries: dict[str, Any], base: Path | None) -> dict[str, Any] | None:
    """What the table says of a name; None where it says nothing, or there is a path of that name."""
    entry = entries.get(name)
    known = isinstance(entry, dict) and any(key in entry for key in (*HUBS, "file_name", "script_url"))
    return entry if known and placed(name, base) is None else None


def _read(given: re.Match[str], entry: dict[str, Any], table: Path, where: str) -> tuple[str, dict[str, str]]:
    """(what to write as `dataset`, `columns`) for a name with what stands behind it. given: the parts of `SPEC`."""
    hub = next((entry[key] for key in HUBS if entry.get(key)), None)
    name = str(hub or table.parent / str(entry.get("file_name", given["name"])))
    subset = given["subset"] or (f":{entry['subset']}" if entry.get("subset") else "")
    split = given["split"] or (f"@{entry['split']}" if entry.get("split", "train") != "train" else "")
    count = given["count"] or (f"#{entry['num_samples']}" if entry.get("num_samples") else "")
    wrong = _others(entry)
    if wrong:
        fix = f"write {name} as `dataset`, and by `columns` what its keys are called (docs/data.md)"
        what = f"{given['name']} says what has no equal here: {', '.join(wrong)}"
        raise UserError(what, where=f"{where}, {table}", fix=fix)
    return f"{name}{subset}{split}{count}{given['weight'] or ''}", _columns(entry)


def _others(entry: dict[str, Any]) -> list[str]:
    """What an entry says beyond what is read here."""
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if not isinstance(columns, dict) or not isinstance(tags, dict):
        return ["columns or tags that are no mapping"]
    wrong = [key for key, value in entry.items() if key not in READ and value]
    wrong += [f"columns.{key}" for key in columns if key not in (*COLUMNS, "messages")]
    wrong += [f"tags.{key} {value}" for key, value in tags.items() if value not in SPELLINGS.get(key, ())]
    formatting = entry.get("formatting", FORMATTINGS[0])
    return wrong if formatting in FORMATTINGS else [f"formatting {formatting}", *wrong]


def _columns(entry: dict[str, Any]) -> dict[str, str]:
    columns = entry.get("columns") or {}
    if entry.get("formatting", FORMATTINGS[0]) != FORMATTINGS[0]:
        named = {key: column for key, column in columns.items() if key not in OF_ALPACA}
        messages = columns.get("messages", CONVERSATIONS[1])
        renamed = {} if messages in CONVERSATIONS else {CONVERSATIONS[0]: messages}
    elif columns and not any(key in columns for key in ANSWERS):
        named, renamed = {}, {"text": columns.get("prompt", "text")}  # of pretraining
    else:
        named, renamed = columns, {}
    renamed |= {COLUMNS[key]: column for key, column in named.items() if key in COLUMNS}
    return {key: column for key, column in renamed.items() if key != column}
