"""Tensor parallelism on real gloo ranks: AdamW steps against the same model undivided, gradient by gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import run_world

from swiftlite.data.batches import collate, empty_micro_batch
from swiftlite.data.order import Sequence as Document
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention import documents as attention
from swiftlite.models.toys import toy_config
from swiftlite.objectives.logprobs import token_logprobs
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel import tensor_borders
from swiftlite.parallel.tensor import apply_tensor_parallel
from swiftlite.parallel.tensor_plan import check_tensor_parallel, tensor_plan

STEPS = 3
BIASES = {"attention_bias": True, "mlp_bias": True}


@dataclass(frozen=True)
class Case:
    """A model and a layout of four ranks: tp 4; fsdp 2 x tp 2; or, without fsdp, tp 2 twice over.

    lora: target modules, "" for full training; kept: modules to save; changes: of the tiny config; recompute: layers in
    the backward pass; double: in fp64, where gradients smaller than fp32's rounding of their matrix decide about
    updates of Adam's (with AVX2 alone one of an embedding's 32,768 weights was 1.1e-4 off, in fp64 none is by more than
    7e-7).
    """

    family: str
    tp: int = 2
    fsdp: bool = False
    sequence_parallel: bool = True
    lora: str = ""
    kept: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    double: bool = False


CASES = {
    "llama 2x2 biases uneven vocabulary": Case("llama", fsdp=True, changes=BIASES | {"vocab_size": 501}),
    "tied 2x2 recomputed": Case("llama-tied", fsdp=True, recompute=True),
    "tied 2x2 lora and embedding": Case("llama-tied", fsdp=True, lora="all-linear", kept=("embed_tokens",)),
    "gemma2 2x2": Case("gemma2", fsdp=True),
    "moe 2x2 router loss": Case("qwen3-moe", fsdp=True, changes={"output_router_logits": True}),
    "qwen3 tp4 shared heads": Case("qwen3", tp=4),
    "gemma3 tp4 shared heads": Case("gemma3", tp=4, sequence_parallel=False),
    "llama tp4 lora shared heads biases": Case("llama", tp=4, lora="q_proj v_proj o_proj up_proj", changes=BIASES),
    "moe tp4": Case("qwen3-moe", tp=4),
    "mistral tp2 whole tokens": Case("mistral", sequence_parallel=False),
    "llama tp2 lora and head": Case("llama", lora="k_proj down_proj", kept=("lm_head", "embed_tokens")),
    "phi3 tp2 gathered": Case("phi3"),
    "glm4-moe tp2 norms without a plan": Case("glm4-moe"),
    "deepseek-v2 tp2 latent": Case("deepseek-v2"),
    "cohere tp2 norms by head": Case("cohere"),
    "apertus tp2 activations with weights": Case("apertus"),
    "gemma4 tp2 embeddings of layers": Case("gemma4", double=True),
    "gemma4 tp2 experts of layers": Case("gemma4-moe"),
}


def config_of(family: str):
    """The tiny families of conftest, and some whose plans have parts that those lack."""
    import transformers as hf

    common = toy_config("llama").to_dict()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    common = {name: common[name] for name in names}
    mixture = {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    small = {
        "head_dim": 8, "global_head_dim": 8, "sliding_window": 8, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    builders = {
        "phi3": lambda: hf.Phi3Config(**common),
        "apertus": lambda: hf.ApertusConfig(**common, hidden_act="xielu"),
        "cohere": lambda: hf.CohereConfig(**common, use_qk_norm=True, logit_scale=0.25),
        "glm4-moe": lambda: hf.Glm4MoeConfig(**common, **mixture, head_dim=16, use_qk_norm=True),
        "deepseek-v2": lambda: hf.DeepseekV2Config(**common | mixture | latent),
        "gemma4": lambda: hf.Gemma4TextConfig(
            **common, **small, hidden_size_per_layer_input=8, vocab_size_per_layer_input=512
        ),
        "gemma4-moe": lambda: hf.Gemma4TextConfig(
            **common,
            **small,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
    }
    return builders[family]() if family in builders else toy_config(family)


def build(case: Case):
    """(what is trained, the causal model inside it), the same on each rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = config_of(case.family)
    for name, value in case.changes.items():
        setattr(config, name, value)
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    base.to(torch.float64 if case.double else torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():  # norms and biases start away from 1 and 0
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    if not case.lora:
        return base.train(), base
    import peft

    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=case.lora if case.lora == "all-linear" else case.lora.split(),
        modules_to_save=list(case.kept) or None,
        ensure_weight_tying=bool(case.kept) and base.config.tie_word_embeddings,
    )
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide A's gradient
                parameter.normal_(std=0.05)
    return model.train(), base


def make_steps(vocabulary: int) -> list[list]:
    """Four micro-batches a step, of unequal numbers of tokens and of trained tokens; one is empty."""
    random = np.random.default_rng(3)

    def document(length: int) -> Document:
        return Document(random.integers(0, vocabulary, length), random.random(length) < 0.6, "test")

    packs = [(9, 1, 14), (11, 5), (3,)]
    return [[*(collate([[document(n) for n in pack]]) for pack in packs), empty_micro_batch()] for _ in range(STEPS)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(model, scorer, steps, mine=slice(None), set_sync=lambda last: None) -> dict[str, Any]:
    """Losses (of this rank's micro-batches), gradient norms, the first step's gradients and the last weights."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # eps: some gradients are zero but for rounding (a bias of keys cancels in the softmax); Adam must not blow them up
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.1, eps=1e-6, fused=True)
    result: dict[str, Any] = {"loss": [], "norm": []}
    for batches in steps:
        tokens, total = sum(batch.trained_tokens for batch in batches), 0.0
        for index, batch in enumerate(batches[mine]):
            set_sync(index == len(batches[mine]) - 1)
            scores = scorer(batch)
            loss = supervised_loss(scores.logprobs, tokens)
            total += loss.item()
            if scores.router_loss is not None:
                loss = loss + scores.router_loss / len(batches)
            loss.backward()
        check_copies(trained)
        gradients = {name: whole(p.grad) for name, p in trained.items() if p.grad is not None}
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
        for parameter in trained.values():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, 1.0 / norm)
        optimizer.step()
        optimizer.zero_grad()
        result["loss"].append(total)
        result["norm"].append(norm)
        result.setdefault("gradients", gradients)
    result["weights"] = {name: whole(p.detach()) for name, p in trained.items()}
    return result


def check_copies(trained: dict[str, torch.nn.Parameter]) -> None:
    """A gradient is placed like its parameter; what is whole on several ranks is the same there."""
    for name, parameter in trained.items():
        if not isinstance(parameter, DTensor) or parameter.grad is None:
            continue
        assert parameter.grad.placements == parameter.placements, name
        for dimension, placement in enumerate(parameter.placements):
            for tensor in (parameter, parameter.grad) if placement.is_replicate() else ():
                local = tensor.detach().to_local()
                extremes = torch.stack([local, -local])
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=parameter.device_mesh.get_group(dimension))
                assert torch.equal(extremes[0], -extremes[1]), name


def train_divided(case: Case) -> dict[str, Any]:
    model, base = build(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // case.tp, case.tp), mesh_dim_names=("fsdp", "tp"))
    apply_tensor_parallel(model, base, mesh["tp"], sequence_parallel=case.sequence_parallel)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    if case.recompute:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = TokenScorer(model, base)
    scorer.check()
    steps = make_steps(base.config.vocab_size)
    if not case.fsdp:
        return train(model, scorer, steps)
    for unit in (*dissect(base).layers, scorer):
        fully_shard(unit, mesh=mesh["fsdp"])
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    result = train(model, scorer, steps, slice(mesh.get_local_rank("fsdp"), None, 2), scorer.set_requires_gradient_sync)
    losses = torch.tensor(result["loss"], dtype=torch.float64)
    dist.all_reduce(losses, group=mesh.get_group("fsdp"))
    return result | {"loss": losses.tolist()}


def train_whole(case: Case) -> dict[str, Any]:
    model, base = build(case)
    return train(model, TokenScorer(model, base), make_steps(base.config.vocab_size))


def compare(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest relative differences to one process; of gradients and weights tensor by tensor."""
    curves = {
        name: max(abs(a - b) / abs(b) for a, b in zip(got[name], expected[name], strict=True))
        for name in ("loss", "norm")
    }
    for name in ("gradients", "weights"):
        assert got[name].keys() == expected[name].keys()
        curves[name] = max(distance(got[name][key], tensor) for key, tensor in expected[name].items())
    return curves


# --- one world for everything that needs ranks ------------------------------------------------------------------------


def in_the_world(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    mine = {name: train_whole(cases[name]) for name in list(cases)[rank :: dist.get_world_size()]}
    parts: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    expected = {name: outcome for part in parts for name, outcome in part.items()}
    results: dict[str, Any] = {name: compare(train_divided(case), expected[name]) for name, case in cases.items()}
    results["vocabulary"] = compare_vocabulary()
    results["meta"] = divide_on_meta()
    return results


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / (expected.norm() + 1e-3)).item()


def compare_vocabulary() -> float:
    """The largest distance of log-probabilities and gradients over a divided head to those over a whole one."""
    mesh, worst = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), 0.0
    options = [{}, {"scale": 0.25, "softcap": 3.0}, {"softcap": 5.0, "chunk": 5}, {"judged": True}]
    for n, vocabulary, trained in ((37, 101, True), (37, 10, True), (37, 101, False), (0, 101, True)):
        for option in options:
            torch.manual_seed(0)
            hidden = torch.randn(n, 16, dtype=torch.float64)
            head, bias = 3 * torch.randn(vocabulary, 16, dtype=torch.float64), torch.randn(vocabulary).double()
            targets, upstream = torch.randint(0, vocabulary, (n,)), torch.randn(n)
            likeliest = (hidden @ head.T + bias).argmax(-1)
            targets = torch.where(upstream > 0, likeliest, targets)  # some of each rank's
            outcomes = []
            for divide in (False, True):
                weights = [head, bias]
                if divide:
                    weights = [distribute_tensor(w, mesh, (Shard(0),), src_data_rank=None) for w in weights]
                weights = [w.detach().requires_grad_(trained) for w in weights]
                entered = hidden.clone().requires_grad_()
                scores = token_logprobs(entered, *weights, targets, **option)
                if option.get("judged"):
                    assert torch.equal(scores[:, 1] == 1, targets == likeliest)
                (scores * upstream.view(-1, *[1] * (scores.dim() - 1))).sum().backward()
                gradients = [whole(w.grad) for w in weights if w.grad is not None]
                assert len(gradients) == (2 if trained else 0)
                outcomes.append([scores.detach(), entered.grad, *gradients])
            for plain, divided in zip(*outcomes, strict=True):
                worst = max(worst, distance(divided, plain))
    return worst


def divide_on_meta() -> dict[str, Any]:
    """What a model that was divided before it had memory looks like."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(toy_config("llama-tied"))
    apply_tensor_parallel(base, base, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
    attention_block = base.model.layers[0].self_attn
    return {
        "meta": all(p.is_meta and isinstance(p, DTensor) for p in base.parameters()),
        "tied": base.lm_head.weight is base.model.embed_tokens.weight,
        "names": list(base.state_dict()) == list(AutoModelForCausalLM.from_config(base.config).state_dict()),
        "q": tuple(attention_block.q_proj.weight.to_local().shape),
        "k": tuple(attention_block.k_proj.weight.to_local().shape),  # 2 heads for 4 ranks: whole on each
        "o": tuple(attention_block.o_proj.weight.to_local().shape),
    }


@pytest.fixture(scope="module")
def world():
    return run_world(4, in_the_world, CASES)


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_one_process(world, name):
    for rank in world:
        differences = rank[name]
        assert differences["loss"] < 1e-5
        assert differences["norm"] < 1e-4
        assert differences["gradients"] < 1e-5
        assert differences["weights"] < 1e-5


def test_logprobs_over_a_divided_vocabulary_equal_those_over_a_whole_one(world):
    assert max(rank["vocabulary"] for rank in world) < 1e-5


def test_a_model_is_divided_before_it_has_memory(world):
    for rank in world:
        found = rank["meta"]
        assert found.pop("meta") and found.pop("tied") and found.pop("names")
        assert found == {"q": (16, 64), "k": (32, 64), "o": (64, 16)}


# --- refusals, without ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "size", "problem", "nearest"),
    [
        ("llama", {}, 3, "4 attention heads do not divide by 3", 2),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, 3, "multiple of its 2 key/value heads", 2),
        ("llama", {"intermediate_size": 130}, 4, "feed-forward width 130", 2),
        ("qwen3-moe", {"num_experts": 6}, 4, "6 experts", 2),
        ("llama", {"vocab_size": 9, "num_key_value_heads": 4}, 4, "9 tokens", 2),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_does(family, changes, size, problem, nearest):
    config = toy_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=problem) as refusal:
        check_tensor_parallel(config, size)
    assert refusal.value.fix == f"use --tensor-parallel-size {nearest}"
    check_tensor_parallel(config, nearest)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3-moe"])
def test_sizes_that_fit_are_not_refused(family):
    for size in (1, 2, 4):
        check_tensor_parallel(toy_config(family), size)


def test_a_compiler_that_deletes_weights_is_refused(monkeypatch):
    monkeypatch.setattr(tensor_borders, "DELETES_HIDDEN", True)
    with pytest.raises(UserError, match="would delete weights"):
        check_tensor_parallel(toy_config("llama"), 2, compile_layers=True)
    check_tensor_parallel(toy_config("llama"), 2)
    check_tensor_parallel(toy_config("llama"), 1, compile_layers=True)


def test_an_architecture_without_a_plan_is_refused_by_name():
    check_tensor_parallel(toy_config("gpt2"), 1)
    with pytest.raises(UserError, match="gpt2 has no tensor-parallel plan"):
        check_tensor_parallel(toy_config("gpt2"), 2)


def test_a_plan_with_unknown_parts_is_refused_by_name():
    config = toy_config("llama")
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(UserError, match="sideways"):
        tensor_plan(config)


def divide_for_four(case: Case) -> None:
    """As rank 0 of four would, up to the first collective."""
    apply_tensor_parallel(*build(case), SimpleNamespace(size=lambda: 4, get_local_rank=lambda: 0))


def test_a_width_that_only_some_layers_have_is_refused_by_the_module_s_name():
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.(gate|up)_proj has 130 features"):
        divide_for_four(Case("glm4-moe", changes={"intermediate_size": 130}))


def test_adapters_that_cannot_be_cut_are_refused_by_name():
    import peft

    for options, name in (({"use_dora": True, "target_modules": ["q_proj"]}, "DoRA"),
                          ({"lora_bias": True, "target_modules": ["o_proj"]}, "o_proj has a bias"),
                          ({"target_modules": ["embed_tokens"]}, "LoRA on the embedding")):  # fmt: skip
        _, base = build(Case("llama"))
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        with pytest.raises(UserError, match=name):
            apply_tensor_parallel(model, base, SimpleNamespace(size=lambda: 4, get_local_rank=lambda: 0))
