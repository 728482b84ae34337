"""Write docs/flags.md, every setting of the training commands, from the schema.

python scripts/render_flags.py [--output docs/flags.md]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from swiftlite.config.flags import Flag, all_flags
from swiftlite.config.others.idle import EVERY, IDLE
from swiftlite.config.others.words import INSTEAD, instead, shown

OUTPUT = Path(__file__).parent.parent / "docs" / "flags.md"
ABOUT = """# Settings

Every setting of `swiftlite sft`, `pretrain`, `dpo`, `kto`, `rm`, `grpo` and `train`, written by
`scripts/render_flags.py` from the schema that checks them; `--help` shows the same. `--max-length 1024` on the command
line is `max_length: 1024` in a recipe, where names may have `-` or `_`. The names of other tools in the last column
mean the same. `swiftlite recipes schema` prints all of it as a JSON schema for editors.
"""
OTHERS = """## Commands and files of other tools

Most flags of ms-swift, Megatron-SWIFT, TRL and LLaMA-Factory, and keys of their and axolotl's files, are names of
settings above. Defaults are swiftlite's: it trains LoRA where nothing says otherwise (TRL, axolotl and Megatron-SWIFT
train all weights), with an alpha of 32 (LLaMA-Factory: twice the rank), one epoch (TRL: three), packed, no weight decay
(ms-swift: 0.1), 3% of warm-up (TRL, ms-swift: none), a cosine (TRL: linear), 2,048 tokens (TRL: 1,024; ms-swift: what
the model takes). A run notes LoRA that nothing named beside a learning rate for all weights, an alpha that goes with
another rank, and packs where `per_device_train_batch_size` counts rows. `--max-samples` chooses by the seed
(LLaMA-Factory: the first rows).

axolotl's `datasets` and `test_datasets` are read where they say no more than `dataset` and `columns` can (`type:
chat_template`, whole splits, answers alone trained), a DeepSpeed file where it says no more than `sharding`, `offload`
and `precision` can (ZeRO 0, 2 and 3, nothing or all offloaded, `auto` elsewhere), and transformers' list `fsdp` and
block `fsdp_config` where they say no more than `sharding`, `offload` and `activation_checkpointing` can. A note tells
what each became, an error what to write instead.

Names of data sets are looked up in LLaMA-Factory's `dataset_info.json`, in `data` or the folder that `--dataset-dir`
names, where no file has the name; a note tells what each is. What an entry says beyond place, subset, split, rows and
the names of keys, is an error.

LLaMA-Factory's, ms-swift's and axolotl's names of templates (`llama3`, `qwen3_nothink`, `tokenizer_default`) are left
out with a note: conversations are written by the chat template that comes with the model, and a model without one is an
error. What they call `alpaca`, `default` or `vicuna` is no model's template, and needs a Jinja file.

Names that change nothing here are accepted with a note:

| names | with | why |
|---|---|---|
"""
REST = """
Others are errors that say what to write instead:

| names | instead |
|---|---|
"""


def render() -> str:
    """Markdown: a table for each panel of the help."""
    parts = [ABOUT]
    for panel, flags in groupby(all_flags().values(), key=lambda flag: flag.panel):
        rows = ["| flag | values | default | what it does | also |", "|---|---|---|---|---|", *map(_row, flags)]
        parts.append(f"## {panel}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, OTHERS + _idle() + REST + _instead()])


def _idle() -> str:
    """A row for each reason and the values that it is of."""
    together: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, entry in IDLE.items():
        together.setdefault(entry, []).append(name)
    rows = ((_names(names), _words(words), shown(why)) for (words, why), names in together.items())
    return "".join("| " + " | ".join(map(_cell, row)) + " |\n" for row in rows)


def _words(words: tuple[str, ...]) -> str:
    return (
        "any value"
        if words == EVERY
        else "on"
        if words[0] == "true"
        else "off"
        if words[0] == "false"
        else _names(words)
    )


def _instead() -> str:
    together: dict[str, list[str]] = {}
    for name in INSTEAD:
        together.setdefault(instead(name, in_recipe=False) or "", []).append(name)
    return "".join(f"| {_cell(_names(names))} | {_cell(fix)} |\n" for fix, names in together.items())


def _names(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def _row(flag: Flag) -> str:
    values = ", ".join(f"`{choice}`" for choice in flag.choices) or flag.metavar or flag.kind
    also = " ".join(
        f"`{alias}`" for alias in (*flag.aliases, *flag.phrases, *(f"{name}: true" for name in flag.switches))
    )
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
