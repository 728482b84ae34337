"""`swiftlite recipes list | show | copy | schema`: the recipes that ship, and the keys that one may have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftlite.cli.model_options import at_home
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from yaml import ScalarNode

PLAIN = re.compile(r"[\w/][\w./@*+-]*")  # needs no quotes in YAML


def register(app: typer.Typer) -> None:
    """Adds the group to the app."""
    group = typer.Typer(help="List, show and copy the recipes that come with swiftlite.", no_args_is_help=True)
    group.command("list", help="Names of all recipes, or of some.")(list_recipes)
    group.command("show", help="Print a recipe.")(show)
    group.command("copy", help="Copy a recipe to change it.")(copy)
    group.command("schema", help="JSON schema of recipes, for editors.")(schema)
    app.add_typer(group, name="recipes")


def list_recipes(
    words: Annotated[list[str] | None, typer.Argument(help="Only those with all of these.", metavar="WORD ...")] = None,
) -> None:
    """Print each recipe's name and its first line, which says what it trains. Raises UserError where there is none."""
    from rich.table import Table

    from swiftlite.cli.console import wide_console
    from swiftlite.config.recipe import shipped_recipes

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        title = first.removeprefix("#").strip() if first.startswith("#") else ""
        if all(word.lower() in f"{name} {title}".lower() for word in words or ()):
            table.add_row(name, title)
    if not table.rows:
        fix = "give fewer words, or none for all of them"
        raise UserError("no recipe has all of these words", where=" ".join(words or ()), fix=fix)
    wide_console().print(table)


def show(name: Annotated[str, typer.Argument(help="Name or path.", metavar="NAME")]) -> None:
    """Print it, coloured in a terminal. Raises UserError where there is none."""
    from rich.console import Console
    from rich.syntax import Syntax

    from swiftlite.config.recipe import find_recipe, recipe_text

    text = recipe_text(find_recipe(name))
    console = Console(soft_wrap=True)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


def copy(
    name: Annotated[str, typer.Argument(help="Name or path.", metavar="NAME")],
    destination: Annotated[str | None, typer.Argument(help="File or folder; here by default.", metavar="DEST")] = None,
) -> None:
    """Write it where no file is yet. Raises UserError where that cannot be."""
    from swiftlite.config.recipe import find_recipe, recipe_text

    source = find_recipe(name)
    target = at_home(Path(destination or source.name), "DEST")
    if target.is_dir() or (destination or "").endswith("/"):
        target = target / source.name
    if target.exists():
        raise UserError("the file exists", where=str(target), fix="name another file")
    if not target.parent.is_dir():
        raise UserError("there is no such folder", where=str(target.parent), fix="make it first, or name another")
    text = _with_whole_paths(recipe_text(source), source)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"the recipe cannot be written: {error.strerror}"
        raise UserError(what, where=str(target), fix="name another file or folder") from error
    typer.echo(f"copied to {target}")


def _with_whole_paths(text: str, source: Path) -> str:
    """A recipe with what lies in its folder under whole paths: a copy looks beside itself."""
    folder = source.resolve().parent
    for node, several in reversed([*_names_in(text, source)]):  # from the end on, so that places in the text stay right
        whole = _whole(node.value, folder, several=several)
        if whole != node.value:
            written = whole if PLAIN.fullmatch(whole) else json.dumps(whole, ensure_ascii=False)
            text = text[: node.start_mark.index] + written + text[node.end_mark.index :]
    return text


def _names_in(text: str, source: Path) -> Iterator[tuple[ScalarNode, bool]]:
    """The values that may be paths, in order, and whether each may hold several."""
    import yaml

    from swiftlite.config.flags import find_flag
    from swiftlite.config.names import DATASETS, SOURCES
    from swiftlite.config.recipe import parse_recipe

    try:
        root = parse_recipe(text, source)
    except UserError:  # it is copied as it is, and says what is wrong when it is used
        return
    for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
        flag = find_flag(str(key.value))
        if flag is not None and flag.name in (*SOURCES, *DATASETS, "reward"):  # written as a data set with a subset is
            nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
            yield from ((node, flag.name not in SOURCES) for node in nodes if isinstance(node, yaml.ScalarNode))


def _whole(value: str, folder: Path, *, several: bool) -> str:
    """A name, or the names parted by blanks, with those that are found in the folder alone under their whole paths."""
    from swiftlite.config.names import SPEC, placed

    given = SPEC.fullmatch(value) if several else None
    for name in (value, *([given["name"]] if given else [])):
        path = placed(name, folder)
        if path is not None and path == str(folder / name):
            return path + value[len(name) :]
    words = value.split() if several else []
    return " ".join(_whole(word, folder, several=True) for word in words) if len(words) > 1 else value


def schema() -> None:
    """Print the JSON schema."""
    from swiftlite.config.json_schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))
