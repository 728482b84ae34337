"""Measures a training command from inside, without changing it: put this folder on PYTHONPATH and name a log file.

Python imports `sitecustomize` in every process that the command starts. As soon as one imports torch, two hooks are
set: token ids that enter a token embedding in training are counted, and each optimizer step writes one JSON line
with its time, that of its first ids, the real ids (not padding), the padding ids, those of one marked token and the
peak resident memory of that process.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import json
import os
import sys
import time

LOG = os.environ.get("BENCH_LOG")
PAD_ID = int(os.environ.get("BENCH_PAD_ID", "0"))
MARK_ID = int(os.environ.get("BENCH_MARK_ID") or -1)  # a token that each answer has once
VOCABULARY = int(os.environ.get("BENCH_VOCABULARY", "0"))  # smaller embeddings (positions, types) hold no token ids


def peak_rss() -> int:
    """Peak resident memory of this process in bytes (VmHWM)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


class Counter:
    """Ids since the last step, and the lines of the log."""

    def __init__(self) -> None:
        self.real = self.padding = self.marked = self.steps = 0
        self.began: float | None = None
        self.process = os.getpid()

    def count(self, ids) -> None:
        self.began = self.began or time.time()
        real = int(ids.ne(PAD_ID).sum())
        self.real += real
        self.padding += ids.numel() - real
        self.marked += int(ids.eq(MARK_ID).sum())

    def write(self, kind: str) -> None:
        import torch

        row = {
            "kind": kind, "time": time.time(), "began": self.began, "pid": self.process, "step": self.steps,
            "real": self.real, "padding": self.padding, "marked": self.marked, "rss": peak_rss(),
            "threads": torch.get_num_threads(),
        }  # fmt: skip
        with open(LOG, "a") as file:
            file.write(json.dumps(row) + "\n")
        self.real = self.padding = self.marked = 0
        self.began = None

    def step(self, *_: object) -> None:
        if self.real + self.padding == 0:  # a wrapper around the optimizer fires a second time for the same step
            return
        self.steps += 1
        self.write("step")

    def end(self) -> None:
        if self.steps and os.getpid() == self.process:  # not the forked workers of a data loader
            self.write("end")


def install() -> None:
    """Set the hooks. torch has just been imported."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counter = Counter()
    forward = torch.nn.Embedding.forward

    def counted(self, input):
        # a reference's pass may be in training mode too, but it has no gradients
        if self.training and torch.is_grad_enabled() and self.num_embeddings >= VOCABULARY:
            counter.count(input)
        return forward(self, input)

    torch.nn.Embedding.forward = counted
    register_optimizer_step_post_hook(counter.step)
    atexit.register(counter.end)


class AfterTorch(importlib.abc.MetaPathFinder):
    """Lets the import of torch go on as ever, and calls `install` when it is done. Being asked where torch lies, as
    transformers does before it imports it, changes nothing.
    """

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path=None, target=None):
        if name != "torch" or self._asking:
            return None
        self._asking = True  # the other finders answer
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module) -> None:
            execute(module)
            sys.meta_path.remove(self)
            install()

        spec.loader.exec_module = execute_and_install
        return spec


if LOG:
    sys.meta_path.insert(0, AfterTorch())
