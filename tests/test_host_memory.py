"""What a machine has no memory for is refused before it is read: the kernel would end the process without a word."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_choose import GIB, LLAMA, outlined
from test_parity import settings
from test_run import train

from swiftlite import host_memory
from swiftlite.errors import UserError
from swiftlite.planning.choose import Choice
from swiftlite.planning.footprint import Footprint
from swiftlite.serving.load import load_for_answers
from swiftlite.serving.source import find_source
from swiftlite.training.guards.fits import check_host

KIB = 1024


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with so many bytes free, and so many of swap."""

    def has(free: int, swap: int = 0) -> None:
        info = f"MemTotal:  9999999 kB\nMemAvailable:   {free // KIB} kB\nSwapFree: {swap // KIB} kB\n"
        (tmp_path / "meminfo").write_text(info)

    for name, place in (("MEMINFO", "meminfo"), ("OWN_GROUPS", "own"), ("GROUPS", "groups")):
        monkeypatch.setattr(host_memory, name, tmp_path / place)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return has


def limited(folder, names, limit, used, given_back):
    """given_back: what the group has of files that were read, half of it more than once."""
    folder.mkdir(parents=True, exist_ok=True)
    most, use, stat, _ = names
    (folder / most).write_text(f"{limit}\n")
    (folder / use).write_text(f"{used}\n")
    of_all, half = "total_" if names == host_memory.VERSION_1 else "", given_back // 2
    kinds = {"anon": 400, f"{of_all}inactive_anon": 400, f"{of_all}inactive_file": half, f"{of_all}active_file": half}
    (folder / stat).write_text("".join(f"{name} {size}\n" for name, size in (kinds | {"file": 300}).items()))


def test_free_is_what_the_system_says_shared_by_the_processes(machine, monkeypatch):
    assert host_memory.free_host_bytes() is None
    machine(8 * GIB)
    assert host_memory.free_host_bytes() == 8 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory.free_host_bytes() == 2 * GIB


@pytest.mark.parametrize(
    ("line", "root", "names"),
    [
        ("0::", "", host_memory.VERSION_2),
        ("7:cpu:/other\n9:memory:", "memory", host_memory.VERSION_1),
    ],
    ids=["version 2", "version 1"],
)
def test_a_container_or_a_job_has_no_more_than_its_limit(machine, tmp_path, line, root, names):
    """A job's group lies in those of its user and its machine; that of a container is the root, as it sees it."""
    machine(8 * GIB)
    groups, own = tmp_path / "groups" / root, tmp_path / "own"
    own.write_text(f"{line}/slurm/job_7\n")
    assert host_memory.free_host_bytes() == 8 * GIB  # no such group
    limited(groups / "slurm" / "job_7", names, "max", 700, 200)
    assert host_memory.free_host_bytes() == 8 * GIB
    limited(groups / "slurm" / "job_7", names, 1000, 700, 200)
    assert host_memory.free_host_bytes() == 500
    limited(groups / "slurm", names, 900, 800, 0)
    assert host_memory.free_host_bytes() == 100
    own.write_text(f"{line}/\n")
    assert host_memory.free_host_bytes() == 8 * GIB
    limited(groups, names, 1000, 2000, 0)
    assert host_memory.free_host_bytes() == 0


def test_pages_on_the_disk_count_as_room(machine, monkeypatch):
    machine(4 * GIB, swap=2 * GIB)
    asked = {"what": "the weights", "where": "--model x", "fix": "use less"}
    host_memory.check_host_memory(6 * GIB, **asked)
    with pytest.raises(UserError, match=r"the weights take about 6.50 GiB of this machine's memory, of which 6.00 GiB"):
        host_memory.check_host_memory(6.5 * GIB, **asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in each of 2 processes, of which 3.00 GiB are free for each"):
        host_memory.check_host_memory(4 * GIB, **asked)


def test_a_machine_that_does_not_say_refuses_nothing(machine):
    host_memory.check_host_memory(1e15, "the weights", "--model x", "use less")


def test_what_may_not_be_read_is_no_limit(machine, tmp_path, monkeypatch):
    machine(8 * GIB)
    unreadable = {tmp_path / "own"}
    (tmp_path / "own").write_text("0::/\n")
    limited(tmp_path / "groups", host_memory.VERSION_2, 1000, 700, 0)
    read_text = Path.read_text

    def guarded(path, *args, **options):
        if path in unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **options)

    assert host_memory.free_host_bytes() == 300
    monkeypatch.setattr(Path, "read_text", guarded)
    assert host_memory.free_host_bytes() == 8 * GIB
    unreadable.add(tmp_path / "meminfo")
    assert host_memory.free_host_bytes() is None


def test_training_is_refused_before_weights_are_read(machine, tiny_model, write_rows, chat_rows, tmp_path):
    machine(100 * KIB)
    model, rows = tiny_model("llama"), write_rows("rows.jsonl", chat_rows)
    with pytest.raises(UserError, match="the model and its optimizer take about .* of which 0.1 MiB are free") as told:
        train(settings(tmp_path, model, rows))
    assert told.value.where == f"--model {model}" and "--tuner lora, --pure-bf16, a smaller" in told.value.fix
    assert not (tmp_path / "out" / "model").exists()


def test_states_that_wait_on_the_host_count_there(machine, tmp_path):
    """8 billion weights and both moments, of two GPUs: 48 GiB and more for each."""
    answers = {"reward": ["last_number"], "method": "grpo"}  # by copies on the devices
    resolved, outline = outlined(tmp_path, LLAMA, tuner="full", nproc_per_node=2, offload="cpu", **answers)
    nothing = Footprint(0, 0, 0, 0, 0, 0)
    choice = Choice(resolved.layout, True, "none", nothing)
    needed = outline.on_host(resolved.config, choice)
    assert needed == pytest.approx(12 * outline.trained / 2, rel=0.01)
    machine(round(needed * 0.9))
    with pytest.raises(UserError, match="this machine's memory"):
        check_host(resolved.config, outline, choice)
    machine(round(needed * 1.1))
    check_host(resolved.config, outline, choice)
    machine(1)
    check_host(resolved.config, outline, Choice(resolved.layout, False, "none", nothing))


def test_ranks_of_a_pipeline_share_a_machine(tmp_path):
    """The first has the embedding, the last the head: both together have what one process has."""
    several = {"nproc_per_node": 2, "pipeline_parallel_size": 2}
    resolved, outline = outlined(tmp_path, LLAMA, "cpu", tuner="full", precision="fp32", **several)
    stages = outline.stages(resolved.config, resolved.layout)
    settled = resolved.config.model_copy(update={"activation_checkpointing": "none"})
    fullest = outline.holds(settled, resolved.layout, stages)
    needed = outline.on_host(resolved.config, Choice(resolved.layout, False, "none", fullest))
    assert needed == pytest.approx(16 * outline.trained / 2, rel=0.01) and needed < fullest.states


def test_answers_need_memory_for_what_is_no_part_of_a_file(machine, tiny_model):
    """Numbers of the files' own type stay there until they are used."""
    folder = str(tiny_model("llama"))  # in fp32
    machine(100 * KIB)
    with pytest.raises(UserError, match="the model's weights in bfloat16 take about"):
        load_for_answers(find_source(folder, None), precision="bf16")
    load_for_answers(find_source(folder, None), precision="fp32")


def test_what_a_model_leaves_in_its_files_takes_no_memory(machine, tiny_model, tmp_path):
    """As a language model does with what sees images."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "more")
    weights = load_file(folder / "model.safetensors")
    taken = sum(tensor.numel() * 2 for tensor in weights.values())
    save_file(weights | {"visual.merger": torch.zeros(taken)}, folder / "model.safetensors", {"format": "pt"})
    machine(round(taken * 0.9))
    with pytest.raises(UserError, match="the model's weights in bfloat16 take about"):
        load_for_answers(find_source(str(folder), None), precision="bf16")
    machine(round(taken * 1.1))
    load_for_answers(find_source(str(folder), None), precision="bf16")


def test_reward_models_are_no_reason_to_refuse_a_run_of_several_processes(machine, tiny_model, tmp_path):
    """They may stay in their files; and one that does not is loaded while others load theirs."""
    resolved, outline = outlined(tmp_path, LLAMA, "cpu", method="grpo", reward=["last_number"], nproc_per_node=2)
    choice = Choice(resolved.layout, False, "none", Footprint(0, 0, 0, 0, 0, 0))
    judged = replace(outline, reward_models=GIB)
    assert judged.on_host(resolved.config, choice) == outline.on_host(resolved.config, choice)
    machine(100 * KIB)
    load_for_answers(find_source(str(tiny_model("llama")), None), precision="bf16", alone=False)
