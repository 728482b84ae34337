"""Muon: PyTorch's own of whole matrices, in any layout. And LoRA+, whose B matrices learn faster."""

import functools
import math
import shutil

import peft
import pytest
import torch
from curves import family_config
from test_parity import check, metrics, plain_adamw, plain_training, planned_rows, render_chat, settings, train_alone
from test_tensor_parallel import config_of
from test_verify import in_real_processes
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import run_ranks

from swiftlite.checkpoint.state import MOMENTUM
from swiftlite.cli.errors import show_error
from swiftlite.config.layout import Layout
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.models.matrices import hidden_matrices
from swiftlite.models.toys import toy_config, write_toy
from swiftlite.parallel.mesh import build_mesh
from swiftlite.training.optimizer import RATIO, build_optimizer, make_moments, set_rate
from swiftlite.training.optimizers import muon
from swiftlite.training.optimizers.muon import Muon, orthogonalized
from swiftlite.verification.cases import FULL, LORA, Subject, cases
from swiftlite.verification.run import read_verdicts, verify_in_process, write_rows

MUON = {"optimizer": "muon"}
RATE, DECAY = 1e-3, 0.1
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_GPT2 = ["c_attn", "c_proj", "c_fc"]
ALONE = functools.partial(build_mesh, Layout(), torch.device("cpu"))


@pytest.fixture
def start(tmp_path, tiny_model, write_rows, chat_rows):
    """A factory: (name of the output folder, settings) -> (loss, gradient norm) of each step."""
    data = write_rows("rows.jsonl", chat_rows)

    def resolve(out, family="llama", **more):
        values = settings(tmp_path, tiny_model(family), data, output_dir=str(tmp_path / out))
        return resolve_config("sft", **values | MUON | more)

    def train(out, family="llama", **more):
        train_alone(resolve(out, family, **more))
        return [(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / out)]

    train.resolve = resolve
    return train


# --- against plain PyTorch --------------------------------------------------------------------------------------------


def plain_muon(names, ratio=1.0):
    """What makes torch.optim.Muon for matrices of modules of these names, and AdamW for the rest. ratio: of LoRA+."""

    def optimizers(model):
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        hidden = {name: p for name, p in trained if name.endswith("weight") and any(f".{n}." in name for n in names)}
        faster = [p for name, p in hidden.items() if "lora_B" in name]
        others = [p for name, p in hidden.items() if "lora_B" not in name]
        options = {"momentum": 0.95, "nesterov": True, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        made = [torch.optim.Muon(others, lr=RATE, **options)]
        made += [torch.optim.Muon(faster, lr=RATE * ratio, **options)] if faster else []
        rest = [p for name, p in trained if name not in hidden]
        return made + ([plain_adamw(rest, RATE, DECAY)] if rest else [])

    return optimizers


def plain_lora_plus(ratio):
    def optimizers(model):
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kinds = ([p for name, p in trained if ("lora_B" in name) == faster] for faster in (False, True))
        return [plain_adamw(kind, rate, DECAY) for kind, rate in zip(kinds, (RATE, RATE * ratio), strict=True)]

    return optimizers


def compared(start, tmp_path, tiny_model, chat_rows, monkeypatch, family, optimizers, wrap=None, **more):
    """Compare a run with plain PyTorch, whose Muon works in bf16 on any device: here in the type of the gradient."""
    config = start.resolve("out", family, **more)
    train_alone(config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(family))
    steps = [[render_chat(tokenizer, chat_rows[row]["messages"]) for row in rows] for rows in planned_rows(config)]
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        expected = plain_training(tiny_model(family), steps, wrap=wrap, optimizers=optimizers)
    check(metrics(tmp_path / "out"), expected, steps)


@pytest.mark.parametrize(("family", "names"), [("llama", PROJECTIONS), ("gpt2", OF_GPT2)])
def test_a_run_equals_pytorchs_own_muon(start, tmp_path, tiny_model, chat_rows, monkeypatch, family, names):
    compared(start, tmp_path, tiny_model, chat_rows, monkeypatch, family, plain_muon(names))


@pytest.mark.parametrize(
    ("optimizer", "ratio", "optimizers"),
    [("muon", 4.0, plain_muon(PROJECTIONS, 4.0)), ("adamw", 16.0, plain_lora_plus(16.0))],
)
def test_adapters_equal_plain_pytorch(
    start, tmp_path, tiny_model, chat_rows, monkeypatch, optimizer, ratio, optimizers
):
    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(tmp_path / "adapter")

    def wrap(model):
        return peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)

    more = {"tuner": "lora", "adapter": str(tmp_path / "adapter"), "optimizer": optimizer, "lora_plus_ratio": ratio}
    compared(start, tmp_path, tiny_model, chat_rows, monkeypatch, "llama", optimizers, wrap, **more)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (2, 24, 40)])
def test_updates_are_pytorchs_own(monkeypatch, shape):
    """Of matrices, and of each in a batch: with a decay that shows."""
    mine = nn.Parameter(torch.ones(shape))
    theirs = [nn.Parameter(torch.ones(shape[-2:])) for _ in mine.view(-1, *shape[-2:])]
    options = {"lr": 0.1, "weight_decay": 0.5}
    own = Muon(
        [{"params": [mine]}], matrices={"m"}, mesh=ALONE(), names={id(mine): "m"}, betas=(0.9, 0.95), eps=1e-8,
        fused=True, **options,
    )  # fmt: skip
    plain = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for step in range(4):
        mine.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 10.0**-step
        for matrix, gradient in zip(theirs, mine.grad.view(-1, *shape[-2:]), strict=True):
            matrix.grad = gradient.clone()
        own.step()
        plain.step()
    torch.testing.assert_close(mine.view(-1, *shape[-2:]), torch.stack(theirs), rtol=1e-5, atol=1e-5)


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24), (1, 16, 16)])
def test_matrices_of_a_batch_are_each_orthogonalised(monkeypatch, shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrices)
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.4 and values.max() < 1.25
    for matrix, result in zip(matrices, found, strict=True):
        torch.testing.assert_close(orthogonalized(matrix), result)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        assert ((left @ right) * result).sum() > 0.9 * result.norm() * math.sqrt(min(shape[1:]))
    monkeypatch.setattr(muon, "PIECE", 1)
    torch.testing.assert_close(orthogonalized(matrices), found)
    assert not orthogonalized(torch.zeros(2, 3)).any()


def model_of(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def last_names(model):
    hidden = hidden_matrices(model)
    return {name.removesuffix(".weight").rpartition(".")[2] for name, p in model.named_parameters() if id(p) in hidden}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama-tied", PROJECTIONS),
        ("gpt2", OF_GPT2),
        ("qwen3-moe", ["q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj"]),
        ("mamba2", ["in_proj", "out_proj"]),
    ],
)
def test_the_hidden_matrices_of_a_model(family, expected):
    assert last_names(model_of(toy_config(family))) == {*expected}


def test_biases_of_experts_and_vectors_of_adapters_are_none():
    experts = model_of(family_config("gpt-oss"))
    assert {"gate_up_proj", "down_proj"} <= last_names(experts)
    assert not [name for name in last_names(experts) if "bias" in name or "norm" in name or "embed" in name]
    assert last_names(model_of(config_of("cohere"))) == {*PROJECTIONS}  # its norms have a vector for each head
    base = model_of(toy_config("llama"))
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    names = {name for name, p in base.named_parameters() if id(p) in hidden_matrices(base) and "lora" in name}
    assert len(names) == 4 and all(".q_proj.lora_" in name for name in names)


def test_on_a_gpu_matrices_are_orthogonalised_in_bf16():
    assert muon.orthogonalized_in(torch.device("cuda")) == torch.bfloat16
    assert muon.orthogonalized_in(torch.device("cpu")) == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_updates_as_pytorch_does():
    mine, theirs = (nn.Parameter(torch.ones(96, 160, device="cuda")) for _ in range(2))
    options = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": DECAY, "fused": True}
    mesh = build_mesh(Layout(), torch.device("cuda"))
    own = Muon([{"params": [mine]}], matrices={"m"}, mesh=mesh, names={id(mine): "m"}, **options)
    plain = torch.optim.Muon([theirs], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        mine.grad = torch.randn(96, 160, generator=torch.Generator().manual_seed(step)).cuda()
        theirs.grad = mine.grad.clone()
        own.step()
        plain.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_hidden_matrix_has_one_moment():
    matrix, vector = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
    config = resolve_config("sft", model="m", dataset=["d"], tuner="full", learning_rate=RATE, **MUON)
    optimizer = build_optimizer([("matrix", matrix), ("vector", vector)], config, ALONE(), {"matrix"})
    make_moments(optimizer)
    assert optimizer.state[matrix].keys() == {"step", MOMENTUM} and len(optimizer.state[vector]) == 3


def test_b_matrices_keep_their_ratio_to_the_learning_rate():
    names = ["q.lora_A.default.weight", "q.lora_B.default.weight", "e.lora_embedding_B.default"]
    trained = [(name, nn.Parameter(torch.ones(3, 4))) for name in names]
    config = resolve_config("sft", model="m", dataset=["d"], learning_rate=RATE, lora_plus_ratio=8)
    optimizer = build_optimizer(trained, config, ALONE())
    for rate in (RATE, RATE / 3):
        set_rate(optimizer, rate)
        found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert [found[id(p)] for _, p in trained] == pytest.approx([rate, 8 * rate, 8 * rate])
    assert {group[RATIO] for group in optimizer.param_groups} == {1.0, 8.0}


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_run_goes_on_bit_for_bit(start, tmp_path, family):
    found = start("whole", family, save_steps=2)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000002"
    assert start("again", family, resume=str(checkpoint)) == found[2:]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]
    if family == "llama":
        for optimizer in ("adamw", "adamw_8bit"):
            with pytest.raises(UserError, match=f"--optimizer muon -> {optimizer}"):
                start("other", optimizer=optimizer, resume=str(checkpoint))


@pytest.mark.parametrize(("first", "second"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_checkpoint_without_the_settings_of_its_run_is_of_one_optimizer(start, tmp_path, first, second):
    start("first", optimizer=first, max_steps=1)
    lone = shutil.copytree(tmp_path / "first" / "checkpoints" / "step-00000001", tmp_path / "lone" / "step-00000001")
    with pytest.raises(UserError, match="exp_avg_sq"):
        start("second", optimizer=second, max_steps=2, resume=str(lone))


def test_where_nothing_is_a_hidden_matrix_the_run_says_so(start, capsys):
    start("norms", tuner="freeze", trainable_layers=0, trainable_modules=["norm"], max_steps=1)
    assert "--optimizer muon is AdamW here" in capsys.readouterr().out


def test_an_adapter_without_b_matrices_has_no_ratio(start, tmp_path, tiny_model):
    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    peft.get_peft_model(base, peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="the adapter has none"):
        start("plus", tuner="lora", adapter=str(tmp_path / "adapter"), lora_plus_ratio=2)
    with pytest.raises(UserError, match="the tuner is full") as error:
        start.resolve("plus", lora_plus_ratio=2)
    assert "--tuner lora" in error.value.fix


def resumed_process(_rank, *arguments):
    verify_in_process(*arguments, show_error, resumed=True)


def test_two_processes_go_on_in_other_layouts(tmp_path):
    subjects = [Subject("llama-tied", "full", FULL | MUON), Subject("llama-tied", "LoRA", LORA | MUON)]
    chosen = ("ddp 2", "fsdp full 2, offloaded", "tp 2", "pp 2")
    picked = [case for case in cases(2) if case.name in chosen]
    models = {"llama-tied": str(write_toy(tmp_path / "model", toy_config("llama-tied")))}
    write_rows(tmp_path)
    run_ranks(2, resumed_process, str(tmp_path), models, subjects, picked)
    found = read_verdicts(tmp_path)
    assert len(found) == 2 * len(chosen) == 2 * len(picked)
    for verdict in found:
        assert verdict.passed and verdict.difference is not None, verdict


def test_four_processes_in_products(tmp_path):
    """Shards of shards, experts dealt out and cut, replicas, stages."""
    chosen = ("dp 2 x tp 2", "tp 2 x pp 2", "ep 4", "hybrid 2x2 with ep 2")
    for verdict in in_real_processes(tmp_path, 4, chosen, Subject("qwen3-moe", "experts", FULL | MUON)):
        assert verdict.passed and verdict.difference is not None, verdict


def test_parts_that_are_uneven_or_empty(tmp_path):
    """64 rows over three processes, and the four of an adapter, which two of them hold."""
    both = Subject("llama", "full", FULL | MUON), Subject("llama", "LoRA", LORA | MUON)
    for verdict in in_real_processes(tmp_path, 3, ("fsdp full 3",), *both):
        assert verdict.passed and verdict.difference is not None, verdict
