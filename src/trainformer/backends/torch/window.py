"""The micro-batches of one optimizer step, on their way to one gradient: losses, weights and counts.

Owns the arithmetic of sums and weights that `backend` states. Computing and applying gradients is left to the backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import BackwardDone, DeviceBatch, Entry, Loss, Mean


class Window:
    """The micro-batches of one optimizer step: their losses, weights and counts.

    Where ranks share a step, `reference` is a number that is the same on all of them; else it is the weight of the
    first micro-batch.
    """

    __slots__ = ("_reference", "_weights", "bad", "consumed", "entries", "is_idle", "samples", "tokens", "whole")

    def __init__(self, reference: float | None = None) -> None:
        self.entries: list[Entry] = []
        self.samples = 0
        self.tokens = 0
        self.bad = 0
        self.consumed = 0
        self.whole: int | None = 0  # samples of all ranks; None: only they themselves know theirs
        self.is_idle = False  # there were micro-batches, and all of them went without a loss
        self._reference: Any = reference
        self._weights: list[Any] = []

    def add(self, output: Any, batch: DeviceBatch) -> Tensor | None:
        """Take in what a task's `train_step` returned; what comes back is to be differentiated, if anything."""
        self.samples += batch.size
        self.tokens += batch.tokens
        self.bad += batch.bad
        self.consumed += batch.size + batch.bad if batch.consumed is None else batch.consumed
        if not isinstance(output, Tensor) or batch.whole is None or self.whole is None:
            self.whole = None
        else:
            self.whole += batch.whole
        if batch.size == 0:
            output = _without_weight(output)
        if isinstance(output, Tensor):
            return self._add_mean(output, batch.size)
        if isinstance(output, (Loss, Mean, BackwardDone)):
            loss = self._add_weighted(output)
            for name, value in (output.metrics or {}).items():
                if name in ("loss", "grad_norm"):
                    raise BadArgument(expected("names of metrics other than 'loss' and 'grad_norm'", name))
                pair = value if isinstance(value, tuple) else (value, batch.size)
                self.entries.append(Entry(name, _detached(pair[0]), _detached(pair[1]), not isinstance(value, tuple)))
            return loss
        raise BadArgument(expected("train_step to return a scalar tensor or Loss(sum, weight)", type(output).__name__))

    def _add_weighted(self, output: Loss | Mean | BackwardDone) -> Tensor | None:
        if isinstance(output, Mean) and output.value is None:
            self.is_idle = not self._weights
            return None
        self.is_idle = False
        if isinstance(output, Mean):
            return self._add_mean(output.value, output.weight)
        if isinstance(output, BackwardDone):
            self.entries.append(Entry("loss", output.sum, output.weight, False))
            self._weights.append(output.weight)
            return None
        return self._add_sum(output.sum, output.weight)

    def _add_mean(self, mean: Tensor, weight: Any) -> Tensor:
        _check_differentiable(mean)
        if isinstance(weight, Tensor):
            weight = _as_divisor(weight, mean)
        self.entries.append(Entry("loss", mean.detach(), weight, True))
        self._weights.append(weight)
        if self._reference is None:
            self._reference = weight
            return mean
        if not isinstance(weight, Tensor) and weight == self._reference:  # to compare tensors would wait for the device
            return mean
        return mean * (weight / self._reference)

    def _add_sum(self, total: Tensor, weight: Any) -> Tensor:
        _check_differentiable(total)
        if isinstance(weight, Tensor):
            weight = _as_divisor(weight, total)
        self.entries.append(Entry("loss", total.detach(), weight, False))
        self._weights.append(weight)
        if self._reference is None:
            # A micro-batch without any weight (all labels masked) has sum 0: it must not become 0 / 0.
            if isinstance(weight, Tensor):
                self._reference = torch.where(weight > 0, weight, 1)
            else:
                self._reference = weight if weight > 0 else 1
        return total / self._reference

    def factor(self) -> Tensor | float | None:
        """What turns the sum of the scaled gradients into the gradient of the mean; None where that is 1."""
        if len(self._weights) == 1:
            return None
        return _ratio(self._reference, self._weight())

    def shared_factor(self, averaged_over: int, weight: Tensor) -> Tensor | float | None:
        """The same for gradients that are means over ranks; `weight` is that of all of them."""
        return _ratio(self._reference * averaged_over, weight if self.whole is None else self.whole)

    def sums(self, device: torch.device) -> Tensor:
        """Weight and sum of the losses so far, on the device: what ranks tell each other of a step."""
        losses = [e for e in self.entries if e.name == "loss"]
        total = sum(e.value * e.weight if e.is_mean else e.value for e in losses)
        return torch.stack([_on(device, self._weight()), _on(device, total)])

    def _weight(self) -> Any:
        return sum(self._weights[1:], start=self._weights[0]) if self._weights else 0

    def share(self, weight: Any, total: Any, only_main: bool) -> list[Entry]:
        """The loss of all ranks instead of our own. `only_main`: another rank enters it into the running metrics."""
        loss = [Entry("loss", total, weight, False)]
        self.entries = [*([] if only_main else loss), *(e for e in self.entries if e.name != "loss")]
        return loss

    def losses(self) -> list[Tensor]:
        """The losses of the window, to be looked at for NaN."""
        return [entry.value for entry in self.entries if entry.name == "loss"]


def _on(device: torch.device, value: Any) -> Tensor:
    # A number is filled in on the device: to copy it there would wait.
    wide = torch.float64
    return value.to(device, wide) if isinstance(value, Tensor) else torch.full((), value, dtype=wide, device=device)


def _ratio(reference: Any, total: Any) -> Tensor | float | None:
    if isinstance(total, Tensor):
        return reference / torch.where(total > 0, total, 1)
    if total == reference:
        return None
    return reference / total if total > 0 else 0.0


def _without_weight(output: Any) -> Any:
    """What a batch that is only there so that its rank can take part counts: nothing, yet with gradients (of zero)."""
    if isinstance(output, Tensor):
        return output * 0
    if isinstance(output, (Loss, BackwardDone)):
        return Loss(output.sum * 0, output.weight * 0)
    if isinstance(output, Mean) and output.value is not None:
        return Mean(output.value * 0, output.weight * 0)
    return output


def _as_divisor(weight: Tensor, loss: Tensor) -> Tensor:
    """A count in the type of the loss: torch divides integers in float32 even where the loss is float64."""
    return weight.detach().to(torch.promote_types(loss.dtype, torch.float32))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _check_differentiable(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise BadArgument(
            expected(
                "train_step to return a scalar",
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__,
                "Take the mean over the batch, or return Loss(sum, weight).",
            )
        )
    if not loss.requires_grad:
        raise BadArgument(
            "Expected the loss to depend on a trainable parameter, received one that does not require gradients. "
            "Is the model frozen, or was the loss computed under no_grad or from detached tensors?"
        )
