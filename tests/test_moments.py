"""AdamW whose moments are kept otherwise. Of 8 bits: near the exact update, a quarter of the memory, the same bytes
again after a file. In the host's memory: the exact update."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import run_world

from swiftlite import imports
from swiftlite.checkpoint.state import COUNTER, MOMENTS, begin_moments
from swiftlite.config.resolve import resolve_config
from swiftlite.errors import UserError
from swiftlite.planning.footprint import PACKED_MOMENTS, moment_bytes
from swiftlite.training.optimizers import adamw_bf16
from swiftlite.training.optimizers.adamw_8bit import SMALLEST, AdamW8bit
from swiftlite.training.optimizers.adamw_bf16 import AdamWBf16
from swiftlite.training.optimizers.adamw_paged import PagedAdamW
from swiftlite.training.setup import check_model

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
SHAPE = (521, 257)  # its last block of 256 is not full, and half of it is enough for either kind


def gradients(count: int) -> list[torch.Tensor]:
    """From step to step of other sizes, and from one number to the next."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator) * 10.0 ** (-(step % 4)) for step in range(count)]


def updated(kind: type[torch.optim.Optimizer], count: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).view(SHAPE).clone())
    optimizer = kind([{"params": [parameter]}], **OPTIONS)
    for gradient in gradients(count):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer


def test_the_first_update_is_that_of_adamw_and_later_ones_are_near_it():
    assert torch.allclose(updated(AdamW8bit, 1)[0], updated(torch.optim.AdamW, 1)[0], rtol=1e-6, atol=1e-7)
    start, exact, near = updated(AdamW8bit, 0)[0], updated(torch.optim.AdamW, 30)[0], updated(AdamW8bit, 30)[0]
    assert (near - exact).norm() < 0.03 * (exact - start).norm()


def test_small_tensors_keep_exact_moments():
    numbers = torch.ones(SMALLEST - 1)
    one, other = nn.Parameter(numbers.clone()), nn.Parameter(numbers.clone())
    for parameter, kind in ((one, AdamW8bit), (other, torch.optim.AdamW)):
        optimizer = kind([{"params": [parameter]}], **OPTIONS)
        for step in range(3):
            parameter.grad = numbers * (step + 1)
            optimizer.step()
    assert torch.equal(one, other)


def test_moments_take_two_bytes_and_scales():
    _, optimizer = updated(AdamW8bit, 1)
    [state] = optimizer.state.values()
    size = sum(part.nbytes for kind in MOMENTS for part in (state[kind].codes, state[kind].scales))
    assert size == pytest.approx(PACKED_MOMENTS * SHAPE[0] * SHAPE[1], rel=1e-2)


def test_moments_that_were_in_a_file_have_the_same_bytes():
    _, optimizer = updated(AdamW8bit, 7)
    [(parameter, state)] = optimizer.state.items()
    before = {kind: (state[kind].codes.clone(), state[kind].scales.clone()) for kind in MOMENTS}
    optimizer.put_moments(parameter, optimizer.moments(parameter))
    after = optimizer.state[parameter]
    assert after["step"] == 7
    for kind, (codes, scales) in before.items():
        assert torch.equal(after[kind].codes, codes) and torch.equal(after[kind].scales, scales)


@pytest.mark.parametrize("piece", [1 << 24, 1000])
def test_moments_in_the_hosts_memory_give_the_same_update(monkeypatch, piece):
    monkeypatch.setattr(adamw_bf16, "PIECE", piece)
    usual, optimizer = updated(torch.optim.AdamW, 5)
    found, paged = updated(PagedAdamW, 5)
    assert torch.equal(found, usual)
    [state], [parameter] = optimizer.state.values(), paged.state
    assert all(torch.equal(values, state[kind]) for kind, values in paged.moments(parameter).items())


def test_a_moment_that_lies_elsewhere_is_written_back():
    """The meta device has no numbers, but it shows what goes where."""
    here, asked = torch.zeros(3), []
    with adamw_bf16.at_hand(here, here.device) as moment:
        assert moment is here
    away = torch.device("meta")
    here.copy_ = lambda visitor, **how: asked.append((visitor.device, how))
    with adamw_bf16.at_hand(here, away) as moment:
        assert moment.device == away and not asked
    assert asked == [(away, {"non_blocking": True})]


@pytest.mark.parametrize("kind", [AdamWBf16, AdamW8bit, PagedAdamW])
def test_updates_are_counted_on_the_host(kind):
    """Which would have to wait for a GPU at each parameter. The meta device shows what lies elsewhere."""
    away = nn.Parameter(torch.empty(8, dtype=torch.bfloat16, device="meta"))
    optimizer = kind([{"params": [away]}], **OPTIONS)
    begin_moments(optimizer, away)
    assert optimizer.state[away][COUNTER].device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_no_moments():
    parameter = nn.Parameter(torch.zeros(1 << 22, device="cuda"))
    optimizer = PagedAdamW([{"params": [parameter]}], **OPTIONS)
    parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() - before < parameter.nbytes // 8
    assert all(optimizer.state[parameter][kind].is_pinned() for kind in MOMENTS)
    usual = nn.Parameter(torch.zeros_like(parameter))
    usual.grad = parameter.grad
    torch.optim.AdamW([{"params": [usual]}], **OPTIONS).step()
    assert torch.equal(parameter, usual)


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        ("adamw", "cuda", 8),
        ("adamw_8bit", "cuda", PACKED_MOMENTS),
        ("paged_adamw", "cuda", 0),
        ("paged_adamw", "cpu", 8),
    ],
)
def test_what_moments_take_of_a_device(optimizer, device, expected):
    assert moment_bytes(optimizer, device) == expected


def on_two_ranks(rank, kinds):
    """Of a matrix whose rows are shared out unevenly: weights and moments after one update, put together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).view(SHAPE)
    found = []
    for kind in kinds:
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = kind([{"params": [parameter]}], **OPTIONS)
        parameter.grad = distribute_tensor(gradients(1)[0], mesh, [Shard(0)])
        optimizer.step()
        moments = optimizer.moments(parameter)
        optimizer.put_moments(parameter, moments)
        found.append(
            [parameter.detach().full_tensor().numpy()] + [moments[kind].full_tensor().numpy() for kind in MOMENTS]
        )
    return found


def test_divided_weights_are_updated_as_whole_ones():
    kinds = (AdamW8bit, PagedAdamW)
    for of_rank in run_world(2, on_two_ranks, kinds):
        for kind, found in zip(kinds, of_rank, strict=True):
            weights, optimizer = updated(kind, 1)
            [parameter] = optimizer.state
            moments = optimizer.moments(parameter)
            assert torch.allclose(torch.from_numpy(found[0]), weights, rtol=1e-6, atol=1e-7)
            for name, values in zip(MOMENTS, found[1:], strict=True):
                assert (torch.from_numpy(values) - moments[name]).norm() < 0.02 * moments[name].norm()


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package bitsandbytes") as error:
        check_model(resolve_config("sft", model="nowhere", dataset=["d"], optimizer="adamw_bnb_8bit"), None, None, None)
    assert "swiftlite[bitsandbytes]" in error.value.fix
