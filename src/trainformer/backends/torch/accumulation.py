"""Gradient accumulation: the micro-batches of one optimizer step, and cutting them smaller when memory runs out.

`AccumulationWindow` owns the (sum, weight) arithmetic that `backend` describes; the backend computes and applies the
gradients. `MemorySplitter` owns the number of pieces a micro-batch is cut into after an out-of-memory error.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import BackwardDone, DeviceBatch, Entry, Loss, Mean
from trainformer.data.sharding import slice_batch

logger = logging.getLogger("trainformer")


class AccumulationWindow:
    """Losses, weights and counts of the micro-batches accumulated for one optimizer step.

    `reference` is what loss sums are divided by before the backward pass. With several ranks it is a constant they
    all know; with one process it is the weight of the first micro-batch.
    """

    __slots__ = (
        *("_reference", "_weights", "bad", "consumed", "entries"),
        *("global_samples", "is_idle", "samples", "tokens"),
    )

    def __init__(self, reference: float | None = None) -> None:
        self.entries: list[Entry] = []
        self.samples = 0
        self.tokens = 0
        self.bad = 0
        self.consumed = 0
        self.global_samples: int | None = 0  # samples over all ranks; None if a rank only knows its own
        self.is_idle = False  # there were micro-batches, but none returned a loss
        self._reference: Any = reference
        self._weights: list[Any] = []

    def add(self, output: Any, batch: DeviceBatch) -> Tensor | None:
        """Record what `train_step` returned; returns the loss to call backward on, if there is one."""
        self.count(batch)
        if not isinstance(output, Tensor) or batch.global_size is None or self.global_samples is None:
            self.global_samples = None
        else:
            self.global_samples += batch.global_size
        if batch.size == 0:
            output = _zero_weight(output)
        if isinstance(output, Tensor):
            return self._add_loss(output, batch.size, is_mean=True)
        if isinstance(output, (Loss, Mean, BackwardDone)):
            loss = self._add_weighted(output)
            for name, value in (output.metrics or {}).items():
                if name in ("loss", "grad_norm"):
                    raise BadArgument(expected("names of metrics other than 'loss' and 'grad_norm'", name))
                pair = value if isinstance(value, tuple) else (value, batch.size)
                _check_metric(name, pair)
                self.entries.append(Entry(name, _detached(pair[0]), _detached(pair[1]), not isinstance(value, tuple)))
            return loss
        raise BadArgument(
            expected(
                "train_step to return a scalar tensor or Loss(sum, weight)", type(output).__name__, _advice(output)
            )
        )

    def count(self, batch: DeviceBatch) -> None:
        """Count the samples and tokens of a batch."""
        self.samples += batch.size
        self.tokens += batch.tokens
        self.bad += batch.bad
        self.consumed += batch.size + batch.bad if batch.consumed is None else batch.consumed

    def _add_weighted(self, output: Loss | Mean | BackwardDone) -> Tensor | None:
        if isinstance(output, Mean) and output.value is None:
            self.is_idle = not self._weights
            return None
        self.is_idle = False
        if isinstance(output, BackwardDone):
            self.entries.append(Entry("loss", output.sum, output.weight, False))
            self._weights.append(output.weight)
            return None
        is_mean = isinstance(output, Mean)
        return self._add_loss(output.value if isinstance(output, Mean) else output.sum, output.weight, is_mean)

    def _add_loss(self, loss: Tensor, weight: Any, is_mean: bool) -> Tensor:
        _check_differentiable(loss)
        if isinstance(weight, Tensor):  # torch divides integers in float32 even if the loss is float64
            weight = weight.detach().to(torch.promote_types(loss.dtype, torch.float32))
        self.entries.append(Entry("loss", loss.detach(), weight, is_mean))
        self._weights.append(weight)
        if is_mean and self._reference is None:
            self._reference = weight
            return loss
        if is_mean:
            # Comparing tensors would sync with the device.
            is_same = not isinstance(weight, Tensor) and weight == self._reference
            return loss if is_same else loss * (weight / self._reference)
        if self._reference is None:
            # A micro-batch of weight 0 (all labels masked) has sum 0: avoid 0 / 0.
            if isinstance(weight, Tensor):
                self._reference = torch.where(weight > 0, weight, 1)
            else:
                self._reference = weight if weight > 0 else 1
        return loss / self._reference

    def gradient_scale(self) -> Tensor | float | None:
        """Factor that turns the accumulated gradients into the gradient of the mean loss; None means 1."""
        if len(self._weights) == 1 or self._reference is None:  # None: the task has scaled the gradients itself
            return None
        return _ratio(self._reference, self._weight())

    def reduced_gradient_scale(self, gradient_divide_factor: int, weight: Tensor) -> Tensor | float | None:
        """The same for gradients that were averaged over ranks; `weight` is the weight summed over ranks."""
        total = weight if self.global_samples is None else self.global_samples
        return _ratio(self._reference * gradient_divide_factor, total)

    def weight_and_sum(self, device: torch.device) -> Tensor:
        """Total weight and loss sum so far, as a tensor on the device: what ranks all-reduce once per step."""
        losses = [e for e in self.entries if e.name == "loss"]
        total = sum(e.value * e.weight if e.is_mean else e.value for e in losses)
        return torch.stack([_on(device, self._weight()), _on(device, total)])

    def _weight(self) -> Any:
        return sum(self._weights[1:], start=self._weights[0]) if self._weights else 0

    def replace_loss(self, weight: Any, total: Any, record: bool) -> list[Entry]:
        """Replace this rank's loss by the all-reduced one. Only one rank may `record` it in the running metrics."""
        loss = [Entry("loss", total, weight, False)]
        self.entries = [*(loss if record else []), *(e for e in self.entries if e.name != "loss")]
        return loss

    def losses(self) -> list[Tensor]:
        """Losses of all micro-batches, for the NaN check."""
        return [entry.value for entry in self.entries if entry.name == "loss"]


def _on(device: torch.device, value: Any) -> Tensor:
    # `full` fills the number in on the device; copying it there would sync.
    wide = torch.float64
    return value.to(device, wide) if isinstance(value, Tensor) else torch.full((), value, dtype=wide, device=device)


def _ratio(reference: Any, total: Any) -> Tensor | float | None:
    if isinstance(total, Tensor):
        return reference / torch.where(total > 0, total, 1)
    if total == reference:
        return None
    return reference / total if total > 0 else 0.0


def _zero_weight(output: Any) -> Any:
    """The output of a padding batch: it counts for nothing, but still gives (zero) gradients to all-reduce."""
    if isinstance(output, Tensor):
        return output * 0
    if isinstance(output, (Loss, BackwardDone)):
        return Loss(output.sum * 0, output.weight * 0)
    if isinstance(output, Mean) and output.value is not None:
        return Mean(output.value * 0, output.weight * 0)
    return output


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _check_metric(name: str, pair: tuple[Any, ...]) -> None:
    for value in pair:
        if not isinstance(value, (Real, Tensor)) or (isinstance(value, Tensor) and value.numel() != 1):
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            what = f"metric {name!r} of the loss to be a scalar or a (sum, weight) pair"
            raise BadArgument(expected(what, shape, "Reduce it, e.g. with .mean()."))


def _advice(output: Any) -> str:
    """What to do about a value of `train_step` that is no loss."""
    if isinstance(output, dict) and "loss" in output:
        return "Return output['loss'], or Loss(sum, weight, metrics) to log further values."
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].ndim == 0:
        return "Return the loss alone, or Loss(sum, weight, metrics) to log further values."
    if isinstance(output, float):
        return "Return the tensor itself, not loss.item(): gradients are computed from it."
    return "Does it lack a return?" if output is None else ""


def _check_differentiable(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        what = "train_step to return a scalar"
        received = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise BadArgument(expected(what, received, "Take the mean over the batch, or return Loss(sum, weight)."))
    if not loss.requires_grad:
        raise BadArgument(
            "Expected the loss to depend on a trainable parameter, received one that does not require gradients. "
            "Is the model frozen, or was the loss computed under no_grad or from detached tensors?"
        )


class MemorySplitter:
    """Cuts micro-batches into as many pieces as memory requires. The number of pieces only grows."""

    def __init__(self, policy: str) -> None:
        if policy not in ("split", "raise"):
            raise BadArgument(expected("oom to be 'split' or 'raise'", policy))
        self.policy = policy
        self.pieces = 1

    def split(self, batch: DeviceBatch) -> list[DeviceBatch]:
        """The batch in pieces of nearly equal size, in order."""
        pieces = min(self.pieces, batch.size)
        if pieces <= 1:
            return [batch]
        edges = [batch.size * i // pieces for i in range(pieces + 1)]
        tokens = batch.tokens / batch.size
        split = [
            DeviceBatch(
                slice_batch(batch.data, low, high, batch.size),
                high - low,
                round(tokens * (high - low)),
                more=batch.more or high < batch.size,
            )
            for low, high in pairwise(edges)
        ]
        return [split[0]._replace(bad=batch.bad), *split[1:]]

    def shrink(self, batch: DeviceBatch, model: nn.Module) -> bool:
        """Use twice as many pieces from now on. Returns False if a single sample is already too large."""
        if self.policy == "raise" or self.pieces >= batch.size:
            return False
        self.pieces *= 2
        size = -(-batch.size // self.pieces)
        kinds = []  # what a split run cannot reproduce
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            kinds.append("BatchNorm statistics (computed over fewer samples at a time)")
        if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
            kinds.append("dropout masks (drawn in a different order)")
        but = f", but not equal to an unsplit run: {' and '.join(kinds)}." if kinds else "."
        logger.warning(
            "out of memory with %d samples at once: repeating the step in pieces of %d, and splitting all later steps "
            "the same way. Losses and gradients are weighted as before%s",
            batch.size, size, but,
        )  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True
