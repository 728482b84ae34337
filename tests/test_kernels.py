"""When Liger's kernels are used. What they compute needs a GPU: `scripts/gpu_check.sh`."""

import sys
from types import ModuleType

import pytest
import torch

from swiftlite import imports
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.kernels.liger import choose_kernels
from swiftlite.training.setup import check_model

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def installed(monkeypatch):
    """A package that knows Llama."""
    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for name in ("liger_kernel", "liger_kernel.transformers", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("swiftlite.models.kernels.liger.is_installed", lambda name: True)


@pytest.mark.parametrize(
    ("wanted", "model_type", "device", "divided", "chosen"),
    [
        ("none", "llama", GPU, False, "none"),
        ("auto", "llama", GPU, False, "liger"),
        ("auto", "llama", GPU, True, "none"),
        ("auto", "llama", CPU, False, "none"),
        ("auto", "gpt2", GPU, False, "none"),
        ("liger", "llama", GPU, False, "liger"),
    ],
)
def test_what_is_chosen(installed, wanted, model_type, device, divided, chosen):
    assert choose_kernels(wanted, model_type, device, divided=divided, tell=pytest.fail) == chosen


def test_auto_does_without_the_package(monkeypatch):
    monkeypatch.setattr("swiftlite.models.kernels.liger.is_installed", lambda name: False)
    assert choose_kernels("auto", "llama", GPU, divided=False, tell=pytest.fail) == "none"


def test_auto_does_without_a_package_that_cannot_be_imported(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    said = []
    assert choose_kernels("auto", "llama", GPU, divided=False, tell=said.append) == "none"
    (note,) = said
    assert note.startswith("--kernels auto does without Liger's kernels, its import fails: ModuleNotFoundError")
    with pytest.raises(UserError, match="its import fails: ModuleNotFoundError"):
        choose_kernels("liger", "llama", GPU, divided=False, tell=pytest.fail)


@pytest.mark.parametrize(("model_type", "device", "words"), [("llama", CPU, "need a GPU"), ("gpt2", GPU, "none for")])
def test_what_was_asked_for_by_name_and_cannot_be_is_refused(installed, model_type, device, words):
    with pytest.raises(UserError, match=words):
        choose_kernels("liger", model_type, device, divided=False, tell=pytest.fail)


def test_contradictions_and_a_missing_package_are_named(monkeypatch):
    values = {"model": "nowhere", "dataset": ["d"], "kernels": "liger"}
    with pytest.raises(UserError, match="fuse the same"):
        resolve_config("sft", **values, compile=True)
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package liger_kernel") as error:
        check_model(resolve_config("sft", **values), None, None, None)
    assert "swiftlite[liger]" in error.value.fix
