"""What others wrote, read with bounds: names that are paths, JSON, and text that is shown or kept.

Files, recipes and models come from anywhere. Nothing here trusts their size, their depth or where they point.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DEEPEST_JSON = 100  # real rows nest a handful of levels; whoever walks a value afterwards may recurse
LARGEST_JSON_FILE = 16 << 20  # bytes; of configurations, manifests and the like
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}|(?<=://)[^/\s@\"']+@|(?<=[?&])(?:access_)?token=[^&\s\"'<>]+")


def without_secrets(text: str) -> str:
    """The text without hub tokens, passwords in addresses and tokens in their queries."""
    return SECRET.sub("***", text)


def masked(value: Any) -> Any:
    """What will be JSON, with each text in it without secrets. Cut out of the JSON itself, one might take the backslash
    of a quote with it."""
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """The text without characters that a terminal would obey or that no file can hold; line breaks and tabs stay.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def names_of(row: Mapping[str, Any]) -> str:
    """The row's first keys, for messages."""
    return ", ".join(printable(str(key))[:40] for key in list(row)[:12]) or "nothing"


def existing(name: str) -> Path | None:
    """The file or folder of that name, with `~` resolved; None where there is none, or can be none."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, a NUL, an unknown ~user: no path then
        return None


def leaves_folder(folder: Path, file: Path) -> bool:
    """Whether a file in a folder is a link out of it; the hub's cache may link `snapshots/REVISION` to its `blobs`."""
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    in_hub_cache = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    return not target.is_relative_to(root) and not in_hub_cache


def unequal_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text. Raises ValueError where it gives a key twice: one of the values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.40} is given twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=unequal_keys)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply or gives a key twice."""
    return _parse(text, _DECODER.decode)


def _parse(text: str, decode: Callable[[str], Any]) -> Any:
    try:
        value = decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_depth(value, text.count("[") + text.count("{"))
    return value


def check_depth(value: Any, brackets: int) -> None:
    """Raises ValueError for a parsed value that is nested too deeply. brackets: that its text opens, as a bound."""
    level = [value] if brackets > DEEPEST_JSON else []
    for _ in range(DEEPEST_JSON):
        children = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [child for group in children for child in group]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST_JSON} levels deep")


def read_json_file(path: Path) -> Any:
    """The value in a small JSON file. Raises OSError (also for what is no file), ValueError."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "it is missing, or is no file", str(path))
    with path.open("rb") as file:
        data = file.read(LARGEST_JSON_FILE + 1)
    if len(data) > LARGEST_JSON_FILE:
        raise ValueError(f"it is larger than {LARGEST_JSON_FILE >> 20} MiB, as no real one is")
    return _parse(data.decode("utf-8"), json.loads)  # others read such files so, keys given twice included
