"""Packages that are installed and cannot be imported, such as those that were made for another torch."""

import importlib
import os
import subprocess
import sys

import pytest
from test_parity import settings

from swiftlite import imports
from swiftlite.cli.errors import show_error
from swiftlite.config.resolve import resolve_config
from swiftlite.config.save import dump_config
from swiftlite.errors import UserError
from swiftlite.imports import do_without_broken, hide_broken, import_package
from swiftlite.reporting.trackers import check_trackers

NOT_NEEDED = (
    *("PIL", "torchvision", "cv2", "torchaudio", "torchcodec", "soundfile", "soxr", "librosa"),
    *("bitsandbytes", "torchao", "hqq", "kernels", "gptqmodel", "optimum", "flash_attn", "tensorflow"),
    *("sentencepiece", "tiktoken", "scipy", "sklearn", "wandb", "deepspeed"),
    *("brotli", "brotlicffi", "zstandard", "triton", "torch_xla", "liger_kernel"),
)


@pytest.fixture
def broken(tmp_path):
    """A factory: names -> a folder with packages of these names, whose import fails."""

    def make(*names):
        for name in names:
            package = tmp_path / "packages" / name
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(f"raise RuntimeError('{name} was made for another torch')\n")
            about = package.with_name(f"{name}-99.0.dist-info")
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        return tmp_path / "packages"

    return make


def test_what_a_run_does_not_use_may_be_broken(tmp_path, tiny_model, write_rows, chat_rows, broken):
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), tuner="lora", max_steps=1)
    recipe, run, packages = tmp_path / "recipe.yaml", tmp_path / "out", broken(*NOT_NEEDED)
    recipe.write_text(dump_config(resolve_config("sft", **values)))
    done = swiftlite(packages, "sft", "--recipe", recipe, "--report-to", "tensorboard")
    assert done.returncode == 0 and "another torch" not in done.stderr, done.stderr
    assert "warning: loss.png needs the package matplotlib, whose import fails: RuntimeError: PIL was" in done.stdout
    assert (run / "model" / "adapter_config.json").is_file() and (run / "report.html").is_file()
    assert list((run / "tensorboard").iterdir())

    for command in (["infer", "--prompt", "Hi"], ["export", "--output-dir", tmp_path / "whole"]):
        done = swiftlite(packages, *command, "--model", run / "model")
        assert done.returncode == 0 and "another torch" not in done.stderr, done.stderr
    done = swiftlite(packages, "report", run)
    assert done.returncode == 2 and "install PIL again" in done.stderr and "report.html" in done.stdout


def test_an_import_that_fails_in_a_started_process_is_told(broken):
    script = (
        "from swiftlite.cli.errors import show_error\n"
        "from swiftlite.parallel.start import Machines, start_processes, told_before_joining\n"
        "def body():\n"
        "    with told_before_joining(show_error): import needed_broken\n"
        "if __name__ == '__main__': start_processes(Machines(2), body)\n"
    )
    path = broken("needed_broken").parent / "start.py"
    path.write_text(script)
    done = python(path.parent / "packages", path)
    assert done.returncode == 1
    assert done.stderr.count("error: the package needed_broken cannot be imported: RuntimeError") == 1, done.stderr


def swiftlite(packages, *words):
    return python(packages, "-m", "swiftlite", *words)


def python(packages, *words):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": f"{packages}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_what_a_setting_needs_is_named_with_its_own_error(monkeypatch, broken):
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    monkeypatch.setattr(imports, "_broken", {})
    monkeypatch.setitem(sys.modules, "hidden_broken", None)
    del sys.modules["hidden_broken"]
    monkeypatch.syspath_prepend(broken("torchao_broken", "swanlab", "hidden_broken"))
    hide_broken("hidden_broken")
    for use in (
        lambda flag: import_package("torchao_broken", flag),
        lambda flag: import_package("hidden_broken", flag),
        lambda flag: check_trackers(["swanlab"]),
    ):
        with pytest.raises(UserError, match="whose import fails: RuntimeError: [a-z_]* was made for") as error:
            use("--fp8")
        assert "again" in error.value.fix


@pytest.mark.parametrize("name", imports.TRIED)
def test_who_tries_a_broken_package_does_without_it(monkeypatch, broken, name):
    monkeypatch.setattr(imports, "_broken", {})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    monkeypatch.syspath_prepend(broken(name))
    do_without_broken()
    with pytest.raises(ImportError, match=f"RuntimeError: {name} was made for") as error:
        importlib.import_module(name)
    assert error.value.name == name
    with pytest.raises(UserError, match=f"whose import fails: RuntimeError: {name} was"):
        import_package(name, "--compile")


def test_a_broken_library_is_not_taken_for_a_data_set_that_is_not_there(tmp_path, tiny_model, broken):
    packages = broken("datasets")
    words = ("sft", "--model", tiny_model("llama"), "--dataset", "owner/name", "--output-dir", tmp_path / "out")
    done = swiftlite(packages, *words)
    assert done.returncode == 2 and "neither a file" not in done.stderr
    assert "needs the package datasets, whose import fails: RuntimeError: datasets was made for" in done.stderr


def test_a_library_does_without_what_it_tries(tmp_path, tiny_model, broken):
    words = ("inspect", "--model", tiny_model("llama"), "--dataset", "owner/name")
    done = swiftlite(broken("zstandard"), *words)  # which fsspec tries for datasets
    assert done.returncode == 2 and "error: neither a file here nor a data set that the hub gives" in done.stderr


@pytest.mark.parametrize(
    ("flag", "extra", "fix"),
    [
        ("--report-to wandb", "wandb", "pip install 'swiftlite[wandb]', or leave --report-to wandb out"),
        ("the adapter", None, "pip install 'not_here'"),  # no extra of swiftlite brings what it always needs
    ],
)
def test_what_is_not_installed_is_told_with_what_brings_it(flag, extra, fix):
    with pytest.raises(UserError, match=f"{flag} needs the package not_here") as error:
        import_package("not_here", flag, extra)
    assert error.value.fix == fix


def test_any_other_is_named(monkeypatch, broken, capsys):
    monkeypatch.syspath_prepend(broken("needed_broken"))
    try:
        try:
            import needed_broken  # noqa: F401
        except RuntimeError as first:
            raise ImportError("Could not import module 'PreTrainedModel'") from first
    except ImportError as error:
        assert show_error(error) == 1
    told = capsys.readouterr().err
    assert "the package needed_broken cannot be imported: RuntimeError: needed_broken was made for" in told
    assert show_error(RuntimeError("no import")) == 1
    assert "error: RuntimeError: no import\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "advice"),
    [
        ("ImportError('libx.so: failed to map segment from shared object')", 1, "ulimit -v unlimited"),
        ("OSError(12, 'Cannot allocate memory')", 1, "ulimit -v unlimited"),
        ("ValueError('Invalid log settings: bogus')", 2, "where: TORCH_LOGS"),
    ],
)
def test_a_package_that_the_surroundings_stop_is_not_to_be_installed_again(
    monkeypatch, tmp_path, capsys, raised, code, advice
):
    monkeypatch.setenv("TORCH_LOGS", "bogus")
    name = f"stopped_{abs(hash(raised))}"
    (tmp_path / f"{name}.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception) as error:  # noqa: B017, PT011 - three kinds
        importlib.import_module(name)
    assert show_error(error.value) == code
    told = capsys.readouterr().err
    assert advice in told and "install" not in told


def test_a_package_that_finds_no_room_for_temporary_files_is_not_broken(monkeypatch, tmp_path, capsys):
    (tmp_path / "wants_room.py").write_text("import tempfile\ntempfile.gettempdir()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "nowhere")])
    with pytest.raises(FileNotFoundError) as error:
        importlib.import_module("wants_room")
    assert show_error(error.value) == 2
    told = capsys.readouterr().err
    assert "no folder in which temporary files can be written" in told and "set TMPDIR" in told


def test_a_package_that_wants_docstrings_is_not_broken(broken):
    run = "import sys; from swiftlite.cli.errors import show_error\ntry: import wants_docstrings\n"
    run += "except RuntimeError as error: sys.exit(show_error(error))"
    words = [sys.executable, "-OO", "-c", run]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(broken("wants_docstrings")), *sys.path])}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "wants_docstrings does not work without docstrings" in done.stderr
    assert "install it again" not in done.stderr and "PYTHONOPTIMIZE=2, or -OO" in done.stderr
