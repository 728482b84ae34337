"""Atomic folders: complete or absent under kills, full disks and damage; which checkpoint is taken; retention."""

import errno
import json
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from swiftlite.checkpoint import folder as folder_module
from swiftlite.checkpoint.folder import (
    MANIFEST,
    atomic_folder,
    check_folder,
    list_checkpoints,
    newest_checkpoint,
    retain,
    step_folder,
)
from swiftlite.errors import RunError


def save(output, step, text="weights"):
    with atomic_folder(step_folder(output, step)) as folder:
        (folder / "model.safetensors").write_text(text)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
    return step_folder(output, step)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_saved_folder_is_complete(tmp_path):
    folder = save(tmp_path, 10)
    assert check_folder(folder, deep=True) == []
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert listed.keys() == {"model.safetensors", "tokenizer/vocab.json"}
    assert listed["model.safetensors"]["size"] == 7
    assert names(folder.parent) == ["step-00000010"]


def test_the_folder_gets_its_name_in_one_move(tmp_path):
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
        written = folder.stat().st_ino
    assert (tmp_path / "model").stat().st_ino == written


def test_the_result_carries_no_manifest_where_none_is_wanted(tmp_path):
    with atomic_folder(tmp_path / "model", manifest=False) as folder:
        (folder / "config.json").write_text("{}")
        assert names(tmp_path) == [".model.partial"]
    assert names(tmp_path) == ["model"] and names(tmp_path / "model") == ["config.json"]


def test_files_and_folders_reach_the_disk_before_the_name_does(tmp_path, monkeypatch):
    synced = []
    real = folder_module._sync
    monkeypatch.setattr(folder_module, "_sync", lambda path: (synced.append(path.name), real(path)))
    save(tmp_path, 1)
    assert set(synced[:2]) == {"model.safetensors", "vocab.json"}
    assert synced[2] == MANIFEST
    assert set(synced[3:5]) == {"tokenizer", ".step-00000001.partial"}
    assert synced[5:] == ["checkpoints"]


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_folder(step_folder(tmp_path, 1)) as folder:
        (folder / "half").write_text("x")
        raise ZeroDivisionError
    assert names(tmp_path / "checkpoints") == []


RUST = Exception("Error while serializing: I/O error: No space left on device (os error 28)")  # as safetensors says it


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "x"), OSError(errno.EDQUOT, "x"), RUST])
def test_a_full_disk_is_a_clear_error_and_frees_the_partial(tmp_path, error):
    before = save(tmp_path, 1)
    with pytest.raises(RunError, match="disk is full") as caught, atomic_folder(step_folder(tmp_path, 2)) as folder:
        (folder / "half").write_text("x")
        raise error
    assert "free space" in caught.value.fix
    assert names(before.parent) == [before.name]
    assert check_folder(before, deep=True) == []


def test_a_limit_on_file_sizes_ends_the_same_way(tmp_path):
    script = (
        "import resource, sys; from pathlib import Path; from swiftlite.checkpoint.folder import atomic_folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with atomic_folder(Path(sys.argv[1])) as folder: (folder / 'big').write_bytes(bytes(5000))"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000  # the limit must not leak into this process
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "model")], capture_output=True, text=True)
    assert "RunError: model cannot be saved: the disk is full" in done.stderr
    assert names(tmp_path) == []


def test_a_folder_that_is_already_there_is_not_replaced(tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(RunError, match="already there"), atomic_folder(folder):
        pytest.fail("nothing may be written")
    assert check_folder(folder, deep=True) == []


def test_a_dead_run_s_partial_goes_and_other_hidden_folders_stay(tmp_path):
    parent = tmp_path / "checkpoints"
    for name in (".step-00000007.partial", ".step-00000001.doomed", ".mine.partial", ".git"):
        (parent / name).mkdir(parents=True)
        (parent / name / "file").write_text("x")
    save(tmp_path, 8)
    assert names(parent) == [".git", ".mine.partial", "step-00000008"]


HOLD = """
import sys, time
from pathlib import Path
from swiftlite.checkpoint.folder import atomic_folder, step_folder
with atomic_folder(step_folder(Path(sys.argv[1]), 1)):
    print("holding", flush=True)
    time.sleep(60)
"""


def test_a_living_run_s_partial_is_left_alone(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        with pytest.raises(RunError, match="another process"):
            save(tmp_path, 2)
        assert names(tmp_path / "checkpoints") == [".step-00000001.partial"]
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    save(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["step-00000002"]


def test_damage_is_found_and_passed_over(tmp_path):
    good, flipped, short, missing, bare = (save(tmp_path, n, "weights" * 9) for n in (1, 2, 3, 4, 5))
    data = bytearray((flipped / "model.safetensors").read_bytes())
    data[30] ^= 1
    (flipped / "model.safetensors").write_bytes(data)
    (short / "model.safetensors").write_text("w")
    (missing / "tokenizer" / "vocab.json").unlink()
    (bare / MANIFEST).unlink()
    (good.parent / ".step-00000006.partial").mkdir()
    (good.parent / ".step-00000000.partial").mkdir()
    newest, passed_over = newest_checkpoint(tmp_path)
    assert newest == good
    assert [line.split(":")[0] for line in passed_over] == [f"step-0000000{n}" for n in (6, 5, 4, 3, 2)]
    reasons = ["never finished", "manifest.json is missing", "vocab.json is missing", "1 bytes instead", "hash differs"]
    for line, reason in zip(passed_over, reasons, strict=True):
        assert reason in line
    assert check_folder(flipped) == []  # sizes alone do not see a flipped bit
    assert len(names(good.parent)) == 7  # reading removes nothing


def test_a_renamed_checkpoint_does_not_hide_newer_ones(tmp_path):
    save(tmp_path, 4).rename(step_folder(tmp_path, 400))
    folders = [save(tmp_path, n) for n in (6, 8)]
    newest, passed_over = newest_checkpoint(tmp_path)
    assert newest == folders[1]
    assert passed_over == ["step-00000400: it was saved as step-00000004"]
    retain(tmp_path, 2)
    assert list_checkpoints(tmp_path)[1:] == [folders[1], folders[0]]


def test_no_checkpoint_at_all(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    assert check_folder(tmp_path / "gone") == ["it is not a folder"]


@pytest.mark.parametrize("name", ["../../secret", "link"])
def test_a_manifest_cannot_point_outside(tmp_path, name):
    folder = save(tmp_path, 1)
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": {name: {"size": 1, "sha256": "0"}}}))
    assert check_folder(folder) == [f"{name} lies outside the folder"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"files": 3}', '{"files": {"a": 1}}', '{"files": {"a": {"size": 1e999}}}', "[" * 100_000]
)
def test_a_damaged_manifest_is_said_to_be_damaged(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / MANIFEST).write_text(text)
    assert check_folder(folder) == [f"{MANIFEST} is damaged"]


def test_a_manifest_cannot_write_to_the_terminal(tmp_path):
    folder = save(tmp_path, 1)
    entry = {"size": 1, "sha256": "0"}
    (folder / MANIFEST).write_text(json.dumps({"files": {"a\x1b[2J": entry, "\ud800": entry, "a\0b": entry}}))
    problems = check_folder(folder, deep=True)
    assert len(problems) == 3
    assert all(problem.isprintable() and problem.isascii() for problem in problems)


def test_retention_keeps_the_newest_and_the_protected(tmp_path):
    folders = {n: save(tmp_path, n) for n in (1, 2, 3, 4)}
    retain(tmp_path, 2, protect={folders[1]})
    assert list_checkpoints(tmp_path) == [folders[4], folders[3], folders[1]]
    retain(tmp_path, 0)
    assert list_checkpoints(tmp_path) == [folders[4]]
    assert names(folders[4].parent) == ["step-00000004"]


def test_retention_does_not_count_a_damaged_checkpoint(tmp_path):
    folders = {n: save(tmp_path, n) for n in (1, 2, 3)}
    (folders[3] / "model.safetensors").write_text("w")
    retain(tmp_path, 1)
    assert list_checkpoints(tmp_path) == [folders[3], folders[2]]
    (folders[2] / MANIFEST).unlink()
    retain(tmp_path, 1)
    assert list_checkpoints(tmp_path) == [folders[3], folders[2]]  # nothing complete: nothing goes


KILLED = """
import sys
from pathlib import Path
from swiftlite.checkpoint.folder import atomic_folder, retain, step_folder
output = Path(sys.argv[1])
print("ready", flush=True)
for step in range(int(sys.argv[2]), 10_000_000):
    with atomic_folder(step_folder(output, step)) as folder:
        for name in range(4):
            (folder / f"{name}.bin").write_bytes(bytes(200_000))
    retain(output, 2)
"""


def test_kill_at_any_moment_leaves_only_complete_checkpoints(tmp_path):
    rng = random.Random(0)
    interrupted, before = 0, 0
    for round_ in range(20):
        start = str(1 + round_ * 100_000)
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), start], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.08))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        complete = list_checkpoints(tmp_path)
        assert len(complete) <= max(3, before + 1), "a kill leaves at most the one that retention had not seen yet"
        before = len(complete)
        for folder in complete:
            assert check_folder(folder, deep=True) == []
        parent = tmp_path / "checkpoints"
        interrupted += parent.is_dir() and len(names(parent)) > len(complete)
    assert complete and interrupted  # some kills fell into a save, else this test shows nothing
    save(tmp_path, 9_000_000)
    assert len(names(parent)) == len(complete) + 1  # the next save clears what the kills left
