"""Recipes: flat YAML files whose keys are flags. Finding them, and reading them without trusting them.

Scalars stay strings and the schema gives them their types, so that `1e-5`, `no` or `0123` mean the same in a recipe and
on the command line. Only a plain `null` (or nothing) is null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.config.flags import (
    Flag,
    all_flags,
    find_flag,
    find_phrases,
    find_switch,
    giving_way,
    known_names,
    nearest,
    off_alone,
)
from swiftlite.config.others import axolotl, fsdp
from swiftlite.config.others.idle import OFF, ON
from swiftlite.config.others.words import instead, instead_of_value, is_known, why_idle
from swiftlite.config.types import said_value
from swiftlite.config.validate import Given, wrong_values
from swiftlite.errors import UserError, all_in_one
from swiftlite.untrusted import existing, unequal_keys

if TYPE_CHECKING:
    from yaml import Node

MOST_TOLD = 20  # wrong keys that are looked into: a file with more of them is no recipe
LARGEST = 64 * 1024  # bytes; a recipe is a page of text, and parsing YAML is slow
MOST_NESTED = 300  # values in a list of data sets
NULLS = ("", "~", "null", "Null", "NULL")
PLAIN_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
TABLES = ("models", "datasets")  # files beside the recipes that are none


@dataclass(frozen=True)
class Entry:
    """One key of a recipe: its value as strings, lists of strings, a mapping or None, and the line it stands in."""

    value: Any
    line: int
    key: str


@dataclass(frozen=True)
class Recipe:
    """A recipe as written: canonical name -> entry. notes: of keys without effect."""

    path: Path
    entries: dict[str, Entry]
    notes: list[str] = field(default_factory=list)

    def where(self, name: str) -> str:
        """`file.yaml:3: learning_rate`."""
        entry = self.entries[name]
        return f"{self.path}:{entry.line}: {entry.key}"

    def given(self) -> dict[str, Given]:
        """Its values as those that somebody gave."""
        return {name: Given(entry.value, self.where(name), "recipe") for name, entry in self.entries.items()}

    def said(self, name: str) -> Any:
        """The value of a setting as it is written; None where nothing is said of it."""
        return self.entries[name].value if name in self.entries else None


def recipes_folder() -> Path:
    """The recipes that ship: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name such as `llama3/8b-sft-fsdp` -> file, sorted by name."""
    folder = recipes_folder()
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    return {name: found[name] for name in sorted(found) if name not in TABLES}


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path or by name, with or without `.yaml`. Raises UserError where there is none."""
    path = existing(name)
    if path is not None and path.is_file():
        return path
    if path is not None and path.is_dir():
        raise UserError("the recipe is a folder", where=name, fix="name a .yaml file in it")
    shipped = shipped_recipes()
    wanted = name.lower().removesuffix(".yaml").removesuffix(".yml").removeprefix("recipes/")
    if wanted in shipped:
        return shipped[wanted]
    same_stem = [full for full in shipped if full.rsplit("/", 1)[-1] == wanted]
    if len(same_stem) == 1:
        return shipped[same_stem[0]]
    if same_stem:
        fix = "say which: " + ", ".join(same_stem)
    else:
        near = nearest(wanted, [*shipped, *(full.rsplit("/", 1)[-1] for full in shipped)])
        fix = (f"did you mean `{near}`? " if near else "") + "`swiftlite recipes list` shows all"
    raise UserError("there is no such recipe, neither a file nor a name", where=name, fix=fix)


def load_recipe(name: str) -> Recipe:
    """Read a recipe given by path or name. Raises one UserError for all keys that are wrong, naming file and line.

    What values mean is checked by whoever merges them with flags, which win over them, but for a recipe that is
    refused anyway: all of it is told at once.
    """
    path = find_recipe(name)
    root, wrong, notes = parse_recipe(recipe_text(path), path), [], []
    recipe = Recipe(path, _entries(path, root, wrong, notes), notes)
    if len(wrong) >= MOST_TOLD:
        raise all_in_one(wrong, "things are wrong in the recipe, and perhaps more")
    if wrong:
        raise all_in_one([*wrong, *wrong_values(recipe.given())], "things are wrong in the recipe")
    return recipe


def recipe_text(path: Path) -> str:
    """Raises UserError for a file that is no text, or too long for a recipe."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"the recipe cannot be read: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError("the recipe is not UTF-8", where=f"{path}:{line}", fix="save it as UTF-8") from error
    if len(data) > LARGEST:
        raise UserError(
            f"the recipe is larger than {LARGEST // 1024} KiB", where=str(path), fix="name a recipe, not a data file"
        )
    return text


def parse_recipe(text: str, path: Path) -> Node:
    """The nodes of YAML. path: of the recipe whose text it is. Raises UserError."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(
            f"the recipe is not valid YAML: {error.problem}",
            where=f"{path}:{line}",
            fix="write one `key: value` a line; a tab or an unquoted `: ` is the usual reason",
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # PyYAML reads numbers unchecked
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError(
            f"the recipe is not valid YAML: {reason}", where=str(path), fix="write one `key: value` a line"
        ) from error
    if node is None:
        raise UserError("the recipe is empty", where=str(path), fix="write one `key: value` a line")
    return node


def _entries(path: Path, root: Node, wrong: list[UserError], notes: list[str]) -> dict[str, Entry]:
    """The entry of each good key. wrong: takes what is wrong with the others; notes: which keys have no effect."""
    import yaml

    if not isinstance(root, yaml.MappingNode):
        raise UserError("a recipe is `key: value` lines", where=str(path), fix="see `swiftlite recipes show`")
    _refuse_torchtune(path, root)
    entries: dict[str, Entry] = {}
    off: dict[str, tuple[Flag, str]] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        where = f"{path}:{line}: {key}"
        try:
            if (read := _read_block(key, value_node, where)) is not None:
                _put_block(entries, read, Entry(key, line, key), where, notes)
                continue
            if find_flag(key) is None and _changes_nothing(key, value_node, where, notes):
                continue
            if switch := find_switch(key):
                item, value = switch[0], _switched(value_node, where, switch)
                if value is None:
                    off[key] = item, where
                    continue
            else:
                item = _known(key, where, heads_others=isinstance(value_node, yaml.MappingNode))
                value = _said(item, value_node, where)
            _put(entries, item, Entry(value, line, key), where, notes)
        except UserError as error:
            wrong.append(error)
            if len(wrong) == MOST_TOLD:
                break
    for key, (item, where) in off.items():
        if item.name not in entries:
            what, fix = off_alone(key, item, in_recipe=True)
            wrong.append(UserError(what, where=where, fix=fix))
    return entries


def _put(entries: dict[str, Entry], item: Flag, entry: Entry, where: str, notes: list[str]) -> None:
    """Take an entry, unless another name of the setting has given another value. Raises UserError."""
    before = entries.get(item.name)
    another = before is not None and before.key != entry.key
    if another and entry.value is None:  # which says nothing, as nulls of axolotl's files do
        return
    if before is None or (another and (before.value is None or item.same(before.value, entry.value))):
        entries[item.name] = entry
        return
    weak = giving_way([before.key, entry.key])
    if not another or len(weak) != 1:
        raise UserError(
            f"`{item.name}` is given twice, first in line {before.line}", where=where, fix="keep one of them"
        )
    ((name, why),) = weak.items()
    strong = entry if name == before.key else before
    notes.append(f"the recipe's {name} has no effect beside {strong.key}: {why}")
    entries[item.name] = strong


def _read_block(key: str, node: Node, where: str) -> dict[str, Any] | None:
    """The settings that another tool says by a value, list or block of its own; None for any other key. Raises
    UserError."""
    if key in axolotl.BLOCKS and node.id == "sequence":
        return axolotl.read_block(key, _nested(node, where, []), where)
    if key == fsdp.LIST and node.id == "sequence":
        return fsdp.read_list(_value(node, where, "list"), where)
    if key == fsdp.BLOCK and node.id == "mapping":
        return fsdp.read_block(_nested(node, where, []), where)
    word = None
    if node.id == "scalar":
        word = _value(node, where, "str")
    elif node.id == "mapping" and find_flag(key) is None and key in known_names():
        word = json.dumps(_nested(node, where, []))  # as it would be written on the command line
    said = [] if word is None else find_phrases(key, word)
    return {item.name: dict([value.split("=", 1)]) if item.kind == "map" else value for item, value in said} or None


def _put_block(entries: dict[str, Entry], read: dict[str, Any], block: Entry, where: str, notes: list[str]) -> None:
    """Take the settings of a block, with a note."""
    words = []
    for name, value in read.items():
        before, phrases = entries.get(name), all_flags()[name].phrases
        if isinstance(value, dict) and before and before.key in phrases and before.value.keys().isdisjoint(value):
            entries[name] = replace(before, value=before.value | value)  # another pair of one mapping
        else:
            _put(entries, all_flags()[name], Entry(value, block.line, block.key), where, notes)
        pairs = [f"{key}={column}" for key, column in value.items()] if isinstance(value, dict) else []
        plain = " ".join(pairs) or (", ".join(value) if isinstance(value, list) else value)
        words.append(f"`{name}: {plain}`")
    said = f"is read as {' and '.join(words)}" if words else "changes nothing here"
    notes.append(f"the recipe's {block.key} {said}")


def _nested(node: Node, where: str, seen: list[Node], *, typed: bool = False) -> Any:
    """Lists and mappings of strings, of which YAML's aliases may not make many. seen: takes what was read; typed: words
    without quotes are numbers and switches, where they look like it."""
    seen.append(node)
    if len(seen) > MOST_NESTED:
        raise UserError(
            "the list is too long, or goes round in itself", where=where, fix="shorten it: `dataset: a, b, ...`"
        )
    if node.id == "sequence":
        return [_nested(item, where, seen, typed=typed) for item in node.value]
    if node.id == "scalar":
        value = _value(node, where, "str")
        return said_value(value) if typed and node.style is None and value is not None else value
    pairs = [(_plain(key, where), _nested(value, where, seen, typed=typed)) for key, value in node.value]
    return _unequal(pairs, where)


def _changes_nothing(key: str, node: Node, where: str, notes: list[str]) -> bool:
    """Whether a key of another tool asks for nothing that is not so in any case; there is a note for all but nulls."""
    name, scalar = key.replace("-", "_"), node.id == "scalar"
    if not (is_known(name) or name in known_names()):
        return False
    value = _value(node, where, "str") if scalar else None
    if scalar and value is None:
        return True
    if not scalar and not node.value and is_known(name):  # {} and [] say as much as a null
        return True
    below = [] if scalar else [item[0] if node.id == "mapping" else item for item in node.value]
    keys = [str(inner.value) for inner in below]
    if why := why_idle(name, value, in_recipe=True, keys=keys):
        notes.append(f"the recipe's {key} has no effect: {why}")
        return True
    return False


def _switched(node: Node, where: str, switch: tuple[Flag, str]) -> str | None:
    """The value of the setting that a switch turns on, None where it is off. `bf16: auto` says it itself."""
    item, on = switch
    word = _value(node, where, "str")
    if word.lower() in item.choices:
        return word
    if word.lower() not in (*ON, *OFF):
        fix = instead_of_value(item.name, word, in_recipe=True) or f"write `{item.name}: {on}`"
        raise UserError(f"it is {word!r}, not true or false", where=where, fix=fix)
    return on if word.lower() in ON else None


def _refuse_torchtune(path: Path, root: Node) -> None:
    """Whose sections name Python classes and their arguments."""
    for key, node in root.value:
        if node.id == "mapping" and any(inner.value == "_component_" for inner, _ in node.value):
            raise UserError(
                "this is a configuration of torchtune, whose sections name Python classes",
                where=f"{path}:{key.start_mark.line + 1}: {key.value}",
                fix="write a flat recipe: model (the checkpoint's folder, as transformers saves it), dataset, tuner, "
                "learning_rate, ...; `swiftlite recipes list` has some to begin with",
            )


def _known(key: str, where: str, *, heads_others: bool) -> Flag:
    """The flag that a key stands for. heads_others: keys stand below it. Raises UserError where there is none."""
    item = find_flag(key)
    if item is not None:
        return item
    near = nearest(key.replace("-", "_"), known_names())
    fix = f"did you mean `{near}`?" if near else "`swiftlite recipes schema` lists the keys"
    if heads_others:
        fix = "a recipe has no sections: write the keys below it at the margin, without it"
    fix = instead(key.replace("-", "_"), in_recipe=True) or fix
    raise UserError(f"unknown key `{key}` in the recipe", where=where, fix=fix)


def _said(item: Flag, node: Node, where: str) -> Any:
    """The value of a key; of a map whose values may be nested, each as the command line has it: those as JSON."""
    if not item.nested or node.id != "mapping":
        return _value(node, where, item.kind)
    values = [_nested(value, where, [], typed=value.id != "scalar") for _, value in node.value]
    said = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return _unequal([(_plain(key, where), text) for (key, _), text in zip(node.value, said, strict=True)], where)


def _value(node: Node, where: str, kind: str) -> Any:
    import yaml

    if node.tag not in PLAIN_TAGS and node.tag != "!":
        raise UserError(f"the YAML tag {node.tag} is not allowed", where=where, fix="write the plain value")
    if isinstance(node, yaml.ScalarNode):
        if any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise UserError("the value holds half of a surrogate pair", where=where, fix="write the letter itself")
        return None if node.style is None and node.value in NULLS else node.value
    if isinstance(node, yaml.SequenceNode):
        if kind not in ("list", "map"):
            raise UserError("one value is expected, not a list", where=where, fix="write one value")
        return [_plain(item, where) for item in node.value]
    if kind != "map":
        raise UserError(
            "the value is nested; recipes are flat", where=where, fix="write `key: value` with a plain value"
        )
    return _unequal([(_plain(key, where), _plain(value, where)) for key, value in node.value], where)


def _unequal(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    try:
        return unequal_keys(pairs)
    except ValueError as error:
        raise UserError(str(error), where=where, fix="keep one of them") from error


def _plain(node: Node, where: str) -> str:
    value = None if node.id != "scalar" else _value(node, where, "str")
    if value is None:
        raise UserError("a list or mapping here holds plain values only", where=where, fix="quote it, or leave it out")
    return value
