"""The import of torch's and transformers' code, without what a run does not use and without looking twice.

What is used is the same; the rest waits until somebody asks for it, or is left out. Four things see to that:

- Python's cyclic garbage collector is off: an import makes hundreds of thousands of objects that stay, and it looks at
  all of them again and again.
- numpy starts no threads of its own, which would spin for a while beside the imports (`import_numpy`).
- transformers reads the source of its models once on a machine, not twice in each process (`_remembered`), and leaves
  its own distributed training and accelerate out, which swiftlite never uses: the engine cuts models itself.
- torch's compiler is not imported before something is compiled, nor its algebra of shapes, nor what divides tensors
  before there are several processes, nor kernels in Python for tensors without data before one of them is wanted
  (`swiftlite.postponed`).
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import inspect
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from swiftlite.errors import UserError
from swiftlite.imports import default_cache, do_without_broken, hide_broken
from swiftlite.postponed import META_KERNELS, POSTPONED, Postponed, register_meta_kernels

METACLASSES = (("torch._custom_class_base", "CustomClassBaseMeta"), ("torch._opaque_base", "OpaqueBaseMeta"))
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
# What transformers and peft find and import, but text and the layers that swiftlite trains have no use for.
UNUSED = (
    *("torchvision", "cv2", "torchaudio", "torchcodec", "soundfile", "soxr", "librosa"),
    *("torch_distributed", "accelerate", "torchao", "hqq", "scipy", "sklearn"),
)
OTHER_LAYERS = ("torchao", "gptqmodel", "aqlm", "eetq", "hqq", "inc", "te_pytorch", "bnb", "bnb_4bit")
SCAN = "create_import_structure_from_path"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around the import of torch or transformers. What was imported is frozen (`gc.freeze`) at the end: later
    collections pass it over as well."""
    was_enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    do_without_broken()
    finder, torch = _Finder(), sys.modules.get("torch")
    sys.meta_path.insert(0, finder)
    try:
        import_numpy()
        with _changed(inspect, "getmodule", _module_by_name), _changed(torch, "compile", _compile_at_call):
            yield
        if sys.modules.get("torch"):
            for name in POSTPONED:  # here, while it is postponed: optimizers import the compiler at their first step
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        if was_enabled:
            if len(sys.modules) > known:
                gc.freeze()
            gc.enable()


def import_numpy() -> None:
    """Import it without threads for products of its own: they take a core from other imports when they start, and it
    multiplies nothing here."""
    if "numpy" in sys.modules:
        return
    before = os.environ.get(NUMPY_THREADS)
    os.environ[NUMPY_THREADS] = "1"
    try:
        importlib.import_module("numpy")
    finally:
        del os.environ[NUMPY_THREADS]
        if before is not None:
            os.environ[NUMPY_THREADS] = before


@contextmanager
def _changed(owner: ModuleType | None, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """owner: None if it is not imported."""
    if owner is None:
        yield
        return
    plain = getattr(owner, name)
    setattr(owner, name, change(plain))
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _generators_can_be_made() -> bool:
    """From PyTorch 2.13 on random generators wait for a class that is given to them on the way to the kernels in
    Python."""
    core = importlib.import_module("torch._C")
    if hasattr(core, "_set_generator_metaclass"):
        home, name = next(each for each in METACLASSES if find_spec(each[0]))
        core._set_generator_metaclass(getattr(importlib.import_module(home), name))
    try:
        core.Generator()
    except RuntimeError:
        return False
    return True


class _Finder(MetaPathFinder):
    """Finds some modules where they are, and has them executed in another way."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGED.get(name) or (Postponed.stand_in if name in POSTPONED else None)
        if change is None:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(change, spec.loader.exec_module)
        return spec


def _change_utilities(execute: Callable[[ModuleType], None], utilities: ModuleType) -> None:
    """transformers' module that tells what there is. accelerate spreads models over devices, which swiftlite does; the
    rest is for images and other weights. Where its import fails, as torchvision's may, no text needs to know."""
    for name in ("PIL", "sentencepiece", "kernels"):  # some tokenizers use the first ones; the last come from the hub
        hide_broken(name)
    execute(utilities)
    if hasattr(utilities, SCAN):
        setattr(utilities, SCAN, _remembered(getattr(utilities, SCAN), Path(utilities.__file__)))
    for name in UNUSED:
        setattr(utilities, f"is_{name}_available", _never)


def _change_adapters(execute: Callable[[ModuleType], None], utilities: ModuleType) -> None:
    """peft's module that tells what there is: it adapts layers of many packages, and imports them to know them."""
    execute(utilities)
    for name in OTHER_LAYERS:
        setattr(utilities, f"is_{name}_available", _never)


def _change_helpers(execute: Callable[[ModuleType], None], helpers: ModuleType) -> None:
    """peft's helpers, which import bitsandbytes where it is to know its layers. Those here are ours."""
    unused = sys.modules.setdefault("bitsandbytes", None) is None  # Python finds no module that is None
    execute(helpers)
    if unused:
        del sys.modules["bitsandbytes"]


def _never(*_: Any, **__: Any) -> bool:
    return False


def _change_tuners(execute: Callable[[ModuleType], None], tuners: ModuleType) -> None:
    """peft's module that adds adapters, which swiftlite does before anything is divided."""
    execute(tuners)
    tuners._torch_supports_distributed = False


def _change_fake_tensors(execute: Callable[[ModuleType], None], fakes: ModuleType) -> None:
    """torch's module of tensors without data that have a device all the same: they ask which kernels there are."""
    execute(fakes)
    begin = fakes.FakeTensorMode.__init__

    @functools.wraps(begin)
    def begin_with_kernels(*positional: Any, **named: Any) -> None:
        register_meta_kernels()
        begin(*positional, **named)

    fakes.FakeTensorMode.__init__ = begin_with_kernels


def _change_meta_kernels(execute: Callable[[ModuleType], None], kernels: ModuleType) -> None:
    """torch's module of kernels in Python for tensors without data: postponed where nothing else needs it."""
    if _generators_can_be_made():
        Postponed.stand_in(execute, kernels)
    else:
        execute(kernels)


CHANGED = {
    META_KERNELS: _change_meta_kernels,
    "torch._subclasses.fake_tensor": _change_fake_tensors,
    "transformers.utils.import_utils": _change_utilities,
    "peft.import_utils": _change_adapters,
    "peft.helpers": _change_helpers,
    "peft.tuners.tuners_utils": _change_tuners,
}


def _module_by_name(find: Callable[..., Any]) -> Callable[..., Any]:
    """inspect.getmodule that asks a frame for its module's name. It looks up the path of every module there is, and
    torch asks it whenever it registers an operator."""

    def module_of(thing: Any, *options: Any) -> Any:
        return sys.modules.get(thing.f_globals.get("__name__")) if inspect.isframe(thing) else find(thing, *options)

    return module_of


def _compile_at_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile that imports the compiler when what it gives is called, not when a library marks a function."""

    @functools.wraps(compile_now)
    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if not isinstance(function, FunctionType):
            return compile_now(function, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *positional, **named: compiled()(*positional, **named))

    return compile_later


def _remembered(scan: Callable[[Any], Any], code: Path) -> Callable[[Any], Any]:
    """scan: from a folder, or a file in it, to the names defined below, in plain containers; code: its source."""

    of_folder = functools.cache(lambda folder: _load_or_make(folder, scan, code))  # asked as a folder and as a file

    def look_up(place: Any) -> Any:
        folder = Path(place)
        folder = folder.parent if folder.is_file() else folder
        return of_folder(folder) if folder.name == "models" else scan(place)

    return look_up


def _load_or_make(folder: Path, scan: Callable[[Any], Any], code: Path) -> Any:
    try:
        cache = default_cache()
    except UserError:  # a user without a home has none
        return scan(folder)
    state = _state_of(folder, code)
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    kept = cache / "imports" / f"{name}.{sys.implementation.cache_tag}"
    with suppress(OSError):
        content = kept.read_bytes()
        found = content[2 * len(state) :]
        if content.startswith(state + hashlib.sha256(found).digest()):  # marshal reads only what it has written
            return marshal.loads(found)
    names = scan(folder)
    with suppress(OSError, ValueError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        written = marshal.dumps(names)
        partial.write_bytes(state + hashlib.sha256(written).digest() + written)
        os.replace(partial, kept)
    return names


def _state_of(folder: Path, code: Path) -> bytes:
    """A digest of the name, size and time of change of every source file below a folder, and of one more."""
    files, folders = [os.fspath(code)], [os.fspath(folder)]
    for each in folders:  # which grows on the way
        with os.scandir(each) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    files.append(entry.path)
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    digest = hashlib.sha256()
    for file in sorted(files):
        status = os.stat(file)
        digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return digest.digest()
