"""What Typer says of a wrong line, as any other error: what is wrong, where, what to do next.

Source of its words: `typer._click.exceptions`, which it does not document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from swiftlite.config.flags import Flag, nearest
from swiftlite.errors import UserError

PROGRAM = "swiftlite"
NO_COMMAND = re.compile(r"No such command '(.*?)'(?:\. Did you mean (.*)\?)?")
NO_OPTION = re.compile(r"No such option: (\S+)(?: \(Possible options: (.*)\))?")
NO_PLACE = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)")
NO_VALUE = re.compile(r"Option '(\S+)' requires an argument")
ONE_TOO_MANY = re.compile(r"Option '(\S+)' does not take a value")
MISSING = re.compile(r"Missing (option|argument) '(.+?)'(?: / .*)?")
WRONG_VALUE = re.compile(r"Invalid value for '(.+?)'(?: / .*?)?: (.*)")
QUANTIZES = re.compile("--(export-quantization|quant)-")  # flags of LLaMA-Factory and ms-swift beside their `export`
BY_MODEL = ("swiftlite infer", "swiftlite export")  # a word alone is what others call the model by
ELSEWHERE = {  # what other tools call a command
    "api": "serve", "chat": "infer", "compare": "report", "convert": "export", "deploy": "serve", "evaluate": "eval",
    "finetune": "sft", "fine-tune": "sft", "generate": "infer", "help": "--help", "inference": "infer",
    "merge": "export", "merge-lora": "export", "orpo": "dpo --loss orpo", "plot": "report", "preprocess": "inspect",
    "preview": "inspect", "reward": "rm", "simpo": "dpo --loss simpo",
}  # fmt: skip


def usage_error(error: Any, words: list[str], commands: Iterable[str]) -> UserError:
    """error: Typer's complaint about a command or one of its own flags; words: of the line; commands: with the schema's
    flags, which Typer may not have been told of."""
    text = error.format_message().replace("\n", " ").rstrip(".")
    context = getattr(error, "ctx", None)
    named = " ".join([PROGRAM, *(word for word in words[:1] if not word.startswith("-"))])
    command = named if context is None else context.command_path  # where a value is missing, or there is one too many
    see = f"`{command} --help` shows what there is"
    if wrong := NO_OPTION.fullmatch(text):
        fix = f"{_instead_of_flag(command, wrong[1], wrong[2])}{see}"
        return UserError(f"unknown flag {wrong[1]}", where=command, fix=fix)
    if wrong := NO_PLACE.fullmatch(text):
        hint = "name the model by --model; " if command in BY_MODEL else ""
        return UserError(f"no flag has these words: {wrong[1]}", where=command, fix=f"{hint}{see}")
    if wrong := NO_COMMAND.fullmatch(text):
        hint = _instead_of_command(command, wrong[1], wrong[2], commands)
        return UserError(f"there is no command {wrong[1]!r}", where=command, fix=f"{hint}{see}")
    if wrong := NO_VALUE.fullmatch(text):
        return UserError(f"{wrong[1]} needs a value", where=command, fix=f"write {wrong[1]} VALUE; {see}")
    if wrong := ONE_TOO_MANY.fullmatch(text):
        return UserError(f"{wrong[1]} takes no value", where=command, fix=f"write {wrong[1]} alone; {see}")
    if wrong := MISSING.fullmatch(text):
        what = wrong[2] if wrong[1] == "argument" else f"{wrong[2]} {error.param.metavar}"
        return UserError(f"{wrong[2]} is missing", where=command, fix=f"add {what}; {see}")
    if wrong := WRONG_VALUE.fullmatch(text):
        return _wrong_value(wrong[1], wrong[2], error, see)
    return UserError(text, where=command, fix=see)


def _instead_of_flag(command: str, flag: str, near: str | None) -> str:
    if command == PROGRAM:
        return "name a command first, flags behind it: `swiftlite sft --model NAME`; "
    if command == "swiftlite export" and QUANTIZES.match(flag):
        return "write `--quantization fp8`, int8 or int4, which need no data; "
    meant = nearest(flag, near.split(", ")) if near else None
    return f"did you mean `{meant}`? " if meant else ""


def _instead_of_command(command: str, word: str, near: str | None, commands: Iterable[str]) -> str:
    """What was meant by another tool's name for a command, whatever Typer finds alike."""
    known = (ELSEWHERE | {name: name for name in commands}).get(word.lower()) if command == PROGRAM else None
    alike = [name.strip("'") for name in near.split(", ")] if near else []
    meant = known or next(iter(alike), None)
    return f"did you mean `{command} {meant}`? " if meant else ""


def _wrong_value(option: str, said: str, error: Any, see: str) -> UserError:
    """Of a number in the words in which the schema's flags are told; `said` of anything else."""
    from pydantic import ValidationError

    from swiftlite.config.validate import Given, explain

    if not isinstance(error.__cause__, ValidationError):
        return UserError(f"{option} cannot be that: {said}", where=option, fix=see)
    detail = error.__cause__.errors(include_url=False)[0]
    kind = detail["type"].partition("_")[0]
    flag = Flag(option, kind, panel="", help="", default=error.param.default, metavar=error.param.metavar)
    what, fix = explain(flag, detail, Given(detail["input"], option, "flag"))
    return UserError(what, where=option, fix=fix)
