"""`--compile`: the same curve, and everything is compiled in the first step: nothing for the check of the architecture
before it, nothing however the rows differ later."""

import shutil

import pytest
import torch
from test_launch import flags  # noqa: F401 - a fixture
from test_parity import metrics, settings, train_alone
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from worlds import run_swiftlite

from swiftlite.config.resolve import resolve_config
from swiftlite.models.compiled import compile_layers
from swiftlite.parallel.tensor_borders import DELETES_HIDDEN


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_train_the_same_and_compile_once(tmp_path, tiny_model, write_rows, chat_rows):
    data, curves, written = write_rows("rows.jsonl", chat_rows), {}, []

    def begin(_args):
        folder = tmp_path / "compiled"
        assert (folder / "audit.json").exists()  # the model has been checked
        file = folder / "metrics.jsonl"
        written.append(len(file.read_text().splitlines()) if file.exists() else 0)

    torch._dynamo.reset()
    callback_handler.register_start_callback(begin)
    try:
        for name, compiled in (("plain", False), ("compiled", True)):
            values = settings(tmp_path, tiny_model("llama"), data, activation_checkpointing="full")
            train_alone(resolve_config("sft", **values | {"compile": compiled, "output_dir": str(tmp_path / name)}))
            curves[name] = [(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / name)]
    finally:
        callback_handler.remove_start_callback(begin)
        torch._dynamo.reset()
    assert curves["compiled"] == [pytest.approx(pair, rel=1e-5) for pair in curves["plain"]]
    assert written and not any(written)  # nothing is compiled once the first step is done


@pytest.mark.skipif(DELETES_HIDDEN, reason="is refused with this torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_that_ranks_divide_train_the_same(tmp_path, flags):  # noqa: F811
    curves = []
    for size, more in ((1, []), (2, ["--compile", "--tp", "2"])):
        out = tmp_path / f"out{size}"
        run_swiftlite(size, "sft", *flags, "--max-steps", "2", "--output-dir", out, *more)
        curves.append([(row["loss"], row["grad_norm"]) for row in metrics(out)])
    assert curves[1] == [pytest.approx(pair, rel=1e-5) for pair in curves[0]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_first_row_as_long_as_the_model_is_wide_is_no_rule():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    layer = Layer(64, 64)
    torch._dynamo.reset()
    counters.clear()
    compile_layers([layer])
    for length in (64, 63, 80):
        layer(torch.ones(1, length, 64))
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(("checkpointing", "graphs"), [("none", 2), ("full", 2), ("selective", 0)])
def test_what_holds_a_convolution_over_tokens_stays_as_it_is_written(
    tmp_path, tiny_model, write_rows, chat_rows, checkpointing, graphs, capsys
):
    data, curves = write_rows("rows.jsonl", chat_rows), []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        more = {
            "activation_checkpointing": checkpointing,
            "compile": compiled,
            "output_dir": str(tmp_path / f"{compiled}"),
        }
        train_alone(resolve_config("sft", **settings(tmp_path, tiny_model("mamba2"), data, max_steps=2) | more))
        curves.append([(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / f"{compiled}")])
    said = capsys.readouterr().out
    assert curves[1] == [pytest.approx(pair, rel=1e-5) for pair in curves[0]]
    assert counters["stats"]["unique_graphs"] == graphs  # of norms
    assert said.count("--compile leaves out Mamba2Mixer") == 1 and said.count("compiled nothing") == (not graphs)
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_run_that_compiles_nothing_says_so(tmp_path, tiny_model, write_rows, chat_rows, capsys):
    """Which calls the compiler can follow, and so whether it is one, depends on the release."""
    torch._dynamo.reset()
    counters.clear()
    more = {"activation_checkpointing": "full", "compile": True, "max_steps": 1}
    train_alone(
        resolve_config("sft", **settings(tmp_path, tiny_model("llama"), write_rows("r.jsonl", chat_rows), **more))
    )
    assert ("compiled nothing" in capsys.readouterr().out) is not bool(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
