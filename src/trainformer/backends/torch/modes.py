"""Modules that a user has frozen in eval mode, and that training leaves there."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.backends.torch.optimizers import modules_of


def frozen_in_eval(task: Any) -> list[nn.Module]:
    """Frozen BatchNorm layers in eval mode inside a model in training mode, and frozen other modules (teachers).

    Setting training mode on these would update statistics, or switch on the dropout, of what was frozen on purpose. A
    model that is in eval mode as a whole was just loaded: it is trained as usual.
    """
    model = task.model
    kept: list[nn.Module] = []
    if model.training:
        kept = [m for m in model.modules() if isinstance(m, _BatchNorm) and _is_frozen(m)]
    held = task.children() if isinstance(task, nn.Module) else modules_of(task).values()
    for module in held:
        if module is not model and _is_frozen(module):
            kept.extend(part for part in module.modules() if not part.training)
    return kept


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return not module.training and bool(parameters) and not any(p.requires_grad for p in parameters)
