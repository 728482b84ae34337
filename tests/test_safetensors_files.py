"""Safetensors headers and indexes from anywhere: described, or refused by name, and never followed outside."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from swiftlite.checkpoint.safetensors_files import BITS, TensorEntry, inspect_model_folder, read_header
from swiftlite.errors import UserError

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def pack(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


DAMAGED = {
    "empty": b"",
    "huge header": pack({"a": ENTRY}, bytes(8), 1 << 60),
    "cut off": pack({"a": ENTRY}, bytes(7)),
    "cut off in the header": pack({"a": ENTRY})[:30],
    "too long": pack({"a": ENTRY}, bytes(9)),
    "no json": pack(b"\x80{{{", bytes(8)),
    "deep json": pack(b"[" * 100_000),
    "deep entry": pack(b'{"a":' * 100_000),
    "list": pack([1, 2]),
    "unknown dtype": pack({"a": {**ENTRY, "dtype": "PICKLE"}}, bytes(8)),
    "list as dtype": pack({"a": {**ENTRY, "dtype": ["F32"]}}, bytes(8)),
    "negative": pack({"a": {**ENTRY, "shape": [-2]}}, bytes(8)),
    "boolean": pack({"a": {**ENTRY, "shape": [True, 2]}}, bytes(8)),
    "float": pack({"a": {**ENTRY, "shape": [2.0]}}, bytes(8)),
    "wrong size": pack({"a": {**ENTRY, "shape": [3]}}, bytes(8)),
    "overflowing size": pack({"a": {**ENTRY, "shape": [2**62, 2**62]}}, bytes(8)),
    "endless shape": pack({"a": {**ENTRY, "shape": [2**62] * 100_000}}, bytes(8)),
    "hole": pack({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
    "backwards": pack({"a": {**ENTRY, "shape": [0], "data_offsets": [8, 0]}}, bytes(8)),
    "overlap": pack({"a": ENTRY, "b": ENTRY}, bytes(8)),
    "twice": pack(b'{"a": %s, "a": %s}' % ((b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}',) * 2), bytes(1)),
    "html": b"<!DOCTYPE html><html>not found</html>",
    "git lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_are_refused_by_name(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(UserError, match=f"{SINGLE} is damaged or foreign"):
        inspect_model_folder(tmp_path)


def test_a_shape_without_end_costs_no_time(tmp_path):
    (tmp_path / SINGLE).write_bytes(pack({"a": {**ENTRY, "shape": [1] * 200}}, bytes(4)))
    with pytest.raises(UserError, match="entry of a is not valid"):
        inspect_model_folder(tmp_path)


def test_what_the_library_writes_is_described(tmp_path):
    tensors = {"b": np.zeros((2, 3), np.float32), "a": np.zeros((), np.int64), "none": np.zeros((0, 4), np.float16)}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    assert inspect_model_folder(tmp_path) == {
        "b": TensorEntry(SINGLE, "F32", (2, 3)),
        "a": TensorEntry(SINGLE, "I64", ()),
        "none": TensorEntry(SINGLE, "F16", (0, 4)),
    }


@pytest.mark.parametrize("file", ["../out.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", 7, "a\\b"])
def test_an_index_cannot_leave_the_folder(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match="leaves the folder"):
        inspect_model_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a"'])
def test_a_damaged_index_is_refused_by_name(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=f"{INDEX} is damaged or foreign"):
        inspect_model_folder(tmp_path)


def test_an_index_with_a_missing_shard_or_tensor_is_refused(tmp_path):
    index = tmp_path / INDEX
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(UserError, match="one.safetensors is missing"):
        inspect_model_folder(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(pack({"a": ENTRY}, bytes(8)))
    with pytest.raises(UserError, match="does not hold b"):
        inspect_model_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert inspect_model_folder(tmp_path) == {"a": TensorEntry("one.safetensors", "F32", (2,))}


@pytest.mark.parametrize("indexed", [False, True])
def test_a_link_may_not_leave_the_folder(tmp_path, indexed):
    folder, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    folder.mkdir()
    outside.write_bytes(pack({"a": ENTRY}, bytes(8)))
    (folder / SINGLE if not indexed else folder / "one.safetensors").symlink_to(outside)
    if indexed:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(UserError, match="link that leaves the model folder"):
        inspect_model_folder(folder)


def test_a_link_inside_the_folder_and_a_linked_folder_are_fine(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data").write_bytes(pack({"a": ENTRY}, bytes(8)))
    (folder / SINGLE).symlink_to("data")
    (tmp_path / "other-name").symlink_to(folder)
    assert inspect_model_folder(tmp_path / "other-name").keys() == {"a"}


def test_the_hub_s_cache_links_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "cafe").write_bytes(pack({"a": ENTRY}, bytes(8)))
    (snapshot / SINGLE).symlink_to("../../blobs/cafe")
    assert inspect_model_folder(snapshot).keys() == {"a"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.pth"])
def test_other_formats_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=f"only {name} .*, which swiftlite does not read"):
        inspect_model_folder(tmp_path)


def test_no_weights_an_adapter_and_no_folder(tmp_path):
    with pytest.raises(UserError, match="neither model.safetensors"):
        inspect_model_folder(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(pack({}))
    with pytest.raises(UserError, match="holds an adapter") as caught:
        inspect_model_folder(tmp_path)
    assert "--adapter" in caught.value.fix
    with pytest.raises(UserError, match="is not there"):
        inspect_model_folder(tmp_path / "gone")


def test_names_cannot_write_to_the_terminal(tmp_path):
    for name in ("\x1b[2J", "\ud800", "a\nfix: run this"):
        (tmp_path / SINGLE).write_bytes(pack({name: 3}))
        with pytest.raises(UserError) as caught:
            inspect_model_folder(tmp_path)
        assert caught.value.what.isprintable() and caught.value.what.isascii()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(BITS)) | st.text(max_size=3),
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=1, max_size=3) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=6), near_entries | json_values, max_size=4) | json_values


def read(path):
    """(the tensors or None where refused, the same by the library)."""
    try:
        ours = {name: list(entry.shape) for name, entry in read_header(path).items()}
    except UserError as error:
        assert path.name in str(error)
        ours = None
    try:
        with safe_open(path, framework="numpy") as file:
            theirs = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError):
        theirs = None
    return ours, theirs


@settings(max_examples=300, deadline=None)
@given(header=headers, data=st.binary(max_size=24))
def test_no_header_gets_through_that_the_library_refuses(tmp_path_factory, header, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(pack(header, data))
    ours, theirs = read(path)
    assert ours is None or ours == theirs


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damaged_byte_makes_a_traceback(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    sound = bytearray(pack({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)))
    for _ in range(data.draw(st.integers(1, 3))):
        sound[data.draw(st.integers(0, len(sound) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(sound[: data.draw(st.integers(0, len(sound)))])
    ours, theirs = read(path)
    assert ours is None or ours == theirs
