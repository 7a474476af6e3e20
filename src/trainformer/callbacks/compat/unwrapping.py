"""The model inside what torch wraps around it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainformer.adapters.base import unwrap_model


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DDP, FSDP, `DataParallel` and `AveragedModel`, in any order.

    >>> inner = nn.Linear(1, 1)
    >>> unwrap(nn.DataParallel(AveragedModel(inner))) is inner  # AveragedModel copies
    False
    """
    while True:
        inner = unwrap_model(model)
        if isinstance(inner, (nn.DataParallel, AveragedModel)) or _is_fsdp(inner):
            inner = inner.module  # type: ignore[assignment]
        if inner is model:
            return model
        model = inner


def _is_fsdp(model: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)
