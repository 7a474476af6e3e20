"""An exponential moving average of a torch model: a second model in fp32 or wider, sharded like the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.utils.distributed import local_tensors


class ModelAverage:
    """Averages `source` into `average`, a copy of it. `modules` names the parts to average; the rest is copied.

    Floating-point buffers (running statistics) are averaged as well, other buffers are copied.

    >>> source = nn.Linear(1, 1, bias=False)
    >>> average = ModelAverage(source, nn.Linear(1, 1, bias=False))
    >>> average.update(1.0)
    >>> torch.equal(average.model.weight, source.weight)
    True
    """

    def __init__(self, source: nn.Module, average: nn.Module, modules: Sequence[str] | None = None) -> None:
        self.model = average.requires_grad_(False).eval()
        for name in modules or ():
            if not any(found == name for found, _ in source.named_modules()):
                names = [found for found, _ in source.named_children()]
                what = f"EMA's modules to be parts of {type(source).__name__}"
                raise BadArgument(expected(what, name, did_you_mean(name, names) or f"It has {', '.join(names)}."))
        names = [name for name, _ in (*source.named_parameters(), *source.named_buffers())]
        pairs = zip([*average.parameters(), *average.buffers()], [*source.parameters(), *source.buffers()], strict=True)
        self._averaged: list[tuple[Tensor, Tensor]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        for name, (tensor, trained) in zip(names, pairs, strict=True):
            chosen = modules is None or any(name.startswith(f"{part}.") for part in modules)
            (self._averaged if chosen and tensor.is_floating_point() else self._copied).append((tensor, trained))

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move the average towards the weights; with a weight of 1 it equals them."""
        moving = [(average, trained.detach().to(average.dtype)) for average, trained in self._averaged]
        torch._foreach_lerp_(local_tensors([a for a, _ in moving]), local_tensors([w for _, w in moving]), weight)
        for average, trained in self._copied:
            average.copy_(trained)

    @property
    def inference_model(self) -> nn.Module:
        """What evaluations use in place of the trained model."""
        return self.model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
