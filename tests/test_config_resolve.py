"""Values become one config: types and spellings, defaults, contradictions, batch arithmetic and layouts."""

import datetime
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftlite.config.batch import solve_batch, weigh
from swiftlite.config.flags import all_flags, find_flag
from swiftlite.config.layout import Layout, plan_layout
from swiftlite.config.notes import METHOD_SETTINGS
from swiftlite.config.others.idle import IDLE
from swiftlite.config.others.words import BEGINNINGS, INSTEAD, SETTING, VALUES, shown
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import RENDEZVOUS, resolve, resolve_config
from swiftlite.config.schema import RunConfig
from swiftlite.config.settings.preference import PreferenceSettings
from swiftlite.config.settings.sampling import SamplingSettings
from swiftlite.config.validate import Given, wrong_values
from swiftlite.errors import UserError

NAMED = {"model": "org/model", "dataset": "org/rows"}


def made(method="sft", **values):
    return resolve_config(method, **{**NAMED, **values})


def plan(env=None, method="sft", **values):
    return resolve(method, {k: Given(v, k, "flag") for k, v in {**NAMED, **values}.items()}, env=env or {})


@pytest.mark.parametrize("name", ["llama3", "qwen3_nothink", "qwen2.5", "tokenizer_default", "chatml", "llama3.jinja"])
def test_another_tools_name_of_a_models_template_is_the_models_own(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, kept = plan(chat_template=name), name in ("chatml", "llama3.jinja")
    assert made.config.chat_template == (name if kept else None)
    assert ["comes with the model" in note for note in made.notes] == [True] * (not kept)
    (tmp_path / name).write_text("{{ messages }}")
    assert plan(chat_template=name).config.chat_template == name  # a file wins


def test_a_folder_at_home_is_meant_by_a_tilde(monkeypatch, tmp_path):
    """A shell leaves it alone behind `--output-dir=`, and in a recipe."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert made(output_dir="~/out").output_dir == str(tmp_path / "out")
    (tmp_path / "m").mkdir()
    (tmp_path / "rows.jsonl").touch()
    named = made(model="~/m", tokenizer="~/m", dataset=["~/rows.jsonl#5*0.5", "~/rows.jsonl"], eval_dataset="~/m")
    assert (named.model, named.tokenizer, named.eval_dataset) == (
        str(tmp_path / "m"),
        str(tmp_path / "m"),
        [named.model],
    )
    assert named.dataset == [f"{tmp_path}/rows.jsonl#5*0.5", f"{tmp_path}/rows.jsonl"]
    assert made(resume="~/out/checkpoints/step-00000001").output_dir == str(tmp_path / "out")


def test_every_flag_has_help_a_panel_and_names_of_its_own():
    spelled = [name for flag in all_flags().values() for name in (flag.name, *flag.aliases, *flag.switches)]
    assert len(spelled) == len(set(spelled))
    for flag in all_flags().values():
        assert flag.help.endswith(".") and flag.panel and flag.default_in_words, flag.name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("model-name-or-path", "model"),
        ("model_type", "model"),
        ("val-dataset", "eval_dataset"),
        ("split_dataset_ratio", "eval_fraction"),
        ("train-type", "tuner"),
        ("lora-r", "lora_rank"),
        ("cutoff-len", "max_length"),
        ("max_seq_length", "max_length"),
        ("truncation-strategy", "overlong"),
        ("per-device-train-batch-size", "micro_batch_size"),
        ("grad-accum", "gradient_accumulation_steps"),
        ("num-train-epochs", "epochs"),
        ("lr", "learning_rate"),
        ("lr_scheduler_type", "lr_scheduler"),
        ("mixed-precision", "precision"),
        ("torch_dtype", "precision"),
        ("parallel-method", "parallel"),
        ("sharding-strategy", "sharding"),
        ("device-mesh", "mesh"),
        ("tp", "tensor_parallel_size"),
        ("sequence-parallel-size", "context_parallel_size"),
        ("ep", "expert_parallel_size"),
        ("gradient-checkpointing", "activation_checkpointing"),
        ("cpu-offload", "offload"),
        ("resume-from-checkpoint", "resume"),
        ("save_total_limit", "keep_checkpoints"),
        ("logging_steps", "log_steps"),
        ("rlhf_type", "method"),
        ("stage", "method"),
        ("base_model", "model"),
        ("sft_type", "tuner"),
        ("lora_model_dir", "adapter"),
        ("deepspeed", "sharding"),
        ("fsdp", "parallel"),
        ("recompute_granularity", "activation_checkpointing"),
        ("sequence_len", "max_length"),
        ("neat_packing", "packing"),
        ("max_epochs", "epochs"),
        ("save", "output_dir"),
        ("early_stop_interval", "early_stopping_patience"),
        ("freeze_extra_modules", "trainable_modules"),
    ],
)
def test_names_of_other_tools(alias, name):
    assert find_flag(alias).name == name


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("sharding", "FULL_SHARD", "full"),
        ("sharding", "shard_grad_op", "grad_op"),
        ("sharding", "No_Shard", "none"),
        ("precision", "bfloat16", "bf16"),
        ("activation_checkpointing", "true", "full"),
        ("activation_checkpointing", "False", "none"),
        ("sharding", "zero3", "full"),
        ("sharding", "zero2", "grad_op"),
        ("sequence_parallel", "true", "always"),
        ("sequence_parallel", "False", "never"),
        ("target_modules", "ALL", ["all-linear"]),
        ("offload", "true", "cpu"),
        ("overlong", "delete", "drop"),
        ("lr_scheduler", "warmup_stable_decay", "wsd"),
        ("lr_scheduler", "CONSTANT-with-warmup", "constant_with_warmup"),
        ("pipeline_schedule", "Interleaved_1F1B", "interleaved-1f1b"),
        ("optimizer", "adamw_torch", "adamw"),
        ("resume", "runs/A_b", "runs/A_b"),
        ("max_shard_size", "500 mb", "500MB"),
        ("max_steps", "none", None),
        ("max_steps", "-1", None),
        ("target_modules", "all", ["all-linear"]),
        ("resume", "null", "never"),
        ("resume", None, "never"),
        ("resume", "on", "auto"),
        ("offload", None, "none"),
        ("quantization", "null", "none"),
        ("sharding", None, None),
        ("report_to", "none", []),
        ("report_to", ["none"], []),
        ("columns", '{"query": "q", "response": "a"}', {"query": "q", "response": "a"}),
        ("columns", "query=q,response=a", {"query": "q", "response": "a"}),
        ("trainable_layers", "-2", -2),
    ],
)
def test_spellings_of_values(name, word, value):
    assert RunConfig(**{name: word}).model_dump()[name] == value


def test_what_is_told_of_other_tools_holds():
    """Their names are no settings' own, and what users are to write instead is accepted."""
    known = {name for flag in all_flags().values() for name in (flag.name, *flag.aliases, *flag.switches)}
    assert not known & (IDLE.keys() | INSTEAD.keys())
    values = [(fix, setting) for setting, fixes in VALUES.items() for _, fix in fixes]
    texts = [*INSTEAD.values(), *(why for _, why in IDLE.values()), *(fix for fix, _ in values)]
    texts += [fix for _, fix in BEGINNINGS]
    for text in texts:
        written = SETTING.findall(text) or SETTING.findall(f"{{{text}}}")
        for name, value in written:
            assert name in all_flags(), text
            if value and "WORD" not in value:
                RunConfig(**{name: value.split() if name == "loss" else value})
        assert "{" not in re.sub(r'\{"role.*?\}', "", shown(text)), text
    assert VALUES.keys() <= all_flags().keys()


@pytest.mark.parametrize(
    ("name", "word", "flag", "recipe"),
    [
        ("method", "orpo", "`--method dpo` and `--loss orpo`", "`method: dpo` and `loss: orpo`"),
        ("sharding", "zero3_offload", "`--offload cpu`", "`offload: cpu`"),
        ("sharding", "examples/deepspeed/ds_z2_config.json", "`--sharding grad_op`", "`sharding: grad_op`"),
        ("sharding", "zero3.json", "`--sharding full`", "`sharding: full`"),
        ("eval_fraction", "100", "`--eval-dataset FILE#100`", "`eval_dataset: FILE#100`"),
        ("tuner", "qlora", "`--quantization nf4`", "`quantization: nf4`"),
        ("overlong", "left", "`--overlong truncate`", "`overlong: truncate`"),
    ],
)
def test_words_of_other_tools_that_mean_something_else_here(name, word, flag, recipe):
    for by, said in (("flag", flag), ("recipe", recipe)):
        (wrong,) = wrong_values({name: Given(word, name, by)})
        assert said in wrong.fix, wrong


def test_defaults_depend_on_method_and_tuner():
    assert (made().tuner, made().learning_rate, made().overlong) == ("lora", 1e-4, "truncate")
    assert made(tuner="full").learning_rate == 1e-5
    pretrain = made("pretrain")
    assert (pretrain.tuner, pretrain.learning_rate, pretrain.overlong) == ("full", 2e-5, "split")
    assert made(save_steps=7, eval_fraction=0.1).eval_steps == 7
    now = datetime.datetime(2031, 2, 3, 4, 5, 6)
    config = resolve("sft", {k: Given(v, k, "flag") for k, v in NAMED.items()}, env={}, now=now).config
    assert config.template_date == "2031-02-03"
    assert config.output_dir == "runs/model-sft-20310203-040506"


def test_a_run_that_goes_on_keeps_its_folder_and_its_day(tmp_path):
    (tmp_path / "config.yaml").write_text("template_date: '2020-01-02'\n")
    checkpoint = tmp_path / "checkpoints" / "step-00000010"
    config = made(resume=str(checkpoint))
    assert (config.output_dir, config.template_date) == (str(tmp_path), "2020-01-02")
    assert made(resume="auto", output_dir=str(tmp_path)).template_date == "2020-01-02"
    assert made(output_dir=str(tmp_path)).template_date != "2020-01-02"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"eval_dataset": "a", "eval_fraction": 0.1}, "keep one"),
        ({"early_stopping_patience": 2}, "--eval-fraction"),
        ({"adapter": "x/y", "tuner": "full"}, "--tuner lora"),
        ({"min_lr": 1e-3}, "lower --min-lr"),
        ({"tuner": "freeze", "trainable_layers": 0}, "--trainable-modules"),
        ({"streaming": "true"}, "leave --streaming out"),
        ({"method": "pretrain", "streaming": "true", "max_steps": 5, "max_samples": 9}, "--max-steps says how much"),
        ({"system": "nowhere.txt"}, "full stop"),
        ({"lr_scheduler": "wsd", "decay_ratio": 0.99}, "--decay-ratio"),
        ({"template_date": "3.2.2031"}, "YYYY-MM-DD"),
        ({"method": "kto", "global_batch_size": 1, "packing": False}, "apo_zero_unpaired"),
        ({"method": "dpo", "loss": "kto"}, "`swiftlite kto`"),
        ({"method": "kto", "loss": "apo_zero"}, "`swiftlite dpo`"),
        (
            {"activation_checkpointing": "selective", "pipeline_schedule": "zero-bubble", "nproc_per_node": "2",
             "pipeline_parallel_size": "2"},
            "interleaved-1f1b",
        ),
        ({"sequence_parallel": "always", "compile": "true"}, "--sequence-parallel auto"),
        ({"resume": "auto"}, "--output-dir"),
        ({"model": ""}, "--model"),
        ({"model": "", "placeholders": "name=gpt2"}, "--model-name is what rows call it"),
        ({"dataset": []}, "--dataset"),
        ({"tunner": "lora"}, "tuner"),
        ({"epochs": "inf"}, "number"),
        ({"columns": "a"}, "KEY=COLUMN"),
        ({"max_shard_size": "5"}, "5GB"),
        ({"parallel": "tp"}, "--tensor-parallel-size is a flag of its own; it takes auto"),
        ({"parallel": "pipeline"}, "--pipeline-parallel-size is a flag of its own"),
        ({"parallel": "fspd"}, "did you mean `fsdp`"),
    ],
)  # fmt: skip
def test_contradictions_name_the_fix(values, said):
    with pytest.raises(UserError) as caught:
        made(**values)
    assert said in caught.value.fix


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_shard_size": "big"}, "max_shard_size is 'big': not a size such as 5GB or 500MB"),
        ({"stop_after": "soon"}, "stop_after is 'soon': not a time such as 3h55m, 90m or 1d"),
        ({"columns": "{a"}, "columns is '{a': not JSON: "),
        ({"placeholders": ["a=1", "a=2"]}, "a is given twice"),
        ({"tuner": "x"}, "tuner cannot be 'x'"),
        ({"lora_rank": "0"}, "lora_rank is '0', out of range"),
    ],
)
def test_a_wrong_value_is_told_with_the_reason(values, said):
    with pytest.raises(UserError) as caught:
        made(**values)
    assert said in caught.value.what


def test_all_wrong_values_are_told_at_once():
    with pytest.raises(UserError) as caught:
        made(tuner="ful", lora_rank="x", packing="maybe")
    assert all(word in str(caught.value) for word in ("`full`", "lora_rank", "packing"))


def test_settings_without_effect_are_noted():
    notes = " ".join(plan(tuner="full", lora_rank=16, num_microbatches=4, epochs=2, max_steps=3).notes)
    assert all(name in notes for name in ("lora_rank", "num_microbatches", "epochs"))
    assert plan(lora_rank=8, lora_alpha=32).notes == []
    notes = plan(min_lr=1e-6, min_lr_ratio=0.2).notes + plan(lr_scheduler="constant", min_lr=1e-6).notes
    assert [note.split(" has no effect ")[0] for note in notes] == ["min_lr_ratio", "min_lr"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"learning_rate": 2e-5}, "--tuner full trains all weights"),
        ({"learning_rate": 2e-5, "tuner": "lora"}, None),
        ({"learning_rate": 5e-5}, None),
        ({"learning_rate": 5e-7, "method": "dpo"}, "--learning-rate 5e-07 is low"),
        ({"learning_rate": 5e-6, "method": "dpo"}, None),
        ({"learning_rate": 2e-5, "method": "pretrain"}, None),
        ({"lora_rank": 8}, "multiplied by 4"),
        ({"lora_rank": 8, "lora_alpha": 32}, None),
        ({"lora_rank": 8, "tuner": "lora", "lora_alpha": 8}, None),
    ],
)
def test_a_default_that_means_more_than_it_seems_is_told(values, told):
    notes = plan(**values).notes
    assert len(notes) == bool(told) and all(told in note for note in notes)


def test_a_batch_of_rows_elsewhere_is_of_packs_here():
    spelled = {"micro_batch_size": Given("2", "--per-device-train-batch-size", "flag")}
    named = {name: Given(value, name, "flag") for name, value in NAMED.items()}
    (note,) = resolve("sft", named | spelled, env={}).notes
    assert "packs of up to 2,048 tokens" in note and "--no-packing" in note
    own = {"micro_batch_size": Given("2", "--micro-batch-size", "flag")}
    unpacked = {"packing": Given("false", "--packing", "flag")}
    assert resolve("sft", named | own, env={}).notes == resolve("sft", named | spelled | unpacked, env={}).notes == []


@pytest.mark.parametrize(
    ("more", "size", "why"),
    [
        ({"nproc_per_node": "3"}, 9, "no multiple of 3 data ranks x 1 a forward pass"),
        ({"micro_batch_size": "3"}, 9, "no multiple of 1 data rank x 3 a forward pass"),
        ({"pipeline_parallel_size": "16"}, 16, "too small for a micro-batch in each of 16 stages"),
        ({"nproc_per_node": "3", "global_batch_size": "6"}, 6, None),
    ],
)
def test_a_batch_that_grows_with_the_layout_is_told(more, size, why):
    values = {"model": "a/b", "dataset": ["c/d"]} | more
    resolved = resolve("sft", {name: Given(value, name, "flag") for name, value in values.items()}, env={})
    assert resolved.config.global_batch_size == size
    told = [note for note in resolved.notes if note.startswith("--global-batch-size")]
    assert told == ([f"--global-batch-size is {size}, not 8, which is {why}"] if why else [])


@pytest.mark.parametrize(
    ("values", "idle"),
    [
        ({"sharding": "full"}, {"sharding"}),
        ({"fsdp_min_params": 5, "sync_every_microbatch": True}, {"fsdp_min_params", "sync_every_microbatch"}),
        ({"fsdp_min_params": 5, "sync_every_microbatch": True, "offload": "cpu"}, set()),
        ({"fsdp_min_params": 5, "sync_every_microbatch": True, "nproc_per_node": 2}, set()),
        ({"sync_every_microbatch": True, "nproc_per_node": 8}, {"sync_every_microbatch"}),  # one micro-batch a step
        ({"sync_every_microbatch": True, "nproc_per_node": 4, "parallel": "megatron", "pipeline_parallel_size": 2},
         {"sync_every_microbatch"}),
        ({"sharding": "grad_op", "tensor_parallel_size": 2}, {"sharding"}),
        ({"sharding": "full", "context_parallel_size": 2}, set()),
        ({"sharding": "hybrid", "mesh": "2x1"}, {"sharding"}),
        ({"sharding": "none"}, set()),
    ],
)  # fmt: skip
def test_settings_of_several_processes_are_noted_where_they_cannot_act(values, idle):
    assert {note.split(" has no effect ")[0] for note in plan(**values).notes} == idle


def test_a_loss_that_is_another_one_is_noted():
    assert "robust is sigmoid without --label-smoothing" in " ".join(plan(method="dpo", loss=["robust"]).notes)
    assert plan(method="dpo", loss=["robust"], label_smoothing=0.1).notes == []


def test_a_revision_of_a_local_folder_is_noted(tmp_path):
    assert "revision has no effect" in " ".join(plan(model=str(tmp_path), revision="v2").notes)
    assert plan(revision="v2").notes == []


@pytest.mark.parametrize(
    ("method", "values", "named"),
    [
        ("pretrain", {"beta": 0.1, "loss": ["sigmoid"], "share_prompt": False}, ["loss", "beta", "share_prompt"]),
        ("sft", {"beta": 0.1, "loss": ["dft"], "reference": "model"}, ["beta", "reference"]),
        ("dpo", {"desirable_weight": 2.0, "undesirable_weight": 2.0}, ["desirable_weight", "undesirable_weight"]),
        ("dpo", {"loss": ["sft"], "beta": 0.2}, ["beta"]),
        ("dpo", {"loss": ["orpo"], "beta": 0.2, "reference": "model"}, ["reference"]),
        ("dpo", {"loss": ["orpo", "sigmoid"], "beta": 0.2, "reference": "model", "rpo_alpha": 1.0}, []),
        ("kto", {"label_smoothing": 0.1, "rpo_alpha": 1.0, "simpo_gamma": 0.5, "share_prompt": True},
         ["label_smoothing", "rpo_alpha", "simpo_gamma", "share_prompt"]),
        ("kto", {"beta": 0.2, "desirable_weight": 2.0, "reference": "precompute"}, []),
    ],
)  # fmt: skip
def test_preference_settings_without_effect_are_noted(method, values, named):
    given = {name: Given(value, name, "flag") for name, value in {**NAMED, **values}.items()}
    assert [note.split()[0] for note in resolve(method, given, env={}).notes] == named


def test_every_preference_setting_says_where_it_acts():
    assert list(METHOD_SETTINGS) == [*PreferenceSettings.model_fields, *SamplingSettings.model_fields]


def test_method_of_command_and_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("method: pt\nmodel: a/b\ndataset: c/d\n")
    recipe = load_recipe(str(path))
    assert resolve(None, {}, recipe, env={}).config.method == "pretrain"
    assert resolve("pretrain", {}, recipe, env={}).config.method == "pretrain"
    with pytest.raises(UserError, match="contradicts"):
        resolve("sft", {}, recipe, env={})
    with pytest.raises(UserError, match="what to train"):
        resolve(None, {k: Given(v, k, "flag") for k, v in NAMED.items()}, env={})


def test_flags_win_over_environment_over_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: a/b\ndataset: c/d\nnproc_per_node: 2\nseed: 1\nglobal_batch_size: 24\n")
    recipe, seven = load_recipe(str(path)), {"seed": Given("7", "--seed", "flag")}
    assert resolve("sft", seven, recipe, env={}).config.seed == 7
    assert resolve("sft", {}, recipe, env={"NPROC_PER_NODE": "4"}).layout.world == 4
    flag = {"nproc_per_node": Given("8", "--nproc-per-node", "flag")}
    assert resolve("sft", flag, recipe, env={"NPROC_PER_NODE": "4"}).layout.world == 8
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1"}
    resolved = resolve("sft", {}, recipe, env=torchrun)
    assert (resolved.layout.world, resolved.config.master_addr, resolved.notes) == (6, None, [])
    resolved = resolve("sft", flag, recipe, env=torchrun)
    assert resolved.layout.world == 6
    assert resolved.notes == ["nproc_per_node has no effect under torchrun, which starts the processes"]


@pytest.mark.parametrize(
    ("values", "idle"),
    [
        ({"lr_scheduler": "constant", "min_lr_ratio": "0.1", "warmup_steps": "5"}, ["min_lr_ratio", "warmup_steps"]),
        ({"lr_scheduler": "constant_with_warmup", "min_lr_ratio": "0.1", "warmup_steps": "5"}, ["min_lr_ratio"]),
        ({"profile": "true", "max_steps": "3"}, ["profile"]),
        ({"profile": "true", "max_steps": "4"}, []),
        ({"run_name": "mine"}, ["run_name"]),
        ({"run_name": "mine", "report_to": "wandb"}, []),
        ({"sample_by": "paragraph"}, ["sample_by"]),
        ({"sample_by": "paragraph", "dataset": ["rows.jsonl", "books.txt.gz#5"]}, []),
        ({"sample_by": "paragraph", "dataset": [".*2"]}, []),  # a folder, which may hold some
        ({"master_addr": "host", "master_port": "29500", "node_rank": "0"}, [*RENDEZVOUS]),
        ({"master_addr": "host", "nproc_per_node": "2"}, []),
        ({"max_samples": "9", "dataset": ["a/b#5*2", "c/d#5"]}, ["max_samples"]),
        ({"max_samples": "9", "dataset": ["a/b#5"], "eval_dataset": ["c/d"]}, []),
        ({"system": "Be brief."}, []),
    ],
)
def test_a_setting_without_effect_is_told(values, idle):
    given = {name: Given(value, name, "flag") for name, value in (NAMED | values).items()}
    assert [note.split()[0] for note in resolve("sft", given, env={}).notes] == idle


def test_a_folder_may_hold_texts_whatever_its_name(tmp_path):
    (tmp_path / "books@2024#1").mkdir()
    for spec in ("books@2024#1", "books@2024#1#5*2"):
        given = {"sample_by": "paragraph", "dataset": [str(tmp_path / spec)]}
        given = {name: Given(value, name, "flag") for name, value in (NAMED | given).items()}
        assert resolve("sft", given, env={}).notes == []


def test_machines_are_numbered_from_0():
    named = {"model": "a/b", "dataset": ["c/d"], "nnodes": 2, "nproc_per_node": 2}
    assert resolve_config("sft", **named, node_rank=1).node_rank == 1
    for sizes, fix in (({"node_rank": 2}, "--nnodes 3"), ({"nnodes": None, "node_rank": 1}, "--nnodes 2")):
        with pytest.raises(UserError) as error:
            resolve_config("sft", **named | sizes)
        assert fix in error.value.fix


# --- batch sizes


@pytest.mark.parametrize("given", [{}, {"global_batch_size": 2}, {"num_microbatches": 2}, {"micro_batch_size": 4},
                                   {"gradient_accumulation_steps": 2, "global_batch_size": 4}])  # fmt: skip
def test_the_batch_that_a_pipeline_is_told_to_take_fits_it(given):
    named = {"model": "a/b", "dataset": ["c/d"], "pipeline_parallel_size": 4, "nproc_per_node": 4}
    try:
        resolve_config("sft", **named | given)
    except UserError as error:
        words = [word.strip(",") for word in error.fix.split(" or ")[0].replace(" with ", " ").split()[1:]]
        said = {name[2:].replace("-", "_"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        config = resolve_config("sft", **named | given | said)
        assert config.gradient_accumulation_steps >= 4
    else:
        assert given in ({}, {"micro_batch_size": 4})


def sizes(total=None, micro=None, accumulation=None):
    named = {"global_batch_size": total, "micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return {name: size for name, size in named.items() if size is not None}


@given(
    micro=st.integers(1, 20),
    accumulation=st.integers(1, 20),
    ranks=st.integers(1, 9),
    kept=st.sets(st.sampled_from(["total", "micro", "accumulation"]), min_size=2),
)
@settings(max_examples=60, deadline=None)
def test_any_two_sizes_give_the_third(micro, accumulation, ranks, kept):
    whole = {"total": micro * accumulation * ranks, "micro": micro, "accumulation": accumulation}
    batch = solve_batch(sizes(**{name: whole[name] for name in kept}), ranks)
    assert (batch.global_size, batch.micro_size, batch.accumulation) == tuple(whole.values())


@given(
    total=st.none() | st.integers(1, 64),
    micro=st.none() | st.integers(1, 16),
    accumulation=st.none() | st.integers(1, 16),
    ranks=st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_a_batch_always_agrees_or_is_refused_with_numbers_that_do(total, micro, accumulation, ranks):
    try:
        batch = solve_batch(sizes(total, micro, accumulation), ranks)
    except UserError as error:
        named = int(error.fix.split("--global-batch-size ")[1].split()[0])
        solve_batch(sizes(named, micro, accumulation), ranks)
        return
    assert batch.global_size == batch.micro_size * batch.accumulation * ranks
    assert total in (None, batch.global_size) and micro in (None, batch.micro_size)


def test_default_batch_is_eight_packs_whatever_the_ranks():
    assert [solve_batch({}, ranks).global_size for ranks in (1, 2, 4, 8, 16)] == [8, 8, 8, 8, 16]
    assert solve_batch(sizes(micro=3), 1).global_size == 9


def test_flags_decide_which_size_of_the_recipe_gives_way():
    recipe = sizes(8, 1, 8)
    assert weigh({}, recipe) == (recipe, [])
    assert weigh(sizes(micro=2), recipe) == (sizes(8, 2), ["gradient_accumulation_steps"])
    assert weigh(sizes(accumulation=4), recipe) == (sizes(micro=1, accumulation=4), ["global_batch_size"])
    assert weigh(sizes(total=16), recipe) == (sizes(16, 1), ["gradient_accumulation_steps"])


# --- layouts


@pytest.mark.parametrize(
    ("values", "mesh", "sharding"),
    [
        ({}, "1 x 1 x 1 x 1 x 1", "none"),
        ({"parallel": "fsdp", "sharding": "full"}, "1 x 1 x 1 x 1 x 1", "none"),
        ({"nproc_per_node": 8}, "1 x 1 x 8 x 1 x 1", "full"),
        ({"parallel": "fsdp", "sharding": "grad_op", "nproc_per_node": 8}, "1 x 1 x 8 x 1 x 1", "grad_op"),
        ({"parallel": "ddp", "nproc_per_node": 8}, "1 x 8 x 1 x 1 x 1", "none"),
        ({"sharding": "NO_SHARD", "nproc_per_node": 4}, "1 x 4 x 1 x 1 x 1", "none"),
        ({"mesh": "2x4"}, "1 x 2 x 4 x 1 x 1", "full"),
        ({"mesh": "2x4", "tensor_parallel_size": 2, "nproc_per_node": 16}, "1 x 2 x 4 x 1 x 2", "full"),
        ({"parallel": "megatron", "tensor_parallel_size": 4, "pipeline_parallel_size": 2}, "2 x 1 x 1 x 1 x 4", "none"),
        ({"parallel": "fsdp", "context_parallel_size": 2, "nproc_per_node": 8}, "1 x 1 x 4 x 2 x 1", "full"),
        ({"sharding": "hybrid", "nproc_per_node": 8, "nnodes": 4}, "1 x 4 x 8 x 1 x 1", "full"),
        ({"nproc_per_node": 8, "nnodes": 2, "expert_parallel_size": 4}, "1 x 1 x 16 x 1 x 1", "full"),
    ],
)
def test_flags_become_a_mesh(values, mesh, sharding):
    layout = plan(**values).layout
    assert (str(layout), layout.sharding) == (mesh, sharding)


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"tensor_parallel_size": 4, "nproc_per_node": 6}, "start 8 processes"),
        ({"tensor_parallel_size": 3, "nproc_per_node": 8}, "--tensor-parallel-size 4"),
        ({"mesh": "2x4", "nproc_per_node": 6}, "--mesh 2x3"),
        ({"mesh": "2x4", "nproc_per_node": 16}, "or divide the model by --tp 2"),
        ({"mesh": "4x4", "nproc_per_node": 8}, "start 16 processes"),
        ({"sharding": "hybrid", "nproc_per_node": 8}, "--mesh 2x4"),
        ({"parallel": "megatron", "nproc_per_node": 8}, "--tensor-parallel-size"),
        ({"parallel": "none", "nproc_per_node": 2}, "--parallel auto"),
        ({"parallel": "none", "tensor_parallel_size": 2}, "--parallel auto"),
        ({"parallel": "ddp", "sharding": "full", "nproc_per_node": 2}, "--parallel fsdp"),
        ({"parallel": "none", "sharding": "full"}, "--parallel fsdp"),
        ({"sharding": "none", "mesh": "2x2"}, "--sharding hybrid"),
        ({"mesh": "2by4"}, "2x4"),
        ({"mesh": "0x4"}, "2x4"),
        ({"expert_parallel_size": 3, "nproc_per_node": 8}, "--expert-parallel-size"),
        ({"pipeline_parallel_size": 4, "global_batch_size": 2}, "--global-batch-size 4"),
        ({"nproc_per_node": 3, "global_batch_size": 8}, "--global-batch-size 6 or 9"),
        ({"pipeline_parallel_size": 2, "num_microbatches": 4, "gradient_accumulation_steps": 8}, "leave one"),
        (
            {"pipeline_parallel_size": 2, "num_microbatches": 2, "global_batch_size": 4, "micro_batch_size": 1},
            "--num-microbatches 4",
        ),
    ],
)
def test_illegal_layouts_name_the_nearest(values, fix):
    with pytest.raises(UserError) as caught:
        plan(**values)
    assert fix in caught.value.fix


@given(
    tp=st.sampled_from([1, 2, 3, 4]),
    pp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2]),
    world=st.integers(1, 24),
)
@settings(max_examples=80, deadline=None)
def test_the_mesh_holds_every_process_or_is_refused(tp, pp, cp, world):
    config = RunConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, context_parallel_size=cp, nproc_per_node=world
    )
    if world % (tp * pp * cp):
        with pytest.raises(UserError, match="cannot be split"):
            plan_layout(config, {})
    else:
        assert plan_layout(config, {}).world == world


def test_a_bad_world_size_is_told():
    with pytest.raises(UserError, match="WORLD_SIZE"):
        plan({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "many"})


@pytest.mark.parametrize("rank", ["x", "2", "-1"])
def test_a_rank_that_is_none_of_the_world_is_told(rank):
    with pytest.raises(UserError, match="^RANK is"):
        plan({"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


def test_a_huge_world_is_checked_at_once():
    with pytest.raises(UserError):
        plan(nproc_per_node=10**9 + 7, tensor_parallel_size=4)


def test_a_recipes_layout_gives_way_to_the_command_line():
    tensor = load_recipe("llama3/3.1-8b-sft-full-fsdp-tp2")
    shared = {"parallel": Given("none", "--parallel", "flag")}
    alone = resolve("sft", shared, tensor, env={})
    assert (
        alone.layout == Layout() and "the recipe's tensor_parallel_size 2 gives way to --parallel none" in alone.notes
    )
    with pytest.raises(UserError, match="contradicts the tensor"):
        resolve("sft", shared | {"tensor_parallel_size": Given("2", "--tp", "flag")}, tensor, env={})


def test_an_adapter_of_another_base_is_told(tmp_path):
    def notes(named, model):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        given = {"model": model, "dataset": ["rows.jsonl"], "output_dir": "out", "adapter": str(tmp_path)}
        return resolve("sft", {name: Given(value, name, "flag") for name, value in given.items()}, env={}).notes

    assert notes("org/Base-8B", "/models/base-8b") == notes(None, "org/base-8b") == []
    (note,) = notes("org/base-8b", "org/base-8b-instruct")
    assert "trained on org/base-8b, --model is org/base-8b-instruct" in note


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"columns": ["a=b", "a=c"]}, "columns"),
        ({"max_shard_size": "0GB"}, "max_shard_size"),
        ({"master_port": 70_000}, "65535"),
    ],
)
def test_values_that_nothing_can_be_made_of(values, said):
    with pytest.raises(UserError, match=said):
        made(**values)
