"""What `--dry-run` prints: the resolved configuration and the plan of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from swiftlite.cli.console import print_notes, wide_console
from swiftlite.config.batch import ranks_in_words
from swiftlite.config.flags import Flag, all_flags, shown_value
from swiftlite.config.methods import (
    PREFERENCE,
    SAMPLING,
    answers,
    asked_at_once,
    examined_at,
    examines,
    learns_again,
    pack_capacity,
    updates,
)
from swiftlite.untrusted import printable

if TYPE_CHECKING:
    from swiftlite.config.layout import Layout
    from swiftlite.config.resolve import Resolved
    from swiftlite.config.schema import RunConfig

SHOWN_GROUPS = 4
SHOWN_RANKS = 8


def show_plan(resolved: Resolved, uses: Callable[[Flag], bool] = lambda flag: True, *, trains: bool = True) -> None:
    """Print to stdout; settings that somebody gave are marked with who did. Raises UserError as `_check` does.

    uses: whether a setting is any business of the command; trains: False where rows are evaluated.
    """
    _check(resolved.config)
    console = wide_console()
    console.print(_configuration(resolved, uses))
    console.print(_plan(resolved, _step if trains else _evaluation))
    print_notes(console, resolved.notes)


def _check(config: RunConfig) -> None:
    """Raises UserError for options of a preference loss that would not act, data set names that mean nothing, and a
    chat template that is not there."""
    from swiftlite.data.rows.sources import parse_spec

    for name in config.dataset:
        parse_spec(name)
    for name in config.eval_dataset:
        parse_spec(name, "--eval-dataset")
    if config.chat_template is not None:
        from swiftlite.models.tokenizer import read_chat_template

        read_chat_template(config.chat_template)
    if answers(config):
        from swiftlite.data.tokens.own_tools import parse_tool
        from swiftlite.training.rollouts.rewards import parse_reward

        for word in config.reward:
            parse_reward(word)
        for word in config.tools:
            parse_tool(word)
    if config.method in PREFERENCE:
        from swiftlite.training.methods import preference_of  # seconds, for torch

        preference_of(config)


def _configuration(resolved: Resolved, uses: Callable[[Flag], bool]) -> Table:
    table = Table(title="Configuration", title_justify="left", box=None, padding=(0, 2))
    for heading in ("setting", "value", "from"):
        table.add_column(heading, header_style="dim", overflow="fold")
    panel = None
    values = resolved.config.model_dump()
    for name, flag in all_flags().items():
        if not uses(flag):
            continue
        if flag.panel != panel:
            panel = flag.panel
            table.add_row(f"[bold blue]{panel}[/]", "", "")
        source = resolved.given.get(name)
        style = "bold" if source else "dim"
        table.add_row(f"[{style}]{name}[/]", Text(printable(shown_value(values[name]))), source or "")
    return table


def _idle(config: RunConfig) -> str:
    """In words, how much of a step a rank of the pipeline waits for others: with two stages a rank half as long. What
    zero-bubble leaves depends on how long the three parts of a stage take."""
    if config.pipeline_schedule == "zero-bubble":
        return ""
    stages, others = (2 if config.pipeline_schedule == "interleaved-1f1b" else 1), config.pipeline_parallel_size - 1
    return f"; about {others / (stages * config.num_microbatches + others):.0%} idle"


def _groups(layout: Layout) -> Iterator[tuple[str, str]]:
    """(dimension, the ranks that lie along it) for each dimension in use; the innermost has neighbouring ranks."""
    stride = layout.world
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        size = asdict(layout)[name]
        block, stride = stride, stride // size
        starts = [start + place for start in range(0, layout.world, block) for place in range(stride)]
        groups = [_ranks(range(start, start + size * stride, stride)) for start in starts[:SHOWN_GROUPS]]
        if size > 1:
            yield name, " | ".join(groups) + (" | ..." if len(starts) > SHOWN_GROUPS else "")


def _ranks(ranks: range) -> str:
    shown = ranks if len(ranks) <= SHOWN_RANKS else ranks[: SHOWN_RANKS - 1]
    return " ".join(map(str, shown)) + ("" if len(shown) == len(ranks) else f" ... {ranks[-1]}")


def _plan(resolved: Resolved, work: Callable[[RunConfig, Layout], Iterator[tuple[str, str]]]) -> Table:
    """work: what is done in that layout, in lines of two parts."""
    config, layout = resolved.config, resolved.layout
    table = Table(title="\nPlan", title_justify="left", box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("processes", f"{layout.world} ({layout.world_source})")
    table.add_row("mesh", f"pp x dp_replicate x dp_shard x cp x tp = {layout}")
    for dimension, text in _groups(layout):
        table.add_row("", f"{dimension}: ranks {text}")
    table.add_row("sharding", layout.sharding)
    if layout.pp > 1:
        words = f"{config.pipeline_schedule}, {config.num_microbatches} micro-batches over {layout.pp} ranks"
        table.add_row("pipeline", words + _idle(config))
    if layout.expert_parallel > 1:
        table.add_row("experts", f"over groups of {layout.expert_parallel} ranks")
    for row in work(config, layout):
        table.add_row(*row)
    return table


def _step(config: RunConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    capacity = pack_capacity(config)
    if config.method in SAMPLING:
        asked = f"{config.global_batch_size} prompts with {config.samples} answers each"
        several = f"{updates(config)} updates by " if learns_again(config) else ""
        yield "a step", f"{asked}, of up to {config.max_new_tokens:,} tokens{_calling(config)}"
        if config.engine_url:
            yield "", f"by {printable(' '.join(config.engine_url))}"
        yield "", f"then {several}forward passes of {config.micro_batch_size} x {capacity:,} tokens at most"
        return
    yield "a step", _batch(config, layout, "accumulated")
    yield "at most", f"{config.global_batch_size * capacity:,} tokens a step"
    if examines(config):
        yield "an evaluation", f"the loss of the rows that are held out, and {_answered(config)}"


def _evaluation(config: RunConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    part = f"{config.eval_fraction:g} of " if config.eval_fraction else ""
    yield "evaluated", part + (" ".join(map(printable, config.dataset)) or "no rows are named yet")
    if config.method not in SAMPLING:
        yield "together", _batch(config, layout, "one by one")
        return
    yield "together", f"{asked_at_once(config)} prompts with {_answered(config)}"
    yield "", f"each process answers {config.answers_at_once} at a time"


def _answered(config: RunConfig) -> str:
    """What a prompt that is evaluated gets."""
    samples, temperature = config.eval_samples, examined_at(config)
    drawn = f"at temperature {temperature:g}" if temperature else "of the likeliest tokens"
    each = f"{samples} answer{'s' if samples > 1 else ''} each, of up to {config.max_new_tokens:,} tokens"
    return f"{each}, {drawn}{_calling(config)}"


def _calling(config: RunConfig) -> str:
    """What answers may call."""
    if not config.tools:
        return ""
    return f", which may call {printable(' '.join(config.tools))} up to {config.tool_rounds} times"


def _batch(config: RunConfig, layout: Layout, one_by_one: str) -> str:
    """What goes through the model before anything is made of it. one_by_one: what forward passes of a rank are."""
    packs = "packs" if config.packing else "rows"
    passes = f"{config.micro_batch_size} a forward pass x {config.gradient_accumulation_steps} {one_by_one}"
    whole = f"{config.global_batch_size} {packs} of up to {pack_capacity(config):,} tokens"
    return f"{whole} = {passes} x {ranks_in_words(layout.data_ranks)}"
