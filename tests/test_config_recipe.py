"""Recipes: read strictly, found by path or name, and the saved configuration that runs again."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from swiftlite.config.changes import changed_settings
from swiftlite.config.json_schema import recipe_schema
from swiftlite.config.methods import Method
from swiftlite.config.names import dataset_name, dataset_names, model_name
from swiftlite.config.recipe import find_recipe, load_recipe, recipes_folder, shipped_recipes
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.save import dump_config, save_config
from swiftlite.config.types import said_value
from swiftlite.config.validate import Given
from swiftlite.errors import UserError


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe's text (or bytes) to a file and read it."""

    def read(text):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_recipe(str(path))

    return read


BASE = "method: sft\nmodel: org/model\ndataset: org/rows\n"


def test_scalars_keep_their_meaning(recipe):
    read = recipe(
        BASE + "learning_rate: 1e-5\nmax-steps: null\nrevision: 0123\npacking: no\nrun_name: 'on'\n"
        "report_to: [wandb, TensorBoard]\ncolumns: {instruction: question}\nwarmup_steps:\nadam_eps: 1.0e-6\n"
    )
    config = resolve(None, {}, read, env={}).config
    assert config.learning_rate == 1e-5 and config.adam_epsilon == 1e-6
    assert config.max_steps is None and config.warmup_steps is None
    assert config.revision == "0123" and config.run_name == "on"
    assert config.packing is False
    assert config.report_to == ["wandb", "tensorboard"]
    assert config.columns == {"instruction": "question"}


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("max_lenght: 5", 4, "max_length"),
        ("lr: 1e-5\nlearning_rate: 1e-4", 5, "twice"),
        ("seed: 1\nseed: 2", 5, "twice"),
        ("seed: {a: 1}", 4, "nested"),
        ("seed: [1, 2]", 4, "one value"),
        ("dataset2: x", 4, "dataset"),
        ("bf16: false", 4, "`precision: fp32`"),
        ("bf16: full", 4, "`pure_bf16: true`"),
        ("max_train_samples: 1000", 4, "#1000"),
        ("fsdp_config: {a: b}", 4, "`sharding`"),
        ("seed: !!python/object/apply:os.system ['true']", 4, "tag"),
        ("target_modules: [[a]]", 4, "plain values"),
        ("columns: {a: {b: c}}", 4, "plain values"),
        ("config_overrides: {a: {b: 1, b: 2}}", 4, "twice"),
        ("special_tokens:\n  pad_token: x\n  eos_token: y", 4, "`new_tokens: TOKEN`"),
        ("seed: 'open", 5, "YAML"),
        ("\tseed: 1", 4, "YAML"),
        ("? [a, b]\n: 1", 4, "unknown key"),
        ("<<: {seed: 1}", 4, "unknown key"),
        ("training:\n  seed: 1", 4, "a recipe has no sections"),
        ("---\nseed: 1", 4, "YAML"),
    ],
)
def test_a_bad_recipe_names_the_line(recipe, text, line, said):
    with pytest.raises(UserError) as caught:
        recipe(BASE + text + "\n")
    assert f"recipe.yaml:{line}" in caught.value.where
    assert said in str(caught.value)
    assert caught.value.fix


LLAMA_FACTORY = """\
model_name_or_path: org/model
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
pref_loss: simpo
dataset: org/rows
max_samples: 1000
default_system: null
dataloader_num_workers: 4
overwrite_output_dir: true
bf16: true
ddp_timeout: 180000000
eval_strategy: steps
"""
AXOLOTL = """\
base_model: org/model
model_type: LlamaForCausalLM
load_in_8bit: false
dataset: org/rows
val_set_size: 0.05
rl: kto
rl_beta: 0.5
adapter: qlora
load_in_4bit: true
warmup_steps: 0.1
tokenizer_type: AutoTokenizer
lora_model_dir:
lora_target_linear: true
sequence_len: 4096
sample_packing: true
wandb_project:
special_tokens:
  pad_token: <|end_of_text|>
plugins:
  - axolotl.integrations.liger.LigerPlugin
bf16: auto
fp16: false
gradient_checkpointing_kwargs:
  use_reentrant: false
flash_attention: true
"""


def test_how_often_in_the_words_of_other_tools(recipe):
    text = "saves_per_epoch: 1\nevals_per_epoch: 4\nsave_strategy:\nlogging_steps: 0.05\neval_steps: 7\n"
    made = resolve(None, {}, recipe(BASE + text + "val_set_size: 0.1\n"), env={})
    config = made.config
    assert (config.save_steps, config.eval_steps, config.log_steps) == ("epoch/1", "epoch/4", 0.05)
    assert made.notes == [
        "the recipe's saves_per_epoch is read as `save_steps: epoch/1`",
        "the recipe's evals_per_epoch is read as `eval_steps: epoch/4`",
        "the recipe's eval_steps has no effect beside evals_per_epoch: which decides here",
    ]
    steps = resolve(None, {"save_steps": Given("9", "--save-steps", "flag")}, recipe(BASE + text), env={}).config
    assert steps.save_steps == 9 and steps.eval_steps == "epoch/4"  # a flag wins over what a recipe says otherwise
    unsaved = resolve(None, {}, recipe(BASE + "save_strategy: no\nval_set_size: 0.1\n"), env={}).config
    assert (unsaved.save_steps, unsaved.eval_steps) == ("never", 500)


def test_a_null_of_another_tools_switch_says_nothing(recipe):
    text = "train_on_inputs:\nload_best_model_at_end: null\nval_set_size: 0.1\n"
    assert resolve(None, {}, recipe(BASE + text), env={}).config.train_on == "answers"
    text = "train_on_inputs: true\nload_best_model_at_end: true\nval_set_size: 0.1\n"
    config = resolve(None, {}, recipe(BASE + text), env={}).config
    assert (config.train_on, config.result) == ("all", "best")


def test_the_least_rate_of_a_decay_as_transformers_takes_it(recipe):
    text = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  min_lr_rate: 0.1\n"
    config = resolve(None, {}, recipe(BASE + text), env={}).config
    assert (config.lr_scheduler, config.min_lr_ratio, config.min_lr) == ("cosine", 0.1, None)
    with pytest.raises(UserError, match="lr_scheduler_kwargs") as told:
        recipe(BASE + "lr_scheduler_kwargs: {power: 2}\n")
    assert "`min_lr: 1e-6`" in told.value.fix


def test_who_a_model_is_in_the_words_of_ms_swift(recipe):
    text = BASE + "model_name: Robo 1\nmodel_author: Us, Inc\n"
    assert resolve(None, {}, recipe(text), env={}).config.placeholders == {"name": "Robo 1", "author": "Us, Inc"}
    assert resolve(None, {}, recipe(BASE + "model_name: null\nmodel_author:\n"), env={}).config.placeholders == {}
    for twice in ("placeholders: name=x\n", "model_name: Robo 2\n", "model-name: Robo 2\n"):
        with pytest.raises(UserError, match="given twice"):
            recipe(text + twice)
    with pytest.raises(UserError, match="tag"):
        recipe(BASE + "save_strategy: !!python/name:os.system epoch\n")


def test_empty_keys_of_other_tools_say_nothing(recipe):
    made = resolve(None, {}, recipe(BASE + "lr_scheduler_kwargs: {}\nspecial_tokens: []\n"), env={})
    assert not any("lr_scheduler" in note or "special_tokens" in note for note in made.notes)


def test_files_of_other_tools_are_read(recipe):
    made = resolve(None, {}, recipe(LLAMA_FACTORY), env={})
    config = made.config
    assert (config.method, config.loss, config.tuner, config.precision) == ("dpo", ["simpo"], "lora", "bf16")
    assert (config.max_samples, config.system) == (1000, None)
    assert config.target_modules == ["all-linear"]
    idle = ("do_train", "dataloader_num_workers", "overwrite_output_dir", "ddp_timeout", "eval_strategy")
    assert [note.split()[2] for note in made.notes[:5]] == list(idle)

    made = resolve(None, {}, recipe(AXOLOTL), env={})
    config = made.config
    assert (config.method, config.model, config.beta, config.precision) == ("kto", "org/model", 0.5, "auto")
    assert (config.eval_fraction, config.max_length, config.adapter) == (0.05, 4096, None)
    assert (config.tuner, config.quantization, config.warmup_ratio, config.warmup_steps) == ("lora", "nf4", 0.1, None)
    idle = (
        "model_type", "load_in_8bit", "tokenizer_type", "special_tokens", "plugins", "gradient_checkpointing_kwargs",
        "flash_attention",
    )  # fmt: skip
    notes = [note for note in made.notes if "has no effect" in note][:7]
    assert [note.split()[2] for note in notes] == list(idle)
    assert "`kernels: auto`" in notes[4] and not any("{" in note for note in notes)
    assert "the recipe's adapter is read as `tuner: lora` and `quantization: nf4`" in made.notes


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("loss_type: dft", ["dft"]), ("use_dft_loss: true", ["dft"]), ("enable_dft_loss: true", ["dft"]),
        ("use_dft_loss: false", []), ("loss_type: nll", ["nll"]), ("enable_dft_loss:", []),
    ],
)  # fmt: skip
def test_dynamic_fine_tuning_in_the_words_of_others(recipe, line, loss):
    assert resolve("sft", {}, recipe(f"model: a/b\ndataset: c/d\n{line}\n"), env={}).config.loss == loss


def test_a_value_given_by_two_names_is_told_where_they_differ(recipe):
    assert recipe(BASE + "torch_dtype: bfloat16\nbf16: true\n").entries["precision"].value == "bf16"
    assert recipe(BASE + "fsdp:\nparallel: fsdp\n").entries["parallel"].value == "fsdp"
    with pytest.raises(UserError, match="given twice, first in line 4"):
        recipe(BASE + "torch_dtype: float32\nbf16: true\n")


def test_a_configuration_of_torchtune_is_told_as_such(recipe):
    with pytest.raises(UserError, match="torchtune") as caught:
        recipe("seed: null\noptimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5\n")
    assert caught.value.where.endswith("recipe.yaml:2: optimizer")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "key: value"),
        ("just words\n", "key: value"),
        (b"model: \xff\xfe\n", "UTF-8"),
        ("model: a\x00b\n", "YAML"),
        ("a: " + "[" * 20000, "nested too deeply"),
        ("run_name: " + "x" * 300_000, "larger"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, content, said):
    with pytest.raises(UserError, match=said):
        recipe(content)


def test_aliases_in_yaml_cannot_grow(recipe):
    bomb = "dataset: &a [x, x]\neval_dataset: [*a, *a]\n"
    with pytest.raises(UserError, match="plain values"):
        recipe("method: sft\nmodel: m/x\n" + bomb)


@pytest.mark.parametrize(
    "text",
    [
        "max_length: many",
        "tuner: lorra",
        "save_steps: true",
        "save_steps: null",
        "save_steps: 1.5",
        "save_steps: 0",
        "eval_steps: epoch/0",
        "log_steps: never",
        "epochs: -1",
        "epochs: 1e308",
    ],
)
def test_a_bad_value_names_the_line(recipe, text):
    read = recipe(BASE + text + "\n")
    with pytest.raises(UserError) as caught:
        resolve(None, {}, read, env={})
    assert "recipe.yaml:4: " + text.split(":")[0] in caught.value.where


def test_found_by_path_name_and_stem(tmp_path, monkeypatch):
    wanted = recipes_folder() / "llama3" / "8b-sft-fsdp.yaml"
    for name in ("llama3/8b-sft-fsdp", "llama3/8b-sft-fsdp.yaml", "recipes/llama3/8b-sft-fsdp.yaml", "8B-sft-FSDP"):
        assert find_recipe(name).resolve() == wanted.resolve()
    with pytest.raises(UserError, match="llama3/8b-sft-lora"):  # two folders have one of this stem
        find_recipe("8b-sft-LoRA")
    with pytest.raises(UserError, match="did you mean `llama3/8b-sft-fsdp`"):
        find_recipe("llama3/8b-sft-fdsp")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "8b-sft-fsdp").write_text(BASE)
    assert find_recipe("8b-sft-fsdp").read_text() == BASE  # a file wins over a name
    assert not {"models", "datasets"} & set(shipped_recipes())


def test_short_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_name("qwen-7b") == "Qwen/Qwen2.5-7B-Instruct"
    assert model_name("LLAMA3_8B") == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert model_name("some/model") == "some/model"
    assert dataset_name("alpaca-en@train#500*2") == "tatsu-lab/alpaca@train#500*2"
    assert dataset_name("gsm8k#5") == "openai/gsm8k:main#5"
    assert dataset_name("gsm8k:socratic@test") == "openai/gsm8k:socratic@test"
    for slip in ("rows.jsonl*2#3", "rows.jsonl#3#4"):  # stay whole, and are no file then
        assert dataset_name(slip) == slip
    (tmp_path / "qwen-7b").mkdir()
    (tmp_path / "alpaca-en").mkdir()
    assert model_name("qwen-7b") == "qwen-7b"
    assert dataset_name("alpaca-en#5") == "alpaca-en#5"


def test_blanks_part_data_sets_but_no_path(tmp_path, monkeypatch):
    folder, work = tmp_path / "recipes", tmp_path / "work"
    folder.mkdir(), work.mkdir()
    monkeypatch.chdir(work)
    for path in (work / "a.jsonl", work / "b c.jsonl", folder / "d e.jsonl"):
        path.write_text("")
    assert dataset_names("a.jsonl org/rows@test  gsm8k#5") == ["a.jsonl", "org/rows@test", "openai/gsm8k:main#5"]
    assert dataset_names("b c.jsonl#5") == ["b c.jsonl#5"]
    assert dataset_names("d e.jsonl*2", folder) == [f"{folder / 'd e.jsonl'}*2"]
    assert dataset_names("b d.jsonl") == ["b d.jsonl"]  # a slip in a path stays whole


def test_paths_are_tried_beside_the_recipe_last(tmp_path, monkeypatch):
    folder, work = tmp_path / "recipes", tmp_path / "work"
    folder.mkdir(), work.mkdir()
    monkeypatch.chdir(work)
    (folder / "rows.jsonl").write_text("{}")
    (folder / "r.yaml").write_text("method: sft\nmodel: m/x\ndataset: rows.jsonl#3\n")
    read = load_recipe(str(folder / "r.yaml"))
    assert resolve(None, {}, read, env={}).config.dataset == [f"{folder / 'rows.jsonl'}#3"]
    (work / "rows.jsonl").write_text("{}")
    assert resolve(None, {}, read, env={}).config.dataset == ["rows.jsonl#3"]


def test_the_saved_config_gives_the_same_run(tmp_path):
    config = resolve_config(
        "sft",
        model="qwen-7b",
        dataset=["alpaca-en#5", "org/b, c"],
        learning_rate="3e-7",
        report_to=["trackio"],
        run_name="0123",
        columns={"instruction": "a: b, {c}"},
        new_tokens=["<a>", "null", " x", "a,b", "#", "é"],
        target_modules=[r"layers\.\d{1,2}\.q"],
        eval_fraction=0.1,
        max_steps=5,
    )
    path = tmp_path / "config.yaml"
    save_config(config, path)
    again = resolve(None, {}, load_recipe(str(path)), env={})
    assert again.config == config
    assert dump_config(again.config) == dump_config(config)
    assert again.notes == []
    plain = yaml.safe_load(path.read_text())  # other readers see the same types
    assert plain["learning_rate"] == 3e-7 and plain["run_name"] == "0123" and plain["tokenizer"] is None
    assert "dry_run" not in plain and "debug" not in plain
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7}, {"eval_fraction": 0.1, "eval_samples": 2}])
def test_the_saved_config_of_a_run_that_draws_answers_gives_the_same_run(tmp_path, more):
    """Without a word on what nobody said."""
    config = resolve_config("grpo", model="m/x", dataset="d/x", reward="contains", **more)
    save_config(config, tmp_path / "config.yaml")
    again = resolve(None, {}, load_recipe(str(tmp_path / "config.yaml")), env={})
    assert dump_config(again.config) == dump_config(config) and again.notes == []


def test_the_saved_config_runs_in_another_layout(tmp_path):
    path = tmp_path / "config.yaml"
    save_config(resolve_config("sft", model="m/x", dataset="d/x"), path)
    again = resolve(None, {}, load_recipe(str(path)), env={"NPROC_PER_NODE": "4"}).config
    assert (again.global_batch_size, again.micro_batch_size, again.gradient_accumulation_steps) == (8, 1, 2)


def test_a_saved_config_runs_again_beside_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(BASE + "output_dir: out\n")
    saved = load_recipe("out/config.yaml")
    first = resolve(None, {}, saved, env={})
    assert first.config.output_dir == "out-2" and "out-2" in first.notes[0]
    (tmp_path / "out-2").mkdir()
    assert resolve(None, {}, saved, env={}).config.output_dir == "out-3"
    goes_on = {"resume": Given("auto", "--resume", "flag")}
    assert resolve(None, goes_on, saved, env={}).config.output_dir == "out"
    named = {"output_dir": Given("out", "-o", "flag")}
    assert resolve(None, named, saved, env={}).config.output_dir == "out"


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path):
    before, after = tmp_path / "out", tmp_path / "moved"
    (before / "checkpoints").mkdir(parents=True)
    save_config(resolve_config("sft", model="m/x", dataset="d/x", output_dir=str(before)), before / "config.yaml")
    before.rename(after)
    goes_on = {"resume": Given("auto", "--resume", "flag")}
    moved = resolve(None, goes_on, load_recipe(str(after / "config.yaml")), env={})
    assert moved.config.output_dir == str(after) and str(before) in moved.notes[0]
    named = goes_on | {"output_dir": Given(str(before), "-o", "flag")}
    assert resolve(None, named, load_recipe(str(after / "config.yaml")), env={}).config.output_dir == str(before)
    before.mkdir()
    assert resolve(None, goes_on, load_recipe(str(after / "config.yaml")), env={}).config.output_dir == str(before)


def test_a_saved_config_of_a_run_that_went_on_begins_anew(tmp_path):
    path = tmp_path / "out" / "config.yaml"
    path.parent.mkdir()
    resumed = resolve_config("sft", model="m/x", dataset="d/x", output_dir=str(path.parent), resume="auto")
    save_config(resumed, path)
    again = resolve(None, {}, load_recipe(str(path)), env={}).config
    assert again.resume == "never" and again.output_dir == f"{path.parent}-2"


def test_a_saved_config_is_found_from_any_folder(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "model", here / "out", here / "cache", there):
        folder.mkdir(parents=True)
    (here / "rows.jsonl").write_text("")
    monkeypatch.chdir(here)
    dataset = ["rows.jsonl#5*2", "org/rows@train"]
    first = resolve_config("sft", model="model", dataset=dataset, output_dir="out", cache_dir="cache")
    save_config(first, here / "out" / "config.yaml")
    assert changed_settings(here / "out" / "config.yaml", first) == {}
    monkeypatch.chdir(there)
    again = resolve(None, {}, load_recipe(str(here / "out" / "config.yaml")), env={}).config
    assert again.model == str(here / "model") and again.cache_dir == str(here / "cache")
    assert again.dataset == [f"{here / 'rows.jsonl'}#5*2", "org/rows@train"]
    assert again.output_dir == f"{here / 'out'}-2"


@pytest.mark.parametrize(
    "written",
    [
        "{num_hidden_layers: 2, act: gelu, window: null, rope: {theta: 5e3, type: '2', a: true}, kinds: [b, 1]}",
        "[num_hidden_layers=2 act=gelu, window=null, "
        """'rope={"theta": 5e3, "type": "2", "a": true}', 'kinds=["b", 1]']""",
    ],
)
def test_overrides_may_be_nested_and_are_saved_as_texts(recipe, written):
    read = recipe(BASE + f"from_scratch: true\ntuner: full\nconfig_overrides: {written}\n")
    config = resolve(None, {}, read, env={}).config
    said = {name: said_value(text) for name, text in config.config_overrides.items()}
    assert said == {
        "num_hidden_layers": 2, "act": "gelu", "window": None, "rope": {"theta": 5e3, "type": "2", "a": True},
        "kinds": ["b", 1],
    }  # fmt: skip
    assert resolve(None, {}, recipe(dump_config(config)), env={}).config.config_overrides == config.config_overrides


def test_json_schema_knows_every_key():
    schema = json.loads(json.dumps(recipe_schema()))
    properties = schema["properties"]
    assert schema["additionalProperties"] is False
    assert properties["max_seq_length"]["deprecated"] and properties["max_length"]["minimum"] == 1
    assert {"type": "null"} in properties["learning_rate"]["anyOf"]
    assert "lora" in str(properties["tuner"]) and properties["packing"]["default"] is True
    assert properties["datasets"]["items"]["required"] == properties["test_datasets"]["items"]["required"] == ["path"]
    for name, entry in properties.items():
        assert entry["description"], name
        assert not {"gt", "ge", "lt", "le"} & set(str(entry).replace("'", " ").split()), name


def test_the_page_of_settings_is_the_schema(tmp_path):
    scripts = Path(__file__).resolve().parent.parent / "scripts"
    written = tmp_path / "flags.md"
    subprocess.run([sys.executable, scripts / "render_flags.py", "--output", written], check=True)
    page = (scripts.parent / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == written.read_text(encoding="utf-8"), "run scripts/render_flags.py"
    assert all(f"{method}`" in page.split("\n## ")[0] for method in get_args(Method))


KINDS = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def fits(value, form):
    """Whether a value has a form of JSON schema, of the few words that ours consists of."""
    kinds = form.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    by_kind = [isinstance(value, KINDS[kind]) and (kind == "boolean") is isinstance(value, bool) for kind in kinds]
    number, text = isinstance(value, (int, float)), isinstance(value, str)
    return (
        (not kinds or any(by_kind))
        and ("anyOf" not in form or any(fits(value, part) for part in form["anyOf"]))
        and ("enum" not in form or any(value is one or (value == one and text) for one in form["enum"]))
        and ("const" not in form or value == form["const"])
        and (not text or re.search(form.get("pattern", ""), value) is not None)
        and (not number or form.get("minimum", value) <= value <= form.get("maximum", value))
        and (not number or value > form.get("exclusiveMinimum", value - 1))
        and (not isinstance(value, list) or all(fits(item, form.get("items", {})) for item in value))
        and (
            not isinstance(value, dict)
            or all(fits(item, form.get("additionalProperties", {})) for item in value.values())
        )
    )


def fits_the_schema(text, schema):
    """As YAML 1.1 reads it, where `1e-5` is a text and `no` a truth value, and as YAML 1.2 does, where they are not."""
    read = yaml.safe_load(text)
    later = {key: float(value) if value == "1e-5" else value for key, value in read.items()}
    forms = schema["properties"]
    by_pattern = [
        (re.compile(pattern), forms[form["$ref"][13:]]) for pattern, form in schema["patternProperties"].items()
    ]
    return all(
        fits(value, forms.get(key.replace("-", "_"), {"enum": []}))
        and all(fits(value, form) for pattern, form in by_pattern if pattern.search(key))
        for values in (read, later)
        for key, value in values.items()
    )


@pytest.mark.parametrize(
    ("text", "optimizer", "ratio"),
    [
        ("use_muon: true\nmuon_momentum: 0.95\n", "muon", 1),
        ("use_muon: false\n", "adamw", 1),
        ("use_muon: null\nloraplus_lr_ratio: null\n", "adamw", 1),
        ("optim: Muon\nlorap_lr_ratio: 16\n", "muon", 16),
        ("optimizer: muon\nuse_muon: yes\n", "muon", 1),
    ],
)
def test_muon_and_lora_plus_by_other_tools_names(recipe, text, optimizer, ratio):
    config = resolve(None, {}, recipe(BASE + text), env={}).config
    assert (config.optimizer, config.lora_plus_ratio) == (optimizer, ratio)


@pytest.mark.parametrize("fsdp", ["fsdp:", "fsdp: ''", "fsdp: []", "fsdp: false"])
def test_what_axolotl_and_transformers_leave_empty_asks_for_nothing(recipe, fsdp):
    text = f"{fsdp}\ndebug:\neval_table_size:\neval_max_new_tokens: 128\n"
    assert resolve(None, {}, recipe(BASE + text), env={}).config == resolve(None, {}, recipe(BASE), env={}).config


def test_json_schema_takes_what_recipes_take():
    schema = json.loads(json.dumps(recipe_schema()))
    saved = dump_config(resolve_config("sft", model="org/model", dataset=["org/rows"]))
    for text in [saved, *(path.read_text() for path in shipped_recipes().values())]:
        assert fits_the_schema(text, schema), text
    for line in (
        "learning_rate: 1e-5", "cutoff_len: 512", "max-length: 512", "sharding_strategy: FULL_SHARD", "max_steps: -1",
        "train_type: LoRA", "torch_dtype: bfloat16", "mixed_precision: no", "gradient_checkpointing: true",
        "cpu_offload: off", "load_in_4bit: true", "quantization_bit: 4", "optim: adamw_torch", "packing: yes",
        "packing: 'yes'", "packing: 0", "mixed_precision: 'no'", "revision: 0123", "run_name: 2024", "method: pt",
        "report_to: [TensorBoard]", "report_to: null", "resume: true",
        "truncation_strategy: Right", "pipeline_schedule: 1F1B", "columns: instruction=q output=a", "dataset: a, b",
        "warmup_steps: none", "overlong: null", "stop_after: 3600", "async_save: on", "bf16: true", "bf16: auto",
        "save_steps: epoch", "save_steps: 0.1", "save_steps: no", "eval_steps: Epoch/4", "eval_steps: null",
        "save_strategy: no", "evals_per_epoch: 4",
        "use_peft: yes", "adapter: lora", "use_muon: true", "loraplus_lr_ratio: 16",
        "warmup_steps: 0.1", "warmup_steps: 5", "deepspeed: zero3", "sequence_parallel: true", "stage: dpo",
        "quantization: 8", "rlhf_type: simpo", "rlhf-type: simpo", "mask_history: null", "fsdp: null", "fsdp: ''",
        "fsdp: []", "fsdp: [full_shard, auto_wrap]", "lr_scheduler_kwargs: {min_lr: 0.1}", "debug: null",
        "config_overrides: {num_hidden_layers: 2, rope_parameters: {rope_theta: 5000}, sliding_window: null}",
    ):  # fmt: skip
        assert fits_the_schema(line, schema), line
    for line in (
        "max_length: 0",
        "max_length: 1.5",
        "lr: fast",
        "precision: bf17",
        "packing: maybe",
        "packing: 2",
        "seed: [1]",
        "save_steps: epochs",
        "save_steps: 0",
        "log_steps: no",
    ):
        assert not fits_the_schema(line, schema), line
    assert any(re.search(pattern, "max-length") for pattern in schema["patternProperties"])


def test_everything_wrong_with_a_recipe_is_told_at_once(recipe):
    with pytest.raises(UserError) as caught:
        recipe(BASE + "max_lenght: 5\nseed: [1]\nlora_rank: many\nbf16: false\noptim: adamw_4bit\n")
    told = (
        (4, "max_length"),
        (5, "one value"),
        (6, "whole number"),
        (7, "precision: fp32"),
        (8, "`optimizer: adamw_8bit`"),
    )
    for line, said in told:
        assert any(f"recipe.yaml:{line}:" in told and said in told for told in caught.value.what.splitlines())
    with pytest.raises(UserError, match="perhaps more"):
        recipe("".join(f"key{number}: 1\n" for number in range(5000)))
    with pytest.raises(UserError, match="--early-stopping-patience") as caught:
        resolve_config("sft", model="m", dataset=["d"], early_stopping_patience=1, template_date="x")
    assert "not a date" in caught.value.what
