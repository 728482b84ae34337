"""Imports of large libraries: what transformers finds out about its files is remembered, and is the same."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import swiftlite
from swiftlite.errors import UserError
from swiftlite.imports import default_cache
from swiftlite.quick_imports import _remembered, quick_imports

ASK = """
import sys
from transformers.utils.import_utils import create_import_structure_from_path, define_import_structure
import transformers
folder = transformers.__path__[0] + "/models"
print(hash(repr(sorted((sorted(key), sorted((k, sorted(v)) for k, v in value.items()))
    for key, value in define_import_structure(folder).items()))))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "llama" / "modeling_llama.py").write_text("__all__ = ['Llama']")
    (folder / "__init__.py").touch()
    return folder


class Scan:
    """Counts how often it is asked, and names the files there are."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, place: Path) -> dict[str, object]:
        self.calls += 1
        return {"llama": {frozenset(("torch",)): {file.stem: {file.read_text()} for file in place.rglob("*.py")}}}


def ask(models: Path, scan: Scan) -> object:
    """What a new process would be told."""
    return _remembered(scan, Path(__file__))(models / "__init__.py")


def test_names_are_looked_for_once(models: Path) -> None:
    scan = Scan()
    first = ask(models, scan)
    assert ask(models, scan) == first == Scan()(models)
    assert scan.calls == 1


def test_a_user_without_a_home_looks_each_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    scan = Scan()
    assert ask(models, scan) == ask(models, scan) == Scan()(models)
    assert scan.calls == 2
    with pytest.raises(UserError, match="no home folder.*\n.*--cache-dir"):
        default_cache()


def test_a_file_of_the_folder_stands_for_it(models: Path) -> None:
    scan = Scan()
    look_up = _remembered(scan, Path(__file__))
    assert look_up(models) == look_up(str(models / "__init__.py"))
    assert scan.calls == 1


@pytest.mark.parametrize("change", ["edited", "added", "removed", "touched", "damaged"])
def test_whatever_differs_is_looked_at_again(models: Path, change: str) -> None:
    scan, file = Scan(), models / "llama" / "modeling_llama.py"
    ask(models, scan)
    [kept] = (models.parent / "cache" / "swiftlite" / "imports").iterdir()
    if change == "edited":
        file.write_text("__all__ = ['Other']")
    elif change == "added":
        (models / "llama" / "more.py").touch()
    elif change == "removed":
        file.unlink()
    elif change == "touched":
        os.utime(file, ns=(0, 0))
    else:
        kept.write_bytes(kept.read_bytes()[:-1])
    assert ask(models, scan) == Scan()(models)
    assert scan.calls == 2


def test_other_folders_are_left_to_transformers(models: Path) -> None:
    scan = Scan()
    for _ in range(2):
        _remembered(scan, Path(__file__))(models / "llama")
    assert scan.calls == 2


def test_a_cache_that_cannot_be_written_is_done_without(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(models.parent / "file"))
    assert ask(models, Scan()) == Scan()(models)


def test_transformers_itself_finds_the_same(tmp_path: Path) -> None:
    """Plainly, when it is looked for and kept, and when it is remembered."""
    quick = "from swiftlite.quick_imports import quick_imports\nwith quick_imports():\n    import transformers\n"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "0"}
    said = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for program in (ASK, quick + ASK, quick + ASK)
    ]
    assert len({process.stdout for process in said}) == 1
    assert len(list(tmp_path.rglob("imports/*"))) == 1


def run(program: str, *arguments: str) -> str:
    """What a fresh process prints."""
    quick = "from swiftlite.quick_imports import quick_imports\nwith quick_imports():\n    import torch\n"
    done = subprocess.run(
        [sys.executable, "-c", quick + program, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = """
import sys
from swiftlite.__main__ import main
sys.argv = ["swiftlite", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code
heavy = ("sympy", "torch._dynamo.symbolic_convert", "torch._inductor", "torch.distributed.tensor._api", "torch._refs")
print("imported:", *(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize("flags", [(), ("--tuner", "lora"), ("--activation-checkpointing", "full")])
def test_one_process_imports_no_compiler_and_nothing_that_divides(
    flags: tuple[str, ...], tmp_path: Path, tiny_model, write_rows, chat_rows
) -> None:
    said = run(
        TRAIN, "sft", "--model", str(tiny_model("llama")), "--dataset", str(write_rows("rows.jsonl", chat_rows)),
        "--output-dir", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache"), "--max-steps", "2", *flags,
    )  # fmt: skip
    assert said.rstrip().endswith("imported:")


MARKED = """
import warnings
import torch._dynamo

marked = []

warnings.simplefilter("error")  # --compile would show them to a user

@torch._dynamo.allow_in_graph
def in_graph(x):
    print("must not be traced")
    return x + 1

@torch.compiler.disable
def apart(x):
    marked.append(torch.compiler.is_compiling())
    return x + 1

def count_graphs(graph, inputs):
    marked.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward

def both(x):
    return in_graph(apart(x) * 2)

before = both(torch.ones(1)).item(), type(torch._dynamo).__name__
after = torch.compile(both, backend=count_graphs)(torch.ones(1)).item(), type(torch._dynamo).__name__
print(before, after, [each if isinstance(each, bool) else in_graph in each for each in marked])
"""


def test_marks_made_before_the_compiler_is_there_are_handed_on() -> None:
    said = run(MARKED)
    assert "(5.0, 'Postponed') (5.0, 'module') [False, False, True]" in said


SUBMODULE = """
import sys
{}
import torch._dynamo.utils, torch._inductor.utils
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo.utils.counters is sys.modules["torch._dynamo.convert_frame"].counters  # imported once
assert torch._dynamo.utils.__spec__.loader.name == "torch._dynamo.utils"
assert type(torch._dynamo).__name__ == "module"
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""


@pytest.mark.parametrize(
    "first",
    ["import torch._dynamo.utils", "from torch._inductor.utils import IndentedBuffer", "torch._dynamo.reset()"],
)
def test_a_module_of_a_postponed_package_is_imported_after_it(first: str) -> None:
    assert run(SUBMODULE.format(first)) == "2.0\n"


TAKEN = """
import sys
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
print(type(torch.fx.experimental.symbolic_shapes).__name__, "sympy" in sys.modules)
print(has_free_unbacked_symbols(torch.ones(2)), type(torch.fx.experimental.symbolic_shapes).__name__)
"""


def test_what_is_taken_of_a_postponed_module_by_name_runs_it_when_it_is_called() -> None:
    assert run(TAKEN) == "Postponed False\nFalse module\n"


KERNELS = """
import sys
kernels = sys.modules["torch._meta_registrations"]
x = torch.ones(2, 3, device="meta")
print(type(kernels).__name__, torch.nn.Linear(3, 4, device="meta")(x).shape)
drawn = torch.rand(2, generator=torch.Generator().manual_seed(1))
{}
print(type(kernels).__name__, torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(1))))
"""
WANTED = {
    "fake tensors": """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.cdist(torch.ones(3, 2), torch.ones(4, 2)).shape == (3, 4)
""",
    "a model's constructor": """
from swiftlite.models.load import _parameters_on_meta
torch.library.define("swiftlite_tests::twice", "(Tensor x) -> Tensor")
torch.library.impl("swiftlite_tests::twice", "cpu", lambda x: 2 * x)
with _parameters_on_meta():
    assert torch.cdist(x, x).shape == (2, 2)
    try:
        torch.ops.swiftlite_tests.twice(x)
        raise SystemExit("what has no kernel must fail")
    except NotImplementedError:
        pass
""",
    "the compiler": """
assert torch.compile(lambda x: torch.cdist(x, x), backend="eager")(torch.ones(2, 3)).shape == (2, 2)
""",
    "what divides": "from torch.distributed.tensor import DTensor",
}


@pytest.mark.parametrize("first", WANTED)
def test_kernels_for_tensors_without_data_are_there_when_they_are_wanted(first: str) -> None:
    said = run(KERNELS.format(WANTED[first])).splitlines()
    assert said == ["Postponed torch.Size([2, 4])", "module True"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("chosen", [{}, {"OPENBLAS_NUM_THREADS": "3"}])
def test_no_thread_is_started_and_no_choice_changed(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    said = run("import os\nprint(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))")
    assert said == f"1 {chosen.get('OPENBLAS_NUM_THREADS')}\n"


def test_a_frame_is_of_the_module_that_inspect_finds() -> None:
    frame = inspect.currentframe()
    with quick_imports():
        found = inspect.getmodule(frame), inspect.getmodule(Path)
    assert found == (inspect.getmodule(frame), inspect.getmodule(Path))
    assert found == (sys.modules[__name__], sys.modules[Path.__module__])


TENSOR = """
from torch import nn
from swiftlite.dtensors import is_dtensor, is_fsdp_module, local
plain = torch.ones(2)
print(is_dtensor(plain), is_fsdp_module(nn.Linear(1, 1)), local(plain) is plain)
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = fully_shard(nn.Linear(1, 1))
print(is_dtensor(module.weight), is_fsdp_module(module), type(local(module.weight)) is torch.Tensor, is_dtensor(plain))
"""


def test_what_is_divided_is_known_once_something_is() -> None:
    assert run(TENSOR) == "False False True\nTrue True True False\n"


def test_adapters_do_not_import_packages_for_layers_that_are_not_there() -> None:
    code = (
        "import sys\nfrom swiftlite.quick_imports import quick_imports\nwith quick_imports(): import peft.tuners.lora\n"
    )
    code += (
        "import importlib.util as found\nprint(found.find_spec('bitsandbytes') is None, 'bitsandbytes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", ["random", "typer"])
def test_modules_in_the_working_folder_are_not_taken_for_the_libraries(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')")
    env = os.environ | {"PYTHONPATH": str(Path(swiftlite.__file__).parent.parent)}
    words = [sys.executable, "-m", "swiftlite", "recipes", "list"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
