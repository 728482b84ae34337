"""Flags, environment and recipe become one `RunConfig` in which every default is filled in and everything agrees."""

from __future__ import annotations

import datetime
import itertools
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftlite.config.batch import ACCUMULATION, ALL, DEFAULT_GLOBAL, GLOBAL, MICRO, Batch, fit_batch, ranks_in_words
from swiftlite.config.checks import check_together
from swiftlite.config.flags import all_flags
from swiftlite.config.layout import Layout, divisors, plan_layout, under_torchrun
from swiftlite.config.methods import SAMPLING, answers, evaluates, prompt_limit
from swiftlite.config.names import (
    ADAPTER_CONFIG,
    DATASETS,
    FUNCTIONS,
    SOURCES,
    check_names,
    dataset_names,
    model_name,
    most_positions,
    placed,
    placed_function,
    system_text,
)
from swiftlite.config.notes import unsaid, unused
from swiftlite.config.others.deepspeed import read_deepspeed
from swiftlite.config.others.llama_factory import read_table
from swiftlite.config.others.words import TEMPLATES
from swiftlite.config.recipe import Recipe, load_recipe
from swiftlite.config.schema import RunConfig
from swiftlite.config.types import NEVER, said_value
from swiftlite.config.validate import Given, build_config
from swiftlite.errors import UserError
from swiftlite.untrusted import read_json_file

RENDEZVOUS = ("node_rank", "master_addr", "master_port")
STARTED_BY_SWIFTLITE = ("nproc_per_node", "nnodes", *RENDEZVOUS, "max_restarts")
SHARDED = ("sharding", "mesh")
DIVIDED = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size", "nproc_per_node",
)  # fmt: skip
CONTRADICTED = {"none": (*SHARDED, *DIVIDED), "ddp": SHARDED}  # by --parallel of the command line, in a recipe
# Learning rates by tuner: adapters bear ten times the rate of whole weights, losses against a reference less than SFT.
ANSWER_RATES = {"lora": 1e-4, "full": 1e-5, "freeze": 1e-5}
TEXT_RATES = {"lora": 1e-4, "full": 2e-5, "freeze": 2e-5}
PREFERENCE_RATES = {"lora": 1e-5, "full": 1e-6, "freeze": 1e-6}
LEARNING_RATES = {
    "sft": ANSWER_RATES, "rm": ANSWER_RATES, "pretrain": TEXT_RATES, "dpo": PREFERENCE_RATES, "kto": PREFERENCE_RATES,
    "grpo": PREFERENCE_RATES,
}  # fmt: skip

SCRATCH_RATE = 3e-4  # of weights that know nothing yet
BETAS = {"dpo": 0.1, "kto": 0.1, **dict.fromkeys(SAMPLING, 0.0)}
OVERLONG = {"pretrain": "split", **dict.fromkeys(SAMPLING, "drop")}


@dataclass(frozen=True)
class Resolved:
    """A run that is ready to start. notes: what the user should know; given: the names somebody set, and who."""

    config: RunConfig
    layout: Layout
    notes: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    recipe: Path | None = None


def resolve_config(method: str = "sft", *, recipe: str | None = None, **values: Any) -> RunConfig:
    """The resolved config of a run on one process, from Python: `resolve_config("sft", model=..., dataset=[...])`."""
    given = {name: Given(value, name, "flag") for name, value in values.items()}
    return resolve(method, given, load_recipe(recipe) if recipe else None, env={}).config


def resolve(
    method: str | None,
    flags: Mapping[str, Given],
    recipe: Recipe | None = None,
    *,
    env: Mapping[str, str] | None = None,
    now: datetime.datetime | None = None,
    needs_rows: bool = True,
    needs_reward: bool = True,
    open_layout: bool = False,
    exact_batch: bool = True,
) -> Resolved:
    """Merge (flags over environment over recipe), type, check, and fill in.

    method: of the command, or None where the recipe or `--method` says it; needs_rows: a data set has to be named;
    needs_reward: so has what rewards answers; open_layout: layouts are still to be compared, and the batch may be
    shared by fewer data ranks than this one has; exact_batch: False where the recipe's batch sizes may give way,
    unless the method's loss depends on them.
    Raises UserError.
    """
    env = os.environ if env is None else env
    now = now or datetime.datetime.now()
    given = _merge(flags, recipe, env)
    base = recipe.path.resolve().parent if recipe else None
    _settle_method(method, given)
    read = [*read_deepspeed(given, base), *read_table(given, base)]
    gave_way = _let_layout_give_way(given)
    typed = build_config(given)
    _require(typed, needs_rows=needs_rows)
    if needs_rows and needs_reward and typed.method in SAMPLING:
        require_reward(typed)
    where = {name: item.where for name, item in given.items()}
    check_names(typed, where)
    typed, moved = _another_folder(typed, given, base)
    typed, own = _own_template(typed, given, base)
    notes = [*(recipe.notes if recipe else []), *read, *moved, *gave_way, *own]
    named = typed.model_copy(update=_names(typed, base))
    layout = plan_layout(named, env)
    batch, gave_way = _batch(named, given, layout, open_layout=open_layout, exact=exact_batch)
    notes += gave_way
    config = named.model_copy(update=_defaults(named, batch, now))
    config, gave_way = _let_lengths_give_way(config, given)
    notes += [*gave_way, *of_another_base(config)]
    check_together(config, where)
    by = {name: item.by for name, item in given.items()}
    notes += [
        *unused(config, layout, by, trains=needs_rows),
        *unsaid(config, given, LEARNING_RATES[config.method]["lora"]),
    ]
    if under_torchrun(env):
        why = "under torchrun, which starts the processes"
        notes += [f"{name} has no effect {why}" for name in STARTED_BY_SWIFTLITE if by.get(name) == "flag"]
    elif layout.world == 1:
        notes += [f"{name} has no effect in one process" for name in RENDEZVOUS if by.get(name) == "flag"]
    return Resolved(config, layout, notes, by, recipe.path if recipe else None)


def _merge(flags: Mapping[str, Given], recipe: Recipe | None, env: Mapping[str, str]) -> dict[str, Given]:
    given = recipe.given() if recipe else {}
    if not under_torchrun(env):  # torchrun sets some of these for its own ends
        for item in all_flags().values():
            if item.env and env.get(item.env):
                given[item.name] = Given(env[item.env], f"environment variable {item.env}", "env")
    return given | dict(flags)


def _settle_method(method: str | None, given: dict[str, Given]) -> None:
    said = given.get("method")
    if method is None:
        if said is None:
            raise UserError(
                "nothing says what to train", fix="add `method: sft` to the recipe, or use `swiftlite sft --recipe ...`"
            )
        return
    if said is not None and said.value is not None:
        theirs = build_config({"method": said}).method
        if theirs != method:
            raise UserError(
                f"`swiftlite {method}` contradicts `method: {theirs}`",
                where=said.where,
                fix=f"use `swiftlite {theirs}`, or `swiftlite train`, which takes the method from the recipe",
            )
    given["method"] = Given(method, "the command", "flag")


def _let_layout_give_way(given: dict[str, Given]) -> list[str]:
    """Take out what a recipe divides where the command line says that nothing is divided. Returns a note for each."""
    chosen = given.get("parallel")
    if chosen is None or chosen.by != "flag":
        return []
    contradicted = CONTRADICTED.get(build_config({"parallel": chosen}).parallel, ())
    lost = [name for name in contradicted if name in given and given[name].by == "recipe"]
    return [f"the recipe's {name} {given.pop(name).value} gives way to {chosen.where} {chosen.value}" for name in lost]


def _let_lengths_give_way(config: RunConfig, given: Mapping[str, Given]) -> tuple[RunConfig, list[str]]:
    """Shorten what nobody has given to what there is room for: a sequence to the model's positions, of which an answer
    leaves a prompt half. With a note for each."""
    notes, positions = [], _positions(config)
    if "max_length" not in given and positions is not None and positions < config.max_length:
        notes.append(f"--max-length is {positions}, not {config.max_length}: the model has no more positions")
        config = config.model_copy(update={"max_length": positions})
    if "max_new_tokens" not in given and answers(config) and prompt_limit(config) < 1:
        half = max(1, config.max_length // 2)
        why = f"a prompt needs room in --max-length {config.max_length} too"
        notes.append(f"--max-new-tokens is {half}, not {config.max_new_tokens}: {why}")
        config = config.model_copy(update={"max_new_tokens": half})
    return config, notes


def _require(config: RunConfig, *, needs_rows: bool) -> None:
    if not config.model:
        fix = "add --model with a hub id, a folder or a short name (qwen3-0.6b)"
        fix += "; --model-name is what rows call it" if config.placeholders else ""
        raise UserError("no model is named", where="--model", fix=fix)
    if needs_rows and not config.dataset and not config.dry_run:  # which only shows what was resolved
        fix = "add --dataset with a file, a folder, a hub id or a short name"
        raise UserError("no data set is named", where="--dataset", fix=fix)


def require_reward(config: RunConfig) -> None:
    """Raises UserError where answers would be drawn that nothing rewards, nor a teacher."""
    if not config.reward and config.teacher is None:
        raise UserError(
            f"nothing says how {config.method} rewards answers",
            fix="give --reward last_number or another that comes along, FILE.py:NAME of your own or a reward model, or "
            "give --teacher MODEL",
        )


def _another_folder(config: RunConfig, given: Mapping[str, Given], base: Path | None) -> tuple[RunConfig, list[str]]:
    """A saved config.yaml runs again beside the run that it lies in, not over it, unless it goes on: in the run's
    folder, also where that has been moved. With a note."""
    said = given.get("output_dir")
    if config.output_dir is None or said is None or said.by != "recipe":
        return config, []
    folder = Path(config.output_dir).expanduser()
    if config.resume == "auto" and base is not None and not folder.exists() and (base / "checkpoints").is_dir():
        note = f"--output-dir is {base}: the run of the recipe is there, and no longer in {folder}"
        return config.model_copy(update={"output_dir": str(base)}), [note]
    if config.resume != "never" or folder.resolve() != base:
        return config, []
    number = next(number for number in itertools.count(2) if not Path(f"{folder}-{number}").exists())
    note = f"--output-dir is {folder}-{number}: {folder} holds the run of the recipe"
    return config.model_copy(update={"output_dir": f"{folder}-{number}"}), [note]


def _own_template(config: RunConfig, given: Mapping[str, Given], base: Path | None) -> tuple[RunConfig, list[str]]:
    """Leaves out, with a note, what other tools call the chat template of a model that has one."""
    name = config.chat_template
    if name is None or placed(name, base) or not TEMPLATES.fullmatch(name.lower()):
        return config, []
    said = given["chat_template"]
    by = f"{said.where} {name}" if said.by == "flag" else f"the recipe's template {name}"
    note = f"{by} is another tool's name: conversations are written by the chat template that comes with the model"
    return config.model_copy(update={"chat_template": None}), [note]


def _names(config: RunConfig, base: Path | None) -> dict[str, Any]:
    """Short names and paths beside the recipe become hub ids and paths."""
    named: dict[str, Any] = {
        name: [each for spec in getattr(config, name) for each in dataset_names(spec, base)] for name in DATASETS
    }
    for name in SOURCES:
        value = getattr(config, name)
        named[name] = value and (placed(value, base) or value)
    for name in ("model", "teacher"):
        named[name] = named[name] and model_name(named[name])
    named |= {name: [placed_function(word, base) for word in getattr(config, name)] for name in FUNCTIONS}
    if config.system is not None:
        named["system"] = system_text(config.system, base)
    return named


def _batch(
    config: RunConfig, given: Mapping[str, Given], layout: Layout, *, open_layout: bool, exact: bool
) -> tuple[Batch, list[str]]:
    sizes: dict[str, dict[str, int]] = {"flag": {}, "recipe": {}}
    for name, size in ((GLOBAL, config.global_batch_size), (MICRO, config.micro_batch_size)):
        if size is not None:
            sizes[given[name].by][name] = size
    accumulation, by = config.gradient_accumulation_steps, given.get(ACCUMULATION)
    said = "--gradient-accumulation-steps"
    if layout.pp > 1 and config.num_microbatches is not None:
        if accumulation not in (None, config.num_microbatches):
            raise UserError(
                f"--num-microbatches {config.num_microbatches} and --gradient-accumulation-steps {accumulation} are "
                "the same thing in a pipeline, but differ",
                fix="leave one of them out",
            )
        accumulation, by = config.num_microbatches, given["num_microbatches"]
        said = "--num-microbatches"
    if accumulation is not None and by is not None:
        sizes[by.by][ACCUMULATION] = accumulation
    ranks = divisors(layout.data_ranks)[::-1] if open_layout else [layout.data_ranks]
    spare = [] if exact else [{MICRO, ACCUMULATION}] if config.method == "kto" else [{MICRO, ACCUMULATION}, {*ALL}]
    batch, gave_way = fit_batch(sizes["flag"], sizes["recipe"], ranks, stages=layout.pp, said=said, spare=spare)
    kept = {**sizes["recipe"], **sizes["flag"]}.keys() - gave_way
    notes = [f"the recipe's {name} {sizes['recipe'][name]} gives way to the flags" for name in gave_way]
    if not {GLOBAL, ACCUMULATION} & kept and batch.global_size != DEFAULT_GLOBAL:
        why = f"no multiple of {ranks_in_words(layout.data_ranks)} x {batch.micro_size} a forward pass"
        if DEFAULT_GLOBAL % (layout.data_ranks * batch.micro_size) == 0:
            why = f"too small for a micro-batch in each of {layout.pp} stages"
        notes.append(f"--global-batch-size is {batch.global_size}, not {DEFAULT_GLOBAL}, which is {why}")
    return batch, notes


def _defaults(config: RunConfig, batch: Batch, now: datetime.datetime) -> dict[str, Any]:
    pretrain = config.method == "pretrain"
    tuner = config.tuner or ("full" if pretrain or config.from_scratch else "lora")
    rate = SCRATCH_RATE if config.from_scratch else LEARNING_RATES[config.method][tuner]
    pipeline = config.pipeline_parallel_size > 1
    output_dir = str(Path(config.output_dir or _output_dir(config, now)).expanduser())
    return {
        "global_batch_size": batch.global_size,
        "micro_batch_size": batch.micro_size,
        "gradient_accumulation_steps": batch.accumulation,
        "num_microbatches": batch.accumulation if pipeline else config.num_microbatches,
        "pipeline_schedule": config.pipeline_schedule or ("1f1b" if pipeline else None),
        "tokenizer": config.tokenizer or _adapters_tokenizer(config),
        "tuner": tuner,
        "overlong": config.overlong or OVERLONG.get(config.method, "truncate"),
        "learning_rate": config.learning_rate or rate,
        "beta": BETAS.get(config.method) if config.beta is None else config.beta,
        "eval_steps": config.eval_steps or (_as_saving(config) if evaluates(config) else None),
        "output_dir": output_dir,
        "template_date": config.template_date or _template_date(config, output_dir, now),
    }


def _as_saving(config: RunConfig) -> int | float | str:
    """How often a run is evaluated that does not say so: one that is never saved as others are by default."""
    return all_flags()["save_steps"].default if config.save_steps == NEVER else config.save_steps


def of_another_base(config: RunConfig) -> list[str]:
    """A note where an adapter's settings name another base model, which may have the same shapes."""
    if config.adapter is None:
        return []
    try:
        named = read_json_file(Path(config.adapter).expanduser() / ADAPTER_CONFIG)["base_model_name_or_path"]
        same = Path(named).name.lower() == Path(config.model).name.lower()
    except (OSError, ValueError, KeyError, TypeError):
        return []  # what is wrong with it is told by whoever loads it
    return [] if same else [f"the adapter was trained on {named}, --model is {config.model}: they should be the same"]


def _adapters_tokenizer(config: RunConfig) -> str | None:
    """What an adapter was trained with counts before what the model came with: it may have new tokens."""
    known = config.adapter is not None and (Path(config.adapter).expanduser() / "tokenizer_config.json").is_file()
    return config.adapter if known else None


def _positions(config: RunConfig) -> int | None:
    """The longest sequence of a local model; None where the model is not here or does not say."""
    try:
        settings = read_json_file(Path(config.model).expanduser() / "config.json")
        overrides = {key: said_value(text) for key, text in config.config_overrides.items()}
        return most_positions((settings.get("text_config") or settings) | overrides)
    except (OSError, ValueError, AttributeError):
        return None  # whoever loads the model says what is wrong with it


def _output_dir(config: RunConfig, now: datetime.datetime) -> str:
    """`runs/<model>-<method>-<time>`; for a run that goes on, the folder its checkpoint lies in."""
    if config.resume == "auto":
        raise UserError(
            "--resume auto needs to know which run to go on with", fix="add --output-dir with the folder of the run"
        )
    checkpoint = Path(config.resume).expanduser()
    if config.resume != "never" and checkpoint.parent.name == "checkpoints":
        return str(checkpoint.parent.parent)
    if config.resume != "never" and (checkpoint / "checkpoints").is_dir():
        return str(checkpoint)
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model).name).strip("-.") or "model"
    return f"runs/{model}-{config.method}-{now:%Y%m%d-%H%M%S}"


def _template_date(config: RunConfig, output_dir: str, now: datetime.datetime) -> str:
    """Today; a run that goes on keeps the day it began, or its rows would change under it."""
    saved = Path(output_dir) / "config.yaml"
    if config.resume != "never" and saved.is_file():
        with suppress(UserError):  # a file that a crash has spoilt does not stop a run whose checkpoints are sound
            if day := load_recipe(str(saved)).said("template_date"):
                return str(day)
    return now.date().isoformat()
