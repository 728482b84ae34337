"""What a run leaves behind, resume bit for bit, tuners, signals, and bad input found before anything is written."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import EQUAL, config_of
from test_parity import metrics, settings, train_alone

from swiftlite.checkpoint.folder import check_folder, list_checkpoints
from swiftlite.config.recipe import load_recipe
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.data import windows
from swiftlite.errors import RunError, UserError
from swiftlite.models.toys import toy_config, toy_judged, toy_pairs, write_toy
from swiftlite.serving.export import ExportOptions, run_export
from swiftlite.serving.source import find_source
from swiftlite.training import loop as loop_module
from swiftlite.training import run as run_module
from swiftlite.training.run import Session
from swiftlite.training.step import DirectStep
from swiftlite.verification.cases import SAMPLED

NEW_TOKENS = [f"<fox {number}>" for number in range(200)]  # more than the toys' vocabulary has rows to spare


@pytest.fixture
def base(tmp_path, tiny_model, write_rows, chat_rows):
    return settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), max_steps=6, save_steps=2)


def train(values, **more):
    config = resolve_config("sft", **(values | more))
    train_alone(config)
    return config


@pytest.fixture
def ernie(tmp_path):
    """A mixture in bf16 whose class says that nobody trains the biases by which experts are chosen."""
    shape = {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
    folder = write_toy(tmp_path / "ernie", config_of("Ernie4_5_MoeConfig", shape | {"max_position_embeddings": 512}))
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    biases = {name: 7 + torch.randn(tensor.shape) for name, tensor in weights.items() if "correction" in name}
    save_file(weights | biases, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "rm", "grpo"])
def test_what_every_method_logs_is_drawn(method, base, tmp_path, write_rows, chat_rows, capsys):
    rows = {"dpo": toy_pairs(12), "rm": toy_pairs(12), "kto": toy_judged(12)}.get(method, chat_rows)
    more = SAMPLED | {"samples": 2, "max_new_tokens": 4} if method == "grpo" else {"eval_fraction": 0.3}
    values = base | {"dataset": [str(write_rows("rows.jsonl", rows))], "max_steps": 2, "eval_steps": 1} | more
    train_alone(resolve_config(method, **values), drawn=True)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be drawn" not in capsys.readouterr().out


def test_the_output_folder_is_as_promised(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train_alone(resolve_config("sft", **base, report_to=["tensorboard"], eval_fraction=0.1), drawn=True)
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert {"config.yaml", "audit.json", "metrics.jsonl", "checkpoints", "model", "loss.png", "report.html"} <= names
    assert [folder.name for folder in list_checkpoints(out)] == ["step-00000006", "step-00000004"]
    assert all(check_folder(folder, deep=True) == [] for folder in list_checkpoints(out))
    keys = {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "trained_tokens", "tokens", "tokens_per_second",
        "step_seconds", "data_seconds", "peak_memory_gib", "mfu", "trained_tokens_per_second",
        "padded_tokens_per_second",
    }  # fmt: skip
    assert keys <= metrics(out)[0].keys()
    documented = set(re.findall(r"`([\w/]+)`", (Path(__file__).parents[1] / "docs" / "output.md").read_text()))
    assert all(row.keys() <= documented for row in metrics(out))
    assert all(row["trained_tokens"] < row["tokens"] <= row["padded_tokens"] for row in metrics(out))
    assert metrics(out)[-1]["eval_loss"] > 0
    audit = json.loads((out / "audit.json").read_text())
    assert audit["rows"]["read"] == 32
    for folder in (out / "model", list_checkpoints(out)[0]):
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(folder).chat_template
    assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    assert json.loads((out / "model" / "config.json").read_text())["dtype"] == "float32"


def same_weights(one, other):
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("tuner", "more"),
    [
        ("full", {}),
        ("full", {"save_dtype": "bf16"}),
        ("full", {"precision": "fp16"}),
        ("full", {"neftune_noise_alpha": 5.0, "loss": ["dft"]}),
        ("full", {"optimizer": "adamw_8bit"}),
        ("lora", {"lora_dropout": 0.3}),
        ("lora", {"dora": True}),
        ("freeze", {"trainable_layers": 1, "save_dtype": "bf16"}),
        *((tuner, {"new_tokens": NEW_TOKENS}) for tuner in ("full", "lora", "freeze")),
    ],
    ids=[
        "full",
        "saved in bf16",
        "fp16",
        "noise, weighted by probability",
        "8 bits",
        "lora with dropout",
        "dora",
        "frozen in fp32, saved in bf16",
        "new tokens",
        "new tokens beside lora",
        "new tokens, frozen",
    ],
)
def test_resume_continues_bit_for_bit(base, tmp_path, tuner, more):
    values = base | {"tuner": tuner, "lr_scheduler": "cosine", "keep_checkpoints": 9} | more
    train(values)
    out, again = tmp_path / "out", tmp_path / "again"
    shutil.copytree(out, again)
    for folder in list_checkpoints(again)[:2]:
        shutil.rmtree(folder)
    shutil.rmtree(again / "model")
    train(values, output_dir=str(again), resume="auto")
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(again)] == [
        (row["step"], row["loss"], row["grad_norm"]) for row in metrics(out)
    ]
    file = "adapter_model.safetensors" if tuner == "lora" else "model.safetensors"
    assert same_weights(out / "model" / file, again / "model" / file)


def test_a_run_that_finds_nothing_to_go_on_from_says_so(base, tmp_path, capsys):
    train(base, max_steps=1, resume="auto")
    said = f"--resume auto: there is no checkpoint in {tmp_path / 'out'} yet, the run starts from the beginning"
    assert said in capsys.readouterr().out.splitlines()


def test_resume_passes_over_a_damaged_checkpoint_and_says_so(base, tmp_path, capsys):
    train(base)
    newest = list_checkpoints(tmp_path / "out")[0]
    (newest / "model.safetensors").write_bytes(b"x")
    shutil.rmtree(tmp_path / "out" / "model")
    train(base, resume="auto")
    said = capsys.readouterr().out
    assert "step-00000006" in said and "bytes instead of" in said
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_of_a_later_step_pushes_no_good_one_out(base, tmp_path):
    train(base, keep_checkpoints=9)
    out = tmp_path / "out"
    shutil.rmtree(out / "model")
    weights = out / "checkpoints" / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # of the right size
    train(base, keep_checkpoints=1, max_steps=5, resume="auto")
    assert [folder.name for folder in list_checkpoints(out)] == ["step-00000006", "step-00000005"]
    assert (out / "checkpoints" / "latest").resolve().name == "step-00000005"


def test_a_run_without_a_sound_checkpoint_does_not_begin_anew_by_itself(base, tmp_path):
    train(base)
    for folder in list_checkpoints(tmp_path / "out"):
        (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="no checkpoint of the run is sound"):
        train(base, resume="auto")
    assert len(metrics(tmp_path / "out")) == 6


@pytest.mark.parametrize("tuner", ["full", "freeze"])
def test_the_result_has_the_type_of_the_source(base, tmp_path, tuner):
    from transformers import AutoModelForCausalLM

    source = shutil.copytree(base["model"], tmp_path / "bf16")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(source)
    train(base, model=str(source), tuner=tuner, max_steps=2)
    result = tmp_path / "out" / "model"
    assert json.loads((result / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(result / "model.safetensors").values()} == {torch.bfloat16}


def test_a_model_that_gives_attention_weights_is_saved(base, tmp_path):
    """transformers refuses to write that of any attention but its own slowest, after all of the training."""
    model = shutil.copytree(base["model"], tmp_path / "model")
    said = json.loads((model / "config.json").read_text()) | {"output_attentions": True}
    (model / "config.json").write_text(json.dumps(said))
    train(base, model=str(model), max_steps=1)
    run_export(ExportOptions(str(tmp_path / "out"), None, tmp_path / "again"))
    for folder in (tmp_path / "out" / "model", tmp_path / "again"):
        saved = json.loads((folder / "config.json").read_text())
        assert saved["output_attentions"] and "attn_implementation" not in " ".join(saved)


def test_another_precision_brings_its_own_loss_scale(base, tmp_path):
    train(base, max_steps=4)
    train(base, max_steps=6, precision="fp16", resume="auto")
    newest = list_checkpoints(tmp_path / "out")[0]
    assert json.loads((newest / "trainer_state.json").read_text())["progress"]["loss_scale"]["dynamic"] is True


def test_a_best_checkpoint_that_could_not_be_saved_is_none(base, tmp_path, monkeypatch):
    losses, saved = iter([3.0, 2.0, 1.0, 5.0, 5.0, 5.0]), Session._save

    def evaluate(self, *_args):
        return next(losses), {}

    def save(self, final, *, now):
        if final.name == "step-00000006":
            raise RunError("the disk is full")
        saved(self, final, now=now)

    monkeypatch.setattr(DirectStep, "evaluate", evaluate)
    monkeypatch.setattr(Session, "_save", save)
    more = {"eval_fraction": 0.1, "eval_steps": 2, "max_steps": 12, "keep_checkpoints": 2, "lr_scheduler": "constant"}
    train(base, **more, on_save_failure="continue")
    assert [folder.name for folder in list_checkpoints(tmp_path / "out")] == [
        "step-00000012", "step-00000010", "step-00000004",
    ]  # fmt: skip
    assert (tmp_path / "out" / "checkpoints" / "best").resolve().name == "step-00000004"


def test_a_bad_row_in_the_middle_of_a_stream_saves_what_was_learnt(base, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1000)
    rows = [json.dumps({"text": f"some text of row {number} " * 5}) for number in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join([*rows[:50], '{"text": 7}', *rows[50:]]) + "\n")
    more = {"dataset": [str(tmp_path / "texts.jsonl")], "streaming": True, "shuffle": False, "save_steps": 500}
    config = resolve_config("pretrain", **base | more | {"max_steps": 500})
    with pytest.raises(RunError, match="wrong_type") as failure:
        train_alone(config)
    assert failure.value.where.endswith("texts.jsonl:51") and "--on-bad-row skip" in failure.value.fix
    saved = list_checkpoints(tmp_path / "out")
    assert len(saved) == 1 and check_folder(saved[0], deep=True) == []
    with pytest.raises(UserError, match="damaged"):
        (saved[0] / "model.safetensors").write_bytes(b"x")
        find_source(str(saved[0]), None)


def test_a_damaged_checkpoint_that_was_passed_over_is_written_again(base, tmp_path):
    train(base, keep_checkpoints=9)
    out = tmp_path / "out"
    shutil.rmtree(out / "model")
    (list_checkpoints(out)[0] / "model.safetensors").write_bytes(b"x")
    train(base, keep_checkpoints=9, resume="auto")
    assert check_folder(list_checkpoints(out)[0], deep=True) == []


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_run_that_is_made_longer_has_the_result_of_its_last_step(base, tmp_path, tuner, capsys):
    train(base, tuner=tuner)
    train(base, tuner=tuner, max_steps=7, resume="auto")
    file = "adapter_model.safetensors" if tuner == "lora" else "model.safetensors"
    newest = list_checkpoints(tmp_path / "out")[0]
    assert newest.name == "step-00000007" and "removed model/" in capsys.readouterr().out
    assert same_weights(newest / file, tmp_path / "out" / "model" / file)


def test_a_run_that_has_ended_is_left_as_it_is(base, tmp_path, capsys):
    train(base)
    added = tmp_path / "out" / "model" / "mine.gguf"
    added.write_text("mine")
    train(base, resume="auto")
    assert added.exists() and "nothing is left to train" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint"):
        train(base, resume="auto")


def test_a_named_checkpoint_is_resumed_elsewhere_but_never_over_newer_ones(base, tmp_path):
    train(base)
    older = list_checkpoints(tmp_path / "out")[1]
    with pytest.raises(UserError, match="newer checkpoints"):
        train(base, resume=str(older))
    train(base, resume=str(older), output_dir=str(tmp_path / "elsewhere"))
    assert [row["step"] for row in metrics(tmp_path / "elsewhere")] == [5, 6]
    (older / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        train(base, resume=str(older), output_dir=str(tmp_path / "third"))
    with pytest.raises(UserError) as refused:
        train(base, resume=str(older.parent / "step-5"), output_dir=str(tmp_path / "third"))
    assert "such as" in refused.value.fix and "step-00000006" in refused.value.fix
    train(base, resume=str(tmp_path / "out"), output_dir=str(tmp_path / "longer"), max_steps=8)  # from its newest
    assert [row["step"] for row in metrics(tmp_path / "longer")] == [7, 8]
    (older.parent / "step-00000006" / "manifest.json").unlink()
    with pytest.raises(UserError) as refused:
        train(base, resume=str(older.parent / "step-5"), output_dir=str(tmp_path / "third"))
    assert "step-00000006" not in refused.value.fix and "auto" not in refused.value.fix


def test_resume_refuses_other_data(base, write_rows, chat_rows):
    train(base)
    write_rows("rows.jsonl", chat_rows[:-1])
    with pytest.raises(UserError, match="data set .* changed .*the rows"):
        train(base, resume="auto")


def test_rows_that_changed_are_not_put_down_to_settings_that_changed_too(base, write_rows, chat_rows):
    train(base, max_steps=2)
    write_rows("rows.jsonl", chat_rows[1:])
    with pytest.raises(UserError, match="through no setting: the rows, tokenizer or swiftlite are others"):
        train(base, resume="auto", learning_rate=0.125)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_rank": 8}, "--lora-rank 16 -> 8"),
        ({"dora": True, "lora_alpha": 5}, "--lora-alpha 32 -> 5, --dora off -> on"),
        ({"target_modules": ["q_proj"]}, "--target-modules all-linear -> q_proj"),
        ({"tuner": "full"}, "--tuner lora -> full"),
        ({"seed": 7}, "data set .*--seed 42 -> 7"),
        ({"global_batch_size": 8}, "data set .*--global-batch-size 4 -> 8"),
    ],
)
def test_resume_names_the_settings_that_cannot_change(base, tmp_path, changed, said):
    values = base | {"tuner": "lora", "max_steps": 2}
    train(values)
    before = (tmp_path / "out" / "config.yaml").read_text()
    with pytest.raises(UserError, match=said):
        train(values | changed, resume="auto")
    assert (tmp_path / "out" / "config.yaml").read_text() == before


def test_resume_tells_of_settings_that_may_change(base, tmp_path, capsys):
    train(base)
    train(base, resume="auto", learning_rate=0.125, max_steps=7, workers=1)
    assert "last started: --max-steps 6 -> 7, --learning-rate 0.001 -> 0.125\n" in capsys.readouterr().out
    assert metrics(tmp_path / "out")[-1]["learning_rate"] == 0.125


def test_saved_config_runs_again_and_gives_the_same_run(base, tmp_path):
    train(base)
    again = resolve_config(recipe=str(tmp_path / "out" / "config.yaml"), output_dir=str(tmp_path / "again"))
    train_alone(again)
    assert [row["loss"] for row in metrics(tmp_path / "again")] == [row["loss"] for row in metrics(tmp_path / "out")]


def test_an_output_folder_that_cannot_be_is_told_before_anything_loads(base, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/run"):
        with pytest.raises(UserError, match="is a file"):
            train(base, output_dir=str(tmp_path / place))
    for closed in ("checkpoints", "model", "out"):
        (tmp_path / "out" / closed).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr("os.access", lambda place, mode, closed=closed: Path(place).name != closed)
        for resume in ("auto", "never"):
            with pytest.raises(UserError, match="the folder cannot be written") as told:
                train(base, resume=resume)
            assert Path(told.value.where).name == closed


def test_an_existing_output_folder_is_never_overwritten(base, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        train(base)
    with pytest.raises(UserError, match="something else than a run"):
        train(base, resume="auto")
    assert (tmp_path / "out" / "precious").read_text() == "x"


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_lora_writes_an_adapter_that_peft_loads(base, tmp_path, options):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = train(base, tuner="lora", **options)
    model = AutoModelForCausalLM.from_pretrained(config.model)
    PeftModel.from_pretrained(model, tmp_path / "out" / "model")
    names = load_file(tmp_path / "out" / "model" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in names)
    assert not any("base_layer" in name for name in names)


def test_an_adapter_names_its_base_for_any_folder(base, tmp_path, monkeypatch):
    model = Path(base["model"])
    monkeypatch.chdir(model.parent)
    train(base, model=model.name, tuner="lora")
    named = json.loads((tmp_path / "out" / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named) == model.absolute()


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("target_modules", ["q_proj", "nope"]),
        ("target_modules", ["nope"]),
        ("modules_to_save", ["nope", "lm_head"]),
    ],
)
def test_modules_that_are_not_there_are_told(base, setting, names):
    with pytest.raises(UserError, match="no module 'nope'") as caught:
        train(base, tuner="lora", **{setting: names})
    assert caught.value.where == f"--{setting.replace('_', '-')}" and "q_proj, k_proj" in caught.value.fix


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_begins_where_the_base_model_is(base, tmp_path, tiny_model, family):
    for dora in (False, True):
        folder = str(tmp_path / str(dora))
        train(base, model=str(tiny_model(family)), tuner="lora", dora=dora, output_dir=folder)
    first = [metrics(tmp_path / folder)[0]["loss"] for folder in ("False", "True")]
    assert first[1] == pytest.approx(first[0], rel=1e-6)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_training_goes_on_from_an_adapter(base, tmp_path, dora):
    from peft import AutoPeftModelForCausalLM

    train(base, tuner="lora", dora=dora)
    adapter, merged = tmp_path / "out" / "model", tmp_path / "merged"
    AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().save_pretrained(merged)
    train(base, tuner="lora", adapter=str(adapter), output_dir=str(tmp_path / "more"))
    tokenizer = {"tokenizer": base["model"], "tuner": "full"}
    train(base | tokenizer, model=str(merged), output_dir=str(tmp_path / "same"))
    first = {name: metrics(tmp_path / name)[0]["loss"] for name in ("out", "more", "same")}
    assert first["more"] == pytest.approx(first["same"], rel=1e-6) and first["more"] < first["out"]


@pytest.mark.parametrize("by_recipe", [False, True], ids=["flags", "config.yaml"])
def test_a_run_goes_on_without_the_adapter_it_began_with(base, tmp_path, capsys, by_recipe):
    adapter, out, again = tmp_path / "first" / "model", tmp_path / "out", tmp_path / "again"
    train(base, tuner="lora", new_tokens=NEW_TOKENS, max_steps=1, output_dir=str(tmp_path / "first"))
    values = base | {"tuner": "lora", "adapter": str(adapter)}
    train(values)
    shutil.copytree(out, again)
    shutil.rmtree(list_checkpoints(again)[0])
    shutil.rmtree(again / "model")
    shutil.rmtree(adapter)
    more = {"resume": "auto", "output_dir": str(again)}
    if by_recipe:
        more = {name: Given(value, name, "flag") for name, value in more.items()}
        train_alone(resolve(None, more, load_recipe(str(again / "config.yaml"))).config)
    else:
        train(values, **more)
    assert f"note: {adapter} holds no adapter any more" in capsys.readouterr().out
    assert metrics(again)[-1]["loss"] == metrics(out)[-1]["loss"]
    for name in ("adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / "model" / name).read_bytes() == (again / "model" / name).read_bytes(), name


def test_training_does_not_go_on_from_an_adapter_of_a_deeper_model(base, tmp_path):
    train(base, tuner="lora", max_steps=1)
    shallow = write_toy(tmp_path / "shallow", toy_config("llama", 1))
    with pytest.raises(UserError, match="layers that the model lacks"):
        train(
            base,
            model=str(shallow),
            adapter=str(tmp_path / "out" / "model"),
            tuner="lora",
            output_dir=str(tmp_path / "more"),
        )


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("tuner", ["full", "lora", "freeze"])
def test_new_tokens_get_rows_that_are_trained_and_saved(base, tmp_path, tiny_model, family, tuner):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = str(tiny_model(family)), tmp_path / "out" / "model"
    alone = {"trainable_layers": 0} if tuner == "freeze" else {}
    train(base, model=source, tuner=tuner, new_tokens=NEW_TOKENS, learning_rate=1e-2, **alone)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(NEW_TOKENS[-1]) == len(tokenizer) - 1
    before = AutoModelForCausalLM.from_pretrained(source)
    old = before.get_input_embeddings().weight
    assert len(tokenizer) > len(old)
    if tuner != "lora":
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        grown = AutoModelForCausalLM.from_pretrained(source)
        grown.resize_token_embeddings(len(tokenizer))
        model = PeftModel.from_pretrained(grown, folder).merge_and_unload()
    for module, other in zip(
        (model.get_input_embeddings(), model.get_output_embeddings()),
        (before.get_input_embeddings(), before.get_output_embeddings()),
        strict=True,
    ):
        new = module.weight[len(other.weight) :]
        assert len(new) == len(tokenizer) - len(old) and not torch.equal(new[-1], other.weight.mean(0))
        assert torch.allclose(new, other.weight.mean(0), atol=0.1)


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_new_tokens_have_their_place_in_the_bias_of_a_head(base, tmp_path, tuner):
    source = write_toy(tmp_path / "source", config_of("PhiConfig", EQUAL["phi"][1] | {"max_position_embeddings": 512}))
    weights = load_file(source / "model.safetensors")
    bias = torch.randn(len(weights["lm_head.bias"]))
    save_file(weights | {"lm_head.bias": bias}, source / "model.safetensors", {"format": "pt"})
    train(base, model=str(source), tuner=tuner, new_tokens=NEW_TOKENS, max_steps=1, learning_rate=1e-9)
    (file,) = (tmp_path / "out" / "model").glob("*.safetensors")
    found = next(tensor for name, tensor in load_file(file).items() if name.endswith("lm_head.bias"))
    assert len(found) > len(bias)
    torch.testing.assert_close(found, torch.cat([bias, bias.mean().expand(len(found) - len(bias))]), rtol=0, atol=1e-6)


def test_the_folder_of_a_run_in_place_of_its_result_is_told_so(base, tmp_path):
    train(base, tuner="lora", max_steps=1)
    inside = re.escape(str(tmp_path / "out" / "model"))
    with pytest.raises(UserError, match=f"no adapter_config.json[^:]*\n.*\n.*: {inside}"):
        train(base, tuner="lora", adapter=str(tmp_path / "out"), output_dir=str(tmp_path / "next"))
    for folder in (tmp_path / "out", tmp_path / "out" / "model"):
        with pytest.raises(UserError, match=f"this is an adapter: .*--adapter {inside}"):
            train(base, model=str(folder), output_dir=str(tmp_path / "next"))
    train(base, tuner="full", max_steps=1, output_dir=str(tmp_path / "whole"))
    inside = re.escape(str(tmp_path / "whole" / "model"))
    with pytest.raises(UserError, match=f"no config.json\n.*\n.*: {inside}"):
        train(base, model=str(tmp_path / "whole"), output_dir=str(tmp_path / "next"))


def test_an_adapter_with_new_tokens_goes_on_with_them(base, tmp_path):
    from transformers import AutoTokenizer

    first, second = tmp_path / "out" / "model", tmp_path / "second"
    train(base, tuner="lora", new_tokens=NEW_TOKENS, max_steps=2)
    train(base, tuner="lora", adapter=str(first), output_dir=str(second), max_steps=1, learning_rate=1e-9)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (first, second / "model")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (first, second / "model"))
    name = next(name for name in old if "embed_tokens" in name)
    torch.testing.assert_close(new[name], old[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("more", [{"new_tokens": NEW_TOKENS}, {"modules_to_save": ["lm_head"]}])
def test_a_tied_head_that_is_trained_whole_starts_as_it_was_and_goes_on(base, tmp_path, tiny_model, more):
    values = base | {"model": str(tiny_model("gpt2")), "tuner": "lora", "keep_checkpoints": 9, "max_steps": 4} | more
    tokens = {"new_tokens": more.get("new_tokens", [])}
    train(base | {"model": values["model"], "max_steps": 1} | tokens, output_dir=str(tmp_path / "whole"))
    train(values)
    trained, whole = metrics(tmp_path / "out"), metrics(tmp_path / "whole")
    assert trained[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-6)
    head = load_file(tmp_path / "out" / "model" / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    old = load_file(tiny_model("gpt2") / "model.safetensors")["transformer.wte.weight"]
    assert not torch.equal(head[: len(old)], old) and torch.allclose(head[: len(old)], old, atol=0.05)
    older = list_checkpoints(tmp_path / "out")[1]
    train(values, resume=str(older), output_dir=str(tmp_path / "more"))
    file = "model/adapter_model.safetensors"
    assert same_weights(tmp_path / "out" / file, tmp_path / "more" / file)


def test_a_gradient_of_zero_is_said(base, tmp_path, tiny_model, capsys):
    shutil.copytree(tiny_model("llama"), tmp_path / "mute")
    weights = load_file(tmp_path / "mute" / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])},
              tmp_path / "mute" / "model.safetensors", {"format": "pt"})  # fmt: skip
    train(base, model=str(tmp_path / "mute"), tuner="freeze", max_steps=2)
    assert [row["grad_norm"] for row in metrics(tmp_path / "out")] == [0, 0]
    assert capsys.readouterr().out.count("is zero") == 1


def test_freeze_trains_the_last_layer_only(base, tmp_path, tiny_model):
    train(base, tuner="freeze", trainable_layers=1, trainable_modules=["model.norm"])
    before = load_file(tiny_model("llama") / "model.safetensors")
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith(("model.layers.1.", "model.norm")) for name in changed)


def test_freeze_trains_nothing_that_the_class_does_not(base, tmp_path, ernie, capsys):
    train(base, model=str(ernie), tuner="freeze", max_steps=1)
    assert "is zero for" not in capsys.readouterr().out
    named = {"trainable_layers": 0, "trainable_modules": ["e_score_correction_bias"]}
    with pytest.raises(UserError, match="no parameter that can be trained is named like 'e_score_correction_bias'"):
        train(base, model=str(ernie), tuner="freeze", output_dir=str(tmp_path / "named"), **named)


def test_what_chooses_experts_is_not_rounded(base, tmp_path, ernie):
    """In the result of a run, in a checkpoint that goes on, and in an export."""
    train(base, model=str(ernie), max_steps=2, save_steps=1)
    train(base, model=str(ernie), max_steps=3, save_steps=1, resume="auto")
    result, exported = tmp_path / "out" / "model", tmp_path / "exported"
    run_export(ExportOptions(str(result), None, exported, dtype="bf16"))
    before = load_file(ernie / "model.safetensors")
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    for folder in (result, exported):
        after = load_file(folder / "model.safetensors")
        assert biases and all(torch.equal(after[name], before[name]) for name in biases)
        exact = {name for name, tensor in after.items() if tensor.dtype == torch.float32}
        assert exact == {name for name in after if "mlp.gate." in name} | {*biases}


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_freeze_trains_a_tied_weight_by_each_of_its_names(base, tmp_path, tiny_model, name):
    source = tiny_model("llama-tied")
    train(base, model=str(source), tuner="freeze", trainable_layers=0, trainable_modules=[name], max_steps=1)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out" / "model"))
    changed = [tensor for tensor in before if not torch.equal(before[tensor], after[tensor])]
    assert changed == ["model.embed_tokens.weight"]


def test_a_signal_saves_and_exits_with_its_number(base, tmp_path, monkeypatch):
    seen = []
    keep = run_module.Session.save_checkpoint

    def interrupt_after_two(self, **more):
        keep(self, **more)
        seen.append(self)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_module.Session, "save_checkpoint", interrupt_after_two)
    with pytest.raises(SystemExit) as stopped:
        train(base)
    assert stopped.value.code == 143
    assert list_checkpoints(tmp_path / "out")[0].name == "step-00000003"
    assert not (tmp_path / "out" / "model").exists()
    monkeypatch.undo()
    train(base, resume="auto")
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]


def test_early_stop_keeps_the_best_checkpoint(base, tmp_path):
    values = base | {"eval_fraction": 0.2, "learning_rate": 0.5, "max_steps": 40, "eval_steps": 1, "save_steps": 1}
    train(values, early_stopping_patience=2, keep_checkpoints=1)
    rows = metrics(tmp_path / "out")
    best = min(rows, key=lambda row: row["eval_loss"])["step"]
    assert len(rows) == best + 2 < 40
    assert f"step-{best:08d}" in {folder.name for folder in list_checkpoints(tmp_path / "out")}


def test_epochs_and_parts_of_the_run_say_when(base, tmp_path):
    values = base | {"eval_fraction": 0.2, "max_steps": None, "epochs": 2.5, "keep_checkpoints": 9}
    train(values, save_steps="epoch", eval_steps=0.5, log_steps="epoch/2", log_first_step=True)
    rows = metrics(tmp_path / "out")
    total = rows[-1]["step"]
    of_an_epoch = next(row["step"] for row in rows if row["epoch"] == 1.0)
    saved = sorted(int(folder.name[5:]) for folder in list_checkpoints(tmp_path / "out"))
    assert saved == [of_an_epoch, 2 * of_an_epoch, total]
    assert [row["step"] for row in rows if "eval_loss" in row] == [math.ceil(total / 2), total]
    assert rows[0]["step"] == 1 and [row["epoch"] for row in rows[1:]] == [0.5, 1.0, 1.25, 1.5, 2.0, 2.5]


def test_a_run_that_is_never_saved_has_its_result_and_a_checkpoint_where_it_is_stopped(base, tmp_path, monkeypatch):
    train(base, save_steps="never")
    out = tmp_path / "out"
    assert not list_checkpoints(out) and (out / "model" / "model.safetensors").exists()
    with pytest.raises(UserError, match="no checkpoint that it could go on from"):
        train(base, save_steps="never", resume="auto")
    shutil.rmtree(out)
    monkeypatch.setattr(loop_module.Loop, "_agree", lambda self, reason, peak: (signal.SIGTERM, peak))
    with pytest.raises(SystemExit):
        train(base, save_steps="never")
    assert [folder.name for folder in list_checkpoints(out)] == ["step-00000001"]


def test_an_evaluation_that_is_no_number_is_never_the_best(base, tmp_path, monkeypatch):
    evaluate, found = DirectStep.evaluate, []

    def first_is_none(self, *given):
        loss, sums = evaluate(self, *given)
        found.append(loss)
        return (math.nan if len(found) == 1 else loss), sums

    monkeypatch.setattr(DirectStep, "evaluate", first_is_none)
    values = base | {"eval_fraction": 0.2, "max_steps": 3, "eval_steps": 1, "save_steps": 1}
    train(values, early_stopping_patience=3, keep_checkpoints=1)
    losses = [row["eval_loss"] for row in metrics(tmp_path / "out")]
    best = (tmp_path / "out" / "checkpoints" / "best").resolve()
    assert losses[0] is None and losses[2] < losses[1] and best.name == "step-00000003"


def test_an_early_stop_leaves_a_checkpoint_and_is_an_end(base, tmp_path, capsys):
    values = base | {"eval_fraction": 0.2, "learning_rate": 0.5, "max_steps": 40, "eval_steps": 1, "save_steps": 30}
    train(values, early_stopping_patience=2)
    out = tmp_path / "out"
    rows = metrics(out)
    assert list_checkpoints(out)[0].name == f"step-{len(rows):08d}"
    train(values, early_stopping_patience=2, resume="auto")
    assert metrics(out) == rows and "nothing is left to train" in capsys.readouterr().out


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_the_result_is_the_best_checkpoint_where_that_is_asked_for(base, tmp_path, capsys, tuner):
    values = base | {"tuner": tuner, "eval_fraction": 0.2, "max_steps": 2, "eval_steps": 1, "save_steps": 1}
    train(values, learning_rate=0.9, keep_checkpoints=1, result="best")
    kept, model = tmp_path / "out" / "checkpoints", tmp_path / "out" / "model"
    best, last = ((kept / name).resolve() for name in ("best", "latest"))
    assert best != last and f"model/ is step {int(best.name[5:])}, which has" in capsys.readouterr().out
    of_the_run = {"manifest.json", "trainer_state.json", "resume"}
    assert {path.name for path in model.iterdir()} == {path.name for path in best.iterdir()} - of_the_run
    for path in model.iterdir():
        assert path.read_bytes() == (best / path.name).read_bytes()
    weights = next(model.glob("*.safetensors"))
    assert weights.read_bytes() != (last / weights.name).read_bytes()


def test_the_result_is_the_last_weights_where_no_evaluation_was_a_number(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(DirectStep, "evaluate", lambda self, *given: (math.nan, {}))
    train(base, eval_fraction=0.2, max_steps=2, result="best")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert "no best checkpoint is known, so model/ has the last weights" in capsys.readouterr().out


WORSE = {"eval_fraction": 0.2, "max_steps": 2, "eval_steps": 1, "save_steps": 1, "learning_rate": 0.9, "result": "best"}


def test_a_best_checkpoint_that_is_not_there_is_told(base, tmp_path, monkeypatch, capsys):
    values, best, real = base | WORSE, tmp_path / "out" / "checkpoints" / "step-00000001", Session._write_result

    def removed_before(session):
        shutil.rmtree(best)
        real(session)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_write_result", removed_before)
        train(values)
    assert "warning: step 1, the best, is gone, so model/ has the last weights" in capsys.readouterr().out
    last = tmp_path / "out" / "checkpoints" / "step-00000002"
    train(values, output_dir=str(tmp_path / "elsewhere"), resume=str(last))
    said = capsys.readouterr().out
    assert re.search(r"step 1, which has the least eval loss so far \(\d+\.\d+\), is not in \S+elsewhere", said)
    for folder in (tmp_path / "out", tmp_path / "elsewhere"):
        assert same_weights(folder / "model" / "model.safetensors", last / "model.safetensors")


def test_a_run_that_has_ended_makes_the_other_result_where_it_is_asked_for(base, tmp_path):
    values, checkpoints = base | WORSE, tmp_path / "out" / "checkpoints"
    for result, step in (("last", 2), ("best", 1), ("last", 2)):
        train(values, result=result, resume="auto")
        made, wanted = (
            folder / "model.safetensors" for folder in (tmp_path / "out" / "model", checkpoints / f"step-{step:08d}")
        )
        assert same_weights(made, wanted)


@pytest.mark.parametrize(
    ("more", "dtype", "files"), [({"save_dtype": "bf16"}, torch.bfloat16, 1), ({"max_shard_size": "100KB"}, None, 2)]
)
def test_a_run_that_has_ended_writes_its_result_again_where_its_files_are_to_be_others(
    base, tmp_path, more, dtype, files
):
    values, model = base | {"max_steps": 1}, tmp_path / "out" / "model"
    train(values)
    before = load_file(model / "model.safetensors")
    train(values, resume="auto", **more)
    found = [load_file(file) for file in model.glob("*.safetensors")]
    assert len(found) >= files
    for name, tensor in {name: tensor for part in found for name, tensor in part.items()}.items():
        assert torch.equal(tensor, before[name].to(dtype or tensor.dtype))


def test_the_best_checkpoint_is_the_best_of_those_that_were_saved(base, tmp_path):
    values = base | {"eval_fraction": 0.2, "learning_rate": 0.5, "max_steps": 8, "eval_steps": 1, "save_steps": 4}
    train(values, keep_checkpoints=1)
    losses = {row["step"]: row["eval_loss"] for row in metrics(tmp_path / "out") if row["step"] % 4 == 0}
    best = (tmp_path / "out" / "checkpoints" / "best").resolve()
    assert best.name == f"step-{min(losses, key=losses.get):08d}" and best.is_dir()


def poisoned(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "poisoned")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][100:] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_loss_that_is_not_finite_stops_with_step_and_rows(base, tmp_path, tiny_model):
    with pytest.raises(RunError, match="step 1 is not finite") as error:
        train(base, model=str(poisoned(tmp_path, tiny_model)))
    assert "rows.jsonl:" in error.value.where


def test_nonfinite_steps_can_be_skipped_and_are_counted(base, tmp_path, tiny_model, capsys):
    train(base, model=str(poisoned(tmp_path, tiny_model)), on_nonfinite="skip")
    said = capsys.readouterr().out
    assert "(6 so far)" in said
    assert "note: steps that were skipped: 6" in said
    assert all(row["loss"] is None for row in metrics(tmp_path / "out"))


def damage(folder, kind):
    file = folder / "model.safetensors"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "foreign":
        tensors = {f"other.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    elif kind == "shape":
        tensors = load_file(file)
        tensors["model.norm.weight"] = torch.ones(3)
        save_file(tensors, file, metadata={"format": "pt"})
    elif kind == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "template":
        (folder / "chat_template.jinja").unlink()
    elif kind == "config":
        (folder / "config.json").write_text("{ broken")
    elif kind == "absent":
        shutil.rmtree(folder)
    elif kind == "nan":
        tensors = load_file(file)
        tensors["model.norm.weight"][:] = torch.nan
        save_file(tensors, file, metadata={"format": "pt"})
    elif kind in ("vocabulary", "type"):
        settings = json.loads((folder / "config.json").read_text())
        settings |= {"vocab_size": 100} if kind == "vocabulary" else {"hidden_size": "64"}
        (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("truncated", "cut off"),
        ("foreign", "are missing"),
        ("shape", "another shape"),
        ("tokenizer", "no tokenizer"),
        ("template", "chat template"),
        ("config", "JSON"),
        ("absent", "neither a folder nor a hub id"),
        ("nan", "not finite"),
        ("vocabulary", "knows only 100 tokens"),
        ("type", "expected int, got str"),
    ],
)
def test_a_bad_model_folder_is_refused_before_anything_is_written(base, tmp_path, tiny_model, kind, said):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "damaged")
    damage(folder, kind)
    with pytest.raises(UserError, match=said):
        train(base, model=str(folder))
    assert not (tmp_path / "out").exists()


def test_an_output_link_that_leads_nowhere_is_refused(base, tmp_path):
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(UserError, match="leads nowhere"):
        train(base)


def test_a_length_beyond_the_model_is_refused(base):
    with pytest.raises(UserError, match="512 positions"):
        train(base, max_length=1024)
