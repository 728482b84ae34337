"""Write docs/flags.md, every setting of the training commands, from the schema.

python scripts/render_flags.py [--output docs/flags.md]
"""

from __future__ import annotations

import argparse
import re
from itertools import groupby
from pathlib import Path

from swiftlite.config.flags import Flag, all_flags

OUTPUT = Path(__file__).parent.parent / "docs" / "flags.md"
ABOUT = """# Settings

Every setting of `swiftlite sft`, `pretrain`, `dpo`, `kto`, `rm` and `train`, written by `scripts/render_flags.py` from
the schema that checks them; `--help` shows the same. `--max-length 1024` on the command line is `max_length: 1024` in a
recipe, where names may have `-` or `_`. The names of other tools in the last column mean the same. `swiftlite recipes
schema` prints all of it as a JSON schema for editors.
"""


def render() -> str:
    """Markdown: a table for each panel of the help."""
    parts = [ABOUT]
    for panel, flags in groupby(all_flags().values(), key=lambda flag: flag.panel):
        rows = ["| flag | values | default | what it does | also |", "|---|---|---|---|---|", *map(_row, flags)]
        parts.append(f"## {panel}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(flag: Flag) -> str:
    values = ", ".join(f"`{choice}`" for choice in flag.choices) or flag.metavar or flag.kind
    also = " ".join(f"`{alias}`" for alias in flag.aliases)
    cells = (f"`{flag.option}`", values, flag.default_in_words, flag.help, also)
    return "| " + " | ".join(_cell(text) for text in cells) + " |"


def _cell(text: str) -> str:
    """Bars would end a cell, and what looks like a tag outside of code would not be shown."""
    pieces = re.split(r"(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.parse_args().output.write_text(render(), encoding="utf-8")
