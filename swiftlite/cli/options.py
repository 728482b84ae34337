"""Typer commands whose options are generated from the schema: names, help sentences, panels, choices and defaults."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftlite.cli.line import Line, read_line
from swiftlite.config.flags import Flag, all_flags, as_option
from swiftlite.config.layout import follows

if TYPE_CHECKING:
    from swiftlite.config.recipe import Recipe
    from swiftlite.config.resolve import Resolved
    from swiftlite.config.validate import Given

KIND_NAMES = {"bool": "on|off", "int": "INT", "float": "FLOAT", "str": "NAME", "list": "NAME ...", "map": "KEY=COLUMN"}
WIDEST_CHOICES = 9  # characters in the help's column of types; longer lists of choices go into the sentence


@dataclass
class Session:
    """What one invocation of the program shares between parsing and the error report."""

    line: Line = field(default_factory=Line)
    debug: bool = False


@dataclass(frozen=True)
class RunCommand:
    """A command that takes the schema's flags. method: what it trains, or None where recipe or `--method` says it.

    fallback: the method where nobody says it, needs_rows: False where no data set has to be named, needs_reward: False
    where no answers are rewarded, and open_layout: True where layouts are compared, of commands that only look; joins:
    False where one of the processes that torchrun starts does it.

    settle(given, recipe): what the flags and the recipe become before they are resolved, of commands that read them in
    another way; uses(flag): whether a setting is any of its business, if help shows not all of them, why_idle: why
    others have no effect, where that is told of those that are given, and meant: which of its settings somebody may
    have meant by one of those; exact_batch: False where a recipe's batch sizes may give way to the processes that
    there are.

    handler(resolved, **own): called with `swiftlite.config.resolve.Resolved` and the values of its own flags, unless
    `--dry-run` asks for configuration and plan only: show(resolved) prints those of a command that does not train.
    """

    name: str
    handler: Callable[..., None]
    help: str
    method: str | None = None
    own: tuple[Flag, ...] = ()
    fallback: str | None = None
    needs_rows: bool = True
    needs_reward: bool = True
    open_layout: bool = False
    joins: bool = True
    settle: Callable[[dict[str, Given], Recipe | None], tuple[dict[str, Given], Recipe | None]] | None = None
    uses: Callable[[Flag], bool] = lambda flag: True
    why_idle: str = ""
    meant: Mapping[str, str] = field(default_factory=dict)
    exact_batch: bool = True
    show: Callable[[Resolved], None] | None = None

    def read(self, words: list[str]) -> Line:
        """The words behind the command, by the schema. Raises UserError."""
        return read_line(self.name, words, self.own)

    def add(self, app: typer.Typer, *, with_options: bool, hidden: bool = False, name: str | None = None) -> None:
        """Register it. with_options: False where only its name and help are needed, which is much quicker."""
        function = self._function() if with_options else _nothing
        app.command(name or self.name, help=self.help, hidden=hidden)(function)

    def _function(self) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            self._run(context.obj, values)

        parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        parameters += [_recipe_parameter(), *map(_parameter, self.own)]
        for name, flag in all_flags().items():
            hidden = not self.uses(flag)
            if name == "method":
                hidden = self.method is not None  # the command's name says it, and another one is an error
                flag = replace(flag, shown="the recipe's" + (f", else {self.fallback}" if self.fallback else ""))
            parameters.append(_parameter(flag, hidden=hidden))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    def _run(self, session: Session, values: dict[str, Any]) -> None:
        from swiftlite.config.recipe import load_recipe
        from swiftlite.config.resolve import resolve
        from swiftlite.config.validate import Given

        line = session.line
        recipe = values.pop("recipe")
        own = {flag.name: own_value(flag, values.pop(flag.name)) for flag in self.own}
        given = {}
        for name, value in values.items():
            if value in (None, []):
                continue
            one_word = isinstance(value, list) and len(value) == 1  # so that `--report-to none` means none
            given[name] = Given(value[0] if one_word else value, line.typed[name], "flag")
        loaded = load_recipe(recipe) if recipe else None
        notes = [*line.notes, *(self._leave_out_idle(given) if self.why_idle else ())]
        if self.settle is not None:
            given, loaded = self.settle(given, loaded)
        said = "method" in given or (loaded is not None and "method" in loaded.entries)
        method = self.method or (None if said else self.fallback)
        needs = {"needs_rows": self.needs_rows, "needs_reward": self.needs_reward}
        bounds = {"open_layout": self.open_layout, "exact_batch": self.exact_batch}
        resolved = resolve(method, given, loaded, **needs, **bounds)
        resolved.notes[:0] = notes
        session.debug = session.debug or resolved.config.debug
        if not resolved.config.dry_run:
            self.handler(resolved, **own)
        elif follows(os.environ):
            return
        elif self.show is not None:
            self.show(resolved)
        else:
            from swiftlite.cli.dry_run import show_plan

            show_plan(resolved)

    def _leave_out_idle(self, given: dict[str, Given]) -> list[str]:
        """Take out the flags that the command does not use, or what they ask for would be checked and built. Returns a
        note for each. Raises UserError for values that none of them takes."""
        from swiftlite.config.validate import build_config

        idle = {name: given.pop(name) for name in list(given) if not self.uses(all_flags()[name])}
        build_config(idle)
        meant = {name: f"; did you mean {as_option(self.meant[name])}?" for name in idle if name in self.meant}
        return [f"{all_flags()[name].option} has no effect: {self.why_idle}{meant.get(name, '')}" for name in idle]


def own_flag(
    name: str, kind: str, default: Any, help_text: str, *, shown: str | None = None, metavar: str | None = None
) -> Flag:
    """A flag that belongs to one command only, such as `inspect --rows`. kind: int, float or str; shown: how help names
    its default; metavar: what it takes, where the kind does not say it."""
    shown = shown or (None if default is not None else "none")
    return Flag(name, kind, panel="Options", help=help_text, default=default, shown=shown, metavar=metavar)


def json_flag(what: str) -> Flag:
    """`--json` of a command that shows something. what: it writes."""
    sentence = f"Write {what} into this file; `-`: to stdout, and all else to stderr."
    return own_flag("json", "str", None, sentence, metavar="FILE")


def own_value(flag: Flag, value: str | None) -> Any:
    """The typed value of a command's own flag, its default where it was not given. Raises UserError."""
    from swiftlite.errors import UserError

    if value is None:
        return flag.default
    types: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    try:
        return types[flag.kind](value)
    except ValueError as error:
        raise UserError(
            f"{flag.option} is {value!r}, not a {'whole ' if flag.kind == 'int' else ''}number",
            where=flag.option,
            fix=f"give a number, such as {flag.default}",
        ) from error


def help_text(flag: Flag) -> str:
    """The help sentence with default and aliases, in Rich markup."""
    text = flag.help.replace("[", r"\[")
    if _choices_in_sentence(flag):
        text += f" One of {', '.join(flag.choices)}."
    details = ["needed" if flag.default_in_words == "needed" else f"default: {flag.default_in_words}"]
    if flag.kind == "bool" and flag.default:
        details.append(f"{flag.negation} turns it off")
    if flag.env:
        details.append(f"env: {flag.env}")
    for words, names in (("also", flag.aliases), ("also by values of", flag.phrases)):
        if names:
            details.append(" ".join([words, *map(as_option, names)]))
    details += [f"{as_option(switch)} is {value}" for switch, value in flag.switches.items()]
    return f"{text} [dim]\\[{'; '.join(details)}][/dim]"


def _choices_in_sentence(flag: Flag) -> bool:
    return len("|".join(flag.choices)) > WIDEST_CHOICES


def _parameter(flag: Flag, *, hidden: bool = False) -> inspect.Parameter:
    from swiftlite.config.setting import RUN

    names = [flag.option, *([f"-{flag.short}"] if flag.short else [])]
    kind = list[str] | None if flag.kind in ("list", "map") else str | None
    choices = "" if _choices_in_sentence(flag) else "|".join(flag.choices)
    metavar = flag.metavar or choices or KIND_NAMES[flag.kind]
    option = typer.Option(
        *names,
        help=help_text(flag),
        metavar=metavar,
        rich_help_panel="Options" if flag.panel == RUN else flag.panel,
        show_default=False,
        hidden=hidden,
    )
    return _keyword(flag.name, Annotated[kind, option])


def _recipe_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--recipe",
        "-r",
        help="Recipe by path or name; flags win over it. [dim]\\[default: none; also --config][/dim]",
        metavar="FILE|NAME",
        show_default=False,
    )
    return _keyword("recipe", Annotated[str | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _nothing() -> None:
    """Stands in for a command that is only listed."""
