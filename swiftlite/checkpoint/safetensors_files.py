"""Look at a model folder's safetensors before any of it is loaded: complete, consistent, and within the folder.

Format: an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data
(https://huggingface.co/docs/safetensors/index#format). Files may come from anywhere, so nothing in them is trusted.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.errors import UserError

LARGEST_HEADER = 100 << 20
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
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
    """Every tensor of a model folder by name. Raises UserError naming the file that is missing, foreign or damaged."""
    if (folder / INDEX).is_file():
        return _inspect_index(folder)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".ckpt"))
    if others:
        raise UserError(
            f"the model folder holds no safetensors, only {others[0]}, which swiftlite does not read",
            where=str(folder),
            fix="convert it: load it with transformers and save_pretrained it",
        )
    raise UserError(
        f"the model folder has neither {SINGLE} nor {INDEX}",
        where=str(folder),
        fix="name a folder that save_pretrained wrote",
    )


def _inspect_index(folder: Path) -> dict[str, TensorEntry]:
    path = folder / INDEX
    index = _parse_json(path.read_bytes() if path.stat().st_size <= LARGEST_HEADER else b"", path)
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise _damaged(path, "it has no weight_map")
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise _damaged(path, f"the entry of {name} leaves the folder: {str(file)[:80]!r}")
        if file not in files:
            shard = folder / file
            if not shard.is_file():
                raise UserError(f"{file} is missing", where=str(path), fix="copy or download the whole model again")
            files[file] = read_header(shard)
        if name not in files[file]:
            raise _damaged(path, f"{file} does not hold {name}")
    return {name: files[file][name] for name, file in mapping.items()}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises UserError where the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _damaged(path, f"it has only {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > LARGEST_HEADER or length > size - 8:
            raise _damaged(path, "its first bytes are no safetensors header")
        header = _parse_json(file.read(length), path)
    entries, ranges = {}, []
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = _check_entry(path, name, entry)
            ranges.append((begin, end, name))
            entries[name] = TensorEntry(path.name, entry["dtype"], tuple(entry["shape"]))
    _check_layout(path, ranges, size - 8 - length)
    return entries


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        bits, shape, (begin, end) = BITS[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the header entry of {name[:80]} is not valid") from error
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _damaged(path, f"the header entry of {name[:80]} is not valid")
    if end - begin != math.ceil(math.prod(shape) * bits / 8):
        raise _damaged(path, f"{name[:80]} has a size that does not fit its shape")
    return begin, end


def _check_layout(path: Path, ranges: list[tuple[int, int, str]], available: int) -> None:
    """Tensors fill the data part without hole, overlap or missing end."""
    reached = 0
    for begin, end, name in sorted(ranges):
        if begin != reached:
            raise _damaged(path, f"{name[:80]} does not start where the tensor before it ends")
        reached = end
    if reached > available:
        raise _damaged(path, f"it is truncated: {available:,} bytes of data instead of {reached:,}")
    if reached < available:
        raise _damaged(path, f"it has {available - reached:,} bytes that belong to no tensor")


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no valid JSON ({str(error)[:100]})") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, "its header is no JSON object")
    return parsed


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path.name} is damaged or foreign: {why}", where=str(path), fix="copy or download the file again"
    )
