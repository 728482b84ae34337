"""Several processes from one command: the same run as one, one voice, one exit code, nobody left behind."""

import itertools
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity import metrics
from torch.distributed import HashStore
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig
from worlds import end_of_command, run_ranks, run_swiftlite

from swiftlite.checkpoint.folder import check_folder, list_checkpoints
from swiftlite.checkpoint.safetensors_files import SINGLE
from swiftlite.checkpoint.weights import TensorFolder
from swiftlite.config.schema import RunConfig
from swiftlite.errors import RunError, UserError
from swiftlite.models.toys import toy_pairs
from swiftlite.parallel import heartbeat
from swiftlite.parallel.meeting import meet_in_store
from swiftlite.parallel.stages import SPLITS_CORRECTLY
from swiftlite.parallel.start import DEFAULT_PORT, Machines
from swiftlite.parallel.world import World
from swiftlite.training import output
from swiftlite.training.guards.agreement import agreed, check_same_weights

ENV = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
SWIFTLITE = [sys.executable, "-m", "swiftlite"]


@pytest.fixture
def flags(tmp_path, tiny_model, write_rows, chat_rows):
    rows = write_rows("rows.jsonl", chat_rows)
    return ["--model", str(tiny_model("llama")), "--dataset", str(rows), "--tuner", "full", "--max-length", "128",
            "--global-batch-size", "8", "--micro-batch-size", "2", "--precision", "fp32", "--learning-rate", "1e-3",
            "--cache-dir", str(tmp_path / "cache")]  # fmt: skip


def run(*words, **more):
    more = {"env": ENV} | more
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=180, **more)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def is_listening(port: str) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", int(port))) == 0


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def check_same_curve(one: Path, two: Path) -> None:
    for mine, other in zip(metrics(two), metrics(one), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def close(one: Path, other: Path) -> bool:
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all((left[n] - right[n]).norm() <= 1e-5 * right[n].norm() for n in left)


def test_a_run_of_two_processes_resumes_in_one_and_back(tmp_path, flags):
    flags = [*flags, "--eval-fraction", "0.2", "--eval-steps", "2"]  # what is saved right behind an evaluation is whole
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    several = ["--parallel", "fsdp", "--save-steps", "2", "--keep-checkpoints", "9", "--async-save"]
    run_swiftlite(1, "sft", *flags, "--max-steps", "6", "-o", one)
    done = run(*SWIFTLITE, "sft", *flags, *several, "--nproc-per-node", "2", "--max-steps", "6", "-o", two)
    assert done.returncode == 0, done.stderr
    assert "2 processes: 2 x full sharding" in done.stdout
    assert done.stdout.count("step 3/6") == 1 and done.stderr == ""
    check_same_curve(one, two)
    for mine, other in zip(metrics(two), metrics(one), strict=True):
        assert mine["tokens"] == other["tokens"] and mine["trained_tokens"] == other["trained_tokens"]
    assert close(two / "model" / "model.safetensors", one / "model" / "model.safetensors")
    middle = two / "checkpoints" / "step-00000004"
    assert check_folder(middle, deep=True) == []
    run_swiftlite(1, "sft", *flags, "--max-steps", "6", "-o", mixed, "--resume", middle)
    assert [row["step"] for row in metrics(mixed)] == [5, 6]
    assert close(mixed / "model" / "model.safetensors", one / "model" / "model.safetensors")
    back = tmp_path / "back"
    run_swiftlite(1, "sft", *flags, "--max-steps", "6", "-o", back, "--save-steps", "3", "--keep-checkpoints", "9")
    last, middle = tmp_path / "last", back / "checkpoints" / "step-00000003"
    run_swiftlite(2, "sft", *flags, *several, "--max-steps", "6", "-o", last, "--resume", middle)
    assert close(last / "model" / "model.safetensors", one / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("schedule", "checkpointing"),
    [("gpipe", "full"), ("gpipe", "selective"), *([("zero-bubble", "full")] if SPLITS_CORRECTLY else [])],
)
def test_a_pipeline_recomputes_each_micro_batch_with_its_own_places(tmp_path, flags, schedule, checkpointing):
    more = ["--max-steps", "3", "--no-packing", "--activation-checkpointing", checkpointing]
    one, two = tmp_path / "one", tmp_path / "two"
    run_swiftlite(1, "sft", *flags, *more, "-o", one)
    run_swiftlite(2, "sft", *flags, *more, "--pp", "2", "--pipeline-schedule", schedule, "-o", two)
    check_same_curve(one, two)


def test_experts_that_are_gathered_ahead_are_recomputed(tmp_path, tiny_model, flags):
    model = shutil.copytree(tiny_model("qwen3-moe"), tmp_path / "model")
    config = Qwen2MoeConfig(  # its shared expert runs behind the others, whose unit is closed by then
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    flags = [flags[0], model, *flags[2:], "--max-steps", "3", "--activation-checkpointing", "selective"]
    one, two = tmp_path / "one", tmp_path / "two"
    run_swiftlite(1, "sft", *flags, "-o", one)
    run_swiftlite(2, "sft", *flags, "--parallel", "fsdp", "-o", two)
    check_same_curve(one, two)


def test_checkpoints_are_whole_where_the_first_process_trains_nothing(tmp_path, flags):
    flags = [*flags, "--tuner", "freeze", "--trainable-layers", "1", "--max-steps", "2", "--save-steps", "1"]
    one, two = tmp_path / "one", tmp_path / "two"
    run_swiftlite(2, "sft", *flags, "--pp", "2", "-o", two)
    run_swiftlite(1, "sft", *flags, "-o", one, "--resume", two / "checkpoints" / "step-00000001")
    for folder in ("model", "checkpoints/latest"):
        assert close(one / folder / "model.safetensors", two / folder / "model.safetensors")
    moments = "checkpoints/latest/resume/tensors.safetensors"
    assert load_file(two / moments) and close(one / moments, two / moments)


def test_the_experts_of_a_reference_model_are_divided_too(tmp_path, tiny_model, write_rows):
    flags = ["--model", tiny_model("qwen3-moe"), "--dataset", write_rows("pairs.jsonl", toy_pairs(8)), "--reference",
             "model", "--tuner", "full", "--max-length", "128", "--global-batch-size", "4", "--micro-batch-size", "2",
             "--precision", "fp32", "--learning-rate", "1e-3", "--max-steps", "2"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    run_swiftlite(1, "dpo", *flags, "-o", one)
    run_swiftlite(2, "dpo", *flags, "--ep", "2", "-o", two)
    check_same_curve(one, two)


def test_one_process_offloads_too(tmp_path, flags):
    plain, offloaded = tmp_path / "plain", tmp_path / "offloaded"
    run_swiftlite(1, "sft", *flags, "--max-steps", "2", "-o", plain)
    run_swiftlite(1, "sft", *flags, "--max-steps", "2", "-o", offloaded, "--offload", "cpu")
    assert [row["loss"] for row in metrics(offloaded)] == pytest.approx([row["loss"] for row in metrics(plain)])


def test_torchrun_and_the_time_in_the_folder_name(tmp_path, flags):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "swiftlite"]
    done = run(*torchrun, "sft", *flags, "--max-steps", "2", "--parallel", "ddp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes: 2 x replicas" in done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_torchrun_has_one_process_export(tmp_path, tiny_model):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "swiftlite"]
    done = run(*torchrun, "export", "--model", tiny_model("llama"), "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1 and done.stderr.count("note: one of the 2 processes does this") == 1
    failed = run(*torchrun, "sft", "--no-such-flag")
    assert failed.stderr.count("error: unknown flag --no-such-flag") == 1


def test_a_mistake_is_told_once(tmp_path, flags):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "alone"}]}\n')
    started = ["--nproc-per-node", "2", "--max-steps", "2", "-o", tmp_path / "out"]
    done = run(*SWIFTLITE, "sft", *flags, *started, "--dataset", bad)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1 and "bad.jsonl:1" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def ranks_of(parent: int) -> list[int]:
    """Processes started by `parent` that train."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent)]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "spawn_main" in line]


def started_run(tmp_path, flags, *more, steps=100_000, seen=2) -> subprocess.Popen:
    """A run of two processes, once the step `seen` is logged."""
    out = tmp_path / "out"
    words = [*SWIFTLITE, "sft", *flags, "--nproc-per-node", "2", "--max-steps", str(steps), "-o", str(out), *more]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    for line in process.stdout:
        if re.match(rf"step +{seen}/", line):
            return process
    raise AssertionError(process.stderr.read())


def alive(pids: list[int]) -> list[int]:
    return [
        pid for pid in pids if Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text()
    ]


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(pids) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_process_ends_the_run_at_once(tmp_path, flags):
    process = started_run(tmp_path, flags)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed by SIGKILL" in err and "Traceback" not in err
    wait_gone(ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_process_is_started_again_from_the_newest_checkpoint(tmp_path, flags):
    process = started_run(tmp_path, flags, "--max-restarts", "1", "--save-steps", "5", steps=30)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "killed by SIGKILL" in err and "starting again" in err
    assert [row["step"] for row in metrics(tmp_path / "out")] == list(range(1, 31))
    assert (tmp_path / "out" / "model").is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_goes_on_from_another_does_so_again_after_a_restart(tmp_path, flags):
    """It has saved nothing of its own yet."""
    run_swiftlite(1, "sft", *flags, "--max-steps", "3", "-o", tmp_path / "first")
    more = "--max-restarts", "1", "--resume", str(tmp_path / "first")
    process = started_run(tmp_path, flags, *more, steps=40, seen=5)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search(r"^step +4/40", out, re.MULTILINE) and not re.search(r"^step +1/40", out, re.MULTILINE)
    assert [row["step"] for row in metrics(tmp_path / "out")] == list(range(4, 41))


@pytest.mark.parametrize("how", ["raise RuntimeError('boom')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_torchrun_starts_the_processes_again(tmp_path, how):
    """Its store keeps what those of the attempt before have noted."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from swiftlite.parallel.world import joined\n"
        "with joined() as world, world.told_once(lambda error: 1):\n"
        "    world.meet('data')\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and world.rank == 1:\n"
        f"        {how}\n"
        "    world.meet('end')\n"
        "    print(f'ended {world.rank}', flush=True)\n"  # at once: torchrun starts Python without buffers
    )
    done = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"ended \d", done.stdout)) == ["ended 0", "ended 1"]


def test_torchrun_starts_the_processes_of_two_machines_again(tmp_path):
    """The one whose process was killed counts a restart, the other one does not."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal\n"
        "from swiftlite.parallel.world import joined\n"
        "with joined() as world, world.told_once(lambda error: 1):\n"
        "    world.meet('data')\n"
        "    killed = pathlib.Path(__file__).with_name('killed')\n"
        "    if world.rank == 1 and not killed.exists():\n"
        "        killed.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    world.meet('end')\n"
        "    print(f'ended {world.rank}', flush=True)\n"
    )
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "j"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--max-restarts", "1", *place, str(script)]
    machines = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENV) for _ in range(2)]
    try:
        ends = [(machine.communicate(timeout=60)[0], machine.returncode) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [code for _, code in ends] == [0, 0]
    assert sorted(re.findall(r"ended \d", "".join(said for said, _ in ends))) == ["ended 0", "ended 1"]


class Gone(Exception):
    """What ends a process that meets others in a thread of a test."""


def test_processes_meet_those_of_their_own_attempt():
    """The store has what those of attempts before have noted: of one that met, and of one that was replaced before."""
    store, gone = HashStore(), threading.Event()

    def leave():
        if gone.is_set():
            raise Gone

    def meet(rank, listen=lambda: None):
        return meet_in_store(store, rank, 2, listen)

    with ThreadPoolExecutor() as pool:
        first = list(pool.map(meet, range(2)))
        alone = pool.submit(meet, 1, leave)
        time.sleep(0.3)
        assert not alone.done()
        gone.set()
        with pytest.raises(Gone):
            alone.result(timeout=10)
        second = list(pool.map(meet, range(2)))
    assert first == [first[0]] * 2 and second == [second[0]] * 2 and first != second


@pytest.mark.parametrize("late", [False, True])
def test_two_machines_with_one_number_do_not_wait_for_ever(monkeypatch, late):
    monkeypatch.setattr(heartbeat, "EVERY", 0.05)
    monkeypatch.setattr(os, "getpid", itertools.count().__next__)
    store = HashStore()
    first, second = heartbeat.Signs(store, 1, 2), heartbeat.Signs(store, 1, 2)
    with ThreadPoolExecutor() as pool, first.given(), heartbeat.Signs(store, 0, 2).given():
        if late:
            list(pool.map(lambda rank: meet_in_store(store, rank, 2, lambda: None), range(2)))
        else:
            pool.submit(meet_in_store, store, 1, 2, first.check)
        with second.given(), pytest.raises(UserError, match="another .* has come as (process|machine) 1"):
            meet_in_store(store, 1, 2, second.check)


def test_another_attempt_of_several_machines_meets_at_another_port():
    assert Machines(2).again() == Machines(2)
    assert Machines(2, nodes=2, port=1000).again().again().port == 1002
    assert Machines(2, nodes=2).again().port == Machines(2, nodes=2).again().port != DEFAULT_PORT


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_no_process_outlives_the_one_that_started_it(tmp_path, flags):
    process = started_run(tmp_path, flags)
    ranks = ranks_of(process.pid)
    process.kill()
    process.communicate(timeout=60)
    wait_gone(ranks)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_and_saves(tmp_path, flags, number, code):
    process = started_run(tmp_path, flags)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopped by signal" in out and "Traceback" not in err
    newest = list_checkpoints(tmp_path / "out")[0]
    assert check_folder(newest, deep=True) == []
    step = json.loads((newest / "trainer_state.json").read_text())["progress"]["step"]
    assert metrics(tmp_path / "out")[-1]["step"] == step


@pytest.mark.parametrize(
    ("around", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); start(process)", 143),
        (
            "start(process); time.sleep(0.4); os.kill(process.pid, signal.SIGINT), os.kill(os.getpid(), signal.SIGINT)",
            130,
        ),
    ],
    ids=["before there is one", "while it imports"],
)
def test_a_signal_to_processes_that_do_not_yet_listen_ends_them_quietly(around, code):
    script = (
        "import os, signal, time\n"
        "from multiprocessing.process import BaseProcess\n"
        "from swiftlite.parallel.start import Machines, start_processes\n"
        "if __name__ == '__main__':\n"
        "    start = BaseProcess.start\n"
        f"    def started(process): {around}\n"
        "    BaseProcess.start = started\n"
        "    start_processes(Machines(1), print, 'went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, ""), (signal.SIGTERM, 1, "process 0 was killed by SIGTERM\n")],
)
def test_a_signal_to_one_process_that_loads_ends_the_others_too(tmp_path, number, code, said):
    script = (
        "import os, sys, time\n"
        "from multiprocessing.process import BaseProcess\n"
        "from swiftlite.errors import RunError\n"
        "from swiftlite.parallel.start import Machines, start_processes\n"
        "if __name__ == '__main__':\n"
        "    start, first = BaseProcess.start, []\n"
        "    def started(process):\n"
        "        start(process)\n"
        f"        if not first: first.append(os.kill(process.pid, {int(number)}))\n"
        "    BaseProcess.start = started\n"
        "    try: start_processes(Machines(2), time.sleep, 600)\n"
        "    except RunError as error: sys.exit(print(error.what) or 1)\n"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, env=env)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, said, "")
    assert not list(tmp_path.iterdir())  # nobody wants the launcher's folders for logs


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_where_one_process_is_interrupted_those_that_wait_for_it_are_too(error, code):
    worlds = two_worlds()
    with pytest.raises(SystemExit) as ended, worlds[1].told_once(lambda error: 1):
        raise error
    assert ended.value.code == code
    with pytest.raises(SystemExit) as ended, worlds[0].told_once(pytest.fail):  # nobody is told of what follows from it
        raise RuntimeError("Connection closed by peer")
    assert ended.value.code == code
    with pytest.raises(SystemExit) as ended, worlds[0].told_once(lambda error: 1):
        worlds[0].meet("data")
    assert ended.value.code == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_to_one_process_ends_those_that_are_in_a_collective_with_it(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from swiftlite.cli.errors import show_error\n"
        "from swiftlite.parallel.start import Machines, start_processes\n"
        "def body():\n"
        "    import torch, torch.distributed as dist\n"
        "    from swiftlite.parallel.world import joined\n"
        "    from swiftlite.training.guards.stopping import stop_requests\n"
        "    with joined() as world, world.told_once(show_error), stop_requests(None, time.monotonic()):\n"
        "        for _ in range(2 * (world.rank == 1)):\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "            time.sleep(1.1)\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "if __name__ == '__main__': start_processes(Machines(2), body)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")


def test_a_signal_that_an_import_swallowed_starts_no_process():
    script = (
        "import os, signal\n"
        "from swiftlite.ending import end_on_signals\n"
        "from swiftlite.parallel.start import Machines, start_processes\n"
        "end_on_signals()\n"
        "class Library:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch.distributed.launcher.api':\n"
        "            try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "            except BaseException: pass\n"
        "__import__('sys').meta_path.insert(0, Library())\n"
        "if __name__ == '__main__': start_processes(Machines(1), print, 'went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "terminated\n")


def test_a_process_of_a_group_ends_before_python_takes_itself_apart():
    script = (
        "from swiftlite.ending import end_without_finalizing\n"
        "class Held:\n    def __del__(self): print('finalized', flush=True)\n"
        "held = Held()\n"
    )
    for ending, code, told in (("end_without_finalizing(3)", 3, ""), ("", 0, "finalized\n")):
        ended = subprocess.run([sys.executable, "-c", script + ending], capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (code, told)


IN_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# Whoever runs the tests may ignore it.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "swiftlite", *sys.argv[2:]])
"""


@pytest.mark.parametrize(
    ("processes", "how", "steps", "code"),
    [(1, "asked", 100_000, 129), (2, "asked", 100_000, 129), (1, "nohup", 60, 0)],
)
def test_a_terminal_that_goes_away_ends_the_step_and_saves(tmp_path, flags, processes, how, steps, code):
    out = tmp_path / "out"
    words = ["sft", *flags, "-o", str(out), "--max-steps", str(steps), "--save-steps", "100000"]
    words += ["--nproc-per-node", str(processes)]
    master, slave = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    env = ENV | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([sys.executable, "-c", IN_TERMINAL, how, *words], **streams, env=env)
    os.close(slave)
    os.set_blocking(master, False)
    shown = b""

    def trains() -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(master, 100_000)
        file = out / "metrics.jsonl"
        return file.exists() and len(file.read_text().splitlines()) >= 2

    try:
        wait_until(trains, seconds=90)
        os.close(master)
        assert process.wait(90) == code
    finally:
        process.kill()
    assert b"\x1b[?25l" in shown  # the panel was drawn
    (saved,) = list_checkpoints(out)
    last = metrics(out)[-1]["step"]
    assert check_folder(saved) == [] and saved.name == f"step-{last:08}"
    assert (last == steps) == (how == "nohup")


def may_make_namespaces() -> bool:
    name = f"swiftlite-test-{os.getpid()}"
    made = shutil.which("ip") and subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return bool(made)


@pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2")
def test_two_network_namespaces_are_two_machines(tmp_path, flags):
    script = Path(__file__).parents[1] / "scripts" / "two_nodes.sh"
    model, rows, rest = flags[1], flags[3], flags[4:]
    more = ["--max-steps", "2", "--micro-batch-size", "1", "--sharding", "hybrid"]
    done = run("bash", script, sys.executable, model, rows, tmp_path / "out", *rest, *more)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "4 processes: 2 x full sharding, 2 x replicas" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2]


def test_machines_need_a_place_to_meet(tmp_path, flags):
    done = run(*SWIFTLITE, "sft", *flags, "-o", tmp_path / "out", "--nnodes", "2")
    assert done.returncode == 2 and "--master-addr HOST" in done.stderr


def test_machines_that_do_not_meet_are_told_in_one_block():
    script = (
        "from swiftlite.errors import UserError\n"
        "from swiftlite.parallel import start\n"
        "start.SECONDS_TO_MEET = 1\n"
        "try: start.start_processes(start.Machines(1, nodes=2, node=1, port=PORT), print)\n"
        "except UserError as error: print(error.what, error.where)\n"
    )
    port = free_port()
    ended = run(sys.executable, "-c", script.replace("PORT", port))
    assert ended.stdout.startswith("the 2 machines did not meet: ") and f"machine 1, 127.0.0.1:{port}" in ended.stdout
    assert ended.stderr == f"machine 1 meets 1 more at 127.0.0.1:{port}\n"


def test_a_machine_that_waits_for_the_others_can_be_ended(tmp_path, flags):
    port = free_port()
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    process = subprocess.Popen(
        [*SWIFTLITE, "sft", *flags, "-o", str(tmp_path / "out"), *words], stderr=subprocess.PIPE, env=ENV
    )
    try:
        wait_until(lambda: is_listening(port), seconds=60)
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()


@pytest.mark.parametrize("own", [True, False])
def test_a_port_that_is_in_use_is_told(tmp_path, flags, own):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = ["--nproc-per-node", "2", "--master-port", port] if own else []
        words = [*SWIFTLITE, "sft", *flags, "-o", str(tmp_path / "out"), *more]
        done = subprocess.run(words, capture_output=True, text=True, timeout=90, env=ENV | ({} if own else place))
    assert done.returncode == 2, done.stderr
    assert "the port at which the processes meet is in use" in done.stderr
    assert ("--master-port" if own else "MASTER_PORT") in done.stderr


def test_an_interface_that_is_not_there_is_told():
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    script = "from swiftlite.parallel.world import joined\nwith joined(): print('joined')"
    told = run(sys.executable, "-c", script, env=ENV | one | {"GLOO_SOCKET_IFNAME": "nonesuch0"})
    assert "no network interface with an address that is named nonesuch0\nwhere: GLOO_SOCKET_IFNAME" in told.stderr


def test_a_machine_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(heartbeat, "EVERY", 0.05)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.5)
    store = HashStore()
    signs = [heartbeat.Signs(store, machine, 2) for machine in range(2)]
    world = World(torch.device("cpu"), 0, 2, store, signs[0])
    with ThreadPoolExecutor() as pool, signs[0].given():
        with signs[1].given():
            waiting = pool.submit(world.meet, "never")
            time.sleep(1)
            assert not waiting.done()  # it lives
        with pytest.raises(RunError, match="machine 1 .* no sign of life"):
            waiting.result(timeout=10)
    silent = World(torch.device("cpu"), 0, 2, HashStore(), heartbeat.Signs(HashStore(), 0, 2))
    with pytest.raises(RunError, match="machine 1 has given no sign of life"):  # it has ended before its first one
        silent.meet("world")


def test_a_machine_that_does_not_see_the_output_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "SECONDS_TO_BE_SEEN", 0.5)
    folder = output.OutputFolder(RunConfig(model="m", dataset=["d"], output_dir=str(tmp_path / "out")), *[None] * 3)
    with pytest.raises(UserError, match="does not see the output folder"):
        folder.check_shared()
    threading.Timer(0.2, lambda: [(tmp_path / "out").mkdir(), (tmp_path / "out" / "config.yaml").touch()]).start()
    folder.check_shared()


def two_worlds() -> list[World]:
    store = HashStore()
    return [World(torch.device("cpu"), rank, 2, store) for rank in range(2)]


def test_processes_that_were_started_otherwise_do_not_train(tmp_path):
    first, second = two_worlds()
    config = RunConfig(model="m", dataset=["d"], learning_rate=1e-3, output_dir="runs/m-1", template_date="2026-01-02")
    agreed(config, first)
    elsewhere = {"model": str(tmp_path), "cache_dir": str(tmp_path), "node_rank": 1, "template_date": "2026-01-01"}
    own = config.model_copy(update=elsewhere | {"output_dir": "runs/m-2"})
    taken = {"output_dir": "runs/m-1", "template_date": "2026-01-02"}
    assert agreed(own, second) == own.model_copy(update=taken)
    with pytest.raises(UserError, match="--learning-rate 0.05 instead of 0.001, --save-steps 7 instead of 500"):
        agreed(own.model_copy(update={"learning_rate": 0.05, "save_steps": 7}), second)


def test_processes_that_find_another_model_do_not_train(tmp_path, tiny_model):
    first, second = two_worlds()
    model, copied, other = tiny_model("llama"), tmp_path / "copied", tmp_path / "other"
    shutil.copytree(model, copied)
    shutil.copytree(model, other)
    save_file({name: 2 * tensor for name, tensor in load_file(model / SINGLE).items()}, other / SINGLE)
    config = AutoConfig.from_pretrained(model)
    check_same_weights(first, config, [TensorFolder(model)])
    check_same_weights(second, AutoConfig.from_pretrained(copied), [TensorFolder(copied)])
    with pytest.raises(UserError, match="another model") as told:
        check_same_weights(second, config, [TensorFolder(other)])
    assert str(other) in told.value.where
    config.rope_parameters["rope_theta"] *= 2
    with pytest.raises(UserError, match="another model") as told:
        check_same_weights(second, config, [TensorFolder(model)])
    assert "settings" in told.value.where


def end_of_one(rank, lines, port):
    """By a launcher that gives them no store of its own, and ends none of them."""
    from swiftlite.parallel import world

    world.SECONDS_FOR_THE_FIRST = 0.5
    os.environ["MASTER_PORT"] = port
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return end_of_command(lines[rank])


def test_processes_that_read_other_rows_do_not_train(tmp_path, flags, write_rows, chat_rows):
    """As on machines whose copies of a file differ."""
    other = write_rows("other.jsonl", chat_rows[1:])
    words = ["sft", *flags, "--max-steps", "2", "-o", str(tmp_path / "out")]
    ends = run_ranks(2, end_of_one, [words, [*words, "--dataset", str(other)]], free_port())
    assert [code for code, _ in ends] == [1, 1], ends
    assert sum("process 1 has read other rows" in said for _, said in ends) == 1, ends
    assert not (tmp_path / "out").exists()


def test_a_process_that_waits_for_the_others_can_be_ended(tmp_path, flags):
    """Where it waits inside PyTorch no signal would be heard before its time-out of minutes."""
    place = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = [*SWIFTLITE, "sft", *flags, "-o", str(tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENV | place)
    try:
        wait_until(lambda: is_listening(place["MASTER_PORT"]), seconds=60)
        process.terminate()
        assert process.communicate(timeout=20)[1].endswith("terminated\n")
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
