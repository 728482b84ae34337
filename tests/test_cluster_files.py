"""The files for clusters: Slurm's script is run with stand-ins for Slurm's commands, Kubernetes' job is read."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from swiftlite.cli.app import main
from swiftlite.config.recipe import load_recipe

SCRIPTS = Path(__file__).parent.parent / "scripts"
SLURM, KUBERNETES = SCRIPTS / "slurm" / "train.sbatch", SCRIPTS / "kubernetes" / "train.yaml"
RECIPE = "llama3/3.3-70b-sft-full-fsdp-tp8"
JOB = {
    "SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_GPUS_PER_NODE": "h100:8", "SLURM_CPUS_PER_TASK": "64",
}  # fmt: skip
STAND_INS = {
    "srun": 'printf "%s\\n" "$@" > srun.args; env > srun.env; echo $$ > srun.pid; trap "exit 1" TERM\n{body}',
    "scancel": 'echo "$@" >> calls; kill -TERM "$(cat srun.pid)"',
    "scontrol": 'case $1 in show) printf "node1\\nnode2\\n";; *) echo "$@" >> calls;; esac',
}


def dry_run(words, monkeypatch, capsys, *, world):
    """Call the program as one of `world` processes of a launcher; returns what it printed, in one line."""
    monkeypatch.setenv("COLUMNS", "400")
    for name, value in {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--dry-run"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, err) == (0, "")
    return " ".join(out.split())


def torchrun(words):
    """(torchrun's options, the words of the program behind `-m swiftlite`)."""
    place = words.index("swiftlite")
    assert words[place - 1] == "-m"
    options = [part for word in words[: place - 1] for part in word.split("=", 1)]
    return dict(zip(options[::2], options[1::2], strict=True)), words[place + 1 :]


# ---- Slurm ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def submit(tmp_path):
    """Start the script as Slurm does. body: what the training does in shell."""

    def start(body, *words):
        commands = tmp_path / "bin"
        commands.mkdir()
        for name, text in STAND_INS.items():
            path = commands / name
            path.write_text(
                "#!/usr/bin/env bash\n" + text.format(body=body) if name == "srun" else f"#!/bin/sh\n{text}"
            )
            path.chmod(0o755)
        env = {**os.environ, **JOB, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHON": "/env/python"}
        return subprocess.Popen(["bash", str(SLURM), *words], cwd=tmp_path, env=env)

    return start


def calls(folder):
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def test_slurm_starts_torchrun_with_the_recipe(submit, tmp_path, monkeypatch, capsys):
    assert submit("exit 0", RECIPE, "--learning-rate", "2e-5").wait(20) == 0
    words = (tmp_path / "srun.args").read_text().splitlines()
    assert words[1:4] == ["/env/python", "-m", "torch.distributed.run"]
    options, program = torchrun(words[4:])
    assert options == {
        "--nnodes": "4", "--nproc-per-node": "8", "--rdzv-backend": "c10d", "--rdzv-endpoint": "node1:21234",
        "--rdzv-id": "41234",
    }  # fmt: skip
    assert "OMP_NUM_THREADS=8\n" in (tmp_path / "srun.env").read_text()
    assert calls(tmp_path) == []
    out = dry_run(program, monkeypatch, capsys, world=32)
    assert "processes 32 (torchrun)" in out
    assert "output_dir runs/3.3-70b-sft-full-fsdp-tp8-41234 flag" in out
    assert "resume auto flag" in out and "learning_rate 2e-05 flag" in out


def test_slurm_hands_on_the_exit_code_of_a_failure_and_queues_nothing(submit, tmp_path):
    assert submit("exit 3", RECIPE).wait(20) == 3
    assert calls(tmp_path) == []


@pytest.mark.parametrize(("after", "queued"), [("exit 1", True), ("exit 0", False)])
def test_slurm_stops_before_the_limit_and_goes_on_later(submit, tmp_path, after, queued):
    """TERM reaches the training, which may take its time; only a run that has not ended is queued again."""
    running = submit(f'trap "sleep 0.3; {after}" TERM; while :; do sleep 0.05; done', RECIPE)
    _wait_for(tmp_path / "srun.pid")
    running.send_signal(signal.SIGUSR1)
    assert running.wait(20) == int(after[-1])
    assert calls(tmp_path) == ["--signal=TERM 41234", *(["requeue 41234"] if queued else [])]


def test_slurm_does_not_queue_again_what_the_user_cancels(submit, tmp_path):
    running = submit("sleep 5", RECIPE)
    _wait_for(tmp_path / "srun.pid")
    running.terminate()
    assert running.wait(20) == -signal.SIGTERM
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGKILL)
    assert calls(tmp_path) == []


def test_slurm_without_a_recipe_says_how_it_is_called(submit):
    assert submit("exit 0").wait(20) != 0


def test_slurm_gives_more_time_than_torchrun_takes():
    text = SLURM.read_text()
    seconds = int(re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.M)[1])
    assert int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)[1]) < seconds
    directives = re.findall(r"^#SBATCH --([a-z-]+)", text, re.M)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue"} <= set(directives)
    assert text.index("set -euo") > text.rindex("#SBATCH --output")  # Slurm reads no directive behind a command


def _wait_for(path):
    end = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def container(spec):
    (found,) = spec["template"]["spec"]["containers"]
    return found


def test_kubernetes_has_the_fields_of_a_pytorchjob():
    job = yaml.safe_load(KUBERNETES.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for spec in replicas.values():
        assert spec["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod, box = spec["template"]["spec"], container(spec)
        assert box["name"] == "pytorch"  # the operator looks for it
        assert all(isinstance(word, str) for word in [*box["command"], *box["args"]])
        assert all(isinstance(entry.get("value", ""), str) for entry in box["env"])
        assert {mount["name"] for mount in box["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        limit = next(int(entry["value"]) for entry in box["env"] if entry["name"].endswith("SHUTDOWN_TIMEOUT"))
        assert limit < pod["terminationGracePeriodSeconds"]


def test_kubernetes_starts_torchrun_with_the_recipe(monkeypatch, capsys):
    replicas = yaml.safe_load(KUBERNETES.read_text())["spec"]["pytorchReplicaSpecs"]
    nodes = sum(spec["replicas"] for spec in replicas.values())
    for spec in replicas.values():
        box = container(spec)
        assert box["command"] == ["torchrun"]
        options, program = torchrun(box["args"])
        gpus = box["resources"]["limits"]["nvidia.com/gpu"]
        assert options["--nnodes"] == str(nodes) and options["--nproc-per-node"] == str(gpus)
        names = {"--node-rank": "RANK", "--master-addr": "MASTER_ADDR", "--master-port": "MASTER_PORT"}
        assert {key: options[key] for key in names} == {key: f"$({name})" for key, name in names.items()}
        recipe = next(word.partition("=")[2] for word in program if word.startswith("--recipe"))
        entries = load_recipe(recipe).entries
        assert (int(entries["nnodes"].value), int(entries["nproc_per_node"].value)) == (nodes, gpus)
        out = dry_run(program, monkeypatch, capsys, world=nodes * gpus)
        assert f"processes {nodes * gpus} (torchrun)" in out and "resume auto flag" in out


# ---- their own instructions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [SLURM, KUBERNETES], ids=lambda path: path.name)
def test_the_command_in_the_first_lines_names_the_file(path):
    line = next(line for line in path.read_text().splitlines() if line.startswith("#   "))
    assert str(path.relative_to(SCRIPTS.parent)) in shlex.split(line.removeprefix("#"))
