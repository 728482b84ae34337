"""Expert parallelism equals one process: one layer of experts by itself, then whole training curves."""

from __future__ import annotations

import pytest
import torch
from curves import Case, build, check_curve, curves, divide, family_config
from worlds import run_world

from swiftlite.checkpoint.boxes import holdings, whole
from swiftlite.config.layout import Layout
from swiftlite.errors import UserError
from swiftlite.parallel.experts import apply_expert_parallel, build_expert_mesh, check_expert_parallel
from swiftlite.parallel.mesh import build_mesh

EP2 = Layout(dp_shard=4, expert_parallel=2, sharding="full")
CASES = [
    Case("qwen3-moe", EP2, sharded=True),
    Case("qwen3-moe", Layout(dp_shard=4, expert_parallel=4, sharding="full"), sharded=True, checkpointing=True),
    Case("qwen3-moe", EP2, lora=r".*\.[qkvo]_proj", sharded=True),
    Case("qwen3-moe", Layout(dp_shard=2, cp=2, expert_parallel=2, sharding="full"), sharded=True),
    Case("mixtral", Layout(dp_replicate=2, dp_shard=2, expert_parallel=2, sharding="full"), sharded=True),
    Case("mixtral-2", EP2, sharded=True),
    Case("gpt-oss", EP2, sharded=True, checkpointing=True),
]
BOXES = [CASES[0], CASES[1], CASES[5]]
TOKENS = 6


def model(family: str):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    return AutoModelForCausalLM.from_config(family_config(family))


def experts_alone(rank: int, size: int, divided: bool):
    """Output and gradients of one layer's experts where no token chooses the second half of them.

    By transformers' eager function, which does not touch an expert without rows.
    """
    base = model("qwen3-moe")
    base.set_experts_implementation("eager")
    if divided:
        apply_expert_parallel(base, build_expert_mesh(Layout(dp_shard=size, expert_parallel=size), torch.device("cpu")))
    experts = base.model.layers[0].mlp.experts
    torch.manual_seed(3)
    hidden, weights = torch.randn(size * TOKENS, 64), torch.rand(size * TOKENS, 2)
    chosen = torch.tensor([[0, 1], [1, 0], [1, 0]]).repeat(size * TOKENS // 3, 1)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS) if divided else slice(None)
    hidden, weights = hidden[mine].requires_grad_(), weights[mine].requires_grad_()
    output = experts(hidden, chosen[mine], weights)
    output.square().sum().backward()
    grads = [p.grad.full_tensor() if divided else p.grad for p in experts.parameters()]
    return output.detach(), hidden.grad, weights.grad, grads


def boxes(case: Case) -> list[tuple[str, int, torch.Tensor, torch.Tensor]]:
    """(name, numbers of the whole tensor, its part in this rank's box, what this rank holds) of the experts."""
    scorer, base = build(case)
    wholes = {name: p.detach().clone() for name, p in base.named_parameters() if ".experts." in name}
    divide(case, scorer, base, build_mesh(case.layout, torch.device("cpu")))
    return [
        (name, tensor.numel(), tensor[holding.box.slices_of(whole(tensor.shape))], holding.tensor)
        for name, tensor in wholes.items()
        for holding in holdings(base.get_parameter(name))
    ]


def body(rank: int):
    results = {"alone": experts_alone(rank, 4, divided=True), "boxes": [boxes(case) for case in BOXES]}
    return results | curves(CASES, rank)


@pytest.fixture(scope="module")
def world():
    return run_world(4, body)


def test_experts_that_no_token_chose_take_part(world):
    wanted = experts_alone(0, 4, divided=False)
    for index in range(3):
        torch.testing.assert_close(torch.cat([rank["alone"][index] for rank in world]), wanted[index])
    for rank in world:
        for grad, wanted_grad in zip(rank["alone"][3], wanted[3], strict=True):
            torch.testing.assert_close(grad, wanted_grad)
            assert not grad[2:].any()


def test_the_parts_of_all_ranks_are_the_whole_tensor(world):
    for index, case in enumerate(BOXES):
        left: dict[str, int] = {}
        for rank in world:
            for name, size, expected, held in rank["boxes"][index]:
                assert torch.equal(expected, held), f"{case}: {name}"
                left[name] = left.get(name, size) - held.numel()
        assert left
        assert set(left.values()) == {0}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_curve_is_that_of_one_process(world, case):
    check_curve(case, world)


def test_what_cannot_be_divided_is_refused():
    check_expert_parallel(model("llama"), Layout())
    check_expert_parallel(model("gpt-oss"), Layout(dp_shard=4, expert_parallel=4))
    with pytest.raises(UserError, match="LlamaForCausalLM has no experts"):
        check_expert_parallel(model("llama"), Layout(dp_shard=2, expert_parallel=2))
    with pytest.raises(UserError, match="does not divide the 4 experts") as error:
        check_expert_parallel(model("mixtral"), Layout(dp_shard=3, expert_parallel=3))
    assert "--expert-parallel-size 2" in error.value.fix
    with pytest.raises(UserError, match="each would divide"):
        check_expert_parallel(model("mixtral"), Layout(dp_shard=2, tp=2, expert_parallel=2))


def test_adapters_on_the_experts_are_refused():
    import peft

    base = model("qwen3-moe")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"]))
    with pytest.raises(UserError, match="LoRA on the experts"):
        check_expert_parallel(base, Layout(dp_shard=2, expert_parallel=2))
