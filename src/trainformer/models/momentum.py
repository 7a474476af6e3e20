"""Momentum encoders (MoCo, BYOL, DINO): an exponential moving average of a model that provides training targets.

Owns the copy, its update and the momentum schedule; tasks call `update` once per optimizer step. For an average of the
weights to evaluate with, see the `EMA` callback.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import local_tensors

_HALF = (torch.float16, torch.bfloat16)
# The attribute with the drop rate of modules that are not nn.Dropout: timm's drop path, DropBlock and patch dropout,
# torchvision's stochastic depth, and torch's attention and recurrent layers.
_DROP_RATES = {"DropPath": "drop_prob", "DropBlock2d": "drop_prob", "PatchDropout": "prob", "StochasticDepth": "p"}
_TORCH_DROP_RATES = ((nn.MultiheadAttention, "dropout"), (nn.RNNBase, "dropout"))


class MomentumCopy(nn.Module):
    """A frozen copy of `module` that `update` moves towards it.

    The parameters require no gradient. Half-precision parameters are kept in float32: an update of 0.001 is lost in
    bf16, which has 8 bits. Dropout and drop path are off permanently, so train mode is deterministic; BatchNorm stays
    in train mode and keeps its own statistics. Other buffers keep their initial values.

    >>> source = nn.Linear(2, 1)
    >>> follower = MomentumCopy(source)
    >>> follower(torch.ones(1, 2)).requires_grad
    False
    >>> with torch.no_grad():
    ...     _ = source.weight.add_(1.0)
    >>> follower.update(source, momentum=0.75)
    >>> source.weight - follower.module.weight
    tensor([[0.7500, 0.7500]], grad_fn=<SubBackward0>)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        source = _plain(module)
        halves = [p.dtype for p in source.parameters() if p.dtype in _HALF]
        self.module = copy.deepcopy(source).requires_grad_(False)
        # A half-precision source expects half-precision inputs; autocast lets the float32 copy accept them.
        self.half_dtype: torch.dtype | None = halves[0] if halves else None
        if halves:
            self.module._apply(lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor)
        disable_dropout(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass of the copy, without gradients."""
        with torch.no_grad(), self._precision():
            return self.module(*args, **kwargs)

    @torch.no_grad()
    def update(self, source: nn.Module, momentum: float) -> None:
        """EMA of all parameters: copy = momentum * copy + (1 - momentum) * source. Buffers do not change.

        One fused operation in the copy's dtype, without a sync; call it after each optimizer step. Pairing the 150
        parameters of a ViT-B by name takes the host about 1 ms.
        """
        if not 0 <= momentum <= 1:
            raise BadArgument(expected("momentum to be from 0 to 1", momentum))
        own = dict(self.module.named_parameters())
        new = dict(_plain(source).named_parameters())
        _check_pairs(own, new)
        moved: list[Tensor] = list(own.values())
        towards: list[Tensor] = [
            weight if weight.dtype == mine.dtype else weight.to(mine.dtype)
            for mine, weight in zip(moved, new.values(), strict=True)
        ]
        if moved:
            torch._foreach_lerp_(local_tensors(moved), local_tensors(towards), 1 - momentum)

    def _precision(self) -> AbstractContextManager[object]:
        first = next(self.module.parameters(), None)
        if self.half_dtype is None or first is None:
            return nullcontext()
        return torch.autocast(first.device.type, dtype=self.half_dtype)


def cosine_momentum(base: float, final: float, step: int, total: int) -> float:
    """Momentum at `step` of `total`: a half cosine from `base` to `final`, then `final`.

    >>> [round(cosine_momentum(0.99, 1.0, step, 10), 4) for step in (0, 5, 10, 11)]
    [0.99, 0.995, 1.0, 1.0]
    """
    if total < 1:
        raise BadArgument(expected("total to be at least 1", total))
    done = min(max(step / total, 0.0), 1.0)
    return final - (final - base) * (1 + math.cos(math.pi * done)) / 2


def disable_dropout(module: nn.Module) -> None:
    """Set all rates of dropout, drop path and stochastic depth in a module to zero, also for train mode."""
    for part in module.modules():
        name = _DROP_RATES.get(type(part).__name__)
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif name is not None and hasattr(part, name):
            setattr(part, name, 0.0)
        for kind, attribute in _TORCH_DROP_RATES:
            if isinstance(part, kind):
                setattr(part, attribute, 0.0)


def _plain(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(module)``, which prefixes parameter names."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def _check_pairs(own: dict[str, nn.Parameter], new: dict[str, nn.Parameter]) -> None:
    if own.keys() != new.keys():
        odd = sorted(own.keys() ^ new.keys())[:4]
        do = "Update it from the module it was copied from."
        raise BadArgument(expected("a source with the parameters of the momentum copy", f"differences in {odd}", do))
    for name, mine in own.items():
        given: Tensor = new[name]
        if mine.shape != given.shape or mine.device != given.device:
            what = f"parameter {name!r} of shape {tuple(mine.shape)} on {mine.device}"
            do = "Move source and momentum copy to one device, and give them one shape."
            raise BadArgument(expected(what, f"shape {tuple(given.shape)} on {given.device}", do))
