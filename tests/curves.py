"""Training curves of tiny models in a layout and on one process, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from swiftlite.config.layout import Layout
from swiftlite.data.batches import MicroBatch, collate
from swiftlite.data.order import Sequence as Document
from swiftlite.models.anatomy import dissect
from swiftlite.models.attention import documents as attention
from swiftlite.models.checkpointing import set_activation_checkpointing
from swiftlite.models.toys import toy_config
from swiftlite.objectives.scorer import TokenScorer
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.context import check_context_parallel, slice_for_context
from swiftlite.parallel.data import DataParallel, shard_over_data
from swiftlite.parallel.experts import apply_expert_parallel, build_expert_mesh, check_expert_parallel, shard_experts
from swiftlite.parallel.mesh import Mesh, build_mesh
from swiftlite.parallel.tensor import apply_tensor_parallel

STEPS = 5


@dataclass(frozen=True)
class Case:
    family: str
    layout: Layout
    lora: str = ""  # the modules adapted
    sharded: bool = False  # by FSDP; else the test sums the gradients itself
    checkpointing: bool = False

    def __str__(self) -> str:
        kind = f"lora {self.lora}" if self.lora else "full"
        engine = ("FSDP" if self.sharded else "plain") + (", checkpointing" if self.checkpointing else "")
        experts = f", ep {self.layout.expert_parallel}" * (self.layout.expert_parallel > 1)
        return f"{self.family}, {kind}, {self.layout}{experts}, {engine}"


def steps() -> Iterator[list[MicroBatch]]:
    """Steps of four micro-batches: few trained tokens, at unequal places, row lengths that 2 and 4 do not divide."""
    generator = np.random.default_rng(5)

    def document(length: int, trained: object) -> Document:
        ids = generator.integers(3, 500, length).astype(np.int32)
        return Document(ids, np.isin(np.arange(length), list(trained)), "rows.jsonl:1")

    for step in range(STEPS):
        first = [document(n, range(n // 2, n)) for n in (7 + step, 40, 1, 12)]
        second = [document(33, []), document(22, [20 + step % 2])]  # one token, on one rank
        third = [document(3 + step, [2])]
        yield [collate([pack]) for pack in (first, second, third, [document(19, range(19))])]


def family_config(family: str):
    """conftest's, and mixtures of experts of other builds; mixtures with their router loss where they have one."""
    import transformers as hf

    common = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 4,
        "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
        "router_aux_loss_coef": 0.05, "output_router_logits": True,
    }  # fmt: skip
    if family == "mixtral":
        return hf.MixtralConfig(**common)
    if family == "mixtral-2":  # fewer experts than ranks
        return hf.MixtralConfig(**common | {"num_local_experts": 2, "num_experts_per_tok": 1})
    if family == "gpt-oss":
        return hf.GptOssConfig(**common, sliding_window=8)
    config = toy_config(family)
    if family == "qwen3-moe":
        config.output_router_logits, config.router_aux_loss_coef = True, 0.05
    return config


def build(case: Case) -> tuple[TokenScorer, torch.nn.Module]:
    """(scorer, the model inside): the same start values in every process."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = family_config(case.family)
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).train()
    model = base
    if case.lora:
        import peft

        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=case.lora, init_lora_weights=False))
    return TokenScorer(model, base), base


def divide(case: Case, scorer: TokenScorer, base: torch.nn.Module, mesh: Mesh) -> None:
    """The order of `training.setup`, without weights from files."""
    layout = case.layout
    check_context_parallel(base.config, layout, 64)
    check_expert_parallel(base, layout)
    if layout.tp > 1:
        apply_tensor_parallel(scorer.model, base, mesh.stored["tp"])
    set_activation_checkpointing(base, dissect(base), "full" if case.checkpointing else "none")
    if layout.expert_parallel > 1:
        expert_mesh = build_expert_mesh(layout, mesh.device)
        shard_experts(
            apply_expert_parallel(base, expert_mesh),
            expert_mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=OffloadPolicy(),
        )
    if case.sharded:
        shard_over_data(scorer, dissect(base).layers, mesh, DataParallel(torch.float32, layout.sharding))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def curve(case: Case, alone: bool) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    """[(loss, gradient norm)] and the final weights. alone: one process computes all micro-batches."""
    scorer, base = build(case)
    mesh = None if alone else build_mesh(case.layout, torch.device("cpu"))
    if not alone:
        divide(case, scorer, base, mesh)
    parameters = [p for p in scorer.parameters() if p.requires_grad]
    # With Adam's usual eps an element whose gradient cancels down to rounding (1e-6 of the norm) takes a whole step in
    # either direction. This one keeps steps in proportion to small gradients, and so shows a wrong scale as well.
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)
    results = []
    for batches in steps():
        count = sum(batch.trained_tokens for batch in batches)
        mine = batches if alone else batches[mesh.data_rank :: case.layout.data_ranks]
        if not alone:
            mine = [slice_for_context(batch, mesh.group("cp")) for batch in mine]
        total = torch.zeros(())
        for batch in mine:
            scores = scorer(batch)
            loss = supervised_loss(scores.logprobs, count)
            if scores.router_loss is not None:
                loss = loss + scores.router_loss / len(batches)
            loss.backward()
            total += loss.detach()
        if not alone:
            mesh.sum_over_data(total)
            if not case.sharded:
                for parameter in parameters:
                    mesh.sum_over_data(parameter.grad)
        norm = torch.stack([whole(p.grad).pow(2).sum() for p in parameters if p.grad is not None]).sum().sqrt()
        optimizer.step()
        optimizer.zero_grad()
        results.append((total.item(), norm.item()))
    return results, [whole(p.detach()).numpy() for p in parameters]


def curves(cases: list[Case], rank: int) -> dict[str, tuple]:
    """What `curve` gives on this rank, by case; only rank 0 hands its weights on."""
    found = {}
    for case in cases:
        points, weights = curve(case, alone=False)
        found[str(case)] = points, weights if rank == 0 else None
    return found


def check_curve(case: Case, ranks: list[dict]) -> None:
    """ranks: of each rank what `curve` gave it, by case. The weights of rank 0 are compared."""
    wanted, wanted_weights = curve(case, alone=True)
    for rank in ranks:
        for (loss, norm), (wanted_loss, wanted_norm) in zip(rank[str(case)][0], wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
    for weight, wanted_weight in zip(ranks[0][str(case)][1], wanted_weights, strict=True):
        np.testing.assert_allclose(weight, wanted_weight, rtol=1e-5, atol=1e-5)
