"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout in this block. Each module gets its own mode back: some may be in evaluation mode on purpose.

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    >>> with evaluating(model):
    ...     [module.training for module in model.modules()]
    [False, False, False]
    >>> [module.training for module in model.modules()]
    [True, True, False]
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
