"""Selective activation checkpointing gives back what was computed, whatever became of it since."""

import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from swiftlite.models.checkpointing import _kept, _tagged_where_compiled


class ChangesOutput(nn.Module):
    """As Gemma 3n's layers, which add to the product that a matmul has just given."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), change

    def forward(self, x):
        product = self.first(x)
        hidden = self.change(product, x)
        return self.second(hidden.square()) + hidden


CHANGES = {
    "added to": lambda product, x: product.add_(x),
    "added to through a view": lambda product, x: product.transpose(0, 1).add_(x.transpose(0, 1)).transpose(0, 1),
    "changed twice": lambda product, x: product.add_(x).mul_(x),
}


@pytest.mark.parametrize("contexts", [_kept, _tagged_where_compiled])
@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_result_that_is_changed_in_place(change, contexts):
    """Also where a layer was to be compiled, and the compiler gave up."""
    torch.manual_seed(0)
    layer, x, found = ChangesOutput(CHANGES[change]), torch.randn(2, 5, 8, requires_grad=True), []
    for run in (layer, lambda given: checkpoint(layer, given, use_reentrant=False, context_fn=contexts)):
        output = run(x)
        found.append([output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_layer_is_recomputed_as_the_compiler_decides():
    class Layer(ChangesOutput):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=_tagged_where_compiled)

    torch._dynamo.reset()
    counters.clear()
    layer, x, found = Layer(CHANGES["added to"]), torch.randn(2, 5, 8, requires_grad=True), []
    for _ in range(2):
        found.append(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))
        layer.compile(dynamic=True)
    assert counters["stats"]["unique_graphs"] == 1
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
