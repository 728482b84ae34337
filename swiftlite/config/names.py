"""Short names of models and data sets, from the tables that ship with the recipes. An existing path always wins."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from swiftlite.config.recipe import recipes_folder

# NAME[:SUBSET][@SPLIT][#COUNT][*WEIGHT]
SPEC = re.compile(r"(?P<name>.+?)(?P<subset>:[^:@#*/\\]+)?(?P<split>@[^@#*]+)?(?P<count>#\d+)?(?P<weight>\*[\d.]+)?")


@cache
def short_names(table: str) -> dict[str, str]:
    """Short name -> hub id. table: `models` or `datasets`."""
    import yaml

    path = recipes_folder() / f"{table}.yaml"
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def model_name(name: str, base: Path | None = None) -> str:
    """The folder or hub id a model's name stands for. base: the recipe's folder, tried after the working folder.

    >>> model_name("Qwen-7B")
    'Qwen/Qwen2.5-7B-Instruct'
    """
    return placed(name, base) or short_names("models").get(_plain(name), name)


def dataset_name(spec: str, base: Path | None = None) -> str:
    """The same for a data set, whose `:SUBSET@SPLIT#COUNT*WEIGHT` is kept; the table may know a subset and split."""
    if whole := placed(spec, base):
        return whole
    given = SPEC.fullmatch(spec)
    if given is None:
        return spec
    path = placed(given["name"], base)
    known = SPEC.fullmatch(path or short_names("datasets").get(_plain(given["name"]), given["name"]))
    if path is not None or known is None:
        return (path or given["name"]) + spec[len(given["name"]) :]
    subset, split = (given[part] or known[part] or "" for part in ("subset", "split"))
    return known["name"] + subset + split + (given["count"] or "") + (given["weight"] or "")


def placed(name: str, base: Path | None) -> str | None:
    """The path of an existing file or folder: against the working folder first, then against base. Else None."""
    for path in (Path(name), *((base / name,) if base is not None else ())):
        try:
            if path.expanduser().exists():
                return str(path)
        except (OSError, ValueError, RuntimeError):  # too long for a path, a NUL, an unknown ~user: no path then
            return None
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
