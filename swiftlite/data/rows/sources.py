"""What `--dataset` names: `NAME_OR_PATH[:SUBSET][@SPLIT][#COUNT][*WEIGHT]` -> the files to read."""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swiftlite.config.save import is_run
from swiftlite.errors import UserError
from swiftlite.untrusted import existing, leaves_folder

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".jl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
}
# Written beside the rows by `datasets.save_to_disk`; they hold no rows themselves.
SIDE_FILES = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json"}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
# Names that may hold rows all the same, and are told where they are left out.
NOT_READ = {".lz4", ".zip", ".tar", ".tgz", ".7z", ".xlsx", ".feather", ".avro", ".orc", ".pkl"}
SPLITS = ("train", "test", "validation", "valid", "val", "eval", "dev")
HUB_SPLIT = "train"  # of a hub data set, where none is named
NOTES = re.compile(r"(licen[cs]e|notice|readme|changelog|copying)(?![a-z])", re.IGNORECASE)  # no rows, in a folder
LARGEST_WEIGHT = 10_000  # visits of a row in an epoch; they are listed in memory
GRAMMAR = "NAME_OR_PATH[:SUBSET][@SPLIT][#COUNT][*WEIGHT]"
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")

_WEIGHT = re.compile(r"\*([^*#@:/]*)$")
_COUNT = re.compile(r"#([^*#@:/]*)$")
_SPLIT = re.compile(r"@([^*#@:/]*?(?:\[[\d%:+-]*\])?)$")  # `train[:20%]` is a part of one, of the hub
_SUBSET = re.compile(r":([^*#@:/]*)$")


@dataclass(frozen=True)
class DatasetSpec:
    """One `--dataset` value taken apart.

    text: as given; flag: that gave it; name: path or hub id; path: set where it exists on disk; count: rows to choose,
    None for all; weight: how many times each row is seen an epoch.
    """

    text: str
    name: str
    flag: str = "--dataset"
    path: Path | None = None
    subset: str | None = None
    split: str | None = None
    count: int | None = None
    weight: float = 1.0

    @property
    def given(self) -> str:
        """`--dataset NAME`, for errors."""
        return f"{self.flag} {self.text}"

    @property
    def part(self) -> str:
        """Subset and split, as they were given."""
        return (f":{self.subset}" if self.subset else "") + (f"@{self.split}" if self.split else "")


@dataclass(frozen=True)
class DataFile:
    """One file of rows. label: how it is named to the user; kind: a value of KINDS, or `hub`; compressed: one of
    COMPRESSED, or nothing."""

    label: str
    kind: str
    path: Path | None = None
    compressed: str = ""
    hub: DatasetSpec | None = None

    def where(self, line: int) -> str:
        """`file.jsonl:17`: the line (of text files) or the row (of the others, and of an array on one line), from 1."""
        return f"{self.label}:{line}"


NamedFiles = list[tuple[Path, DataFile]]  # of a folder, each with its path in it


@dataclass(frozen=True)
class Source:
    """A spec and the files it stands for. unread: those of its folder that may hold rows and are not read."""

    spec: DatasetSpec
    files: list[DataFile]
    unread: tuple[str, ...] = ()


def parse_spec(text: str, flag: str = "--dataset", most: int | None = None) -> DatasetSpec:
    """Take a data set name apart. The longest existing path wins over every suffix. flag: that gave it; most: the count
    of a name that has none.

    Raises UserError for a count or weight that is no positive number.
    """
    spec = _taken_apart(text, flag)
    return spec if spec.count is not None else replace(spec, count=most)


def _taken_apart(text: str, flag: str) -> DatasetSpec:
    spec = DatasetSpec(text=text, name=text, flag=flag)
    if not text.strip():
        raise UserError("the name of a data set is empty", where=flag, fix=f"give {GRAMMAR}")
    for pattern, field in ((_WEIGHT, "weight"), (_COUNT, "count"), (_SPLIT, "split"), (_SUBSET, "subset")):
        if path := existing(spec.name):
            return replace(spec, path=path)
        match = pattern.search(spec.name)
        if match and match.start() > 0:
            value = _suffix_value(field, match.group(1), spec)
            spec = replace(spec, name=spec.name[: match.start()], **{field: value})
    path = existing(spec.name)
    if path is None and any(existing(spec.name[: mark.start()]) for mark in re.finditer(r"[*#@:]", spec.name)):
        raise UserError(
            "what follows the path is given twice, or in another order",
            where=spec.given,
            fix=f"give {GRAMMAR}",
        )
    return replace(spec, path=path)


def _suffix_value(field: str, value: str, spec: DatasetSpec) -> str | int | float:
    if field in ("split", "subset"):
        if not value:
            raise UserError(f"the {field} is empty", where=spec.given, fix=f"give {GRAMMAR}")
        return value
    if pattern := _unexpanded(spec):
        raise pattern
    try:
        number = int(value) if field == "count" else float(value)
    except ValueError:
        number = -1
    if not (number > 0 and math.isfinite(number) and (field == "count" or number <= LARGEST_WEIGHT)):
        sign = "#" if field == "count" else "*"
        raise UserError(
            f"{sign}{value} is not a {field}: it must be a {'whole ' if field == 'count' else ''}number above 0"
            + ("" if field == "count" else f", at most {LARGEST_WEIGHT:,}"),
            where=spec.given,
            fix=f"give {GRAMMAR}, for example data.jsonl#1000*0.5",
        )
    return number


def names_of_sets(texts: Sequence[str]) -> tuple[str, ...]:
    """What each of several data sets is called where numbers are told of it: the last part of its name, without a
    file's ending, and its subset and split; all that was given where that is another's too, or nothing. Escaped where a
    terminal would obey it. Nothing for a single one.
    """
    if len(texts) == 1:
        return ()
    short = [_short_name(parse_spec(text)) for text in texts]
    names = [name if name and short.count(name) == 1 else text for name, text in zip(short, texts, strict=True)]
    names = names if len(set(names)) == len(names) else list(texts)  # one's own name may be all that another was given
    return tuple(name if name.isprintable() else repr(name)[1:-1] for name in names)


def _short_name(spec: DatasetSpec) -> str:
    name = Path(spec.name).name
    for endings in (COMPRESSED, tuple(KINDS)):
        name = name[: -len(Path(name).suffix)] if name.lower().endswith(endings) else name
    return name + spec.part


def resolve(spec: DatasetSpec, method: str = "sft") -> Source:
    """The files behind a spec, for a method. Raises UserError where there are none."""
    if spec.path is None:
        if _looks_like_a_path(spec.name):
            raise missing_file(spec)
        return Source(spec, [DataFile(label=spec.name + spec.part, kind="hub", hub=spec)])
    if spec.path.is_dir():
        files, unread = _folder_files(spec, method)
        return Source(spec, files, tuple(unread))
    if spec.split or spec.subset:
        raise UserError("a single file has neither splits nor subsets", where=spec.given, fix=f"name {spec.name}")
    if not spec.path.is_file():
        raise UserError(
            "the data set is no plain file",
            where=str(spec.path),
            fix="name a file or a folder; what a pipe gives, also <(...), has to be written to a file first",
        )
    file = as_data_file(spec.path)
    if file is None:
        raise UserError(
            f"files of type {spec.path.suffix or 'without a suffix'} are not read",
            where=str(spec.path),
            fix=f"use one of {', '.join(KINDS)}, each also with {', '.join(COMPRESSED)}",
        )
    return Source(spec, [file])


def as_data_file(path: Path) -> DataFile | None:
    """The file with its kind, told by its name; None for a name that is not known."""
    last = path.suffix.lower()
    compressed = last if last in COMPRESSED else ""
    kind = KINDS.get(Path(path.stem).suffix.lower() if compressed else last)
    return None if kind is None else DataFile(label=_told(path), kind=kind, path=path, compressed=compressed)


def _told(path: Path) -> str:
    """The path as text that every file can hold: names may be bytes that are no UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _looks_like_a_path(name: str) -> bool:
    known = as_data_file(Path(name)) is not None
    return known or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _unexpanded(spec: DatasetSpec) -> UserError | None:
    """The error for a name that a shell would have made into those of several files, None for any other."""
    text = spec.text
    folder = existing(str(Path(text).parent))
    names = os.listdir(folder) if folder is not None and folder.is_dir() and not existing(text) else []
    found = sorted(fnmatch.filter(names, Path(text).name))
    if not found or Path(text).name in found:  # no pattern, but a link that leads nowhere
        return None
    what = f"this is a pattern of {len(found)} {'files' if len(found) > 1 else 'file'}, such as {folder / found[0]}"
    return UserError(what, where=spec.given, fix="leave its quotes out, or name the folder")


def missing_file(spec: DatasetSpec) -> UserError:
    """The error for a name that is no file, with the nearest names that do exist."""
    if pattern := _unexpanded(spec):
        return pattern
    if ADDRESS.match(spec.name):
        fix = "download it and name the file, or name a data set of the hub as OWNER/NAME"
        return UserError("data sets are not read from addresses", where=spec.given, fix=fix)
    folder = existing(str(Path(spec.name).parent))
    if folder is None or not folder.is_dir():
        where = str(Path(spec.name).parent)
        return UserError("no such folder", where=where, fix=f"check the path of {spec.given}")
    path = folder / Path(spec.name).name
    if os.path.islink(path):  # false for names that no file can have
        return UserError("the link leads nowhere", where=str(path), fix=f"it names {os.readlink(path)}")
    names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(str(folder / name) for name in close)}?" if close else "check the path"
    return UserError("no such file", where=str(path), fix=fix)


def _below(root: Path) -> list[Path]:
    """What is in a folder and in those in it, but for hidden ones. Raises UserError for one that cannot be looked into,
    which pathlib would pass over in silence."""
    inside = [root, *root.rglob("*")] if root.is_dir() else []
    seen = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    closed = next((path for path in seen if path.is_dir() and not os.access(path, os.R_OK | os.X_OK)), None)
    if closed is not None:
        raise UserError("the folder cannot be looked into", where=str(closed), fix="check its rights, or move it away")
    return seen


def _folder_files(spec: DatasetSpec, method: str) -> tuple[list[DataFile], list[str]]:
    """Every readable file below a folder in the order of its path, or those of one split; and what may hold rows too.

    The split of a file is told by its folders and its name, as on the hub (`train-00000.parquet`, `test/a.jsonl`).
    Without `@SPLIT` a folder that has a `train` split and another gives that one, any other folder gives everything.
    What runs have written into folders of their own there is no data, and no model is. Links to folders, or to nothing,
    are not followed.
    """
    if spec.subset == "..":
        raise UserError("the subset leaves the folder", where=spec.given, fix=f"give {GRAMMAR}")
    root = spec.path / spec.subset if spec.subset else spec.path
    inside = _below(root)
    found = sorted(path for path in inside if path.is_file() and path.name not in SIDE_FILES)
    no_data = {path.parent for path in found if path.parent != root and _marks_no_data(path)}
    found = [path for path in found if no_data.isdisjoint(path.parents)]
    aside = {path for path in found if any(part.startswith("_") for part in path.relative_to(root).parts)}
    files = [(path.relative_to(root), file) for path in found if path not in aside and (file := as_data_file(path))]
    unread = [path for path in found if _may_hold_rows(path) and (path in aside or not as_data_file(path))]
    links = [path for path in inside[1:] if path.is_symlink() and not path.is_file()]
    unread += [path for path in links if no_data.isdisjoint(path.parents)]
    files, others = _of_split(files, spec.split)
    files, notes = _without_notes(files, method)
    if not files:
        splits = [name for name in SPLITS if any(_in_split(path, name) for path, _ in others)]
        raise UserError(
            f"the folder holds no data file{f' of split {spec.split}' if spec.split else ''}",
            where=str(root),
            fix=f"give one of its splits: {', '.join(splits)}"
            if splits
            else f"put files of type {', '.join(KINDS)} there, which may be compressed ({', '.join(COMPRESSED)})",
        )
    if spec.split in (None, "train"):  # whoever names another split does not ask for what has none
        unread += [file.path for path, file in others if not any(_in_split(path, name) for name in SPLITS)]
    outermost = [folder for folder in no_data if no_data.isdisjoint(folder.parents)]
    unread += [*outermost, *(file.path for _, file in notes)]
    for _, file in [*files, *notes]:
        if leaves_folder(spec.path, file.path):
            raise UserError(
                "the file is a link that leaves the data folder", where=file.label, fix="name the file itself"
            )
    return [file for _, file in files], [_told(path) for path in sorted(unread)]


def _marks_no_data(path: Path) -> bool:
    """Whether a file tells that its folder is that of a run or of a model, whose JSON files are no rows."""
    return path.suffix == ".safetensors" or (path.name == "config.yaml" and is_run(path.parent))


def _of_split(files: NamedFiles, split: str | None) -> tuple[NamedFiles, NamedFiles]:
    """(the files of the split, the others); without one, of `train` where there is that and another, else all."""
    there = {name for name in SPLITS for path, _ in files if _in_split(path, name)}
    chosen = split or ("train" if "train" in there and len(there) > 1 else None)
    if chosen is None:
        return files, []
    return (
        [(path, file) for path, file in files if _in_split(path, chosen)],
        [(path, file) for path, file in files if not _in_split(path, chosen)],
    )


def _without_notes(files: NamedFiles, method: str) -> tuple[NamedFiles, NamedFiles]:
    """(files of rows, texts that are none): a licence and the like; but for pretraining, every text beside rows."""
    beside_rows = method != "pretrain" and any(file.kind != "txt" for _, file in files)
    rows, notes = [], []
    for path, file in files:
        is_note = file.kind == "txt" and (beside_rows or NOTES.match(path.name))
        (notes if is_note else rows).append((path, file))
    return rows, notes


def _may_hold_rows(path: Path) -> bool:
    return any(suffix.lower() in KINDS.keys() | NOT_READ for suffix in path.suffixes)


def _in_split(path: Path, split: str) -> bool:
    names = [*path.parts[:-1], path.name.split(".")[0]]
    return any(re.fullmatch(rf"{re.escape(split)}([-_.].*|\d*)", name, re.IGNORECASE) for name in names)
