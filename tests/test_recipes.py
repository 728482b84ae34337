"""Every recipe resolves, its header tells the truth, and its layout fits the real model and the real GPU.

Models are built without weights: a layer for each pipeline stage, at their real width.
"""

import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from model_shapes import (
    FROZEN_BYTES,
    MODELS,
    NF4_BITS,
    built_sizes,
    frozen_bytes,
    left_out,
    parameters,
    real_config,
    sizes,
    state_gib,
    trained_bytes,
    unlike_layers,
)

from swiftlite.cli.app import main
from swiftlite.config.batch import GLOBAL
from swiftlite.config.names import short_names
from swiftlite.config.recipe import load_recipe, recipes_folder, shipped_recipes
from swiftlite.config.resolve import Resolved, resolve
from swiftlite.config.validate import Given
from swiftlite.errors import UserError
from swiftlite.models.anatomy import check_trainable_architecture, why_alone
from swiftlite.models.architecture import import_architecture
from swiftlite.models.attention import documents as attention
from swiftlite.models.load import build_model
from swiftlite.models.tuners import apply_tuner
from swiftlite.parallel.context import check_context_parallel
from swiftlite.parallel.experts import check_expert_parallel
from swiftlite.parallel.pipeline import cut_model
from swiftlite.parallel.stages import check_pipeline, choose_schedule, plan_stages
from swiftlite.parallel.tensor_plan import check_tensor_parallel
from swiftlite.planning.devices import find_device
from swiftlite.training.guards.fits import check_alone
from swiftlite.training.plan import Fleet, Proposal, outline_of, settle
from swiftlite.training.rollouts.engine import start_words

RECIPES = shipped_recipes()
SLURM = "scripts/slurm/train.sbatch"
HARDWARE = re.compile(
    r"(?:(?P<nodes>\d+) nodes x )?(?P<gpus>\d+) GPUs? of (?P<gib>\d+) GiB|a CPU with (?P<cpu>\d+) GiB"
)
UNEVEN = 0.15  # stages of a pipeline are of the same time, not of the same size


@dataclass(frozen=True)
class Header:
    """What the comments at the top of a recipe say."""

    title: str
    nodes: int
    processes: int
    gib: int
    memory: str
    start: list[str]

    @property
    def world(self) -> int:
        return self.nodes * self.processes


@cache
def header(name: str) -> Header:
    lines = RECIPES[name].read_text().splitlines()
    title, *rest = (line.removeprefix("# ") for line in lines[:4])
    said = dict(line.split(": ", 1) for line in rest)
    assert list(said) == ["Hardware", "Memory", "Start"]
    found = HARDWARE.fullmatch(said["Hardware"])
    nodes, gpus = int(found["nodes"] or 1), int(found["gpus"] or 1)
    return Header(title, nodes, gpus, int(found["gib"] or found["cpu"]), said["Memory"], shlex.split(said["Start"]))


@cache
def resolved(name: str) -> Resolved:
    """As it resolves in a process that a launcher started on the hardware of the header."""
    said, env = header(name), {}
    if said.world > 1:
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(said.world)}
    return resolve(None, {}, load_recipe(name), env=env)


def in_words(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def dry_run(words, monkeypatch, capsys) -> str:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--dry-run"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, err) == (0, "")
    return " ".join(out.split()) + " "


@pytest.mark.parametrize("model", MODELS)
def test_the_table_of_shapes_gives_the_parameters_of_the_model_card(model):
    assert sizes(model).total + left_out(model) == int(MODELS[model]["parameters"])
    assert sizes(model) == built_sizes(model)


@pytest.mark.parametrize("name", RECIPES)
def test_a_header_is_true(name):
    said, found = header(name), resolved(name)
    config, layout = found.config, found.layout
    assert said.title.endswith(".") and len(said.title) < 100
    assert layout.world == said.world
    assert found.notes == []  # no key without effect
    parts, (plain, packed, learnt) = layout.shards, parameters(config)
    trained = f"{in_words(learnt)} x {sum(trained_bytes(config))} bytes"
    if plain:
        trained += f" + {in_words(plain)} of the image tower x {frozen_bytes(config)} bytes"
    if config.tuner == "lora":
        trained = f"{in_words(plain)} x {FROZEN_BYTES} bytes + {in_words(learnt)} of LoRA x 16 bytes"
    if packed:
        trained = f"{in_words(packed)} x {NF4_BITS} bits + {trained}"
    if config.teacher is not None:
        trained += f" + {in_words(sizes(config.teacher).total)} of the teacher x {FROZEN_BYTES} bytes"
    trained = f"({trained})" if " + " in trained and parts > 1 else trained
    among = f" / {parts} GPUs" if parts > 1 else ""
    if has_copy(config, layout):
        among += f" + {in_words(sizes(config.model).total)} of a copy that answers x {FROZEN_BYTES} bytes"
    assert said.memory.startswith(f"{trained}{among} = {all_gib(name):.1f} GiB ")


def has_copy(config, layout) -> bool:
    """Whether each process has the model once more, whole."""
    return config.method == "grpo" and layout.world > 1 and not config.engine_url


def all_gib(name: str) -> float:
    """What the states of a recipe take of a GPU, and the weights of its teacher and of what answers."""
    config, layout = resolved(name).config, resolved(name).layout
    taught = 0 if config.teacher is None else FROZEN_BYTES * sizes(config.teacher).total / layout.shards / 2**30
    copied = FROZEN_BYTES * sizes(config.model).total / 2**30 if has_copy(config, layout) else 0
    return state_gib(config, layout) + taught + copied


def planned(name: str, gib: float, folder: Path) -> Proposal:
    """What `swiftlite plan` says of a recipe on devices with so much memory."""
    named = {key: value for key in ("model", "teacher") if (value := getattr(resolved(name).config, key))}
    for key, model in named.items():
        real_config(model).save_pretrained(folder / key)
    shape = real_config(named["model"], overrides=resolved(name).config.config_overrides)
    config = resolved(name).config.model_copy(update={key: str(folder / key) for key in named})
    found = replace(resolved(name), config=config, given=dict.fromkeys(type(config).model_fields, "recipe"))
    device = replace(find_device("h100"), memory=gib * 2**30)
    fleet = Fleet(device, header(name).nodes, header(name).processes)
    return settle(found, outline_of(found.config, shape, "cuda"), fleet)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_hardware(name, tmp_path):
    """And the sum in its header is that of the plan."""
    found = planned(name, header(name).gib, tmp_path)
    held = found.footprint
    assert found.fits and found.flags.keys() <= {"activation_checkpointing"}
    config, layout = resolved(name).config, resolved(name).layout
    gradients = parameters(config)[2] * trained_bytes(config)[1] / layout.shards
    states = held.weights + held.moments + gradients  # in shards
    assert states / 2**30 == pytest.approx(all_gib(name), rel=UNEVEN)


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_the_header_starts_the_recipe(name, monkeypatch, capsys):
    said = header(name)
    words = said.start
    if words[0] == "sbatch":
        assert words == ["sbatch", "--nodes", str(said.nodes), SLURM, name]
        assert {"nnodes", "nproc_per_node"} <= load_recipe(name).entries.keys()
        words = ["swiftlite", "train", "--recipe", name]
    elif words[0] == "torchrun":
        assert words[1:3] == ["--nproc-per-node", str(said.processes)] and said.nodes == 1
        monkeypatch.setenv("WORLD_SIZE", str(said.world))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        words = words[words.index("-m") + 1 :]
    monkeypatch.chdir(recipes_folder().parent)
    assert f"processes {said.world} (" in dry_run(words[1:], monkeypatch, capsys)


def test_a_recipe_with_an_engine_says_how_that_is_started():
    """On all of several GPUs, if it likes."""
    beside = [name for name in RECIPES if resolved(name).config.engine_url]
    for name in beside:
        said = RECIPES[name].read_text().splitlines()[4]
        assert said.partition(" --tensor-parallel-size")[0] == f"# Engine: {start_words(resolved(name).config)}"
    assert len(beside) == 2


def check_layout(config, layout, folder, *, count=True) -> None:
    """Everything that is refused before weights load, and the count of LoRA's parameters. Raises UserError."""
    scores, overrides = config.method == "rm", config.config_overrides
    whole = real_config(config.model, overrides=overrides)
    check_trainable_architecture(whole)
    import_architecture(whole, classifier=scores)
    assert config.max_length <= whole.get_text_config().max_position_embeddings
    schedule, micro_batches = config.pipeline_schedule, config.gradient_accumulation_steps
    check_tensor_parallel(whole, layout.tp)
    check_pipeline(whole, layout, schedule, micro_batches, compile_layers=config.compile)
    check_context_parallel(whole, layout, config.max_length)
    layers = max(2 * layout.pp, unlike_layers(config.model))
    shape = real_config(config.model, layers, overrides)
    shape.num_labels = 1
    base = build_model(str(folder), shape, dtype=torch.bfloat16, attention=attention.register(), classifier=scores)
    model = apply_tuner(base, config, None, print)
    if config.tuner == "lora" and count:
        score = shape.get_text_config().hidden_size * scores
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == sizes(config.model).adapters(config.lora_rank, layers) + score
    check_expert_parallel(base, layout)
    if why := why_alone(base):
        check_alone(config, layout, base, why)
    if layout.pp > 1:
        plan = plan_stages(base, layout.pp, choose_schedule(schedule, layers, layout.pp), length=config.max_length)
        stages = [stage for rank in range(layout.pp) for stage in cut_model(model, base, plan, rank)]
        assert len(stages) == layout.pp * plan.schedule.per_rank


@pytest.mark.parametrize("name", RECIPES)
def test_a_layout_fits_the_real_model(name, tmp_path):
    found = resolved(name)
    check_layout(found.config, found.layout, tmp_path)
    assert found.config.global_batch_size % (found.config.micro_batch_size * found.layout.data_ranks) == 0


@pytest.mark.parametrize(
    ("name", "key", "value", "world", "why"),
    [
        ("llama3/3.3-70b-sft-full-fsdp-tp8", "tensor_parallel_size", 3, 12, "attention heads"),
        ("llama3/3.1-70b-sft-full-tp8-pp4", "pipeline_parallel_size", 81, 81 * 8, "layers"),
        ("qwen3/30b-a3b-sft-full-ep8", "expert_parallel_size", 3, 3, "128 experts"),
        ("qwen3/8b-sft-full-fsdp", "expert_parallel_size", 2, 2, "no experts"),
        ("gemma/3-4b-sft-lora", "pipeline_parallel_size", 35, 35, "gemma3 has 34"),
        ("qwen3/30b-a3b-sft-lora-ep8", "target_modules", ["all-linear"], 8, "LoRA on the experts"),
        ("qwen3/next-80b-a3b-sft-lora-fsdp", "expert_parallel_size", 8, 8, "cannot share a row"),
        ("llama3/3.1-8b-sft-full-fsdp", GLOBAL, 12, 8, "multiple"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(name, key, value, world, why, tmp_path):
    """The checks above can fail."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    changed = {key: Given(value, key, "flag")}
    if key != GLOBAL:
        changed[GLOBAL] = Given(world * 8, GLOBAL, "flag")
    with pytest.raises(UserError, match=why):
        found = resolve(None, changed, load_recipe(name), env=env)
        check_layout(found.config, found.layout, tmp_path, count=False)


def test_a_model_that_takes_images_too_can_be_cut(tmp_path):
    given = {"pipeline_parallel_size": Given(2, "pipeline_parallel_size", "flag")}
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    found = resolve(None, given, load_recipe("gemma/3-4b-sft-lora"), env=env)
    check_layout(found.config, found.layout, tmp_path)


def test_a_gpu_that_is_too_small_shows(tmp_path):
    assert not planned("llama3/3.1-8b-sft-full-fsdp", 40, tmp_path).fits


def test_short_names_are_hub_ids_and_each_model_of_a_recipe_has_one():
    models = short_names("models")
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", hub) for hub in models.values())
    assert all(name == name.lower() for name in models)
    assert len(set(models.values())) >= len(models) - 1  # `qwen-7b` is a second name
    assert {load_recipe(name).entries["model"].value for name in RECIPES} <= models.keys()


def test_families_and_methods_are_covered():
    """What the recipes are for: the common models, adapters and all weights, one GPU to several nodes."""
    families = {name.split("/")[0] for name in RECIPES}
    assert families >= {
        "deepseek-r1", "gemma", "glm4", "gpt-oss", "granite", "llama3", "mistral", "olmo2", "phi", "qwen2.5",
        "qwen2.5-vl", "qwen3", "qwen3-vl", "qwen3.5", "smollm2", "smollm3",
    }  # fmt: skip
    configs = [resolved(name).config for name in RECIPES]
    assert {config.method for config in configs} == {"sft", "pretrain", "dpo", "kto", "rm", "grpo"}
    for key in ("from_scratch", "optimizer_in_backward", "pure_bf16", "teacher"):
        assert any(getattr(config, key) for config in configs), key
    assert {config.quantization for config in configs} >= {"none", "nf4"}
    assert {config.qat for config in configs} >= {"none", "int4"}
    assert {config.optimizer for config in configs} >= {"adamw", "adamw_8bit", "paged_adamw"}
    layouts = [resolved(name).layout for name in RECIPES]
    for dimension in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "expert_parallel"):
        assert any(getattr(layout, dimension) > 1 for layout in layouts), dimension
    assert any(layout.tp > 1 and layout.pp > 1 and layout.data_ranks > 1 for layout in layouts)


DOCS = recipes_folder().parent / "docs" / "parallelism.md"
MESHES = re.findall(r"^\| `(--parallel [^`]+)` \| ([\dx ]+) \|$", DOCS.read_text(), re.M)
COMMANDS = re.findall(r"^    (?:torchrun --nproc-per-node 8 -m )?swiftlite (sft .+)$", DOCS.read_text(), re.M)


@pytest.mark.parametrize(("flags", "mesh"), MESHES)
def test_the_docs_say_which_mesh_flags_give(flags, mesh, monkeypatch, capsys):
    shared = ["sft", "--model", "m/x", "--global-batch-size", "64", "--nproc-per-node", "16"]
    out = dry_run([*shared, *flags.split()], monkeypatch, capsys)
    assert f"pp x dp_replicate x dp_shard x cp x tp = {mesh} " in out


def test_the_commands_of_the_docs_parse(monkeypatch, capsys):
    assert len(MESHES) == 8 and len(COMMANDS) == 3
    for line in COMMANDS:
        assert "processes" in dry_run(line.split(), monkeypatch, capsys)
