"""Look at a model folder's safetensors before any of it is loaded: complete, consistent, and within the folder.

Format: an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data
(https://huggingface.co/docs/safetensors/index#format). Files may come from anywhere, so nothing in them is trusted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.errors import UserError
from swiftlite.untrusted import existing, leaves_folder, unequal_keys

LARGEST_HEADER = 100 << 20  # what the safetensors library itself allows
MOST_DIMENSIONS, LARGEST_NUMBER = 64, 2**63  # real tensors are far below; they bound the work on hostile headers
SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
OTHER_FORMATS = {
    ".bin": "a pickle, which can run code when it is read",
    ".pt": "a pickle, which can run code when it is read",
    ".pth": "a pickle, which can run code when it is read",
    ".ckpt": "a pickle, which can run code when it is read",
    ".gguf": "made for llama.cpp",
    ".h5": "made for TensorFlow",
    ".msgpack": "made for Flax",
}
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: file name within the folder, dtype as safetensors writes it, shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def inspect_model_folder(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a model folder by name. Raises UserError naming the file that is missing, foreign or damaged.

    `model.safetensors` comes before an index, as in transformers. Reads headers only, never the weights.
    """
    with _readable(folder):
        if not folder.is_dir():
            raise UserError("the model folder is not there", where=str(folder), fix="check the path")
        if (folder / SINGLE).is_file():
            _check_inside(folder, SINGLE)
            return read_header(folder / SINGLE)
        if (folder / INDEX).is_file():
            return _inspect_index(folder)
        raise _no_weights(folder)


def _no_weights(folder: Path) -> UserError:
    names = sorted(entry.name for entry in folder.iterdir())
    others = [name for name in names if Path(name).suffix in OTHER_FORMATS]
    what = f"the model folder has neither {SINGLE} nor {INDEX}"
    fix = "name a folder that save_pretrained wrote"
    if ADAPTER in names:
        what = "the folder holds an adapter, not a whole model"
        fix = "give the base model by --model, this by --adapter"
    elif others:
        why = OTHER_FORMATS[Path(others[0]).suffix]
        what = f"the model folder holds no safetensors, only {others[0]} ({why}), which swiftlite does not read"
        fix = "use the safetensors version of the model, or load this one with transformers and save_pretrained it"
    return UserError(what, where=str(folder), fix=fix)


def _inspect_index(folder: Path) -> dict[str, TensorEntry]:
    path = folder / INDEX
    _check_inside(folder, INDEX)
    if path.stat().st_size > LARGEST_HEADER:
        raise damaged(path, f"it is larger than any real one ({path.stat().st_size:,} bytes)")
    mapping = _parse_json(path.read_bytes(), path).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise damaged(path, "it has no weight_map")
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or "\0" in file or file in ("", ".."):
            raise damaged(path, f"the entry of {_shown(name)} leaves the folder: {_shown(str(file))}")
        if file not in files:
            shard = existing(str(folder / file))
            if shard is None or not shard.is_file():
                raise UserError(
                    f"{_shown(file)} is missing", where=str(path), fix="copy or download the whole model again"
                )
            _check_inside(folder, file)
            files[file] = read_header(folder / file)
        if name not in files[file]:
            raise damaged(path, f"{_shown(file)} does not hold {_shown(name)}")
    return {name: files[file][name] for name, file in mapping.items()}


def inspect_file(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one file by name. Raises UserError where it is missing, damaged, or a link out of its folder."""
    with _readable(path):
        if not path.is_file():
            raise UserError(f"{path.name} is missing", where=str(path), fix="copy or download the whole folder again")
        _check_inside(path.parent, path.name)
        return read_header(path)


def _check_inside(folder: Path, file: str) -> None:
    if leaves_folder(folder, folder / file):
        raise UserError(
            f"{_shown(file)} is a link that leaves the model folder",
            where=str(folder / file),
            fix=f"copy {(folder / file).resolve()} there instead, if you trust it",
        )


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises UserError where the file is damaged or cannot be read."""
    with _readable(path), path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        if len(start) < 8:
            raise damaged(path, f"it has only {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > LARGEST_HEADER or length > size - 8:
            raise damaged(path, "its first bytes are no safetensors header, or it was cut off")
        header = _parse_json(file.read(length), path)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise damaged(path, "its __metadata__ is no mapping of texts")
    entries, ranges = {}, []
    for name, entry in header.items():
        begin, end = _check_entry(path, name, entry)
        ranges.append((begin, end, name))
        entries[name] = TensorEntry(path.name, entry["dtype"], tuple(entry["shape"]))
    _check_layout(path, ranges, size - 8 - length)
    return entries


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path.name} cannot be read: {error.strerror}", where=str(error.filename or path), fix="check the file"
        ) from error


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        bits, shape, (begin, end) = BITS[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"the header entry of {_shown(name)} is not valid") from error
    numbers = [*shape, begin, end] if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS else [None]
    if any(type(number) is not int or not 0 <= number < LARGEST_NUMBER for number in numbers):
        raise damaged(path, f"the header entry of {_shown(name)} is not valid")
    if end - begin != -(-math.prod(shape) * bits // 8):
        raise damaged(path, f"the size of {_shown(name)} does not fit its shape")
    return begin, end


def _check_layout(path: Path, ranges: list[tuple[int, int, str]], available: int) -> None:
    """Tensors fill the data part without hole, overlap or missing end."""
    reached = 0
    for begin, end, name in sorted(ranges):
        if begin != reached:
            raise damaged(path, f"{_shown(name)} does not start where the tensor before it ends")
        reached = end
    if reached > available:
        raise damaged(path, f"it was cut off: {available:,} bytes of data instead of {reached:,}")
    if reached < available:
        raise damaged(path, f"it has {available - reached:,} bytes that belong to no tensor")


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unequal_keys)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it holds no valid JSON where it should ({_shown(str(error))})") from error
    if not isinstance(parsed, dict):
        raise damaged(path, "it holds no JSON object where it should")
    return parsed


def _shown(text: str) -> str:
    """Short, and safe to print: no control characters that a terminal would obey."""
    text = text[:100]
    return text if text.isprintable() else ascii(text)


def damaged(path: Path, why: str) -> UserError:
    """The error for a file that is not what its name says."""
    return UserError(
        f"{path.name} is damaged or foreign: {why[:300]}", where=str(path), fix="copy or download the file again"
    )
