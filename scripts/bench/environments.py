"""One virtual environment for each measured tool, made once and kept in the cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What a peer needs.

    install: what pip is asked for; pins: bounds for what comes along with it; drop: packages removed again;
    empty: modules that are imported but not used by text training, each replaced by an empty one.
    """

    install: tuple[str, ...]
    pins: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


ENVIRONMENTS = {
    "trl": Environment(("trl==1.16.0", "peft==0.21.2"), ("transformers==5.23.0",)),
    # Text needs neither picture nor sound, and PyPI's builds of these two fail to load beside a CPU build of torch.
    "llamafactory": Environment(
        ("llamafactory==0.9.5",), ("transformers==5.6.0", "trl==0.24.0"), ("torchvision", "torchaudio"), ("torchaudio",)
    ),
    "ms-swift": Environment(("ms-swift==4.6.0",), ("transformers==5.19.0", "trl==0.29.1")),
    # Its jsonargparse needs requests, which neither of them asks pip for.
    "litgpt": Environment(("litgpt==0.5.13", "requests")),
}
SHOWN = ("torch", "transformers", "trl", "ms-swift", "llamafactory", "litgpt", "swiftlite")


class EnvironmentFailed(Exception):
    """pip could not make the environment; the message names its log."""


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def make_environment(name: str, envs: Path) -> Path:
    """The Python of tool `name`'s environment under `envs`, made now unless it is there, complete and of these pins.

    torch is installed first and pinned afterwards, or pip would replace a CPU build by a CUDA build of gigabytes.

    Raises:
        EnvironmentFailed: a pip command failed; the half-made folder is removed.
    """
    wanted = ENVIRONMENTS[name]
    folder, log = envs / name, envs / f"{name}.log"
    ready = folder / "ready.json"
    recipe = {"torch": TORCH, **{field: list(value) for field, value in vars(wanted).items()}}
    if ready.is_file() and json.loads(ready.read_text()) == recipe:
        return python_of(folder)
    print(f"making the environment of {name} (some minutes; pip's log: {log})", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    envs.mkdir(parents=True, exist_ok=True)
    python = str(python_of(folder))
    constraints = envs / f"{name}-constraints.txt"
    constraints.write_text("\n".join((TORCH, *wanted.pins, *wanted.install)) + "\n")
    pip = [python, "-m", "pip", "install", "--no-input", "-c", str(constraints)]
    with log.open("w") as output:
        commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, TORCH], [*pip, *wanted.install]]
        if wanted.drop:
            commands.append([python, "-m", "pip", "uninstall", "-y", *wanted.drop])
        for command in commands:
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
                shutil.rmtree(folder, ignore_errors=True)
                raise EnvironmentFailed(f"`{' '.join(command)}` failed: see {log}")
    for module in wanted.empty:
        stub = next(folder.glob("lib/python*/site-packages")) / module / "__init__.py"
        stub.parent.mkdir()
        stub.write_text('"""Empty: text training imports this module but does not use it."""\n')
    ready.write_text(json.dumps(recipe))
    return python_of(folder)


def compile_package(python: Path, package: str) -> None:
    """Write the compiled files of a package's code, as pip does when it installs one. One that is used from its source
    has none where Python was told to write none."""
    code = f"import compileall, {package}\ncompileall.compile_dir({package}.__path__[0], quiet=1)"
    subprocess.run([str(python), "-c", code], check=True)


def versions(python: Path) -> dict[str, str]:
    """Versions of the packages of `SHOWN` that `python`'s environment has."""
    code = (
        "import json, sys\nfrom importlib.metadata import PackageNotFoundError, version\nfound = {}\n"
        "for name in sys.argv[1:]:\n    try:\n        found[name] = version(name)\n"
        "    except PackageNotFoundError:\n        pass\nprint(json.dumps(found))"
    )
    done = subprocess.run([str(python), "-c", code, *SHOWN], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
