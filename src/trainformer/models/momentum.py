"""Momentum networks: a second copy of a model that follows the first one slowly (MoCo, BYOL, DINO).

Owns the copy, its update and the schedule of its momentum. When to update (once per optimizer step) and what the copy
is for are the task's business. The average of weights that a user evaluates with is another thing: see the `EMA`
callback.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import local_tensors

_HALF = (torch.float16, torch.bfloat16)
# Where modules that are no nn.Dropout keep a rate: drop-path and DropBlock of timm, its patch dropout, torchvision's
# stochastic depth, and what attention and recurrent layers of torch hand to their functions.
_RATES = {"DropPath": "drop_prob", "DropBlock2d": "drop_prob", "PatchDropout": "prob", "StochasticDepth": "p"}
_RATES_OF_TORCH = ((nn.MultiheadAttention, "dropout"), (nn.RNNBase, "dropout"))


class MomentumCopy(nn.Module):
    """A frozen copy of `module` that moves towards it by `update`.

    Its parameters want no gradient and are kept in fp32 where the source has half precision: a step of 0.001 towards a
    weight is lost in bf16, which has 8 bits. Dropout and drop-path are off for good, so that in train mode nothing is
    random, and BatchNorm, which stays in train mode with the rest, collects statistics of its own. Other buffers are
    what they were when the copy was made.

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
        # A source in half precision expects half-precision inputs; autocast lets its fp32 copy take them.
        self.half_dtype: torch.dtype | None = halves[0] if halves else None
        if halves:
            self.module._apply(lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor)
        switch_off_dropout(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the copy makes of the input, without gradients."""
        with torch.no_grad(), self._precision():
            return self.module(*args, **kwargs)

    @torch.no_grad()
    def update(self, source: nn.Module, momentum: float) -> None:
        """Move all parameters: copy = momentum * copy + (1 - momentum) * source. Buffers stay as they are.

        One fused operation in the copy's precision, without waiting for the device: call it after each optimizer step.
        Pairing the 150 parameters of a ViT-B by name takes the host about 1 ms, and the device is done by then.
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

    def _precision(self) -> Any:
        first = next(self.module.parameters(), None)
        if self.half_dtype is None or first is None:
            return nullcontext()
        return torch.autocast(first.device.type, dtype=self.half_dtype)


def cosine_momentum(base: float, final: float, step: int, total: int) -> float:
    """Momentum at `step` of `total`: from `base` to `final` along half a cosine, and `final` from then on.

    >>> [round(cosine_momentum(0.99, 1.0, step, 10), 4) for step in (0, 5, 10, 11)]
    [0.99, 0.995, 1.0, 1.0]
    """
    if total < 1:
        raise BadArgument(expected("total to be at least 1", total))
    done = min(max(step / total, 0.0), 1.0)
    return final - (final - base) * (1 + math.cos(math.pi * done)) / 2


def switch_off_dropout(module: nn.Module) -> None:
    """Set every rate of dropout, drop-path and stochastic depth in a module to zero, for train mode as well."""
    for part in module.modules():
        name = _RATES.get(type(part).__name__)
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif name is not None and hasattr(part, name):
            setattr(part, name, 0.0)
        for kind, attribute in _RATES_OF_TORCH:
            if isinstance(part, kind):
                setattr(part, attribute, 0.0)


def _plain(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(module)``, whose parameters have a prefix to their names."""
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
            raise BadArgument(
                expected(
                    f"parameter {name!r} of shape {tuple(mine.shape)} on {mine.device}",
                    f"shape {tuple(given.shape)} on {given.device}",
                    "Move source and momentum copy to one device, and give them one shape.",
                )
            )
