"""Selective activation checkpointing gives back what was computed, whatever became of it since."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swiftlite.models.checkpointing import _kept


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


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_result_that_is_changed_in_place(change):
    torch.manual_seed(0)
    layer, x, found = ChangesOutput(CHANGES[change]), torch.randn(2, 5, 8, requires_grad=True), []
    for run in (layer, lambda given: checkpoint(layer, given, use_reentrant=False, context_fn=_kept)):
        output = run(x)
        found.append([output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)
