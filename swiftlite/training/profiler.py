"""`--profile`: records a few steps, and says where their time went by kind of work and by module.

A module's share of the backward pass is found through the numbers by which autograd links each of its functions to the
forward operation it belongs to (https://docs.pytorch.org/docs/stable/profiler.html).
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from swiftlite.models.anatomy import dissect
from swiftlite.parallel.mesh import Mesh
from swiftlite.reporting.files import disk_errors
from swiftlite.training.divide import Part

WARM, RECORDED = 2, 2  # steps left out before, steps recorded
QUIET = "6"  # the recorder's own notes would stand among the lines of the run
SCOPE, STEP, BACKWARD = "module: ", "ProfilerStep", "autograd::engine::evaluate_function: "

# What an operation's name says of its kind; the first that fits.
KINDS = (
    ("communication", ("c10d", "nccl", "gloo", "wait_tensor", "all_gather", "all_reduce", "reduce_scatter", "rs_wait")),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "varlen", "flex_attention")),
    (
        "matrix products",
        ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "_mm", "aten::matmul", "mkldnn::_linear"),
    ),
    ("optimizer", ("adam", "_foreach")),
    ("copies", ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::fill_", "aten::zero_", "Memcpy")),
)
COMMUNICATION, ATTENTION = KINDS[0][0], KINDS[1][0]
ATTENTION_NODE = "_ByDocument"  # autograd's node of `swiftlite.models.attention.cpu`, and that of its backward
ELEMENTWISE, REST = "element by element", "Python and waiting"
MEANWHILE = "while this one computed"


def kind_of(name: str) -> str:
    """The kind of work of one operation."""
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), ELEMENTWISE)


@dataclass(frozen=True)
class Table:
    """Milliseconds a step. wall: from begin to end; kinds: of all work; modules: (forward, backward) of each, where
    they are known.

    messages: (in which one was under way between processes, of that while this one computed).
    """

    wall: float
    kinds: dict[str, float]
    modules: dict[str, tuple[float, float]]
    messages: tuple[float, float] = (0.0, 0.0)

    def lines(self) -> list[str]:
        """As text for a terminal; the kinds and the rest add up to the step."""
        width = max([28, *(len(module) + 1 for module in self.modules)])
        rows = [f"{'kind of work':<{width}}{'ms a step':>12}{'share':>9}"]
        for kind, spent in sorted(self.kinds.items(), key=lambda item: -item[1]):
            rows.append(f"{kind:<{width}}{spent:>12,.1f}{spent / self.wall:>9.1%}")
        rows.append(f"{'step':<{width}}{self.wall:>12,.1f}{1:>9.1%}")
        if under_way := self.messages[0]:
            rows += ["", f"{'messages under way':<{width}}{under_way:>12,.1f}"]
            rows.append(f"{MEANWHILE:<{width}}{self.messages[1]:>12,.1f}{self.messages[1] / under_way:>9.1%}")
        rows += ["", f"{'module':<{width}}{'forward':>12}{'backward':>12}"] if self.modules else []
        for module, spent in sorted(self.modules.items(), key=lambda item: -sum(item[1])):
            rows.append(f"{module:<{width}}{spent[0]:>12,.1f}{spent[1]:>12,.1f}")
        return rows


class StepProfiler:
    """Records steps `WARM + 1` and the next. Use as a context manager around the steps; call `step` after each."""

    def __init__(self, folder: Path, mesh: Mesh, parts: Sequence[Part], *, by_module: bool) -> None:
        """parts: of the model here; by_module: mark the modules, which compiled layers do not bear."""
        self._folder, self._name, self._on_gpu = folder, f"rank-{mesh.rank:05d}", mesh.device.type == "cuda"
        self._parts, self._by_module, self._marks = parts if by_module else [], by_module, []
        self.table: Table | None = None
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu,
            schedule=schedule(wait=WARM - 1, warmup=1, active=RECORDED, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )

    def __enter__(self) -> StepProfiler:
        self._marks = [mark for part in self._parts for mark in _mark(part)]
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        for mark in self._marks:
            mark.remove()

    def step(self) -> bool:
        """One more step has ended. Returns whether the table is there since."""
        known = self.table is not None
        self._profile.step()
        return self.table is not None and not known

    def words(self) -> str:
        """What takes the most, and where the rest stands."""
        largest = sorted(self.table.kinds.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{kind} {spent / self.table.wall:.0%}" for kind, spent in largest)
        return f"a step of {self.table.wall:,.0f} ms: {shares}; more in {self._folder / self._name}.txt"

    def _write(self, recorded: profile) -> None:
        if self._profile.step_num < WARM + RECORDED:  # the run ended before
            return
        self.table = tabulate(recorded.events(), on_gpu=self._on_gpu)
        if not self._by_module:  # all of it would be outside the model
            self.table = replace(self.table, modules={})
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._folder / f"{self._name}.json.gz"))
            (self._folder / f"{self._name}.txt").write_text("\n".join(self.table.lines()) + "\n", encoding="utf-8")


def _mark(part: Part) -> list[torch.utils.hooks.RemovableHandle]:
    """Name what runs inside each kind of module: the layers' parts, the decoder's, and what is left of both."""
    anatomy = dissect(part.base)
    named = {part.scorer: "head and loss", anatomy.decoder: "decoder, rest"}
    for name, child in anatomy.decoder.named_children():
        named[child] = name
    for layer in anatomy.layers:
        named[layer] = "layers, rest"
        named |= {child: f"layers.{name}" for name, child in layer.named_children()}
    named.pop(anatomy.layers, None)
    return [handle for module, name in named.items() for handle in _bracket(module, name)]


def _bracket(module: nn.Module, name: str) -> list[torch.utils.hooks.RemovableHandle]:
    here = threading.local()  # the module may run in several threads at a time

    def enter(*_: object) -> None:
        here.scopes = [*getattr(here, "scopes", []), record_function(SCOPE + name)]
        here.scopes[-1].__enter__()

    def leave(*_: object) -> None:
        here.scopes.pop().__exit__(None, None, None)

    # recomputation in the backward pass leaves a module by an exception
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def tabulate(events: Sequence, *, on_gpu: bool) -> Table:
    """Sum recorded events (of `torch.profiler.profile.events()`) up by kind and by module.

    On a GPU it is the time of kernels, and what no kernel covers is the rest; on a CPU the time of operations in the
    thread that trains.
    """
    steps = [event for event in events if event.name.startswith(STEP) and event.device_type == DeviceType.CPU]
    wall, count = sum(step.cpu_time_total for step in steps), max(1, len(steps))
    main = steps[0].thread if steps else None
    places = _places(events)
    kinds: dict[str, float] = defaultdict(float)
    modules: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        ours = event.name.startswith((SCOPE, STEP))
        if event.device_type != DeviceType.CPU or (_is_mark(event) if on_gpu else ours or event.thread != main):
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        module, backward = places[event.id]
        kinds["optimizer" if module == "optimizer" else _kind(event, on_gpu=on_gpu)] += spent
        modules[module][backward] += spent
    known = sum(spent for kind, spent in kinds.items() if kind != REST)
    kinds[REST] = wall - (_length(_union(_kernels(events))) if on_gpu else known)
    scale = 1e-3 / count  # microseconds of all steps
    return Table(
        wall * scale,
        {kind: spent * scale for kind, spent in kinds.items()},
        {name: (spent[0] * scale, spent[1] * scale) for name, spent in modules.items() if sum(spent)},
        tuple(spent * scale for spent in _messages(events, on_gpu=on_gpu)),
    )


def _kind(event, *, on_gpu: bool) -> str:  # noqa: ANN001 - FunctionEvent, which has no public name
    """Of an event's own time. On a CPU a function of autograd, or what FSDP marks, has only Python's, and what it waits
    for messages."""
    if on_gpu:
        return kind_of(event.name)
    if _is_operation(event):
        return ATTENTION if _is_of_attention(event) else kind_of(event.name)
    waits = any(kind_of(each.name) == COMMUNICATION for each in (event, *event.cpu_children))
    return COMMUNICATION if waits else REST


def _is_of_attention(event) -> bool:  # noqa: ANN001
    """Whether it is one of the products and softmaxes that attention consists of where it is written out."""
    while event is not None and not event.name.startswith(ATTENTION_NODE):
        event = event.cpu_parent
    return event is not None


def _is_mark(event) -> bool:  # noqa: ANN001
    return event.name.startswith((SCOPE, STEP)) or event.is_user_annotation


def _places(events: Sequence) -> dict[int, tuple[str, bool]]:
    """(module, whether in the backward pass) of each event by its id."""
    places: dict[int, tuple[str, bool]] = {}
    numbered: dict[tuple[int, int], str] = {}  # (thread, autograd's number) of forward operations -> module
    for event in sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end)):
        module, backward = places.get(event.cpu_parent.id, ("", False)) if event.cpu_parent else ("", False)
        if event.name.startswith(SCOPE):
            module = event.name.removeprefix(SCOPE)
        elif event.name.startswith("Optimizer."):
            module = "optimizer"
        elif event.name.startswith(BACKWARD):
            module, backward = numbered.get((event.fwd_thread, event.sequence_nr), ""), True
        elif not backward and event.sequence_nr >= 0 and module:
            numbered.setdefault((event.thread, event.sequence_nr), module)
        places[event.id] = module or "outside the model", backward
    return places


def _messages(events: Sequence, *, on_gpu: bool) -> tuple[float, float]:
    """Microseconds in which a message was under way, and of those in which this process computed as well.

    Messages are NCCL's kernels or what gloo's threads do. What computes are the other kernels or, in other threads, the
    dispatcher's operations: functions of autograd and marks may hold what waits.
    """
    if on_gpu:
        here = _kernels(events)
        sent = [event for event in here if kind_of(event.name) == COMMUNICATION]
    else:
        sent = [event for event in events if event.name.startswith("gloo:")]
        away = {event.thread for event in sent}
        here = [event for event in events if event.thread not in away and _is_operation(event)]
    work = [event for event in here if kind_of(event.name) != COMMUNICATION]
    under_way, computing = _length(_union(sent)), _length(_union(work))
    both = under_way + computing - _length(_union(sent + work))
    return under_way, max(0.0, both)  # a rest of rounding may be below


def _kernels(events: Sequence) -> list:
    return [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]


def _is_operation(event) -> bool:  # noqa: ANN001
    return "::" in event.name and not event.name.startswith("autograd::") and not _is_mark(event)


def _union(events: Sequence) -> list[tuple[float, float]]:
    """The spans, (begin, end) in microseconds, in which any of the events was going on; in order, apart."""
    spans: list[tuple[float, float]] = []
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
