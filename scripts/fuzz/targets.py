"""What is fuzzed: for each kind of input how examples are made, and the product's own function that reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz import rows
from fuzz.damage import LETTERS, TEXTS, VALUES, changed, damaged

SIZES = st.sampled_from((0, 0, 1, 1, 2, 5))  # how many changes


@dataclass(frozen=True)
class Example:
    """files: relative path -> content; facts: what the reader is told besides."""

    files: dict[str, bytes]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """make: a strategy of Examples; read(folder, scratch, facts): whether it is accepted; share: of all inputs."""

    name: str
    make: st.SearchStrategy[Example]
    read: Callable[[Path, Path, dict[str, Any]], bool]
    share: int


def _json_files(place: str, valid: Any, others: dict[str, bytes], names: tuple[str, ...]) -> st.SearchStrategy[Example]:
    """One JSON file beside others that are sound; its value changed, then its bytes."""

    @st.composite
    def make(draw: st.DrawFn) -> Example:
        chance = random.Random(draw(st.integers(0, 2**48)))
        value = changed(valid, chance, draw(st.lists(VALUES, max_size=3)), names)
        text = json.dumps(value).encode("utf-8", "surrogatepass")
        return Example({**others, place: damaged(text, chance, draw(SIZES))})

    return make()


# ---- rows -----------------------------------------------------------------------------------------------------------


@st.composite
def _make_rows(draw: st.DrawFn) -> Example:
    chance = random.Random(draw(st.integers(0, 2**48)))
    method, form = chance.choice(rows.FORMS)
    kind = chance.choice(rows.KINDS)
    valid = [form] * chance.choice((1, 2, 3))
    found = [changed(row, chance, draw(st.lists(VALUES, max_size=2)), rows.NAMES) for row in valid]
    content = damaged(rows.written(found, valid, kind), chance, draw(SIZES))
    facts = {"method": method, "skip": chance.random() < 0.7, "stream": chance.random() < 0.2}
    suffix, content = rows.packed(kind, content, chance)
    return Example({f"rows{suffix}": content}, facts)


# ---- recipes --------------------------------------------------------------------------------------------------------

RECIPE = "method: sft\nmodel: model\ndataset: [rows.jsonl]\nlearning_rate: 1e-5\nmax_length: 128\ntuner: lora\n"
YAML_VALUES = (
    "null", "~", "[]", "{}", "[a, b]", "{a: b}", "-1", "0", "1", "2", "8", "1e-5", "1e999", ".nan", "0x10", "true",
    "yes", "none", "auto", "full", "fsdp", "megatron", "bf16", "5GB", "3h55m", "2x4", "&a [*a]", "*a", "!!int 3",
    "!x y",
    "!!python/object/apply:os.system [touch x]", '"\\uD800"', '"\\UFFFFFFFF"', '"\\0"', "'" + "x" * 5000 + "'",
    "~nobody/x", "../../x", "/etc", "https://user:secret@host/x", "9" * 5000, "|\n  text", "1" + "0" * 30,
    "rows.jsonl*1e9",
    "hf_abcdefghijklmnopqrstuvwxyz", "a=b", "[[1]]", "{? [a] : b}", "1" + "0" * 400, "rows.jsonl#5", "2026-01-01",
)  # fmt: skip


@st.composite
def _make_recipe(draw: st.DrawFn) -> Example:
    from swiftlite.config.flags import all_flags, known_names

    chance = random.Random(draw(st.integers(0, 2**48)))
    lines = RECIPE.splitlines()
    for value in draw(st.lists(st.one_of(st.sampled_from(YAML_VALUES), st.text(LETTERS, max_size=12)), max_size=5)):
        flag = chance.choice(list(all_flags().values()))
        key = chance.choice((flag.name, flag.name, chance.choice(known_names()), value[:20] or "x"))
        chosen = chance.choice((value, value, json.dumps(value), *flag.choices[:3], str(flag.default)))
        lines = [line for line in lines if not line.startswith(f"{key}:") or chance.random() < 0.1]
        lines.insert(chance.randrange(len(lines) + 1), f"{key}: {chosen}")
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return Example({"recipe.yaml": damaged(text, chance, draw(SIZES))})


def _read_recipe(folder: Path, scratch: Path, facts: dict[str, Any]) -> bool:
    from swiftlite.config.recipe import load_recipe
    from swiftlite.config.resolve import resolve
    from swiftlite.config.save import dump_config

    with contextlib.chdir(folder):
        config = resolve(None, {}, load_recipe("recipe.yaml"), env={}).config
    saved = dump_config(config)
    if "secret@" in saved or "hf_abcdef" in saved:
        raise AssertionError("a secret is saved in config.yaml")
    saved.encode("utf-8")
    return True


# ---- models ---------------------------------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [22, 30]},
}
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_NAMES = ("dtype", "shape", "data_offsets", "__metadata__", "a.weight", "b")


def packed_tensors(header: Any, data: bytes = bytes(30), length: int | None = None) -> bytes:
    """A safetensors file. length: of the header, where it is to be another than it is."""
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@st.composite
def _make_tensors(draw: st.DrawFn) -> Example:
    chance = random.Random(draw(st.integers(0, 2**48)))
    header = changed(HEADER, chance, draw(st.lists(VALUES, max_size=2)), HEADER_NAMES)
    length = draw(st.one_of(st.none(), st.none(), st.integers(0, 2**64 - 1)))
    content = packed_tensors(header, bytes(chance.choice((30, 30, 30, 0, 29, 31))), length)
    return Example({MODEL: damaged(content, chance, draw(SIZES))})


def _read_tensors(folder: Path, scratch: Path, facts: dict[str, Any]) -> bool:
    """Everything that is described is also read: what passes here must not fail behind."""
    from swiftlite.checkpoint.weights import TensorFolder

    found = TensorFolder(folder)
    for name in found.entries:
        found.read(name)
    return True


def _index_example() -> st.SearchStrategy[Example]:
    shard = {name: HEADER[name] for name in ("a.weight", "b", "c")}
    second = {"d": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    files = {"model-1.safetensors": packed_tensors(shard), "model-2.safetensors": packed_tensors(second, bytes(1))}
    mapping = dict.fromkeys(shard, "model-1.safetensors") | {"d": "model-2.safetensors"}
    names = ("weight_map", "metadata", "a.weight", "d", "e")
    return _json_files(INDEX, {"metadata": {"total_size": 31}, "weight_map": mapping}, files, names)


MODEL_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "dtype": "float32",
}  # fmt: skip
CODE = b"open('evil-was-here', 'w').close()\nclass Evil: pass\n"


def _read_model_config(folder: Path, scratch: Path, facts: dict[str, Any]) -> bool:
    from swiftlite.models.anatomy import check_trainable_architecture
    from swiftlite.models.load import load_config

    check_trainable_architecture(load_config(str(folder)))
    return True


# ---- checkpoints ----------------------------------------------------------------------------------------------------

STEP = "checkpoints/step-00000001"
KEPT = {"config.json": b"{}\n", "model.safetensors": packed_tensors(HEADER)}
STATE = {
    "format": 1, "data": "d" * 40, "seed": 42,
    "progress": {
        "step": 3, "epoch": 0.5, "best_loss": 1.5, "best_step": 2, "evaluations_without_gain": 0,
        "skipped_steps": [1], "loss_scale": {"value": 65536.0, "good_steps": 3, "dynamic": True},
        "method": {"total": 0.0, "pairs": 0},
    },
}  # fmt: skip


def _manifest_example() -> st.SearchStrategy[Example]:
    files = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in KEPT.items()}
    others = {f"{STEP}/{name}": data for name, data in KEPT.items()}
    names = ("files", "format", "size", "sha256", "config.json", *TEXTS)
    return _json_files(f"{STEP}/manifest.json", {"format": 1, "files": files}, others, names)


def _read_manifest(folder: Path, scratch: Path, facts: dict[str, Any]) -> bool:
    from swiftlite.checkpoint.folder import newest_checkpoint

    newest, passed_over = newest_checkpoint(folder)
    if any(len(line) > 1000 or not line.isprintable() for line in passed_over):
        raise AssertionError(f"no line for a terminal: {passed_over!r:.200}")
    return newest is not None


def _read_state(folder: Path, scratch: Path, facts: dict[str, Any]) -> bool:
    from swiftlite.checkpoint.state import read_trainer_state
    from swiftlite.training.run import saved_progress

    saved_progress(read_trainer_state(folder), folder, {"total": 0.0, "pairs": 0})
    return True


PROGRESS_NAMES = ("progress", "data", "format", "step", "epoch", "loss_scale", "method", "value", "more", *TEXTS)
TARGETS = (
    Target("rows", _make_rows(), rows.read, 28),
    Target("recipes", _make_recipe(), _read_recipe, 16),
    Target("safetensors headers", _make_tensors(), _read_tensors, 18),
    Target("index files", _index_example(), _read_tensors, 12),
    Target("manifests", _manifest_example(), _read_manifest, 10),
    Target("trainer states", _json_files("trainer_state.json", STATE, {}, PROGRESS_NAMES), _read_state, 8),
    Target(
        "model configs",
        _json_files("config.json", MODEL_CONFIG, {"evil.py": CODE}, (*MODEL_CONFIG, "attn_implementation")),
        _read_model_config,
        8,
    ),
)


def variants(example: Example, count: int) -> Iterator[Example]:
    """The example with bytes of its files changed blindly, `count` times."""
    chance = random.Random(repr(sorted(example.files.items())))
    for _ in range(count):
        name = chance.choice(sorted(example.files))
        spoilt = damaged(example.files[name], chance, chance.choice((1, 1, 2, 4)))
        yield Example({**example.files, name: spoilt}, example.facts)


def lay_out(example: Example, folder: Path) -> None:
    """Write the files of an example into an empty folder."""
    for name, content in example.files.items():
        path = folder / name
        os.makedirs(path.parent, exist_ok=True)
        path.write_bytes(content)
