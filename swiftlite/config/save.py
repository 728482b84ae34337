"""`config.yaml`: the resolved configuration as a recipe, grouped like the help. Reading it gives the same run again."""

from __future__ import annotations

import os
from pathlib import Path

from swiftlite import __version__
from swiftlite.config.flags import all_flags
from swiftlite.config.names import with_absolute_names
from swiftlite.config.schema import RunConfig

NOT_SAVED = ("dry_run", "debug")
WRITTEN_BY = "# Written by swiftlite"
DERIVED = ("gradient_accumulation_steps", "num_microbatches")  # they change with the layout, the global batch does not


def save_config(config: RunConfig, path: Path) -> None:
    """Write the config as a recipe that runs from any folder, and from the start; the file is whole or unchanged."""
    partial = path.with_name(f".{path.name}.partial")
    config = with_absolute_names(config.model_copy(update={"resume": "never"}))
    with partial.open("w", encoding="utf-8") as file:
        file.write(dump_config(config))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def is_run(folder: Path) -> bool:
    """Whether a folder is the output folder of a run."""
    try:
        return (folder / "config.yaml").read_bytes().startswith(WRITTEN_BY.encode())
    except OSError:  # none, or none that may be read
        return False


def dump_config(config: RunConfig) -> str:
    """The recipe's text: every setting, a comment over each group."""
    import yaml

    lines = [
        f"{WRITTEN_BY} {__version__}: every setting of this run.",
        "# `swiftlite train --recipe THIS_FILE` runs it again, in a folder beside this; --resume auto goes on.",
    ]
    panel = None
    values = config.model_dump()
    for name, flag in all_flags().items():
        value = values[name]
        if name in NOT_SAVED:
            continue
        if flag.panel != panel:
            panel = flag.panel
            lines += ["", f"# {panel}"]
        line = yaml.safe_dump({name: value}, default_flow_style=True, allow_unicode=True, width=10**9).strip()[1:-1]
        if name in DERIVED and value is not None:
            line = f"# {line}  (follows from the batch sizes and the layout)"
        lines.append(line)
    return "\n".join(lines) + "\n"
