"""A task as a module whose forward pass is one of the task's functions: what wrappers around modules can wrap.

So a task may call its model, or parts of it, as it likes, and every parameter it trains is covered: those of the loss
as well. Owns no parameters itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trainformer.backends.torch.optimizers import modules_of, named_parameters


class StepModule(nn.Module):
    """Everything a task holds, called by ``module(function, batch)``."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name.replace(".", "_"): module for name, module in modules_of(task).items()})
        known = {id(p) for p in self.parts.parameters()}
        # A temperature, say, that the task keeps as a bare parameter.
        self.rest = nn.ParameterList([p for p in named_parameters(task).values() if id(p) not in known])

    def forward(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """What the function says of the batch."""
        return function(batch)
