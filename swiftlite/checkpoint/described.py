"""Which tensors of a folder are codes, and of what kind: told by their names, types and shapes, and by what
`config.json` says of sizes. Whatever these do not tell for sure is refused: other numbers would be another model.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.checkpoint.codes import BLOCK, WORD, Codes, Grid, Microscaled, Packed, Read, Scaled, Tabled
from swiftlite.checkpoint.safetensors_files import BITS, TensorEntry
from swiftlite.config.names import codes_section, schemes_of
from swiftlite.untrusted import read_json_file

CODED = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "I8", "U8"}  # types that are no numbers alone
FLOATS = {"F64", "F32", "F16", "BF16"}
EXPONENTS = {"U8", "F8_E8M0"}
INTEGERS = {"I8", "I32", "I64"}
EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
SCALES = {  # to multiply by, and the types of codes that have them; of the last a 127th
    "weight_scale_inv": EIGHT_BITS,
    "weight_scale": (*EIGHT_BITS, "I8"),
    "scale": EIGHT_BITS,  # DeepSeek V4
    "qscale_weight": EIGHT_BITS,  # Mistral
    "SCB": ("I8",),
}
ZEROS, GROUPS, SHAPE, FORMAT = "weight_zero_point", "weight_g_idx", "weight_shape", "weight_format"
BESIDE = (ZEROS, GROUPS, SHAPE, FORMAT, "input_scale", "activation_scale", "qscale_act")
OF_WEIGHTS = {"weight", "weight_packed", ZEROS, GROUPS, SHAPE, FORMAT, *SCALES}
QUANT_STATE = ".quant_state.bitsandbytes__"
LARGEST_STATE = 1 << 16  # bytes; real ones have some hundred
USUAL_BLOCK = 128  # of transformers' `fp8`, where config.json does not say one
WIDTHS = (2, 4, 8)  # bits of a packed code


class Unreadable(ValueError):
    """Codes that are not what their names say, or of a kind that nothing here reads."""


@dataclass(frozen=True)
class Sizes:
    """What config.json says: how many rows and how many columns may share a scale, and the bits of a code."""

    rows: frozenset[int]
    columns: frozenset[int]
    bits: frozenset[int]


@dataclass(frozen=True)
class Files:
    """entries: of all tensors; raw: reads them; kinds: for each layer the ends of its tensors' names."""

    entries: Mapping[str, TensorEntry]
    raw: Read
    kinds: Mapping[str, set[str]]
    sizes: Sizes


def find_codes(entries: Mapping[str, TensorEntry], raw: Read, folder: Path) -> dict[str, Codes]:
    """The tensors that are written as codes, by the names that they have elsewhere. entries: of the files in `folder`.
    Raises Unreadable."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in entries:
        place, _, kind = name.rpartition(".")
        kinds[place].add(kind)
    wanted = {name: made for name, entry in entries.items() if (made := _kind(name, entry, kinds)) is not None}
    if not wanted:
        return {}
    files, found = Files(entries, raw, kinds, _sizes(folder)), {}
    for name, made in wanted.items():
        whole, codes = made(name, files)
        if whole in found or (whole in entries and whole not in codes.names):
            raise Unreadable(f"{whole} is there twice, as codes and as numbers or other codes")
        found[whole] = codes
    return found


def without_codes(entries: Mapping[str, TensorEntry], found: Mapping[str, Codes]) -> dict[str, TensorEntry]:
    """The entries as if the files held the numbers themselves."""
    parts = {name for codes in found.values() for name in codes.names}
    parts |= {f"{name.removesuffix('.weight')}.{more}" for name in found for more in BESIDE}
    plain = {name: entry for name, entry in entries.items() if name not in parts}
    return plain | {
        name: TensorEntry(entries[codes.names[0]].file, "F32", codes.shape) for name, codes in found.items()
    }


def _kind(
    name: str, entry: TensorEntry, kinds: Mapping[str, set[str]]
) -> Callable[[str, Files], tuple[str, Codes]] | None:
    """What makes codes of a tensor, None where it is none, or no first part of any."""
    place, _, kind = name.rpartition(".")
    if kind == "weight" and entry.dtype in CODED and not kinds[place].isdisjoint(SCALES):
        return _scaled
    if kind == "weight_packed":
        return _packed
    if QUANT_STATE in name:
        return _tabled
    if kind.endswith("_blocks") and f"{kind.removesuffix('_blocks')}_scales" in kinds[place]:
        return _microscaled
    return None


def _scaled(name: str, files: Files) -> tuple[str, Scaled]:
    place, entry = name.removesuffix(".weight"), files.entries[name]
    scale = _check_parts(place, files)
    if entry.dtype not in SCALES[scale]:
        raise Unreadable(f"{name} is of type {entry.dtype}, which beside {scale} may hold two numbers in a byte")
    order = f"{place}.{FORMAT}"
    if scale == "SCB" and order in files.entries and (files.entries[order].shape or files.raw(order, None).item()):
        raise Unreadable(f"{name} is in the order of a GPU's kernels ({FORMAT})")
    types = FLOATS | EXPONENTS if entry.dtype in EIGHT_BITS else FLOATS
    scales = _grid(f"{place}.{scale}", entry.shape, files, types)
    zeros = _grid(f"{place}.{ZEROS}", entry.shape, files, INTEGERS | FLOATS) if ZEROS in files.kinds[place] else None
    exponents = files.entries[scales.name].dtype == "U8"
    return name, Scaled(entry.shape, name, scales, zeros, exponents, 127 if scale == "SCB" else 1)


def _packed(name: str, files: Files) -> tuple[str, Packed]:
    place, entry = name.removesuffix(".weight_packed"), files.entries[name]
    scale = _check_parts(place, files)
    if SHAPE not in files.kinds[place] or scale != "weight_scale" or entry.dtype != "I32" or len(entry.shape) != 2:
        raise Unreadable(f"{name} is packed in a way that swiftlite does not read")
    shape = files.entries[f"{place}.{SHAPE}"]
    if shape.shape != (2,) or shape.dtype not in INTEGERS:
        raise Unreadable(f"{place}.{SHAPE} is not two whole numbers")
    rows, columns = files.raw(f"{place}.{SHAPE}", None).tolist()
    widths = {bits for bits in WIDTHS if columns > 0 and -(-columns * bits // WORD) == entry.shape[1]}
    widths &= files.sizes.bits or widths
    if rows != entry.shape[0] or len(widths) != 1:
        raise Unreadable(f"{name} does not hold {rows} x {columns} codes of 2, 4 or 8 bits, densely packed")
    scales, bits = _grid(f"{place}.{scale}", (rows, columns), files, FLOATS), widths.pop()
    stored = files.entries.get(f"{place}.{ZEROS}")
    if stored is None:
        return f"{place}.weight", Packed((rows, columns), name, scales, bits)
    in_words = stored.dtype == "I32" and scales.shape[:1] == (rows,)
    wanted = (-(-rows * bits // WORD), *scales.shape[1:]) if in_words else scales.shape
    if stored.shape != wanted or stored.dtype != ("I32" if in_words else "I8"):
        raise Unreadable(f"{place}.{ZEROS} does not fit {place}.{scale}")
    zeros = Grid(f"{place}.{ZEROS}", scales.shape, scales.blocks, scales.groups)
    return f"{place}.weight", Packed((rows, columns), name, scales, bits, zeros, in_words)


def _microscaled(name: str, files: Files) -> tuple[str, Microscaled]:
    whole = name.removesuffix("_blocks")
    blocks, scales = files.entries[name], files.entries[f"{whole}_scales"]
    if (blocks.dtype, scales.dtype, len(blocks.shape), blocks.shape[3:]) != ("U8", "U8", 4, (BLOCK // 2,)):
        raise Unreadable(f"{name} and {whole}_scales are no blocks of {BLOCK} 4-bit floats and exponents of 8 bits")
    if scales.shape != blocks.shape[:3]:
        raise Unreadable(f"{whole}_scales does not fit {name}")
    experts, rows, groups, _ = blocks.shape
    return whole, Microscaled((experts, groups * BLOCK, rows), name, f"{whole}_scales")


def _tabled(name: str, files: Files) -> tuple[str, Tabled]:
    whole = name.partition(QUANT_STATE)[0]
    described = files.entries[name]
    if described.dtype != "U8" or len(described.shape) != 1 or described.shape[0] > LARGEST_STATE:
        raise Unreadable(f"{name} is no short text")
    try:
        state = json.loads(bytes(files.raw(name, None).tolist()))
        shape, block = tuple(state["shape"]), state["blocksize"]
        nested = {"nested_blocksize": state["nested_blocksize"]} if "nested_offset" in state else {}
        whole_numbers = [*shape, block, *nested.values()]
        offset = float(state["nested_offset"]) if nested else 0.0
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Unreadable(f"{name} does not describe codes: {type(error).__name__}") from error
    if not shape or any(type(number) is not int or number < 1 for number in whole_numbers) or not math.isfinite(offset):
        raise Unreadable(f"{name} does not describe codes: {str(state)[:200]}")
    blocks = -(-math.prod(shape) // block)
    wanted = {f"{whole}.absmax": ((blocks,), ("U8",) if nested else ("F32",)), f"{whole}.quant_map": ((16,), ("F32",))}
    if nested:
        wanted[f"{whole}.nested_absmax"] = (-(-blocks // state["nested_blocksize"]),), ("F32",)
        wanted[f"{whole}.nested_quant_map"] = (256,), ("F32",)
    for other, (its_shape, types) in wanted.items():
        if (entry := files.entries.get(other)) is None or entry.shape != its_shape or entry.dtype not in types:
            raise Unreadable(f"{other} is not what {name} says")
    codes = files.entries.get(whole)
    if codes is None or len(codes.shape) != 2 or codes.shape[1] != 1 or BITS[codes.dtype] % 8:
        raise Unreadable(f"{whole} is no column of codes")
    width = BITS[codes.dtype] // 8
    if codes.shape[0] != -(-math.prod(shape) // (2 * width)):
        raise Unreadable(f"{whole} does not hold {' x '.join(map(str, shape))} codes of 4 bits")
    return whole, Tabled(shape, whole, name, state, width)


def _check_parts(place: str, files: Files) -> str:
    """The one kind of scale that a layer has. Raises Unreadable where it has several, none, or parts that would make
    other numbers of its codes."""
    kinds = files.kinds[place]
    scales, strange = kinds & SCALES.keys(), {kind for kind in kinds if kind.startswith("weight_")} - OF_WEIGHTS
    if strange:
        raise Unreadable(f"{place}.{min(strange)} is a part of codes that swiftlite does not know")
    if len(scales) != 1:
        raise Unreadable(f"{place} has {' and '.join(sorted(scales)) or 'no scales'} beside its codes")
    return scales.pop()


def _grid(name: str, shape: tuple[int, ...], files: Files, types: Iterable[str]) -> Grid:
    """Scales or zeros of a matrix of `shape`, once they fit."""
    entry, place = files.entries[name], name.rpartition(".")[0]
    if entry.dtype not in types or len(entry.shape) > len(shape):
        raise Unreadable(f"{name} is of type {entry.dtype} and shape {list(entry.shape)}, beside codes {list(shape)}")
    counts = (*entry.shape, *[1] * (len(shape) - len(entry.shape)))
    by_rows = len(entry.shape) == 1  # which are not those of blocks
    known = {len(shape) - 2: files.sizes.rows, len(shape) - 1: files.sizes.columns}
    pairs = enumerate(zip(shape, counts, strict=True))
    blocks = [_block(size, count, known.get(dim, ())) for dim, (size, count) in pairs]
    if None in blocks or (by_rows and counts[0] not in (1, shape[0])):
        said = ", ".join(map(str, sorted(files.sizes.rows | files.sizes.columns))) or "nothing"
        raise Unreadable(f"{name} of shape {list(entry.shape)} does not fit codes {list(shape)} in blocks of {said}")
    return Grid(name, entry.shape, tuple(blocks), _groups(f"{place}.{GROUPS}", shape, counts, files))


def _block(size: int, count: int, known: Iterable[int]) -> int | None:
    """How many numbers share a scale, the last ones may be fewer; None where nothing tells."""
    if count == 1 or count == size:
        return max(1, size // count)
    fits = [block for block in known if -(-size // block) == count]
    if len(fits) == 1:
        return fits[0]
    return size // count if not known and 0 < count < size and size % count == 0 else None


def _groups(name: str, shape: tuple[int, ...], counts: tuple[int, ...], files: Files) -> Any:
    """For each column the place of its group, of codes that were put in the order of activations; None without."""
    entry = files.entries.get(name)
    if entry is None or counts[-1] == 1:
        return None
    if entry.dtype not in INTEGERS or entry.shape != shape[-1:]:
        raise Unreadable(f"{name} is not a whole number for each of {shape[-1]} columns")
    groups = files.raw(name, None).long()
    if (groups == -1).any():  # as compressed-tensors writes it where columns are in order
        return None
    if groups.min() < 0 or groups.max() >= counts[-1]:
        raise Unreadable(f"{name} names groups that there are no scales for")
    return groups


def _sizes(folder: Path) -> Sizes:
    try:
        section = codes_section(read_json_file(folder / "config.json"))
    except (OSError, ValueError):
        section = {}
    weights = [scheme["weights"] for scheme in schemes_of(section) if isinstance(scheme.get("weights"), dict)]
    pairs = [args.get("block_structure") for args in weights]
    if section.get("quant_method") == "fp8":
        pairs.append(section.get("weight_block_size", [USUAL_BLOCK, USUAL_BLOCK]))
    pairs = [pair.split("x") if isinstance(pair, str) else pair for pair in pairs]
    pairs = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    groups = [args.get("group_size") for args in weights]
    return Sizes(
        _numbers(rows for rows, _ in pairs),
        _numbers([*groups, *(columns for _, columns in pairs)]),
        _numbers(args.get("num_bits") for args in weights),
    )


def _numbers(values: Iterable[Any]) -> frozenset[int]:
    """Those that are whole and above 0."""
    texts = (str(value) for value in values if type(value) in (int, str))
    return frozenset(int(text) for text in texts if text.isdecimal() and 0 < len(text) < 12 and int(text) > 0)
