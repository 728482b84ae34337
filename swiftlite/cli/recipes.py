"""`swiftlite recipes list | show | copy | schema`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from swiftlite.errors import UserError


def register(app: typer.Typer) -> None:
    """Adds the group to the app."""
    group = typer.Typer(help="List, show and copy the recipes that come with swiftlite.", no_args_is_help=True)
    group.command("list", help="Names of all recipes.")(list_recipes)
    group.command("show", help="Print a recipe.")(show)
    group.command("copy", help="Copy a recipe to change it.")(copy)
    group.command("schema", help="JSON schema of recipes, for editors.")(schema)
    app.add_typer(group, name="recipes")


def list_recipes() -> None:
    from swiftlite.config.recipe import shipped_recipes

    names = shipped_recipes()
    width = max(map(len, names), default=0)
    for name, path in names.items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:{width}}  {first.removeprefix('#').strip()}" if first.startswith("#") else name)


def show(name: Annotated[str, typer.Argument(help="Name or path.", metavar="NAME")]) -> None:
    from rich.console import Console
    from rich.syntax import Syntax

    from swiftlite.config.recipe import find_recipe

    text = find_recipe(name).read_text(encoding="utf-8")
    console = Console(soft_wrap=True)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


def copy(
    name: Annotated[str, typer.Argument(help="Name or path.", metavar="NAME")],
    destination: Annotated[Path | None, typer.Argument(help="File or folder; here by default.", metavar="DEST")] = None,
) -> None:
    from swiftlite.config.recipe import find_recipe

    source = find_recipe(name)
    target = destination or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise UserError("the file exists", where=str(target), fix="name another file")
    if not target.parent.is_dir():
        raise UserError("there is no such folder", where=str(target.parent), fix="make it first, or name another")
    text = _with_whole_paths(source.read_text(encoding="utf-8"), source.parent)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"the recipe cannot be written: {error.strerror}"
        raise UserError(what, where=str(target), fix="name another file or folder") from error
    typer.echo(f"copied to {target}")


def _with_whole_paths(text: str, folder: Path) -> str:
    """A recipe with the data that lie in its folder under their whole paths: a copy looks beside itself."""

    def whole(name: re.Match) -> str:
        path = folder.resolve() / name[0]
        return str(path) if path.exists() else name[0]

    def placed(line: re.Match) -> str:
        return line[1] + re.sub(r"[\w.][\w./-]*\w", whole, line[2])

    return re.sub(r"^((?:eval_)?dataset:)(.*)$", placed, text, flags=re.MULTILINE)


def schema() -> None:
    from swiftlite.config.json_schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))
