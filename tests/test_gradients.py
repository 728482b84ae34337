"""Gradients that keep their memory from step to step."""

import torch
from torch import nn

from swiftlite.training.gradients import KeptGradients


def test_they_are_those_of_one_step_in_the_same_memory():
    module = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 2, bias=False), "frozen": nn.Linear(2, 2)})
    module["frozen"].requires_grad_(False)
    kept, places = KeptGradients(module), []
    for step in range(3):
        x = torch.full((4, 3), float(step + 1))
        expected = torch.autograd.grad(module["b"](module["a"](x)).sum() * 2, [*module["a"].parameters()])
        with kept.of_step():
            for _ in range(2):
                module["b"](module["a"](x)).sum().backward()
        for parameter, gradient in zip(module["a"].parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        places.append(module["a"].weight.grad.data_ptr())
        assert module["frozen"].weight.grad is None
        for parameter in module.parameters():
            parameter.grad = None
    assert len(set(places)) == 1
    assert places[0] % 64 == 0


def test_what_gets_no_gradient_has_none():
    module = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(3, 5)})
    kept = KeptGradients(module)
    for used, unused in (("a", "b"), ("b", "a")):
        with kept.of_step():
            module[used](torch.ones(1, 3)).sum().backward()
        assert module[used].weight.grad.count_nonzero()
        assert module[unused].weight.grad is None
