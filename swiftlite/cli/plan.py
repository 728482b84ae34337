"""`swiftlite plan`: memory, messages and time of every layout, and the command that trains in the best one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swiftlite.cli.json_output import TO_STDOUT, check_output, write_output
from swiftlite.cli.options import RunCommand, json_flag, own_flag
from swiftlite.cli.plan_json import plan_values
from swiftlite.config.flags import all_flags
from swiftlite.config.methods import SAMPLING
from swiftlite.config.setting import LOGGING
from swiftlite.errors import UserError
from swiftlite.sizes import in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from transformers import PretrainedConfig

    from swiftlite.config.resolve import Resolved
    from swiftlite.config.schema import RunConfig
    from swiftlite.planning.devices import Device
    from swiftlite.training.needs import Outline
    from swiftlite.training.plan import Fleet, Plan, Proposal

GB = 10**9
SLOWEST = 1e-6  # GB/s of a link: with less a step would seem to last for ever
WORLDS = (1, 2, 4, 8)  # devices of a machine that are looked at where nobody says how many there are,
NODES = (2, 4, 8, 16, 32)  # and machines, where one is not enough
SIZES = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}  # fmt: skip
EXPLAINED = (
    "rows: of a forward pass; memory: of the fullest device; times are estimates, at half of the device's peak and 70% "
    "of its links"
)
ON_EACH = "start it on each of the {} machines, with --node-rank (from 0) and --master-addr (of the first one):"
UNSAID = ("method", "dry_run", "debug", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")


def plan(
    resolved: Resolved,
    device: str | None,
    device_memory: str | None,
    link: float,
    network: float,
    rows: int,
    json: str | None,
) -> None:
    """Print what layouts take. Raises UserError where the device is unknown, or nothing fits."""
    from swiftlite.cli.console import print_notes, print_whole, wide_console
    from swiftlite.quick_imports import quick_imports

    _check_own(link, network, rows, json)
    with quick_imports():
        from swiftlite.checkpoint.tensor_writer import parse_size
        from swiftlite.planning.machine import device_of, measure_rate
        from swiftlite.training.plan import outline_of
    memory = None if device_memory is None else parse_size(_checked_size(device_memory))
    kind, target = device_of(device, memory, link * GB or None, network * GB or None)
    console = wide_console(stderr=json == TO_STDOUT)
    print_notes(console, resolved.notes)
    with console.status("building the model without weights"):
        outline = outline_of(resolved.config, _config_of_model(resolved.config), kind, target.capability)
        if kind == "cpu":
            target = replace(target, flops=measure_rate(outline.precision.dtype))
        plans = list(_plans(resolved, outline, target))
    _say_what_for(console, outline, target)
    several = len(plans) > 1  # numbers of devices
    shown = [(fleet, proposal) for fleet, plan in plans for proposal in plan.proposals[: 1 if several else rows]]
    refused = {kind: error for _, plan in reversed(plans) for kind, error in plan.refused.items()}
    if not shown:
        raise next(iter(plans[0][1].refused.values()))
    fitting = [(fleet, plan.best) for fleet, plan in plans if plan.best]
    command = _command(resolved, *fitting[0]) if fitting else None
    if json is not None:
        write_output(plan_values(resolved.config, outline, target, plans, refused.values(), command), json)
    print_whole(console, _table(shown))
    console.print(EXPLAINED, style="dim")
    if resolved.config.method in SAMPLING:
        console.print("Times are of training alone: how long answers take to sample is not known.", style="dim")
    _say_refused(console, refused.values())
    if not fitting:
        raise _nothing_fits(resolved, [proposal for _, proposal in shown])
    fleet, best = fitting[0]
    console.print(_parts(best))
    console.print("\nstart it by:" if fleet.machines == 1 else f"\n{ON_EACH.format(fleet.machines)}")
    console.print(shlex.join(command), markup=False, soft_wrap=True)


def _check_own(link: float, network: float, rows: int, json: str | None) -> None:
    if rows < 1:
        raise UserError("--rows is below 1", where="--rows", fix="give the number of layouts to show")
    for option, speed in (("--link", link), ("--network", network)):
        if speed != 0 and not SLOWEST <= speed < math.inf:  # nor is it nan
            raise UserError(f"{option} is {speed:g}", where=option, fix=f"give GB/s, {SLOWEST:g} or more")
    check_output(json)


def _config_of_model(config: RunConfig) -> PretrainedConfig:
    from swiftlite.models.load import load_config_of

    return load_config_of(config)


def _checked_size(text: str) -> str:
    from swiftlite.config.types import check_size

    try:
        return check_size(text)
    except ValueError as error:
        what = f"--device-memory is {text!r}: {error}"
        raise UserError(what, where="--device-memory", fix="write 80GB or 79GiB") from error


def _plans(resolved: Resolved, outline: Outline, device: Device) -> Iterator[tuple[Fleet, Plan]]:
    """For the devices that were named, or as many as it takes to fit."""
    from swiftlite.training.plan import Fleet, propose

    config = resolved.config
    if {"nproc_per_node", "nnodes"} & resolved.given.keys():
        worlds = [(config.nnodes or 1, config.nproc_per_node or 1)]
    elif outline.device.type == "cpu":
        worlds = [(1, 1)]
    else:  # sizes that are given want a number of devices, of which others are multiples
        usual = [(1, devices) for devices in WORLDS] + [(nodes, WORLDS[-1]) for nodes in NODES]
        least = resolved.layout.world
        worlds = [world for world in usual if math.prod(world) % least == 0] or [(1, least)]
    fits = False
    for nodes, devices in worlds:
        if fits and nodes > 1:
            return
        target = device
        if outline.device.type == "cpu":  # processes share its memory and its cores
            target = replace(device, memory=device.memory / devices, flops=device.flops / devices)
        fleet = Fleet(target, nodes, devices)
        found = propose(resolved, outline, fleet)
        fits = fits or found.best is not None
        if found.proposals or (nodes, devices) == worlds[-1]:
            yield fleet, found


def _say_what_for(console: Console, outline: Outline, device: Device) -> None:
    trained, total = outline.trained, outline.trained + outline.frozen
    console.print(f"model:   {total:,} parameters, {trained:,} trained; {outline.precision.words}", markup=False)
    links = f"{device.link / GB:,.0f} GB/s to its neighbours, {device.network / GB:,.0f} GB/s to other machines"
    rate = f"{device.flops / 1e12:.3g} TFLOP/s"
    if outline.device.type == "cuda":  # data sheets', whatever --precision says
        rate += " in bf16"
    console.print(f"device:  {device.name}, {in_words(device.memory)}, {rate}; {links}")


def _table(shown: list[tuple[Fleet, Proposal]]) -> Table:
    from rich.table import Table

    table = Table(title="\nLayouts, the fastest that fit first", title_justify="left", box=None, padding=(0, 1))
    table.add_column("devices", header_style="dim", no_wrap=True)
    table.add_column("layout", header_style="dim", overflow="fold")
    table.add_column("recompute", header_style="dim", no_wrap=True)
    for heading in ("rows", "memory", "s a step", "tokens/s"):
        table.add_column(heading, header_style="dim", justify="right", no_wrap=True)
    for fleet, proposal in shown:
        config, fits = proposal.config, proposal.fits
        table.add_row(
            f"{fleet.machines} x {fleet.per_machine}" if fleet.machines > 1 else str(fleet.per_machine),
            _words(proposal),
            config.activation_checkpointing,
            str(config.micro_batch_size),
            in_words(proposal.footprint.total),
            _seconds(proposal.pace.seconds) if fits else "too large",
            f"{proposal.tokens_per_second:,.0f}" if fits else "",
            style=None if fits else "dim",
        )
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:,.0f}"


def _words(proposal: Proposal) -> str:
    """A layout in a few words."""
    config, layout = proposal.config, proposal.layout
    words = [f"{short} {size}" for name, short in SIZES.items() if (size := getattr(config, name)) > 1]
    if layout.dp_shard * layout.cp > 1:  # the ranks of a row share weights too
        words.append(f"fsdp {layout.sharding} {layout.dp_shard * layout.cp}".replace("none ", ""))
    if layout.dp_replicate > 1:
        words.append(f"replicas {layout.dp_replicate}")
    if config.sync_every_microbatch:
        words.append("reduced each micro-batch")
    return ", ".join(words) or "one process"


def _parts(best: Proposal) -> Table:
    """Where memory and time of the best layout go."""
    from rich.table import Table

    table = Table(title="\nThe best one", title_justify="left", box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    for name, size in best.footprint.parts():
        table.add_row(name, in_words(size), "")
    table.add_row("in all", in_words(best.footprint.total), f"of {in_words(best.limit)} that may be taken")
    table.add_row("arithmetic", f"{best.pace.compute:.3f} s", "")
    if best.layout.pp > 1:
        table.add_row("pipeline idles", f"{best.pace.idle:.3f} s", "")
    for message in best.pace.messages:
        traffic, where = message.traffic, "between machines" if message.between_machines else "within a machine"
        words = f"{traffic.dimension} {traffic.collective} of {traffic.what}, {in_words(traffic.size)} {where}"
        table.add_row("messages", f"{message.seconds:.3f} s", f"{words}; {message.exposed:.3f} s not hidden")
    return table


def _say_refused(console: Console, refused: Collection[UserError]) -> None:
    if refused:
        console.print("\n[bold]Refused[/]")
    for error in refused:
        console.print(f"  {error.what}" + (f" ({error.where})" if error.where else ""), markup=False)


def _command(resolved: Resolved, fleet: Fleet, best: Proposal) -> list[str]:
    """What starts the best layout: what was given, and what the plan has added."""
    recipe = ["--recipe", str(resolved.recipe)] if resolved.recipe else []
    words = ["swiftlite", resolved.config.method, *recipe]
    for name, by in resolved.given.items():
        if name not in UNSAID and name not in best.flags and by != "recipe":
            words += _flag(name, getattr(resolved.config, name))
    for name, value in ((fleet.flags if best.layout.world > 1 else {}) | best.flags).items():
        words += _flag(name, value)
    return words


def _flag(name: str, value: Any) -> list[str]:
    flag = all_flags()[name]
    if isinstance(value, bool):
        return [flag.option if value else flag.negation]
    if isinstance(value, dict):
        return [flag.option, *(f"{key}={item}" for key, item in value.items())]
    return [flag.option, *(map(str, value) if isinstance(value, list) else [str(value)])]


def _nothing_fits(resolved: Resolved, shown: list[Proposal]) -> UserError:
    nearest, config = min(shown, key=lambda proposal: proposal.footprint.total), resolved.config
    lighter = [
        ("--tuner lora", config.tuner != "lora" and not config.from_scratch),
        ("--quantization nf4", config.tuner == "lora" and config.quantization == "none"),
        ("--offload cpu", config.offload == "none"),
        ("--optimizer paged_adamw", config.tuner == "full" and config.optimizer == "adamw"),
        ("a smaller --max-length", True),
        ("more devices", True),
    ]
    return UserError(
        f"nothing fits: the nearest needs {in_words(nearest.footprint.total)} of a device, of which "
        f"{in_words(nearest.limit)} may be taken",
        where=_words(nearest),
        fix="try " + ", ".join(words for words, helps in lighter if helps),
    )


PLAN = RunCommand(
    "plan",
    plan,
    "Predict memory and time of layouts without weights or GPUs, and recommend one.",
    own=(
        own_flag("device", "str", None, "Device to plan for, such as h100, a100, rtx-4090 or cpu.", shown="this one's"),
        own_flag(
            "device_memory", "str", None, "Memory of a device, such as 80GB.", shown="the device's", metavar="SIZE"
        ),
        own_flag("link", "float", 0.0, "GB/s that a device sends to the others of its machine.", shown="the device's"),
        own_flag("network", "float", 0.0, "GB/s that a device sends to other machines.", shown="usual for the device"),
        own_flag("rows", "int", 8, "Layouts to show."),
        json_flag("all layouts"),
    ),
    fallback="sft",
    uses=lambda flag: flag.panel != LOGGING,
    needs_rows=False,
    open_layout=True,
    joins=False,
)
