"""Pipelines on real gloo ranks: five AdamW steps through the stages against the same model in one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from worlds import run_world

from swiftlite.checkpoint.boxes import holdings, whole
from swiftlite.checkpoint.weights import materialize
from swiftlite.config.layout import Layout
from swiftlite.data.batches import collate
from swiftlite.data.order import Sequence as Document
from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention import documents as attention
from swiftlite.models.checkpointing import set_activation_checkpointing
from swiftlite.models.toys import toy_config
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.parallel import stages
from swiftlite.parallel.data import DataParallel, shard_over_data
from swiftlite.parallel.mesh import Mesh, build_mesh
from swiftlite.parallel.pipeline import Pipeline, cut_model
from swiftlite.parallel.stages import (
    GPIPE,
    INTERLEAVED,
    ONE_FORWARD_ONE_BACKWARD,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    Schedule,
    balance,
    check_pipeline,
    choose_schedule,
    plan_stages,
)
from swiftlite.parallel.tensor import apply_tensor_parallel
from swiftlite.planning.communication import PIPELINE_ROUND
from swiftlite.training.divide import Part
from swiftlite.training.losses import TokenLoss
from swiftlite.training.optimizer import clip_gradients
from swiftlite.training.pipeline_step import PipelineStep, StageScorer, Work
from swiftlite.training.precision import Precision
from swiftlite.training.step import DirectStep

STEPS = 4
FP32 = Precision("fp32", torch.float32)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """lora: train adapters; frozen: first layers that are not trained; changes: of the toy's config."""

    family: str
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD
    layers: int = 4
    lora: bool = False
    frozen: int = 0
    checkpointing: str = "none"
    changes: dict[str, Any] = field(default_factory=dict)


def build(case: Case, device: str = "cpu"):
    """(what is trained, the causal model inside it), the same weights in each process or none."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = toy_config(case.family, case.layers)
    for name, value in case.changes.items():
        setattr(config, name, value)
    config._attn_implementation = attention.register()
    base = AutoModelForCausalLM.from_config(config).float().train()
    model = base
    if case.lora:
        import peft

        settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        model = peft.get_peft_model(base, settings).train()
    if case.frozen:
        base.get_input_embeddings().requires_grad_(False)
        for layer in dissect(base).layers[: case.frozen]:
            layer.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases start away from 1 and 0
                parameter += 0.1 * torch.randn_like(parameter)
            if "lora_B" in name:  # zero at first, which would hide A's gradient
                parameter.normal_(std=0.05)
    return model, base


def to_meta(model: torch.nn.Module) -> None:
    """Parameters without memory, as the engine builds a model; tied ones stay tied, buffers stay real."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                made[id(parameter)] = empty
            setattr(module, name, made[id(parameter)])


def steps_of(vocabulary: int, number: int) -> list[list]:
    """Packed micro-batches of unequal length and unequally many trained tokens; the third step has long rows."""
    random = np.random.default_rng(3)
    steps = []
    for step in range(STEPS):
        batches = []
        for index in range(number):
            lengths = random.integers(1, 90 if step == 2 else 14, 1 + index % 3)
            documents = [
                Document(random.integers(0, vocabulary, n), random.random(n) < 0.2 + 0.1 * index, "") for n in lengths
            ]
            batches.append(collate([documents]))
        steps.append(batches)
    return steps


def optimize(parameters: list, counted: list, mesh: Mesh, optimizer) -> float:
    """One update with the gradient clipped at 1. Returns its norm."""
    norm = clip_gradients(counted, 0.0, mesh)
    for parameter in parameters:
        parameter.grad *= min(1.0, 1.0 / (norm + 1e-6))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def adamw(parameters: list) -> torch.optim.Optimizer | SimpleNamespace:
    if not parameters:
        return SimpleNamespace(step=lambda: None, zero_grad=lambda **_: None)
    # With the usual epsilon of 1e-8 a gradient that is zero but for rounding (2e-8 beside a median of 9e-3 was seen)
    # moves its weight by a whole learning rate, in a direction that rounding decides.
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-6)


def direct(case: Case, number: int) -> dict[str, Any]:
    """The same training in one process."""
    model, base = build(case)
    mesh = Mesh(Layout(), CPU)
    runner = DirectStep(TokenScorer(model, base), FP32, mesh, seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, result = adamw(trained), {"loss": [], "norm": [], "micro": [], "router": [], "padded": []}
    steps = steps_of(base.config.vocab_size, number)
    with torch.no_grad():
        result["eval"] = runner.evaluate(steps[2], TokenLoss(1))[0]
    for step, batches in enumerate(steps):
        outcome = runner.train(step, batches, TokenLoss(sum(b.trained_tokens for b in batches)), 1.0, len(batches))
        assert outcome.padded_tokens == sum(b.tokens for b in batches)
        result["loss"].append(outcome.loss)
        result["micro"].append(outcome.micro_losses)
        result["router"].append(outcome.router_loss)
        result["padded"].append(outcome.padded_tokens)
        result["norm"].append(optimize(trained, trained, mesh, optimizer))
    result["weights"] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return result


def piped(case: Case, number: int, layout: Layout, sharding: str = "full") -> dict[str, Any]:
    """The training on this rank of a pipeline; `number` micro-batches a step over all data ranks."""
    mesh = build_mesh(layout, CPU)
    model, base = build(case)
    values = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    plan = plan_stages(base, layout.pp, case.schedule, length=32)
    dtype = base.get_input_embeddings().weight.dtype
    to_meta(model)
    stages = cut_model(model, base, plan, mesh.place("pp"))
    scorers = [StageScorer(stage, dtype).train() for stage in stages]
    options = DataParallel(torch.float32, sharding, resharding=False)
    for stage, scorer in zip(stages, scorers, strict=True):
        anatomy = dissect(stage.base)
        if layout.tp > 1:
            apply_tensor_parallel(stage.model, stage.base, mesh.stored["tp"])
        set_activation_checkpointing(stage.base, anatomy, case.checkpointing)
        shard_over_data(scorer, anatomy.layers, mesh, options)
        materialize(scorer, CPU)
    parts = [Part(scorer, stage.model, stage.base, stage) for stage, scorer in zip(stages, scorers, strict=True)]
    tensors = [entry for part in parts for entry in part.tensors()]
    with torch.no_grad():
        for name, tensor, _ in tensors:
            for holding in holdings(tensor):
                holding.tensor.copy_(values[name][holding.box.slices_of(whole(values[name].shape))])
    runner = PipelineStep(Pipeline(stages, plan, mesh.group("pp")), scorers, FP32, mesh, seed=0)
    trained = [p for _, p, _ in tensors if isinstance(p, torch.nn.Parameter) and p.requires_grad]
    counted = [p for _, p, counts in tensors if isinstance(p, torch.nn.Parameter) and p.requires_grad and counts]
    optimizer, result = adamw(trained), {"loss": [], "norm": [], "micro": [], "router": [], "padded": []}
    steps = [batches[mesh.data_rank :: layout.data_ranks] for batches in steps_of(base.config.vocab_size, number)]
    everything = steps_of(base.config.vocab_size, number)
    result["eval"] = runner.evaluate(steps[2], TokenLoss(1))[0]
    for step, batches in enumerate(steps):
        outcome = runner.train(
            step, batches, TokenLoss(sum(b.trained_tokens for b in everything[step])), 1.0, len(everything[step])
        )
        result["loss"].append(outcome.loss)
        result["micro"].append(outcome.micro_losses)
        result["router"].append(outcome.router_loss)
        result["padded"].append(outcome.padded_tokens)
        result["norm"].append(optimize(trained, counted, mesh, optimizer))
        if step == 1:  # between two steps
            runner.evaluate(steps[2], TokenLoss(1))
    result["weights"] = [
        (name, (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().copy())
        for name, p, _ in tensors
        if isinstance(p, torch.nn.Parameter)
    ]
    result["data_rank"] = mesh.data_rank
    return result


def world(_rank: int, runs: list[tuple]) -> list[dict[str, Any]]:
    return [piped(*run) for run in runs]


def compare(case: Case, results: list[dict[str, Any]], reference: dict[str, Any], layout: Layout) -> None:
    """results: of each rank."""
    seen: set[str] = set()
    for result in results:
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5), case
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-4), case
        assert result["eval"] == pytest.approx(reference["eval"], rel=1e-5), case
        for padded, tokens in zip(result["padded"], reference["padded"], strict=True):
            assert padded >= tokens and padded % PIPELINE_ROUND == 0  # of all data ranks and slices
        micro = [losses[result["data_rank"] :: layout.data_ranks] for losses in reference["micro"]]
        for mine, theirs in zip(result["micro"], micro, strict=True):
            if layout.cp == 1:  # of a divided row each rank has a part of the loss
                assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7), case
        if reference["router"][0] is None:
            assert result["router"] == reference["router"]
        else:
            assert result["router"] == pytest.approx(reference["router"], rel=1e-5), case
        for name, value in result["weights"]:
            seen.add(name)
            np.testing.assert_allclose(value, reference["weights"][name], rtol=0, atol=1e-5, err_msg=f"{case} {name}")
    assert seen == set(reference["weights"]), case


def check_runs(size: int, runs: list[tuple]) -> None:
    """runs: those whose backward pass this torch cuts wrongly are left out, as swiftlite refuses them."""
    runs = [run for run in runs if stages.SPLITS_CORRECTLY or not run[0].schedule.splits_backward]
    results = run_world(size, world, runs)
    references: dict[str, dict] = {}
    for place, (case, number, layout, *_) in enumerate(runs):
        key = repr((case.family, case.layers, case.lora, case.frozen, case.changes, number))
        if key not in references:
            references[key] = direct(case, number)
        compare(case, [result[place] for result in results], references[key], layout)


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
TWO = Layout(pp=2)


def test_two_ranks_train_as_one():
    check_runs(
        2,
        [
            *[(Case("llama", s), 5, TWO) for s in (GPIPE, ONE_FORWARD_ONE_BACKWARD)],
            *[(Case("llama", s), 6, TWO) for s in (INTERLEAVED, ZERO_BUBBLE, ZERO_BUBBLE_V)],
            (Case("llama", ONE_FORWARD_ONE_BACKWARD), 1, TWO),  # fewer micro-batches than stages
            (Case("llama", INTERLEAVED), 5, TWO),  # not a multiple of the rounds
            *[(Case("llama-tied", s), 5, TWO) for s in (ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, ZERO_BUBBLE_V)],
            *[(Case(family), 4, TWO) for family in ("qwen3", "mistral", "gemma")],
            # The second stage starts with another kind of layer than the first.
            *[(Case(family, layers=5), 4, TWO) for family in ("gemma2", "gemma3", "gpt2")],
            (Case("gemma3", ZERO_BUBBLE_V, layers=5), 4, TWO),
            *[(Case("gpt2", s), 4, TWO) for s in (INTERLEAVED, ZERO_BUBBLE_V)],
            *[(Case("qwen3-moe", s, changes=ROUTED), 5, TWO) for s in (ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE_V)],
            (Case("qwen3-moe"), 4, TWO),
            *[(Case("llama", s, lora=True), 4, TWO) for s in (ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE_V)],
            (Case("llama-tied", lora=True, checkpointing="full"), 4, TWO),
            *[(Case("llama", s, frozen=2), 4, TWO) for s in (ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE)],
            *[
                (Case("llama", s, checkpointing="full"), 4, TWO)
                for s in (ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, ZERO_BUBBLE_V)
            ],
            (Case("qwen3", checkpointing="selective"), 4, TWO),
        ],
    )


def test_four_ranks_train_as_one():
    four, mixed = Layout(pp=4), Layout(pp=2, dp_shard=2, sharding="full")
    check_runs(
        4,
        [
            (Case("llama-tied", layers=8), 6, four),
            (Case("llama-tied", INTERLEAVED, layers=8), 8, four),
            (Case("gemma3", ZERO_BUBBLE_V, layers=9), 8, four),
            *[(Case("llama-tied", s), 8, mixed) for s in (ONE_FORWARD_ONE_BACKWARD, INTERLEAVED)],
            *[(Case("llama-tied", s), 8, mixed) for s in (ZERO_BUBBLE, ZERO_BUBBLE_V)],
            (Case("qwen3", GPIPE, checkpointing="full"), 8, mixed, "grad_op"),
            (Case("llama", lora=True), 8, mixed),
            (Case("llama", ZERO_BUBBLE_V, lora=True, checkpointing="full"), 8, mixed),
            (Case("qwen3-moe", changes=ROUTED), 8, mixed),
            (Case("llama-tied"), 8, Layout(pp=2, dp_replicate=2), "none"),
            (Case("llama-tied", ZERO_BUBBLE_V), 4, Layout(pp=2, tp=2)),
            (Case("qwen3-moe", changes=ROUTED), 4, Layout(pp=2, cp=2)),
            (Case("gpt2", ZERO_BUBBLE_V), 2, mixed),  # one micro-batch on each data rank
        ],
    )


def in_one_process(base, ranks: int, schedule: Schedule = ONE_FORWARD_ONE_BACKWARD) -> list[StageScorer]:
    """All stages of a model, in order."""
    plan = plan_stages(base, ranks, schedule, length=32)
    stages = [stage for rank in range(ranks) for stage in cut_model(base, base, plan, rank)]
    return [StageScorer(stage, torch.float32).eval() for stage in sorted(stages, key=lambda stage: stage.index)]


def run_stages(scorers: list[StageScorer], batch) -> tuple[torch.Tensor, ...]:
    values: tuple[torch.Tensor, ...] = ()
    for scorer in scorers:
        scorer.begin(Work([batch], lambda *_: contextlib.nullcontext()))
        values = scorer(*values)
    return values


def architectures() -> dict[str, Any]:
    """What stands around the layers differs: scaled embeddings, norms before, dropout, dense layers before routed."""
    import transformers as hf

    common = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    small = {"vocab_size": 512, "n_embd": 64, "n_layer": 5, "n_head": 4, "bos_token_id": 2, "eos_token_id": 2}
    return {
        "granite": hf.GraniteConfig(**common, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
        "cohere2": hf.Cohere2Config(**common, sliding_window=8),
        "smollm3": hf.SmolLM3Config(**common),
        "phi": hf.PhiConfig(**common, embd_pdrop=0.1),
        "bloom": hf.BloomConfig(vocab_size=512, hidden_size=64, n_layer=5, n_head=4, bos_token_id=1, eos_token_id=2),
        "gpt-bigcode": hf.GPTBigCodeConfig(**small, n_positions=512),
        "mixtral": hf.MixtralConfig(**common, num_local_experts=4, output_router_logits=True),
        "deepseek": hf.DeepseekV3Config(
            **(common | {"num_key_value_heads": 4}), q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16,
            qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=2, moe_intermediate_size=32,
        ),
    }  # fmt: skip


def random_model(config):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config._attn_implementation = attention.register()
    return AutoModelForCausalLM.from_config(config).float().eval()


def test_fsdp_can_move_what_enters_the_first_stage():
    """As it does on a GPU, where it fails if there is nothing at all."""
    scorer, *_ = in_one_process(random_model(toy_config("llama")), 2)
    moved = []

    def move(_module, args, kwargs):
        moved.append(_to_kwargs(args, kwargs, torch.device("cpu"), use_side_stream_for_tensor_copies=False))

    scorer.register_forward_pre_hook(move, with_kwargs=True)
    run_stages([scorer], steps_of(512, 3)[2][2])
    [(args, kwargs)] = moved
    assert args[0] == (None,) and not kwargs[0]


@pytest.mark.parametrize("name", sorted(architectures()))
def test_stages_in_a_row_are_the_model(name):
    base = random_model(architectures()[name])
    batch = steps_of(512, 3)[2][2]
    scorers = in_one_process(base, 2, INTERLEAVED)
    assert len(scorers) == 4
    if name == "bloom":  # its positions go on from one document to the next; its stages are those of the model
        with pytest.raises(UserError, match="another"):
            TokenScorer(base, base).check()
    else:
        for scorer in scorers:
            scorer.check()
    names = [scorer.stage.full_name(local) for scorer in scorers for local, _ in scorer.model.named_parameters()]
    assert set(names) == {name for name, _ in base.named_parameters()}
    with torch.no_grad():
        scores, values = TokenScorer(base, base)(batch), run_stages(scorers, batch)
    assert torch.equal(values[0], scores.logprobs)
    if scores.router_loss is not None:
        assert values[1].item() == pytest.approx(scores.router_loss.item(), rel=1e-6)


def test_padding_changes_no_score():
    base = random_model(toy_config("gpt2"))
    batch = steps_of(512, 3)[0][2]
    padded = batch.padded_to(128)
    assert padded.input_ids.shape == (1, 128)
    assert padded.trained_tokens == batch.trained_tokens
    assert torch.diff(padded.cu_seqlens).max() == padded.position_ids.max() + 1 == batch.max_document
    with torch.no_grad():
        scores = [TokenScorer(base, base)(b).logprobs for b in (batch, padded)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-6, atol=1e-6)


def test_stages_share_the_cost():
    assert balance([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert balance([1, 1, 1, 4], 2) == [range(3), range(3, 4)]
    assert balance([2, 2, 2, 2, 2, 5], 3) == [range(2), range(2, 5), range(5, 6)]
    assert balance([1, 1, 6, 1, 1], 3) == [range(2), range(2, 3), range(3, 5)]  # even where the largest is fixed
    base = random_model(toy_config("llama", 8))
    plan = plan_stages(base, 2, ONE_FORWARD_ONE_BACKWARD, length=32)
    assert [len(layers) for layers in plan.ranges] == [4, 4]
    wide = toy_config("llama", 8)
    wide.vocab_size = 512 * 8  # the head weighs as much as six layers
    plan = plan_stages(random_model(wide), 2, ONE_FORWARD_ONE_BACKWARD, length=32)
    assert [len(layers) for layers in plan.ranges] == [7, 1]


def test_places_of_stages():
    base = random_model(toy_config("llama", 8))
    placed = {s.engine: plan_stages(base, 2, s, length=32) for s in (INTERLEAVED, ZERO_BUBBLE_V)}
    assert [placed["ScheduleInterleaved1F1B"].stages_of(rank) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [placed["ScheduleZBVZeroBubble"].stages_of(rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert choose_schedule("zero-bubble", 8, 4) is ZERO_BUBBLE_V
    assert choose_schedule("zero-bubble", 7, 4) is ZERO_BUBBLE


@pytest.mark.parametrize(
    ("layers", "pp", "schedule", "number", "what", "fix"),
    [
        (4, 8, "1f1b", 8, "needs 8 layers", "--pipeline-parallel-size 4"),
        (4, 4, "interleaved-1f1b", 8, "needs 8 layers", "--pipeline-schedule 1f1b, or --pipeline-parallel-size 2"),
        (4, 4, "1f1b", 3, "cannot run 3", "--num-microbatches 4"),
        (8, 4, "interleaved-1f1b", 9, "cannot run 9", "--num-microbatches 8 or 10"),
        (4, 4, "zero-bubble", 9, "cannot run 9", "--num-microbatches 8 or 10"),
    ],
)
def test_pipelines_refused(layers, pp, schedule, number, what, fix, monkeypatch):
    monkeypatch.setattr(stages, "SPLITS_CORRECTLY", True)
    with pytest.raises(UserError, match=what) as caught:
        check_pipeline(toy_config("llama", layers), Layout(pp=pp), schedule, number)
    assert caught.value.fix == f"use {fix}"


def test_a_torch_that_cuts_the_backward_pass_wrongly_is_refused(monkeypatch):
    monkeypatch.setattr(stages, "SPLITS_CORRECTLY", False)
    with pytest.raises(UserError, match="zero-bubble needs torch 2.13 or newer"):
        check_pipeline(toy_config("llama", 4), TWO, "zero-bubble", 4)
    check_pipeline(toy_config("llama", 4), TWO, "interleaved-1f1b", 4)


def test_architectures_refused(monkeypatch):
    monkeypatch.setattr(stages, "SPLITS_CORRECTLY", True)
    from transformers import Gemma3nTextConfig

    with pytest.raises(UserError, match="gemma3n_text is an architecture whose last layers read"):
        check_pipeline(Gemma3nTextConfig(), TWO, "1f1b", 4)
    with pytest.raises(UserError, match="--compile|compiled layers cannot"):
        check_pipeline(toy_config("llama", 4), TWO, "zero-bubble", 4, compile_layers=True)
    shared = random_model(toy_config("llama"))
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    with pytest.raises(UserError, match="layers that share weights: 0 and 1"):
        in_one_process(shared, 2)
    outside = random_model(toy_config("llama"))
    outside.model.bridge = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match="weights outside its layers, embedding, norm and head: model.bridge"):
        in_one_process(outside, 2)


def test_what_a_decoder_does_beside_its_layers_is_found(monkeypatch):
    monkeypatch.setattr("swiftlite.parallel.pipeline.INPUT_FACTORS", ())
    with pytest.raises(UserError, match="changes hidden states outside its layers"):
        in_one_process(random_model(architectures()["granite"]), 2)


def test_unknown_heads_and_leaking_documents_are_found(monkeypatch):
    from swiftlite.models.logits import LogitTransform
    from swiftlite.objectives import scorer as scoring

    scorer = in_one_process(random_model(toy_config("llama")), 2)[1]
    scorer._anatomy = replace(scorer._anatomy, transform=LogitTransform(scale=3.0))
    with pytest.raises(UserError, match="turns hidden states into logits"):
        scorer.check()
    leaking = random_model(toy_config("llama"))
    leaking.set_attn_implementation("sdpa")  # knows nothing of borders where nothing restarts
    scorer = in_one_process(leaking, 2)[0]
    probe = scoring.make_probe
    monkeypatch.setattr(scoring, "make_probe", lambda *a: replace(probe(*a), position_ids=torch.arange(8)[None]))
    with pytest.raises(UserError, match="lets one packed document see another"):
        scorer.check()
