"""Modules whose code runs when anything of theirs is wanted, and is never run where nothing is."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
META_KERNELS = "torch._meta_registrations"
SHAPES = "torch.fx.experimental.symbolic_shapes"
POSTPONED = (COMPILER, "torch.distributed.tensor", META_KERNELS, SHAPES)
ALONE = (f"{COMPILER}.config", f"{COMPILER}._trace_wrapped_higher_order_op")  # import nothing of it
MARKS = ("allow_in_graph", "assume_constant_result", "disallow_in_graph")
# What others take of a module by name when they are imported, to call it later: of flexible attention, in PyTorch 2.15.
TAKEN = {SHAPES: ("has_free_unbacked_symbols",)}


def register_meta_kernels() -> bool:
    """Have torch register its kernels in Python for tensors without data (device `meta`, fake tensors), which takes
    0.2 s. Returns whether they were not there yet: an operation that raised NotImplementedError may work now."""
    kernels = sys.modules.get(META_KERNELS)
    if not isinstance(kernels, Postponed):
        return False
    kernels.run()
    return True


class _PackageFirst(MetaPathFinder):
    """Runs the code of a postponed package before that of a module in it, as if it had never been postponed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package = next((package for package in POSTPONED if name.startswith(f"{package}.")), None)
        if package is None or name in ALONE or not isinstance(sys.modules.get(package), Postponed):
            return None
        sys.modules[package].run()
        return _Found.spec_of(sys.modules[name]) if name in sys.modules else None


class _Found(Loader):
    """Of a module that its package has imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    @classmethod
    def spec_of(cls, module: ModuleType) -> ModuleSpec:
        """For as long as it is looked for it has to be the module's own, or Python executes its code once more."""
        module.__spec__ = ModuleSpec(module.__name__, cls(module))
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class Postponed(ModuleType):
    """A module before its code has run. It runs when anything is asked of it that is not here yet."""

    @classmethod
    def stand_in(cls, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if not any(isinstance(finder, _PackageFirst) for finder in sys.meta_path):
            sys.meta_path.insert(0, _PackageFirst())
        module.__class__ = cls
        marks = _Marks(module) if module.__name__ == COMPILER else None
        vars(module).update(marks.functions() if marks else {}, _marks=marks, _execute=execute, _lock=threading.RLock())
        for name in TAKEN.get(module.__name__, ()):
            setattr(module, name, functools.partial(module._call, name))

    def __getattr__(self, name: str) -> Any:
        """Python and others ask every module for `__names__`, and checkpointing the compiler for a setting: that is no
        use of it."""
        if name == "config" and self._marks:
            return importlib.import_module(f"{self.__name__}.config")
        if not name.startswith("__") or name == "__all__":
            self.run()
        return ModuleType.__getattribute__(self, name)  # whose class this may be by now

    def _call(self, name: str, *positional: Any, **named: Any) -> Any:
        self.run()
        return getattr(self, name)(*positional, **named)

    def run(self) -> None:
        """Execute the module's code, once; it is an ordinary module afterwards."""
        with self._lock:
            execute = vars(self).pop("_execute", None)
            if execute is None:  # this thread is about it, or another one has done it
                return
            if self.__name__ != META_KERNELS:
                register_meta_kernels()
            try:
                execute(self)
            except BaseException:
                self._execute = execute
                raise
            self.__class__ = ModuleType
            if self._marks:
                self._marks.hand_on()


class _Marks:
    """The functions of torch's compiler that mark others, before its code has run.

    torch and transformers import it (0.6 s, 80 MiB) to mark functions for it, and each step of an optimizer breaks a
    graph in it. Nothing comes of that as long as nothing is compiled; marks are handed on when its code has run.
    """

    def __init__(self, compiler: Postponed) -> None:
        self._compiler = compiler
        self._made: list[tuple[str, Callable[..., Any]]] = []
        self._disabled: list[Callable[[], None]] = []
        self._is_there = False

    def functions(self) -> dict[str, Callable[..., Any]]:
        keep = {name: functools.partial(self._keep, name) for name in MARKS}
        return {"graph_break": lambda message="": None, "disable": self._disable, **keep}

    def hand_on(self) -> None:
        self._is_there = True
        for name, function in self._made:
            getattr(self._compiler, name)(function)
        for disable in self._disabled:
            disable()

    def _keep(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._is_there:
            return getattr(self._compiler, name)(function)
        self._made.append((name, function))
        return function

    def _disable(self, function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """The function as it is until the compiler is there, and then as that wants it."""
        if function is None:
            return functools.partial(self._disable, recursive=recursive, **options)
        if not isinstance(function, FunctionType) and not self._is_there:
            self._compiler.run()
        if self._is_there:
            return self._compiler.disable(function, recursive, **options)
        marked = [function]

        def hand_on() -> None:
            marked[0] = self._compiler.disable(function, recursive, **options)

        @functools.wraps(function)
        def call(*positional: Any, **named: Any) -> Any:
            return marked[0](*positional, **named)

        self._disabled.append(hand_on)
        return call
