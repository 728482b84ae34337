"""File systems that are full or read-only, and files that were cut, changed or lost: nothing good goes with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from contextlib import suppress

import pytest
from test_launch import ENV, SWIFTLITE, close, flags  # noqa: F401 - a fixture
from test_parity import metrics, settings
from test_run import same_weights, train

from swiftlite.checkpoint import saver as saver_module
from swiftlite.checkpoint.folder import check_folder, list_checkpoints
from swiftlite.checkpoint.space import SPARE
from swiftlite.errors import RunError, UserError

MIB = 1 << 20
DISK = SPARE + 16 * MIB


def mounted(*words: object) -> bool:
    return shutil.which("mount") is not None and subprocess.run(["mount", *map(str, words)]).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for some checkpoints of the toy model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted("-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder):
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    return settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=6, save_steps=2)


def fill_up(disk, but: int) -> None:
    """Leave so many bytes."""
    with (disk / "other people's data").open("ab") as file:
        file.write(bytes(shutil.disk_usage(disk).free - but))


def at_checkpoint(monkeypatch, number: int, happens) -> None:
    """Let something happen right before the n-th checkpoint is written."""
    real, written = saver_module.write_together, []

    def write(mesh, final, *arguments, **more):
        written.append(final)
        if len(written) == number:
            happens()
        real(mesh, final, *arguments, **more)

    monkeypatch.setattr(saver_module, "write_together", write)


@pytest.mark.parametrize("left", [0, 1000, MIB])
def test_a_full_disk_keeps_the_checkpoint_before_and_the_run_goes_on_later(
    base, small_disk, tmp_path, monkeypatch, left
):
    output = small_disk / "out"
    at_checkpoint(monkeypatch, 2, lambda: fill_up(small_disk, left))
    with pytest.raises(RunError, match="the disk is full; what was saved before is untouched"):
        train(base, output_dir=str(output))
    assert [folder.name for folder in list_checkpoints(output)] == ["step-00000002"]
    assert check_folder(list_checkpoints(output)[0], deep=True) == []
    assert {path.name for path in (output / "checkpoints").iterdir()} == {"step-00000002", "latest"}
    monkeypatch.undo()
    (small_disk / "other people's data").unlink()
    train(base, output_dir=str(output), resume="auto")
    train(base, output_dir=str(tmp_path / "whole"))
    assert same_weights(output / "model" / "model.safetensors", tmp_path / "whole" / "model" / "model.safetensors")
    assert [row["step"] for row in metrics(output)] == [1, 2, 3, 4, 5, 6]


def test_two_processes_tell_once_that_the_disk_is_full(small_disk, flags):  # noqa: F811
    output = small_disk / "out"
    words = ["--nproc-per-node", "2", "--parallel", "fsdp", "--max-steps", "2000", "--save-steps", "5", "-o", output]
    process = subprocess.Popen(
        [*SWIFTLITE, "sft", *flags, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    while not (output / "checkpoints" / "step-00000010").is_dir():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    while process.poll() is None:
        with suppress(OSError):  # the run writes at the same time, and may have filled it for a moment
            fill_up(small_disk, 0)
            break
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("the disk is full") == 1 and "Traceback" not in err and "another process" not in err
    assert check_folder(list_checkpoints(output)[0], deep=True) == []


def test_a_disk_that_was_too_small_from_the_start_is_left_alone(base, small_disk):
    fill_up(small_disk, SPARE)
    with pytest.raises(UserError, match="MiB of disk and 16.0 MiB are free"):
        train(base, output_dir=str(small_disk / "out"))
    assert not (small_disk / "out").exists()


def test_a_folder_that_became_read_only_is_named(base, small_disk, monkeypatch):
    folder = small_disk / "out" / "checkpoints"

    def protect() -> None:
        assert mounted("--bind", folder, folder) and mounted("-o", "remount,bind,ro", folder)

    at_checkpoint(monkeypatch, 2, protect)
    try:
        with pytest.raises(RunError, match="Read-only file system; what was saved before is untouched") as error:
            train(base, output_dir=str(small_disk / "out"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert str(folder) in error.value.where and "--resume auto" in error.value.fix
    train(base, output_dir=str(small_disk / "out"), resume="auto")
    assert (small_disk / "out" / "model").is_dir()


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {"cut": (cut, "bytes instead of"), "flipped": (flip_a_bit, "its hash differs"), "lost": (None, "is missing")}


def test_resume_says_which_files_are_damaged_and_takes_the_checkpoint_before(base, tmp_path, capsys):
    train(base, keep_checkpoints=9)
    whole = json.dumps([row["loss"] for row in metrics(tmp_path / "out")])
    for name in ("model.safetensors", "resume/tensors.safetensors", "trainer_state.json", "manifest.json"):
        for damage, said in DAMAGE.values():
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "out", copy, symlinks=True)
            shutil.rmtree(copy / "model")
            file = copy / "checkpoints" / "step-00000006" / name
            file.unlink() if damage is None else damage(file)
            capsys.readouterr()
            train(base, output_dir=str(copy), resume="auto")
            line = next(line for line in capsys.readouterr().out.splitlines() if "passed over step-00000006" in line)
            assert said in line or name == "manifest.json", line
            assert json.dumps([row["loss"] for row in metrics(copy)]) == whole
            assert same_weights(copy / "model" / "model.safetensors", tmp_path / "out" / "model" / "model.safetensors")
            shutil.rmtree(copy)
