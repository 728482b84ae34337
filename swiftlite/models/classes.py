"""Classes that modules are given in place of their own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def known_as(plain: type[nn.Module]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A decorator: the class has the names of the one that it takes the place of, for whoever prints or looks at it."""

    def rename(ours: type[nn.Module]) -> type[nn.Module]:
        ours.__name__, ours.__qualname__, ours.__module__ = plain.__name__, plain.__qualname__, plain.__module__
        return ours

    return rename
