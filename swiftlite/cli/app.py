"""The `swiftlite` program: finds the command, lets Typer parse it, and turns whatever goes wrong into one block.

Exit codes: 0 done, 1 failed while running, 2 something the user can mend, 128 + its number for a signal.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import typer

from swiftlite.cli.errors import show_error
from swiftlite.cli.line import MAY_BE_EMPTY, RECIPE
from swiftlite.cli.options import RunCommand, Session
from swiftlite.cli.usage import usage_error
from swiftlite.config.layout import follows, leave_torchrun, under_torchrun
from swiftlite.ending import SECONDS_FOR_THE_FIRST, end_on_signals, seen_signal
from swiftlite.errors import UserError
from swiftlite.streams import settle_streams

ABOUT = "Fine-tune Hugging Face language models from one command."
EPILOG = "Start: [bold]swiftlite sft --model PATH --dataset rows.jsonl[/bold]  ·  every command has [bold]--help[/bold]"

NO_READER = 141  # the reader of our output has left, as `| head` does: what a shell says of tools that end by SIGPIPE
SHORT = re.compile("-[a-zA-Z]")
TAKES_SEVERAL = "--tools"  # of the flags that are no setting of the schema's commands


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit with its code."""
    settle_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    session = Session(debug="--debug" in _own(words))
    end_on_signals()
    code = _run(words, session)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # nothing more can be told
        code = code or NO_READER
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(words: list[str], session: Session) -> int:
    from typer.exceptions import TyperException

    try:
        _check_working_folder()
        chosen, words = _find_command(words)
        if chosen is not None:
            session.line = chosen.read(words[1:])
        if (chosen is None or not chosen.joins or session.line.help) and not _does_it_alone(chosen):
            return 0
        if chosen is not None:
            words = [words[0], *session.line.canonical()]
        else:
            words = _plain_words(words)
            _check_filled(words)
        code = build_app(chosen)(words, prog_name="swiftlite", standalone_mode=False, obj=session)
        if code == 128 + signal.SIGINT:  # Typer's answer to a KeyboardInterrupt
            return _interrupted()
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # as Rich and Typer take it
            return NO_READER
        return stop.code if isinstance(stop.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BaseException as error:  # some libraries' errors are no Exception; all of them end in one block
        if seen := seen_signal():  # a library caught what the signal raised, and failed of it
            return _interrupted() if seen == signal.SIGINT else 128 + seen  # the other one is told at once
        wrong_line = isinstance(error, TyperException)
        return _report(usage_error(error, words, run_commands()) if wrong_line else error, session)


def _does_it_alone(chosen: RunCommand | None) -> bool:
    """Whether this process, of those that torchrun started, does what is work for one of them; the schema's commands
    still show what they would be for all. With a note."""
    if follows(os.environ):
        return False
    if under_torchrun(os.environ) and os.environ["WORLD_SIZE"] != "1":
        print(f"note: one of the {os.environ['WORLD_SIZE']} processes does this, and the others end", file=sys.stderr)
    if chosen is None:
        leave_torchrun(os.environ)
    return True


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def _check_working_folder() -> None:
    """Raises UserError where it was removed, or made anew: no name leads anywhere, and libraries end the process."""
    try:
        os.getcwd()
    except OSError as error:
        fix = "change into a folder that is there: cd .. and back, where it was made anew"
        raise UserError(f"the working folder is gone: {error.strerror}", fix=fix) from error


def _find_command(words: list[str]) -> tuple[RunCommand | None, list[str]]:
    """(the command that takes the schema's flags, the words with the command first); None for any other command."""
    commands = run_commands()
    value_of_recipe = False
    for place, word in enumerate(words):
        if word in commands and not value_of_recipe:
            return commands[word], [word, *words[:place], *words[place + 1 :]]
        if not word.startswith("-") and not value_of_recipe:
            break
        value_of_recipe = word in RECIPE
    return None, words


def _plain_words(words: list[str]) -> list[str]:
    """The line of a command with its own flags: without `--debug`, `-` for `_` in flags, and `-o=PATH` in two words,
    of which Click would make the path `=PATH`; no words ask for help."""
    plain, own = [], _own(words)
    for word in own:
        name, equals, value = word.partition("=")
        if SHORT.fullmatch(name) and equals:
            plain += [name, value]
        elif word != "--debug":
            plain.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    plain = [*_spread(plain), *words[len(own) :]]
    return [*plain, "--help"] if plain in ([], ["recipes"]) else plain


def _spread(words: list[str]) -> list[str]:
    """`--tools A B`, as the schema's commands take it, in the words of Click: `--tools A --tools B`."""
    spread: list[str] = []
    for word in words:
        is_another = spread[-2:-1] == [TAKES_SEVERAL] and not word.startswith("-")
        spread += [TAKES_SEVERAL, word] if is_another else [word]
    return spread


def _own(words: list[str]) -> list[str]:
    """Those before `--`, behind which words are an engine's (`serve`) and stay as they are."""
    return words[: words.index("--")] if "--" in words else words


def _check_filled(words: list[str]) -> None:
    """Raises UserError for an empty word, as the schema's commands do: as a path it would be the working folder."""
    words = _own(words)
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=") if word.startswith("-") else (before, "", word)
        if (equals or not word.startswith("-")) and not value.strip() and option != MAY_BE_EMPTY:
            of = f"the value of {option}" if option.startswith("-") else "a word of the line"
            raise UserError(f"{of} is empty", where=f"swiftlite {words[0]}", fix="is a variable of your shell unset?")


def run_commands() -> dict[str, RunCommand]:
    """The commands whose flags come from the schema, by every name they have."""
    from swiftlite.cli.eval import EVAL
    from swiftlite.cli.inspect import INSPECT
    from swiftlite.cli.plan import PLAN
    from swiftlite.cli.train import TRAIN_COMMANDS

    commands = {command.name: command for command in [*TRAIN_COMMANDS, INSPECT, PLAN, EVAL]}
    return commands | {"pt": commands["pretrain"], "rlhf": commands["train"]}  # as ms-swift calls them


def build_app(chosen: RunCommand | None = None) -> typer.Typer:
    """The Typer app. chosen: the one command that is run, with its options; otherwise those with the schema's flags are
    only listed."""
    app = typer.Typer(
        help=ABOUT,
        epilog=EPILOG,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_top)
    for name, command in run_commands().items():
        if chosen in (None, command):
            command.add(app, with_options=command is chosen, name=name, hidden=name != command.name)
    if chosen is None:
        from swiftlite.cli import export, infer, recipes, report, serve, verify

        for module in (infer, export, serve, recipes, report, verify):
            module.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from swiftlite import __version__

        typer.echo(f"swiftlite {__version__}")
        raise typer.Exit


def _top(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True, metavar=""
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks.", metavar=""),
) -> None:
    """`--debug` is read before anything can fail, in `main`."""


def _report(error: BaseException, session: Session) -> int:
    if follows(os.environ) and os.environ.get("LOCAL_RANK") != "0" and isinstance(error, UserError):
        # Those of a machine read the same line and the same files; its first tells of it, unless torchrun ends it
        # before, because of this one.
        time.sleep(SECONDS_FOR_THE_FIRST)
        return error.exit_code
    return show_error(error, debug=session.debug)
