"""`swiftlite recipes list | show | copy | schema`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from swiftlite.errors import UserError

SEVERAL = ("dataset", "eval_dataset")  # settings of several names
PATHS = ("model", "tokenizer", "adapter", "chat_template", *SEVERAL)
PLAIN = re.compile(r"[\w/][\w./@*+-]*")  # needs no quotes in YAML


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

    text = _text_of(find_recipe(name))
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
    text = _with_whole_paths(_text_of(source), source.parent)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"the recipe cannot be written: {error.strerror}"
        raise UserError(what, where=str(target), fix="name another file or folder") from error
    typer.echo(f"copied to {target}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError("the recipe is not UTF-8", where=str(path), fix="save it as UTF-8") from error


def _with_whole_paths(text: str, folder: Path) -> str:
    """A recipe with what lies in its folder under whole paths: a copy looks beside itself."""
    import yaml

    from swiftlite.config.flags import find_flag

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:  # it is copied as it is, and says what is wrong when it is used
        return text
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    for key, value in reversed(pairs):  # from the end on, so that places in the text stay right
        flag = find_flag(str(key.value))
        if flag is None or flag.name not in PATHS:
            continue
        for node in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(node, yaml.ScalarNode):
                continue
            whole = _whole(node.value, folder.resolve(), several=flag.name in SEVERAL)
            if whole != node.value:
                written = whole if PLAIN.fullmatch(whole) else json.dumps(whole, ensure_ascii=False)
                text = text[: node.start_mark.index] + written + text[node.end_mark.index :]
    return text


def _whole(value: str, folder: Path, *, several: bool) -> str:
    """A name, or the names parted by blanks, with those that are found in the folder alone under their whole paths."""
    from swiftlite.config.names import SPEC

    given = SPEC.fullmatch(value) if several else None
    for name in (value, *([given["name"]] if given else [])):
        if not Path(name).exists() and (folder / name).exists():
            return str(folder / name) + value[len(name) :]
    words = value.split() if several else []
    return " ".join(_whole(word, folder, several=True) for word in words) if len(words) > 1 else value


def schema() -> None:
    from swiftlite.config.json_schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))
