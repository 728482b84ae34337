"""Safetensors files that several processes fill together, each its own boxes, without gathering anything.

The header of a safetensors file tells where each tensor will lie, so the files are laid out beforehand, by every
process alike; then each writes the bytes of what it holds at their places. The result is byte for byte the same in
every layout.
Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from swiftlite.checkpoint.boxes import Box, Holding
from swiftlite.checkpoint.catalog import Entry

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
UNITS = {
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: file name and the offset of its first byte in it."""

    entry: Entry
    dtype: torch.dtype
    file: str
    offset: int


class FilePlan:
    """The files of some tensors: which tensor in which file, and each file's header."""

    def __init__(self, tensors: Iterable[tuple[Entry, torch.dtype]], stem: str, largest: int | None) -> None:
        """stem: `model` gives `model.safetensors`, or numbered files where one would exceed `largest` bytes;
        `folder/model` lies in a folder of its own."""
        shards = _shards(tensors, largest)
        count = len(shards)
        self.slots: list[Slot] = []
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._stem = stem
        for number, shard in enumerate(shards, 1):
            name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
            self._lay_out(name, shard)

    def _lay_out(self, file: str, shard: list[tuple[Entry, torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry, dtype in _whole(shard):
            end = offset + _bytes(entry, dtype)
            header[entry.name] = {"dtype": NAMES[dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._headers[file] = struct.pack("<Q", len(text)) + text
        start = len(self._headers[file])
        self._sizes[file] = start + offset
        for entry, dtype in shard:
            begin = header[entry.name]["data_offsets"][0]
            self.slots.append(Slot(entry, dtype, file, start + begin))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    def create(self, folder: Path) -> None:
        """Make the files in their full size, with their headers, and the index where there are several."""
        for file, header in self._headers.items():
            (folder / file).parent.mkdir(exist_ok=True)
            with (folder / file).open("wb") as handle:
                handle.write(header)
                handle.truncate(self._sizes[file])
        if len(self._headers) > 1:
            total = sum(_bytes(*tensor) for tensor in _whole((slot.entry, slot.dtype) for slot in self.slots))
            index = {
                "metadata": {"total_size": total},
                "weight_map": {slot.entry.name: slot.file for slot in sorted(self.slots, key=lambda s: s.entry.name)},
            }
            text = json.dumps(index, indent=2) + "\n"
            (folder / f"{self._stem}.safetensors.index.json").write_text(text, encoding="utf-8")

    def write(self, folder: Path, held: dict[str, list[Holding]]) -> None:
        """Put what this process holds into the files. held: by owner; only what this process has to write."""
        handles: dict[str, int] = {}
        try:
            for slot in self.slots:
                for holding in held.get(slot.entry.owner, ()):
                    if slot.file not in handles:
                        handles[slot.file] = os.open(folder / slot.file, os.O_WRONLY)
                    _write_overlap(handles[slot.file], slot, holding)
            for handle in handles.values():
                os.fsync(handle)
        finally:
            for handle in handles.values():
                os.close(handle)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MiB`, `1000`."""
    number, unit = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", text).groups()
    return int(float(number) * UNITS[unit.upper()])


def _bytes(entry: Entry, dtype: torch.dtype) -> int:
    return math.prod(entry.shape) * dtype.itemsize


def _whole(tensors: Iterable[tuple[Entry, torch.dtype]]) -> Iterable[tuple[Entry, torch.dtype]]:
    """Each tensor on disk once, whose parts follow each other."""
    return (next(parts) for _, parts in itertools.groupby(tensors, key=lambda pair: pair[0].name))


def _shards(tensors: Iterable[tuple[Entry, torch.dtype]], largest: int | None) -> list[list[tuple[Entry, torch.dtype]]]:
    shards: list[list[tuple[Entry, torch.dtype]]] = [[]]
    size = 0
    for entry, dtype in sorted(tensors, key=lambda pair: -pair[1].itemsize):  # stable; large elements first: aligned
        is_further_part = bool(shards[-1]) and shards[-1][-1][0].name == entry.name
        length = 0 if is_further_part else _bytes(entry, dtype)
        if shards[-1] and largest is not None and size + length > largest:
            shards.append([])
            size = 0
        shards[-1].append((entry, dtype))
        size += length
    return shards


def _write_overlap(handle: int, slot: Slot, holding: Holding) -> None:
    entry = slot.entry
    common = entry.box.overlap(holding.box)
    if common is None:
        return
    piece = holding.tensor[common.slices_of(holding.box)]
    left_out = [dim for dim in range(piece.ndim) if dim not in entry.dims]
    piece = piece.permute((*entry.dims, *left_out)).reshape([piece.shape[dim] for dim in entry.dims])
    place = entry.on_disk(common.slices_of(entry.box))
    target = Box(tuple(part.start for part in place), tuple(piece.shape))
    data = piece.to(device="cpu", dtype=slot.dtype).contiguous()
    raw = memoryview(data.reshape(-1).view(torch.uint8).numpy())
    done = 0
    for element, count in _runs(target, entry.shape):
        offset, length = slot.offset + element * slot.dtype.itemsize, count * slot.dtype.itemsize
        _write_all(handle, raw[done : done + length], offset)
        done += length


def _runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first element, count) of each stretch of a box that is contiguous in a row-major tensor of `shape`."""
    split = len(shape)  # from here on the box spans whole dimensions
    while split and box.shape[split - 1] == shape[split - 1]:
        split -= 1
    outer, inner = max(0, split - 1), math.prod(shape[split:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = (box.shape[outer] if split else 1) * inner
    for number in range(math.prod(box.shape[:outer])):
        first, rest = 0, number
        for dim in reversed(range(outer)):
            rest, index = divmod(rest, box.shape[dim])
            first += (box.start[dim] + index) * strides[dim]
        yield first + (box.start[outer] * strides[outer] if split else 0), count


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written
