"""Atomic folders: complete or absent under kills, full disks and damage; retention; hostile safetensors."""

import errno
import json
import random
import signal
import struct
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftlite.checkpoint.folder import (
    MANIFEST,
    atomic_folder,
    check_folder,
    list_checkpoints,
    newest_checkpoint,
    retain,
    step_folder,
)
from swiftlite.checkpoint.safetensors_files import inspect_model_folder, read_header
from swiftlite.errors import RunError, UserError


def save(output, step, text="weights"):
    with atomic_folder(step_folder(output, step)) as folder:
        (folder / "model.safetensors").write_text(text)
        (folder / "state.json").write_text("{}")
    return step_folder(output, step)


def test_a_saved_folder_is_complete(tmp_path):
    folder = save(tmp_path, 10)
    assert check_folder(folder, deep=True) == []
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == {"model.safetensors", "state.json"}
    assert [p.name for p in folder.parent.iterdir()] == ["step-00000010"]


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_folder(step_folder(tmp_path, 1)) as folder:
        (folder / "half").write_text("x")
        raise ZeroDivisionError
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_full_disk_is_a_clear_error_and_frees_the_partial(tmp_path):
    before = save(tmp_path, 1)
    with pytest.raises(RunError, match="disk is full"), atomic_folder(step_folder(tmp_path, 2)) as folder:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list_checkpoints(tmp_path) == [before]
    assert len(list(before.parent.iterdir())) == 1


def test_damage_is_found_and_passed_over(tmp_path):
    good, flipped, short, missing, bare = (save(tmp_path, n, "weights" * 9) for n in (1, 2, 3, 4, 5))
    (flipped / "model.safetensors").write_text("Weights" + "weights" * 8)
    (short / "model.safetensors").write_text("w")
    (missing / "state.json").unlink()
    (bare / MANIFEST).unlink()
    newest, passed_over = newest_checkpoint(tmp_path)
    assert newest == good
    assert [line.split(":")[0][-1] for line in passed_over] == ["5", "4", "3", "2"]
    assert "hash differs" in passed_over[-1] and "bytes instead of" in passed_over[-2]
    assert check_folder(flipped) == []  # sizes alone do not see a flipped bit


def test_a_manifest_cannot_point_outside(tmp_path):
    folder = save(tmp_path, 1)
    (tmp_path / "secret").write_text("x")
    (folder / MANIFEST).write_text(
        json.dumps({"format": 1, "files": {"../../secret": {"size": 1, "sha256": "0"}}})
    )
    assert "outside" in check_folder(folder)[0]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"files": 3}', '{"files": {"a": 1}}', "[" * 100_000])
def test_a_damaged_manifest_is_said_to_be_damaged(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / MANIFEST).write_text(text)
    assert check_folder(folder) == [f"{MANIFEST} is damaged"]


def test_retention_keeps_the_newest_and_the_protected(tmp_path):
    folders = {n: save(tmp_path, n) for n in (1, 2, 3, 4)}
    retain(tmp_path, 2, protect={folders[1]})
    assert list_checkpoints(tmp_path) == [folders[4], folders[3], folders[1]]
    retain(tmp_path, 0)
    assert list_checkpoints(tmp_path) == [folders[4]]


KILLED = """
import sys
from pathlib import Path
from swiftlite.checkpoint.folder import atomic_folder, retain, step_folder
output = Path(sys.argv[1])
print("ready", flush=True)
for step in range(1, 10_000):
    with atomic_folder(step_folder(output, step)) as folder:
        for name in range(4):
            (folder / f"{name}.bin").write_bytes(bytes(200_000))
    retain(output, 2)
"""


def test_kill_at_any_moment_leaves_only_complete_checkpoints(tmp_path):
    rng = random.Random(0)
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for folder in list_checkpoints(tmp_path):
            assert check_folder(folder, deep=True) == []
            for path in sorted(folder.rglob("*"), reverse=True):
                path.unlink()
            folder.rmdir()  # the next round starts from step 1 again


def pack(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "huge header": pack({"a": ENTRY}, bytes(8), 1 << 60),
    "truncated": pack({"a": ENTRY}, bytes(7)),
    "too long": pack({"a": ENTRY}, bytes(9)),
    "no json": pack(b"\x80{{{", bytes(8)),
    "deep json": pack(b"[" * 100_000),
    "list": pack([1, 2]),
    "unknown dtype": pack({"a": {**ENTRY, "dtype": "PICKLE"}}, bytes(8)),
    "negative": pack({"a": {**ENTRY, "shape": [-2]}}, bytes(8)),
    "wrong size": pack({"a": {**ENTRY, "shape": [3]}}, bytes(8)),
    "hole": pack({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
    "overlap": pack({"a": ENTRY, "b": ENTRY}, bytes(8)),
    "twice": pack(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', bytes(1)),
    "html": b"<!DOCTYPE html><html>not found</html>",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_safetensors_are_refused_by_name(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="model.safetensors is damaged or foreign"):
        inspect_model_folder(tmp_path)


def test_a_sound_file_is_described(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pack({"a": ENTRY, "__metadata__": {"format": "pt"}}, bytes(8)))
    entry = inspect_model_folder(tmp_path)["a"]
    assert (entry.file, entry.dtype, entry.shape) == ("model.safetensors", "F32", (2,))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", 7])
def test_an_index_cannot_leave_the_folder(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match="leaves the folder"):
        inspect_model_folder(tmp_path)


def test_an_index_with_a_missing_shard_or_tensor_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(UserError, match="one.safetensors is missing"):
        inspect_model_folder(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(pack({"a": ENTRY}, bytes(8)))
    with pytest.raises(UserError, match="does not hold b"):
        inspect_model_folder(tmp_path)


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="pytorch_model.bin, which swiftlite does not read"):
        inspect_model_folder(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(header=st.dictionaries(st.text(max_size=6), json_values, max_size=4) | json_values, data=st.binary(max_size=16))
def test_any_header_is_read_or_refused(tmp_path_factory, header, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(pack(header, data))
    try:
        read_header(path)
    except UserError as error:
        assert "fuzz.safetensors" in str(error)
