"""The records that pass between the layers. They hold tensors of any framework without knowing which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Loss(NamedTuple):
    """What a task's `train_step` may return instead of a mean: a sum and the weight it is to be divided by.

    The engine divides the sums of all micro-batches (and ranks) once by the sum of all weights, so that the
    result does not depend on how the data were sliced. `sum` carries the gradient. `weight` is a number or a
    scalar tensor (number of supervised tokens, of valid pixels, of samples). `metrics` are further values to
    log, each a scalar (averaged over samples) or a ``(sum, weight)`` pair.

    >>> Loss(sum=12.0, weight=4)
    Loss(sum=12.0, weight=4, metrics=None)
    """

    sum: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


class Sized(NamedTuple):
    """A batch on its way from the loader, with the number of samples in it and, where known, which ones."""

    data: Any
    size: int
    indices: Any = None


class Placed(NamedTuple):
    """The same batch where the model is. `tokens` is 0 for data that have none."""

    data: Any
    size: int
    tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """What one optimizer step produced. Scalars stay on the device; reading one waits for it."""

    loss_sums: list[Any]
    loss_weights: list[Any]
    grad_norm: Any
    lr: float
    samples: int
    tokens: int = 0
    metrics: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
