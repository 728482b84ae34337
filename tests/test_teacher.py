"""Knowledge distillation: runs with a teacher against plain PyTorch, and what cannot teach."""

import json
import math
import shutil

import pytest
import torch
from model_shapes import real_config
from safetensors.torch import load_file, save_file
from test_parity import check, metrics, plain_training, planned_rows, render_chat, settings, train_alone
from test_plan import FOUR, GIB, LLAMA, outlined
from test_verify import ZERO_BUBBLE, in_real_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.config.layout import Layout
from swiftlite.config.others.words import instead
from swiftlite.config.resolve import resolve, resolve_config
from swiftlite.config.validate import Given
from swiftlite.errors import RunError, UserError
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.parallel.data import DataParallel
from swiftlite.reporting.curves import curve_of
from swiftlite.training.best import forget_other_losses
from swiftlite.training.plan import propose, settle
from swiftlite.training.progress import Progress
from swiftlite.training.teacher import check_teacher
from swiftlite.verification.cases import FULL, LORA, Subject


class Taught:
    """What `plain_training` calls for the embeddings and the loss of each document, with the whole distributions."""

    def __init__(self, teacher, weight, count):
        self._teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32, attn_implementation="eager")
        self._teacher.eval()
        self._weight, self._count = weight, count

    def embed(self, model, ids, _step, _place):
        self._ids = torch.tensor([ids])
        return model.get_input_embeddings()(self._ids)

    def summed(self, logits, targets):
        with torch.no_grad():
            theirs = self._teacher(input_ids=self._ids, use_cache=False).logits[0, :-1]
        likeliest, ids = theirs.topk(min(self._count, theirs.shape[-1]))
        p, own = likeliest.log_softmax(-1), logits.log_softmax(-1)
        kl = (p.exp() * (p - own.gather(-1, ids))).sum(-1)
        learnt = targets != -100
        text = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        return (1 - self._weight) * text + self._weight * kl[learnt].sum()


@pytest.mark.parametrize(
    ("family", "teacher", "more"),
    [
        ("llama-tied", "qwen3", {"teacher_tokens": 8, "micro_batch_size": 2}),
        ("gemma2", "gemma2", {"teacher_weight": 1.0, "seed": 3}),
        ("gpt2", "qwen3-moe", {"packing": False, "teacher_tokens": 100_000}),  # of which no vocabulary has so many
        ("qwen3.5", "llama", {"teacher_weight": 0.2}),  # documents in rows of their own
        ("llama", "mamba2", {"micro_batch_size": 4}),
    ],
)
def test_a_taught_run_equals_plain_pytorch(tmp_path, tiny_model, write_rows, chat_rows, family, teacher, more):
    model, data = tiny_model(family), write_rows("rows.jsonl", chat_rows)
    values = settings(tmp_path, model, data, teacher=str(tiny_model(teacher))) | more
    config = resolve_config("sft", **values)
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [[render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows] for rows in planned_rows(config)]
    plain = Taught(config.teacher, config.teacher_weight, config.teacher_tokens)
    rows = metrics(tmp_path / "out")
    check(rows, plain_training(model, steps, embed=plain.embed, summed=plain.summed), steps)
    for row in rows:
        parts = (1 - config.teacher_weight) * row["cross_entropy"] + config.teacher_weight * row["kl/teacher"]
        assert row["loss"] == pytest.approx(parts, rel=1e-5) and math.isfinite(row["kl/teacher"])


def larger_teacher(folder, family="gemma3"):
    """Of six layers, with rows behind those of the tokens, as models have whose vocabularies are filled up."""
    config = toy_config(family, 6)
    config.vocab_size += 40
    return str(write_toy(folder, config))


def test_two_processes_learn_the_same(tmp_path):
    flags = {"teacher": larger_teacher(tmp_path / "teacher"), "teacher_tokens": 20}
    both = Subject("llama-tied", "full", FULL | flags), Subject("llama-tied", "LoRA", LORA | flags)
    chosen = ("ddp 2", "fsdp full 2, recomputing", "fsdp full 2, offloaded", "tp 2", "pp 2", *ZERO_BUBBLE, "cp 2")
    for verdict in in_real_processes(tmp_path, 2, chosen, *both):
        assert verdict.passed and verdict.difference is not None, verdict


def test_four_processes_learn_the_same(tmp_path):
    flags = {"teacher": larger_teacher(tmp_path / "teacher", "qwen3-moe"), "micro_batch_size": 1}
    chosen = ("hybrid 2x2", "tp 2 x pp 2", "tp 2 x cp 2", "pp 2 x cp 2")
    for verdict in in_real_processes(tmp_path, 4, chosen, Subject("llama", "full", FULL | flags)):
        assert verdict.passed and verdict.difference is not None, verdict


def test_a_run_goes_on_bit_for_bit(tmp_path, tiny_model, write_rows, chat_rows):
    """And is evaluated without the teacher: by the cross-entropy of a run that has none, before anything is learnt."""
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), eval_fraction=0.25)
    values |= {"save_steps": 2, "eval_steps": 1, "keep_checkpoints": 9}
    taught = values | {"teacher": str(tiny_model("qwen3")), "tuner": "lora", "lora_dropout": 0.2}
    train_alone(resolve_config("sft", **taught))
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000002"
    train_alone(resolve_config("sft", **taught | {"output_dir": str(tmp_path / "again"), "resume": str(checkpoint)}))
    kept = ("step", "loss", "grad_norm", "kl/teacher", "eval_loss")
    first, again = ([[row[name] for name in kept] for row in metrics(tmp_path / name)] for name in ("out", "again"))
    assert again == first[2:]
    still = {"max_steps": 1, "learning_rate": 1e-12}
    losses = []
    for name, run in (("still", taught), ("alone", values)):
        train_alone(resolve_config("sft", **run | still | {"output_dir": str(tmp_path / name)}))
        losses.append(metrics(tmp_path / name)[0]["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_model_that_is_its_own_teacher_differs_in_nothing(tmp_path, tiny_model, write_rows, chat_rows):
    model = str(tiny_model("gemma2"))
    values = settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), teacher=model, max_steps=1)
    train_alone(resolve_config("sft", **values | {"teacher_weight": 1, "teacher_tokens": 10**6}))
    (row,) = metrics(tmp_path / "out")
    assert abs(row["loss"]) < 1e-6 and abs(row["kl/teacher"]) < 1e-6 and row["grad_norm"] < 1e-5
    assert row["cross_entropy"] > 1


def test_numbers_of_a_teacher_that_are_not_finite_are_told_as_its_own(tmp_path, tiny_model, write_rows, chat_rows):
    teacher = shutil.copytree(tiny_model("llama"), tmp_path / "teacher")
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.embed_tokens.weight"][100:] = float("nan")  # of tokens that no check of a model tries
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    values = settings(tmp_path, tiny_model("qwen3"), write_rows("rows.jsonl", chat_rows), teacher=str(teacher))
    with pytest.raises(RunError, match="the KL to the teacher of step 1 is not finite") as error:
        train_alone(resolve_config("sft", **values))
    assert "check the teacher's weights" in error.value.fix


def test_a_loss_with_another_teacher_is_no_spike_among_those_before():
    """Evaluations stay what they were: they are of the text alone."""
    progress = Progress(recent_losses=[2.0] * 30, best_loss=1.5)
    for changed, left in (({"learning_rate": ""}, 30), ({"teacher_weight": "--teacher-weight 0.9 -> 0.1"}, 0)):
        forget_other_losses(progress, resolved().config, changed, pytest.fail)
        assert len(progress.recent_losses) == left and progress.best_loss == 1.5


def test_the_loss_of_a_taught_run_is_drawn_as_one_of_tokens():
    assert curve_of([{"loss": 2.0, "cross_entropy": 2.5, "kl/teacher": 1.5}])[1] == "loss per trained token"
    assert curve_of([{"loss": 0.7, "rewards/margin": 0.0}])[1] == "loss per pair or answer"


# --- what cannot teach ----------------------------------------------------------------------------------------------


def resolved(method="sft", **more):
    given = {"model": "a/b", "dataset": ["c/d"], "teacher": "e/f"} | more
    return resolve(method, {name: Given(value, name, "flag") for name, value in given.items()}, env={})


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("dpo", {}, "dpo compares whole answers"),
        ("rm", {}, "rm compares whole answers"),
        ("sft", {"loss": "dft"}, "--loss dft weighs"),
        ("sft", {"new_tokens": ["<a>"]}, "knows nothing of --new-tokens"),
        ("sft", {"teacher_weight": "0.0009"}, "out of range"),
        ("sft", {"teacher_weight": "1.01"}, "out of range"),
        ("sft", {"teacher_tokens": "0"}, "out of range"),
    ],
)
def test_what_does_not_go_together_is_refused(method, more, words):
    with pytest.raises(UserError, match=words):
        resolved(method, **more)


def test_a_short_name_is_a_teacher_and_its_weight_needs_one():
    assert resolved(teacher="qwen-7b").config.teacher == "Qwen/Qwen2.5-7B-Instruct"
    (note,) = [note for note in resolved(teacher=None, teacher_weight="0.2").notes if "teacher" in note]
    assert note == "teacher_weight has no effect without --teacher"


@pytest.mark.parametrize("name", ["kd_ce_alpha", "kd_temperature", "kd_trainer", "gkd_beta", "teacher_server"])
def test_other_tools_words_of_distillation_name_the_teacher(name):
    assert "--teacher MODEL" in (instead(name, in_recipe=False) or "")


@pytest.mark.parametrize("name", ["lmbda", "seq_kd"])
def test_a_teacher_that_is_learnt_from_on_sampled_answers_is_grpos(name):
    assert "grpo on those that the model gives" in (instead(name, in_recipe=False) or "")


def other_words(folder):
    """The tokenizer with one token changed for another."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|turn_end|>"))


def fewer_rows(folder):
    """An embedding without the last tokens."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"vocab_size": values["vocab_size"] // 2}))


def other_names(folder):
    """A file that lacks a tensor of the model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["strange.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file)


def quantized(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))


def adapter(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_words, "the teacher has other tokens: 1 of the model's"),
        (fewer_rows, "the teacher has other tokens"),
        (adapter, "of the teacher: it is an adapter"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "of the teacher: the model folder has no tokenizer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "of the teacher: "),
        (other_names, "of the teacher: tensors of the model are missing"),
        (quantized, "of the teacher: the model's weights are quantized"),
    ],
)
def test_who_cannot_teach_is_refused_before_weights_load(
    tmp_path, tiny_model, write_rows, chat_rows, monkeypatch, change, words
):
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "teacher")
    change(folder)
    values = settings(tmp_path, tiny_model("llama"), write_rows("rows.jsonl", chat_rows), teacher=str(folder))
    monkeypatch.setattr("swiftlite.training.run.build_trainee", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=words) as refused:
        train_alone(resolve_config("sft", **values))
    assert str(folder) in refused.value.where
    assert "--quantization" not in refused.value.fix  # which is the trained model's alone
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "layout", "words"),
    [
        ("qwen3.5", Layout(tp=2), "of the teacher: documents of Qwen3_5ForCausalLM cannot share a row"),
        ("llama", Layout(dp_shard=2, expert_parallel=2), "of the teacher: LlamaForCausalLM has no experts"),
    ],
)
def test_a_layout_that_is_none_for_the_teacher_is_refused_before_weights_load(
    tmp_path, tiny_model, write_rows, chat_rows, family, layout, words
):
    model = tiny_model("qwen3-moe")
    values = settings(tmp_path, model, write_rows("rows.jsonl", chat_rows), teacher=str(tiny_model(family)))
    config = resolve_config("sft", **values)
    with pytest.raises(UserError, match=words):
        check_teacher(config, layout, torch.device("cpu"), lambda: AutoTokenizer.from_pretrained(model))


def test_memory_and_time_of_a_teacher_are_planned(tmp_path):
    flags = {"tuner": "full", "tensor_parallel_size": 2, "parallel": "fsdp", "nproc_per_node": 4, "max_length": 2048}
    flags |= {
        "micro_batch_size": 1,
        "global_batch_size": 6,
        "activation_checkpointing": "none",
        "sync_every_microbatch": True,
    }
    teacher = tmp_path / "teacher"
    real_config("meta-llama/Llama-3.1-70B-Instruct").save_pretrained(teacher)
    alone, taught = (
        settle(*outlined(tmp_path / str(number), LLAMA, **flags | more), FOUR)
        for number, more in enumerate(({}, {"teacher": str(teacher)}))
    )
    weights = taught.footprint.weights - alone.footprint.weights
    assert weights / GIB == pytest.approx(2 * 70.55e9 / 4 / GIB, rel=1e-3)  # in bf16, a quarter on each
    told = taught.footprint.activations - alone.footprint.activations
    assert told == 3 * 2048 * 64 * (4 + 4 + 8)  # of three micro-batches 64 tokens at each place
    assert taught.footprint.total - alone.footprint.total == pytest.approx(weights + told)
    assert taught.pace.seconds > 3 * alone.pace.seconds  # a third of nine times the work


def test_no_layout_is_planned_that_the_teacher_does_not_take(tmp_path, tiny_model):
    flags = {"tensor_parallel_size": 2, "parallel": "fsdp", "nproc_per_node": 4, "teacher": str(tiny_model("qwen3.5"))}
    plan = propose(*outlined(tmp_path, LLAMA, **flags), FOUR)
    assert not plan.proposals
    assert "of the teacher: documents of Qwen3_5ForCausalLM cannot share a row" in str(plan.refused)


@pytest.mark.parametrize(("sharding", "evaluated", "trained"), [("full", True, True), ("grad_op", True, False),
                                                               ("none", False, False)])  # fmt: skip
def test_without_a_backward_pass_divided_weights_are_never_kept_whole(sharding, evaluated, trained):
    for evaluates, expected in ((True, evaluated), (False, trained)):
        options = DataParallel(torch.float32, sharding, evaluates=evaluates).unit(torch.device("cpu"))
        assert options["reshard_after_forward"] == expected
