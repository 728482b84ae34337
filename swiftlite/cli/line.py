"""The words of a command line, read by the schema: any spelling and alias of a flag becomes `--name=value`.

Typer then sees only canonical options. Here `--max_length`, `--dataset a b c`, `--packing false`, `--cutoff-len 512`
and a bare `--cpu-offload` get their meaning, and an unknown flag its nearest neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from swiftlite.config.flags import (
    Flag,
    all_flags,
    as_option,
    find_flag,
    find_phrases,
    find_switch,
    giving_way,
    known_names,
    nearest,
    off_alone,
    plain_name,
)
from swiftlite.config.others.words import instead, is_known, why_idle
from swiftlite.errors import UserError, all_in_one
from swiftlite.untrusted import existing

TRUTH = dict.fromkeys(("true", "yes", "on", "1"), "true") | dict.fromkeys(("false", "no", "off", "0"), "false")
RECIPE = ("--recipe", "--config", "-r")
MAY_BE_EMPTY = "--system"  # some templates write a message of their own where there is none
NEGATIVE_NUMBER = re.compile(r"-\.?\d")


@dataclass
class Line:
    """values: canonical name -> words given; typed: how each flag was spelt; recipe: of `--recipe`; notes: to show."""

    values: dict[str, list[str]] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)
    recipe: str | None = None
    help: bool = False
    notes: list[str] = field(default_factory=list)

    def canonical(self) -> list[str]:
        """The same line as Typer is to see it."""
        words = ["--help"] if self.help else []
        words += [f"--recipe={self.recipe}"] if self.recipe is not None else []
        for name, values in self.values.items():
            words += [f"{as_option(name)}={value}" for value in values]
        return words


def read_line(command: str, words: list[str], own: Iterable[Flag] = ()) -> Line:
    """Read the words behind a command that takes the schema's flags. own: further flags of that command.

    Raises UserError for unknown flags (all of them), a flag without its value and a word that belongs to no flag.
    """
    reader = _Reader(command, words, {flag.name: flag for flag in own})
    return reader.read()


class _Reader:
    """Walks over the words once."""

    def __init__(self, command: str, words: list[str], own: dict[str, Flag]) -> None:
        self._command, self._words, self._own = command, words, own
        self._at = 0
        self._line = Line()
        self._unknown: list[UserError] = []
        self._off: dict[str, Flag] = {}  # switches of other tools that are off, and the settings that they are of

    def read(self) -> Line:
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            option, equals, value = word.partition("=")
            if option in ("--help", "-h"):
                self._line.help = True
            elif option in RECIPE:
                self._recipe(option, value if equals else None)
            elif word.startswith("-") and not NEGATIVE_NUMBER.match(word) and word != "-":
                self._flag(option, value if equals else None)
            else:
                raise UserError(f"{word!r} belongs to no flag", where=self._where(), fix=self._with_flag(word))
        if self._unknown:
            raise all_in_one(self._unknown, "flags are unknown")
        for option, flag in self._off.items():
            if flag.name not in self._line.values:
                what, fix = off_alone(option, flag, in_recipe=False)
                raise UserError(what, where=self._where(), fix=fix)
        return self._line

    def _recipe(self, option: str, value: str | None) -> None:
        before, self._line.recipe = self._line.recipe, self._value(option, value)
        if before not in (None, self._line.recipe):
            raise UserError(
                f"two recipes are named, {before} and {self._line.recipe}",
                where=self._where(),
                fix="name one of them, and give the rest as flags",
            )

    def _flag(self, option: str, value: str | None) -> None:
        said = self._next() if value is None else value
        if phrases := find_phrases(plain_name(option), said):
            self._at += value is None and said is not None
            meant = " and ".join(f"{flag.option} {ours}" for flag, ours in phrases)
            self._line.notes.append(f"{' '.join(filter(None, (option, said)))} is read as {meant}")
            for flag, ours in phrases:
                self._put(flag, option, [ours])
            return
        found = self._find(option)
        if found is None:
            self._other(option, value)
            return
        flag, negated = found
        if flag.kind == "bool":
            words = [self._truth(option, value, negated)]
        elif flag.kind in ("list", "map"):
            words = self._several(option, value)
        else:
            words = [self._value(option, value, bare=flag.bare)]
        self._put(flag, option, words)

    def _put(self, flag: Flag, option: str, words: list[str]) -> None:
        """Take the words of a flag, of which another one of its names may have given some."""
        before, spelled = self._line.values.get(flag.name), self._line.typed.get(flag.name, "")
        weak = giving_way([option, spelled]) if before else {}
        if flag.kind == "map" or (flag.kind == "list" and not weak):
            words = (before or []) + words
        elif before and not flag.same(before[0], words[0]):
            if len(weak) == 1:
                ((name, why),) = weak.items()
                self._line.notes.append(f"{name} has no effect beside {spelled if name == option else option}: {why}")
                if name == option:
                    return
            else:
                self._line.notes.append(f"{option} was given twice; {words[0]} counts, not {before[0]}")
        self._line.values[flag.name] = words
        self._line.typed[flag.name] = option

    def _other(self, option: str, value: str | None) -> None:
        """A flag that no setting has: a switch of another tool, a flag of one that changes nothing, or a slip."""
        name = plain_name(option)
        negated = name.startswith("no_") and not is_known(name)
        switch = find_switch(name) or (find_switch(name[3:]) if negated else None)
        if switch is not None:
            flag, meant = switch
            if self._truth(option, value, negated and not find_switch(name)) == "true":
                self._put(flag, option, [meant])
            else:
                self._off[f"--{option[5:]}" if negated else option] = flag
            return
        words = [] if value is None else [value]
        while self._next() is not None:
            words.append(self._words[self._at])
            self._at += 1
        known = name[3:] if negated and is_known(name[3:]) else name
        said = " ".join(words) or ("true" if known == name else "false")
        if why := why_idle(known, said, in_recipe=False):
            self._line.notes.append(f"{' '.join([option, *words])} has no effect: {why}")
        else:
            self._unknown.append(self._unknown_flag(option))

    def _find(self, option: str) -> tuple[Flag, bool] | None:
        """The flag and whether it stands as `--no-...`; None where there is no such flag."""
        if not option.startswith("--"):
            for flag in all_flags().values():
                if option == f"-{flag.short}":
                    return flag, False
        else:
            name = plain_name(option)
            if flag := self._own.get(name) or find_flag(name):
                return flag, False
            flag = self._own.get(name[3:]) or find_flag(name[3:])
            if name.startswith("no_") and flag and flag.kind == "bool":
                return flag, True
        return None

    def _unknown_flag(self, option: str) -> UserError:
        name = plain_name(option)
        if told := instead(name, in_recipe=False):
            return UserError(f"unknown flag {option}", where=self._where(), fix=told)
        negated = [f"no_{flag.name}" for flag in all_flags().values() if flag.kind == "bool"]
        near = nearest(name, [*known_names(), *negated, *self._own, "recipe"])
        hint = f"did you mean `{as_option(near)}`? " if near else ""
        return UserError(
            f"unknown flag {option}", where=self._where(), fix=f"{hint}`swiftlite {self._command} --help` shows all"
        )

    def _truth(self, option: str, value: str | None, negated: bool) -> str:
        if negated:
            if value is not None:
                raise UserError(f"{option} takes no value", where=self._where(), fix=f"write {option} alone")
            return "false"
        if value is None:
            following = self._next()
            if following is None or following.lower() not in TRUTH:
                return "true"
            self._at += 1
            value = following
        if value.lower() not in TRUTH:
            raise UserError(f"{option} is {value!r}, not true or false", where=option, fix=f"write {option} alone")
        return TRUTH[value.lower()]

    def _several(self, option: str, value: str | None) -> list[str]:
        from swiftlite.config.types import split_list

        words = [] if value is None else [self._value(option, value)]
        while self._next() is not None:
            words.append(self._value(option, None))
        if not words:
            raise self._missing(option)
        return [part for word in words for part in split_list(word)]

    def _value(self, option: str, value: str | None, *, bare: str | None = None) -> str:
        if value is None:
            value = self._next()
            if value is None:
                if bare is None:
                    raise self._missing(option)
                return bare
            self._at += 1
        if not value.strip() and option != MAY_BE_EMPTY:
            raise UserError(
                f"the value of {option} is empty", where=self._where(), fix="is a variable of your shell unset?"
            )
        return value

    def _next(self) -> str | None:
        """The following word if it can be a value."""
        if self._at >= len(self._words):
            return None
        word = self._words[self._at]
        return None if word.startswith("-") and word != "-" and not NEGATIVE_NUMBER.match(word) else word

    def _missing(self, option: str) -> UserError:
        return UserError(f"{option} needs a value", where=self._where(), fix=f"write {option} VALUE")

    def _where(self) -> str:
        return f"swiftlite {self._command}"

    def _with_flag(self, word: str) -> str:
        """What was meant by the word just read, of no flag: a recipe, a setting as LLaMA-Factory, torchtune and verl
        take them, rows, or a value of a flag that is on or off."""
        path, equals, value = word.partition("=")
        name = path.rpartition(".")[2]  # verl's are `actor_rollout_ref.rollout.n=5`
        before = self._words[self._at - 2] if self._at > 1 else ""
        if word.endswith((".yaml", ".yml")):
            return f"write `--recipe {word}`"
        if equals and (flag := find_flag(name)):
            return f"write `{flag.option} {value}`"
        if equals and (told := instead(name, in_recipe=False)):
            return told
        if before.startswith("--") and "=" not in before:
            return f"write {before} alone"
        if (file := existing(word)) and file.is_file():
            return f"write `--dataset {word}`"
        return "put a flag in front of it, or quote a value that holds blanks"
