"""Packages that are installed and cannot be imported, such as those that were made for another torch."""

import os
import subprocess
import sys

import pytest
from test_parity import settings

from swiftlite.cli.errors import show_error
from swiftlite.config.resolve import resolve_config
from swiftlite.config.save import dump_config
from swiftlite.errors import UserError
from swiftlite.imports import import_package
from swiftlite.reporting.trackers import open_trackers

NOT_NEEDED = ("PIL", "bitsandbytes", "sentencepiece", "scipy", "torchao", "torchvision", "wandb")


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
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(resolve_config("sft", **values)))
    done = subprocess.run(
        [sys.executable, "-m", "swiftlite", "sft", "--recipe", str(recipe)],
        env=os.environ | {"PYTHONPATH": f"{broken(*NOT_NEEDED)}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "another torch" not in done.stderr, done.stderr
    assert (tmp_path / "out" / "model" / "adapter_config.json").is_file()


def test_what_a_setting_needs_is_named_with_its_own_error(monkeypatch, broken, tmp_path):
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    monkeypatch.syspath_prepend(broken("torchao_broken", "swanlab"))
    for use in (
        lambda flag: import_package("torchao_broken", flag),
        lambda flag: open_trackers(["swanlab"], tmp_path, "run", "1", 0, {}),
    ):
        with pytest.raises(UserError, match="whose import fails: RuntimeError: [a-z_]* was made for") as error:
            use("--fp8")
        assert "again" in error.value.fix


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
